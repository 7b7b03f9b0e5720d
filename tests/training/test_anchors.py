"""Anchors and supervised slots, compared with the rules written as loops."""

import pytest
import torch

from jetflow.training.anchors import sample_anchors, supervised_slots


def mask_of(*rows: str) -> torch.Tensor:
    """`x` is supervised, `.` is not."""
    return torch.tensor([[char == "x" for char in row] for row in rows])


def test_anchors_are_the_positions_before_supervised_tokens():
    loss_mask = mask_of("...xx.x.", "x.......", "........", ".......x")
    anchors, valid = sample_anchors(loss_mask, 4)
    # The first token of a row has no position before it.
    assert [row[ok].tolist() for row, ok in zip(anchors, valid, strict=True)] == [[2, 3, 5], [], [], [6]]
    assert (anchors[~valid] == 0).all()


def test_anchors_are_drawn_without_replacement_and_each_about_equally_often():
    loss_mask = mask_of("..xxxxxx.xx", "...........")
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(11)
    for _ in range(2000):
        anchors, valid = sample_anchors(loss_mask, 3, generator)
        assert valid[0].all()
        assert not valid[1].any()
        assert len(set(anchors[0].tolist())) == 3
        counts[anchors[0]] += 1
    # 750 expected for each; the standard deviation is 22.
    assert (counts[[1, 2, 3, 4, 5, 6, 8, 9]] - 750).abs().max() < 110
    assert counts[[0, 7, 10]].sum() == 0


def test_same_generator_state_gives_the_same_anchors():
    loss_mask = torch.ones(2, 50, dtype=torch.bool)
    first = sample_anchors(loss_mask, 5, torch.Generator().manual_seed(3))[0]
    assert torch.equal(first, sample_anchors(loss_mask, 5, torch.Generator().manual_seed(3))[0])
    assert not torch.equal(first, sample_anchors(loss_mask, 5, torch.Generator().manual_seed(4))[0])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9])
def test_short_rows_next_to_a_long_one(length):
    loss_mask = torch.zeros(2, 9, dtype=torch.bool)
    loss_mask[0, 1:], loss_mask[1, 1:length] = True, True
    anchors, valid = sample_anchors(loss_mask, 12)
    assert anchors.shape == valid.shape == (2, 12)
    assert valid.sum(-1).tolist() == [8, length - 1]


def plain_slots(loss_mask, anchors, valid, block_size):
    slots = torch.zeros(*anchors.shape, block_size - 1, dtype=torch.bool)
    for b in range(anchors.shape[0]):
        for a in range(anchors.shape[1]):
            for i in range(1, block_size):
                position = int(anchors[b, a]) + i
                if not valid[b, a] or position >= loss_mask.shape[1] or not loss_mask[b, position]:
                    break
                slots[b, a, i - 1] = True
    return slots


@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_supervised_slots_end_with_the_span(block_size):
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        loss_mask = torch.rand(3, 12, generator=generator) < 0.7
        anchors = torch.randint(12, (3, 5), generator=generator)
        valid = torch.rand(3, 5, generator=generator) < 0.8
        slots = supervised_slots(loss_mask, anchors, valid=valid, block_size=block_size)
        assert torch.equal(slots, plain_slots(loss_mask, anchors, valid, block_size))


def test_block_does_not_reach_into_the_next_span():
    loss_mask = mask_of("..xx.xxx")
    slots = supervised_slots(loss_mask, torch.tensor([[1, 4]]), valid=torch.ones(1, 2, dtype=torch.bool), block_size=6)
    assert slots[0].tolist() == [[True, True, False, False, False], [True, True, True, False, False]]


def test_wrong_arguments_are_named():
    loss_mask = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="num_anchors must be at least 1, got 0"):
        sample_anchors(loss_mask, 0)
    with pytest.raises(ValueError, match=r"loss_mask must be bool \[B, S\], got torch.int64 \(2, 5\)"):
        sample_anchors(loss_mask.long(), 1)
    anchors, valid = sample_anchors(loss_mask, 1)
    with pytest.raises(ValueError, match=r"loss_mask must be bool \[B, S\], got torch.bool \(5,\)"):
        supervised_slots(loss_mask[0], anchors, valid=valid, block_size=4)
    with pytest.raises(ValueError, match="block_size must be at least 2, got 1"):
        supervised_slots(loss_mask, anchors, valid=valid, block_size=1)

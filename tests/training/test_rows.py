"""Rows: every document once per epoch, the same ones for every step whoever asks, and anchors that documents own."""

import pytest
import torch

from jetflow.training.data import Example
from jetflow.training.rows import TrainingRows


def examples_of(*lengths, prompt=2):
    return [Example(f"e{i}", [i] * length, [(prompt, length)]) for i, length in enumerate(lengths)]


LENGTHS = (9, 5, 12, 7, 3, 16, 4, 8, 6, 10)
packed_or_not = pytest.mark.parametrize("pack", [False, True], ids=["apart", "packed"])


def make_rows(lengths=LENGTHS, **changes):
    given = {"max_length": 20, "rows_per_step": 2, "num_anchors": 3, "seed": 5} | changes
    return TrainingRows(examples_of(*lengths), **given)


@packed_or_not
def test_every_document_comes_once_per_epoch_in_an_order_of_its_own(pack):
    rows = make_rows(rows_per_step=1, pack=pack)
    epochs = {}
    for step in range(40):
        epoch, found = rows.rows_of_step(step)
        epochs.setdefault(epoch, []).extend(doc for row in found for doc in row)
    whole = [epochs[epoch] for epoch in sorted(epochs)[:3]]
    assert all(sorted(one) == list(range(len(LENGTHS))) for one in whole)
    assert whole[0] != whole[1]


@packed_or_not
def test_a_step_has_the_same_rows_and_anchors_whoever_asks(pack):
    one, other = make_rows(pack=pack), make_rows(pack=pack)
    wanted = [one.rows_of_step(step) for step in range(12)]
    assert [other.rows_of_step(step) for step in (7, 3, 11)] == [wanted[7], wanted[3], wanted[11]]
    epoch, rows = wanted[7]
    first, second = one.collate(rows, epoch), other.collate(rows, epoch)
    assert torch.equal(first.anchors, second.anchors)
    assert not torch.equal(first.anchors, other.collate(rows, epoch + 1).anchors)


def test_anchors_belong_to_the_document_whatever_stands_beside_it():
    rows = make_rows(pack=True)
    alone = rows.collate([[5]], 0)
    beside = rows.collate([[0, 5]], 0)
    offset = LENGTHS[0]
    own = beside.anchors[0][beside.anchors[0] >= offset] - offset
    assert torch.equal(own, alone.anchors[0][alone.valid[0]])


def test_packed_rows_hold_documents_whole_and_every_document_gets_anchors():
    rows = make_rows((18, 3, 3, 9, 8), pack=True, rows_per_step=1)
    for step in range(3):
        epoch, found = rows.rows_of_step(step)
        batch = rows.collate(found, epoch)
        assert batch.batch.token_ids.shape[1] <= 20
        for row, documents in enumerate(batch.documents):
            anchors = batch.anchors[row][batch.valid[row]]
            for example, begin, end in documents:
                assert batch.batch.token_ids[row, begin:end].tolist() == [example] * (end - begin)
                inside = anchors[(anchors >= begin) & (anchors < end)]
                assert 1 <= len(inside) <= 3
                # The next token is supervised and of the same document.
                assert all(begin + 1 <= anchor < end - 1 for anchor in inside.tolist())


def test_rows_of_a_step_are_of_like_length():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 200, (256,), generator=generator).tolist()
    rows = make_rows(lengths, max_length=200, rows_per_step=8)
    spreads = []
    for step in range(32):
        _, found = rows.rows_of_step(step)
        sizes = [lengths[row[0]] for row in found]
        spreads.append(max(sizes) - min(sizes))
    assert sum(spreads) / len(spreads) < 15


def test_first_token_of_a_document_is_never_predicted():
    rows = TrainingRows([Example("a", [1, 2, 3], [(0, 3)])], max_length=8, rows_per_step=1, num_anchors=8)
    batch = rows.collate([[0]], 0)
    assert batch.batch.loss_mask.tolist() == [[False, True, True]]
    assert batch.anchors[batch.valid].tolist() == [0, 1]


def test_what_cannot_be_trained_on_is_counted():
    examples = [
        Example("fine", [1, 2, 3, 4], [(2, 4)]),
        Example("no answer", [1, 2, 3], []),
        Example("answer behind the cut", list(range(30)), [(25, 30)]),
        Example("cut within its answer", list(range(30)), [(5, 30)]),
        Example("one token answer", [1, 2], [(1, 2)]),
    ]
    rows = TrainingRows(examples, max_length=20, rows_per_step=1, num_anchors=2)
    assert (rows.num_left_out, rows.num_cut) == (2, 2)
    assert rows.num_tokens == 4 + 20 + 2
    assert rows.frequent_tokens(40, 2).tolist() == [1, 2]
    for index in range(3):
        assert rows.collate([[index]], 0).documents[0][0][0] == (0, 3, 4)[index]


def test_fewer_documents_than_a_step_wants_are_one_step():
    rows = make_rows((5, 6), rows_per_step=8)
    assert rows.rows_of_step(3)[0] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 1}, "max_length must be at least 2, got 1"),
        ({"rows_per_step": 0}, "rows_per_step must be at least 1, got 0"),
        ({"num_anchors": 0}, "num_anchors must be at least 1, got 0"),
        ({"lengths": ()}, "none of 0 has a token to predict"),
        ({"lengths": (2, 2)}, "none of 2 has a token to predict within max_length=20"),
    ],
)
def test_bad_settings_and_empty_data_are_named(changes, message):
    if changes.get("lengths") == (2, 2):
        with pytest.raises(ValueError, match=message):
            TrainingRows([Example("e", [1, 2], [])] * 2, max_length=20, rows_per_step=1, num_anchors=1)
        return
    with pytest.raises(ValueError, match=message):
        make_rows(**changes)

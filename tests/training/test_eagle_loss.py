import pytest
import torch
from conftest import make_model

from jetflow import CrossEntropy, EagleDrafter, ForwardKL, Frontier, SpeculativeDecoder, Target
from jetflow.training import Batch, eagle_loss, new_eagle_head
from jetflow.training.eagle import UnrollSettings, unrolled_loss

DRAFTED = torch.arange(0, 61, 2)
# The same sums in another order, float32.
SAME = 1e-5


def make_parts(seed: int = 0, **options):
    target = Target(make_model("qwen3"))
    target.model.requires_grad_(False)
    torch.manual_seed(seed)
    head = new_eagle_head(target, taps=(0, 1, 3), **options)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return target, head


def some_batch(rows: int = 2, length: int = 14) -> Batch:
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(3, 61, (rows, length), generator=generator)
    loss_mask = torch.zeros(rows, length, dtype=torch.bool)
    loss_mask[:, 4:] = True
    return Batch(token_ids, loss_mask)


class Recorder:
    """A loss that keeps what it is given."""

    def __init__(self):
        self.draft, self.target, self.labels = [], [], []

    def __call__(self, draft_logits, target_logits, labels):
        self.draft.append(draft_logits.detach())
        self.target.append(target_logits)
        self.labels.append(labels)
        return draft_logits.sum(-1) * 0


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True, "draft_tokens": DRAFTED}], ids=["3", "3.1"])
@torch.no_grad()
def test_unrolled_steps_are_those_of_decoding_along_the_true_path(options):
    """Step j of anchor a in training has the logits of level j of a draft whose tokens are the true ones."""
    target, head = make_parts(**options)
    batch, num_unroll = some_batch(), 4
    anchors = torch.tensor([[3, 6, 8], [4, 5, 9]])
    recorder = Recorder()
    unrolled_loss(
        head, target, batch, anchors=anchors, valid=torch.ones_like(anchors, dtype=torch.bool),
        settings=UnrollSettings(recorder, num_unroll),
    )  # fmt: skip
    trained = torch.cat(recorder.draft).view(2, 3, num_unroll, -1).log_softmax(-1)
    for row, text in enumerate(batch.token_ids.tolist()):
        for column, anchor in enumerate(anchors[row].tolist()):
            drafter = EagleDrafter(head, target, width=len(trained[0, 0, 0]))
            features, _ = target.features(torch.tensor([text[:anchor]]), drafter.taps)
            drafter.reset(1)
            # In two parts, as a prompt and a round.
            for part in (slice(0, 2), slice(2, anchor)):
                count = len(text[:anchor][part])
                drafter.observe(torch.tensor([text[:anchor][part]]), features[:, part], torch.tensor([count]))
            source = source_of(drafter, text[anchor], num_unroll)
            for level in range(1, num_unroll + 1):
                token = torch.tensor([[text[anchor + level - 1]]])
                tokens, log_probs = source(level, Frontier(token, torch.zeros_like(token), torch.zeros(1, 1)))
                expected = trained[row, column, level - 1]
                columns = tokens[0, 0] if head.draft_tokens is None else torch.searchsorted(head.draft_tokens, tokens[0, 0])
                torch.testing.assert_close(log_probs[0, 0], expected[columns], atol=SAME, rtol=0)


def source_of(drafter, root, depth):
    """The drafter's candidate source, taken where an expander would get it."""
    from jetflow import DraftContext

    found = []
    drafter._expander = lambda root_tokens, source, budget: found.append(source)
    drafter.propose(DraftContext(torch.tensor([root]), torch.tensor([0]), [[root]], max_depth=depth), depth + 1)
    return found[0]


@torch.no_grad()
def test_each_step_is_taught_the_targets_law_of_its_token():
    target, head = make_parts(draft_tokens=DRAFTED)
    batch = some_batch(rows=1)
    recorder = Recorder()
    anchors = torch.tensor([[5]])
    unrolled_loss(head, target, batch, anchors=anchors, valid=anchors > 0, settings=UnrollSettings(recorder, 3))
    logits, _ = target.forward(batch.token_ids)
    torch.testing.assert_close(torch.cat(recorder.target), logits[0, 5:8, DRAFTED], atol=SAME, rtol=0)
    truth = batch.token_ids[0, 6:9].tolist()
    expected = [DRAFTED.tolist().index(token) if token in DRAFTED.tolist() else -100 for token in truth]
    assert torch.cat(recorder.labels).tolist() == expected


def test_packed_documents_give_the_loss_of_separate_rows():
    target, head = make_parts()
    whole = some_batch(rows=2, length=12)
    packed = Batch(whole.token_ids.view(1, 24), whole.loss_mask.view(1, 24), torch.arange(2).repeat_interleave(12)[None])
    apart = eagle_loss(head, target, whole, loss=ForwardKL(), num_unroll=3)
    together = eagle_loss(head, target, packed, loss=ForwardKL(), num_unroll=3)
    assert together.num_slots_by_depth.tolist() == apart.num_slots_by_depth.tolist() == [16, 14, 12]
    torch.testing.assert_close(together.loss, apart.loss, atol=SAME, rtol=0)


def test_tokens_that_cannot_be_drafted_weigh_nothing_and_count_as_misses():
    target, head = make_parts(draft_tokens=DRAFTED)
    batch = some_batch()
    out = eagle_loss(head, target, batch, loss=CrossEntropy(), num_unroll=1)
    labels = batch.token_ids[:, 4:]
    assert int(out.num_slots_by_depth[0]) == labels.numel()
    assert int(out.weight_sum) == int((labels % 2 == 0).sum()) < labels.numel()


def test_chunks_change_neither_loss_nor_gradients():
    target, head = make_parts()
    batch = some_batch()
    anchors = torch.arange(4, 10).expand(2, -1)
    found = []
    for chunk_size in (7, 4096):
        head.zero_grad()
        out = unrolled_loss(
            head, target, batch, anchors=anchors, valid=anchors > 0,
            settings=UnrollSettings(ForwardKL(), 3, decay_rate=2.0, chunk_size=chunk_size),
        )  # fmt: skip
        out.loss.backward()
        found.append([out.loss.detach(), *(parameter.grad.clone() for parameter in head.parameters())])
    assert all(bool(gradient.abs().sum() > 0) for gradient in found[0][1:])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=SAME, rtol=1e-4)


def test_a_batch_without_supervision_gives_zero_and_zero_gradients():
    target, head = make_parts()
    batch = some_batch()
    out = eagle_loss(head, target, batch._replace(loss_mask=torch.zeros_like(batch.loss_mask)), loss=ForwardKL())
    out.loss.backward()
    assert float(out.loss) == 0
    assert float(out.weight_sum) == 0
    assert not any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in head.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_unroll": 0}, "num_unroll must be at least 1, got 0"),
        ({"num_anchors": 0}, "num_anchors must be at least 1, got 0"),
        ({"decay_rate": -1.0}, "decay_rate must be 0"),
    ],
)
def test_bad_settings_are_refused(options, message):
    target, head = make_parts()
    with pytest.raises(ValueError, match=message):
        eagle_loss(head, target, some_batch(), loss=ForwardKL(), **options)


def test_default_taps_need_a_deep_target():
    with pytest.raises(ValueError, match="leaves no three different default taps"):
        new_eagle_head(Target(make_model("qwen3")))


def test_a_trained_head_drafts_what_the_target_writes():
    """A few steps on the target's own text bring the acceptance length from about 1 to above 2."""
    target = Target(make_model("qwen3"))
    target.model.requires_grad_(False)
    torch.manual_seed(0)
    head = new_eagle_head(target, taps=(0, 1, 3))
    decoder = SpeculativeDecoder(target, EagleDrafter(head, target, depth=4), budget=16)
    prompts = [[token, token + 1] for token in range(3, 8)]
    texts = [
        prompt + one.token_ids
        for prompt, one in zip(prompts, decoder.generate(prompts, max_new_tokens=14, eos_token_id=[]), strict=True)
    ]
    before = tau_of(decoder, prompts)
    mask = torch.ones(len(texts), len(texts[0]), dtype=torch.bool)
    mask[:, :2] = False
    batch = Batch(torch.tensor(texts), mask)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        out = eagle_loss(head, target, batch, loss=CrossEntropy(), num_unroll=4)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(float(out.loss))
    assert losses[-1] < 0.3 * losses[0]
    assert tau_of(decoder, prompts) > before + 1


def tau_of(decoder, prompts):
    results = decoder.generate(prompts, max_new_tokens=14, eos_token_id=[])
    return sum(len(one.token_ids) for one in results) / sum(len(one.rounds) + 1 for one in results)

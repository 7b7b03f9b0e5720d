"""Heads of DSpark and DFlash 2 give the numbers of the public code on the same weights; see `tests/data/README.md`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import plain_greedy
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from jetflow import BestFirst, Chain, ParallelDrafter, SpeculativeDecoder, Target, load_head, save_head
from jetflow.heads.checkpoint import read_config
from jetflow.protocols import DraftContext, Frontier
from jetflow.training.warm_start import warm_start

DATA = Path(__file__).parents[1] / "data" / "published_corrections"
VOCAB = 48
DSPARK = ["deepspec-vanilla", "deepspec-gated", "deepspec-rnn", "specforge", "speculators-anchor", "speculators-own"]
# Depths, and candidates of each.
SELECTED = {"dflash2": (3, 6), "dflash2-sliding": (7, 16)}
CASES = [*DSPARK, *SELECTED, "dflash-sliding"]
# Both sides compute in float32, in different orders.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=16, vocab_size=VOCAB, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=24, max_position_embeddings=128, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    words = load_file(DATA / "target.safetensors")
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(words["embed"])
        model.get_output_embeddings().weight.copy_(words["lm_head"])
    return Target(model)


def drafter_of(case, target, expander=None, width=VOCAB):
    """A drafter behind the context of the public run, its numbers, and the root."""
    numbers = load_file(DATA / case / "numbers.safetensors")
    drafter = ParallelDrafter(load_head(DATA / case), target, expander, width=width)
    drafter.reset(1)
    length = numbers["features"].shape[1]
    drafter.observe(torch.zeros(1, length, dtype=torch.int64), numbers["features"], torch.tensor([length]))
    return drafter, numbers, numbers["path"][:1]


def laws_along(drafter, numbers, root):
    """The law, float [V], behind each prefix of the path of the public run."""
    path = numbers["path"]
    states = drafter._draft(root, len(path))
    source = drafter._laws.source(*drafter._laws.logits(states, root[:, None]), VOCAB)
    found = []
    for level, token in enumerate(path.tolist(), start=1):
        frontier = Frontier(torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1))
        tokens, log_probs = source(level, frontier)
        found.append(torch.empty(VOCAB).scatter(0, tokens[0, 0], log_probs[0, 0]))
    return torch.stack(found)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_plain_logits_are_those_of_the_public_code(case, target):
    drafter, numbers, root = drafter_of(case, target)
    ours = drafter.draft_logits(root, len(numbers["logits"]))[0]
    torch.testing.assert_close(ours, numbers["logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", DSPARK)
@torch.no_grad()
def test_corrected_laws_are_those_of_the_public_code(case, target):
    drafter, numbers, root = drafter_of(case, target)
    expected = numbers["corrected"].log_softmax(-1)
    assert (expected - numbers["logits"].log_softmax(-1)).abs().max() > 0.1
    torch.testing.assert_close(laws_along(drafter, numbers, root), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", SELECTED)
@torch.no_grad()
def test_the_selector_chooses_among_the_likeliest_tokens_which_keep_their_mass(case, target):
    drafter, numbers, root = drafter_of(case, target)
    laws, plain = laws_along(drafter, numbers, root), numbers["logits"].log_softmax(-1)
    candidates = numbers["candidates"]
    assert candidates.shape == SELECTED[case]
    chosen, before = laws.gather(1, candidates), plain.gather(1, candidates)
    torch.testing.assert_close(chosen.log_softmax(-1), numbers["scores"].log_softmax(-1), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(chosen.logsumexp(-1), before.logsumexp(-1), atol=TOLERANCE, rtol=0)
    others = torch.ones(len(laws), VOCAB, dtype=torch.bool).scatter(1, candidates, False)
    torch.testing.assert_close(laws[others], plain[others], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_greedy_chain_is_that_of_the_public_code_at_any_budget(case, target):
    # The selector chooses among few tokens, which the default width holds; Markov heads correct the whole vocabulary.
    drafter, numbers, root = drafter_of(case, target, Chain(), width=None if case in SELECTED else VOCAB)
    chain = [*root.tolist(), *numbers["greedy"].tolist()]
    for budget in range(2, len(chain) + 1):
        assert drafter.propose(context(root), budget).tokens[0].tolist() == chain[:budget]


def context(root):
    return DraftContext(root, torch.tensor([5]), [[0] * 5 + root.tolist()], max_depth=8)


@pytest.mark.parametrize("case", CASES)
def test_the_text_stays_the_targets(case, target):
    prompt = [5, 9, 13, 21, 9, 13, 30]
    for options in ({}, {"vocabulary": torch.arange(1, 40)}):
        drafter = ParallelDrafter(load_head(DATA / case), target, BestFirst(), **options)
        for budget in (1, 2, 9):
            result = SpeculativeDecoder(target, drafter, budget=budget).generate(prompt, max_new_tokens=20)
            assert result.token_ids == plain_greedy(target.model, prompt, 20)


def test_blocks_that_sample_from_the_anchor_draft_one_token_more():
    assert load_head(DATA / "speculators-anchor").config.depth == 4
    assert load_head(DATA / "speculators-own").config.depth == 3
    assert load_head(DATA / "deepspec-vanilla").config.depth == 4


def test_copies_of_the_targets_embeddings_take_no_memory(target, tmp_path):
    folder = copy_of("deepspec-vanilla", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach().clone()
    save_file(tensors, folder / "model.safetensors")
    head = load_head(folder)
    ParallelDrafter(head, target)
    assert head.embed_tokens.weight is target.model.get_input_embeddings().weight
    # The other one differs and stays.
    assert torch.equal(head.lm_head.weight, tensors["lm_head.weight"])


def test_they_are_neither_trained_nor_saved(target, tmp_path):
    for case in ("deepspec-gated", "dflash2"):
        head = load_head(DATA / case)
        with pytest.raises(ValueError, match="cannot be saved; copy its folder"):
            save_head(head, tmp_path)
        with pytest.raises(ValueError, match="only JetFlow and DFlash heads are trained"):
            warm_start(head, target)
        with pytest.raises(ValueError, match="cannot be trained on"):
            head(torch.zeros(1, 4, 16), torch.zeros(1, 5, 32), torch.zeros(1, 4).long(), torch.ones(1, 1, 4, 9).bool())


def copy_of(case, tmp_path):
    return Path(shutil.copytree(DATA / case, tmp_path / case))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("deepspec-rnn", {"markov_head_type": "lstm"}, "markov_head_type must be one of vanilla, gated, rnn, got 'lstm'"),
        (
            "deepspec-rnn",
            {"architectures": ["Gemma4DSparkModel"]},
            "Gemma4DSparkModel.*only DSpark heads on the DFlash backbone",
        ),
        ("deepspec-rnn", {"selector_rank": 4}, "two corrections: markov_rank=6, selector_rank=4"),
        ("specforge", {"markov_rank": 9}, "markov_rank=9, dflash_config.markov_rank=6"),
        ("specforge", {"dflash_config": {"projector_type": "domino"}}, "projector_type='domino'"),
        ("dflash2", {"dflash_config": {"shift_label": True}}, "shift_label=true"),
        ("dflash2", {"dflash_config": {"selector_top_k": None}}, "selector_rank but no selector_top_k"),
        ("dflash2", {"dflash_config": {"selector_top_k": 49}}, "selector_candidates=49 must be in"),
        ("dflash2", {"dflash_config": {"conv_group_size": None}}, "conv_kernel_size=2 and conv_group_size=None"),
        ("dflash2", {"dflash_config": {"conv_group_size": 5}}, r"convolution=\(2, 5\) must be"),
        ("dflash2", {"attention_value_scale": 0.5}, "attention_value_scale=0.5"),
        ("speculators-own", {"draft_vocab_size": 32}, "draft_vocab_size=32 must equal vocab_size=48"),
    ],
)
def test_what_is_not_supported_is_refused_by_key(case, changes, message):
    raw = json.loads((DATA / case / "config.json").read_text())
    nested = {**raw.get("dflash_config", {}), **changes.get("dflash_config", {})}
    with pytest.raises(ValueError, match=message):
        read_config({**raw, **changes, **({"dflash_config": nested} if nested else {})})


def test_a_checkpoint_without_its_correction_is_refused(tmp_path):
    folder = copy_of("specforge", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value for name, value in tensors.items() if "markov_w2" not in name}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks the tensor 'markov_head.markov_w2.weight'"):
        load_head(folder)

"""EAGLE-3 heads give the numbers that the public code gave; tests/data/eagle/README.md says where they come from."""

from pathlib import Path

import pytest
import torch
from conftest import SMALL
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from jetflow import DraftContext, EagleDrafter, EagleHead, Target, load_head

DATA = Path(__file__).parents[1] / "data" / "eagle"
# float32 sums in another order.
PARITY = 1e-4


def parts(name: str) -> tuple[EagleHead, dict[str, torch.Tensor]]:
    head = load_head(DATA / name)
    assert isinstance(head, EagleHead)
    return head, load_file(DATA / name / "expected.safetensors")


def unrolled_logits(head: EagleHead, text: torch.Tensor, features: torch.Tensor, anchors, path: torch.Tensor) -> torch.Tensor:
    """Logits [A, K, R] of steps unrolled from positions `anchors`, reading the tokens `path` [A, K - 1]."""
    length = len(features)
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    embeds = head.embed_tokens(text[1 : length + 1])[None]
    states = head(embeds, features[None], mask, torch.as_tensor(anchors)[None], head.embed_tokens(path)[None])
    return head.lm_head(states)[0]


@torch.no_grad()
def test_a_pass_and_a_tree_level_of_safeailab():
    head, expected = parts("safeai")
    assert head.config.taps is None
    assert head.config.rope_parameters["rope_theta"] == 5000.0
    text, features = expected["text"], expected["features"][:8]
    context = unrolled_logits(head, text, features, range(8), torch.zeros(8, 0, dtype=torch.int64))[:, 0]
    torch.testing.assert_close(context, expected["context_logits"], atol=PARITY, rtol=0)
    level = unrolled_logits(head, text, features, [7, 7, 7], expected["level_tokens"][:, None])[:, 1]
    torch.testing.assert_close(level, expected["level_logits"], atol=PARITY, rtol=0)


def test_the_trees_of_two_rounds_of_safeailab():
    head, expected = parts("safeai")
    target = Target(Qwen3ForCausalLM(Qwen3Config(**{**SMALL, "num_hidden_layers": 8}, head_dim=16)).eval())
    drafter = EagleDrafter(head, target, depth=4, width=3, num_expanded=3)
    assert drafter.taps == (1, 3, 4)
    text, features = expected["text"], expected["features"]
    drafter.reset(1)
    for index, part in enumerate((slice(0, 8), slice(8, 12))):
        drafter.observe(text[None, part], features[None, part], torch.tensor([part.stop - part.start]))
        prefix = text[: part.stop + 1].tolist()
        context = DraftContext(text[part.stop, None], torch.tensor([part.stop]), [prefix], max_depth=9)
        tree = drafter.propose(context, 13)
        ours = paths_of(tree.tokens[0].tolist(), tree.parents[0].tolist())
        theirs = paths_of(expected[f"tree_tokens_{index}"].tolist(), expected[f"tree_parents_{index}"].tolist())
        assert len(ours) == 13
        assert ours == theirs


def paths_of(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


@pytest.mark.parametrize("name", ["speculators_qwen3", "speculators_llama"])
@torch.no_grad()
def test_unrolled_steps_of_speculators(name):
    head, expected = parts(name)
    config = head.config
    assert config.taps == (0, 1, 3)
    flags = (config.qk_norm, config.fc_norm, config.norm_output, config.norm_before_residual)
    assert flags == ((True, True, True, False) if name == "speculators_qwen3" else (False, False, False, True))
    text, features, theirs = expected["text"], expected["features"], expected["unrolled_logits"]
    steps, length = theirs.shape[:2]
    anchors = torch.arange(length)
    path = text[(anchors[:, None] + torch.arange(2, steps + 1)).clamp(max=length)]
    ours = unrolled_logits(head, text, features, anchors, path)
    for step in range(steps):
        # Behind the end of the text their steps read zeros, ours its last token; neither is trained on.
        real = slice(0, length - step)
        torch.testing.assert_close(ours[real, step], theirs[step, real], atol=PARITY, rtol=0)

import dataclasses

import pytest
import torch
from conftest import make_model, plain_greedy

from jetflow import (
    Beam,
    BestFirst,
    Chain,
    DraftContext,
    EagleDrafter,
    EagleHead,
    EagleHeadConfig,
    FixedShape,
    SpeculativeDecoder,
    Target,
)

PROMPT = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9]
DRAFTED = torch.tensor([3, 5, 9, 13, 17, 21, 22, 30, 40, 44, 52, 60])


def make_eagle(target: Target, draft_tokens: torch.Tensor | None = None, seed: int = 1, **changes) -> EagleHead:
    torch.manual_seed(seed)
    size = None if draft_tokens is None else len(draft_tokens)
    config = EagleHeadConfig.for_target(target.config, draft_vocab_size=size, taps=(0, 1, 3))
    head = EagleHead(dataclasses.replace(config, **changes), draft_tokens).eval()
    with torch.no_grad():
        # Large weights, so that laws are far from flat and a wrong mask or state shows.
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return head


def law_of_path(head: EagleHead, target: Target, prefix: list[int], path: list[int]) -> torch.Tensor:
    """The head's law behind `prefix + path`, by one plain pass per step with explicit loops and no cache.

    Position i reads token i + 1 and the target's state at i; behind the prefix it reads the state of the step before.
    """
    config, layer = head.config, head.midlayer
    root_place = len(prefix) - 1
    features, _ = target.features(torch.tensor([prefix[:-1]]), config.taps)
    states = [*head.fuse(features)[0].unbind(0)]
    tokens = [*prefix[1:], *path]
    keys, values = [], []
    for place, token in enumerate(tokens):
        embed = target.embed(torch.tensor(token)) if head.embed_tokens is None else head.embed_tokens(torch.tensor(token))
        state = states[place]
        normed = layer.hidden_norm(state)
        read = torch.cat([layer.input_layernorm(embed), normed])
        attention = layer.self_attn
        query, key, value = (
            project(read).view(-1, config.head_dim) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if config.qk_norm:
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = turned(query, place, config), turned(key, place, config)
        keys.append(key)
        values.append(value)
        group = config.num_heads // config.num_kv_heads
        out = []
        for index in range(config.num_heads):
            scores = torch.stack([query[index] @ one[index // group] for one in keys]) / config.head_dim**0.5
            out.append(scores.softmax(0) @ torch.stack([one[index // group] for one in values]))
        state = (normed if config.norm_before_residual else state) + attention.o_proj(torch.cat(out))
        state = state + layer.mlp(layer.post_attention_layernorm(state))
        final = head.norm(state)
        if place >= root_place - 1:
            states.append(final if config.norm_output else state)
    return head.lm_head(final).log_softmax(-1)


def turned(states: torch.Tensor, position: int, config: EagleHeadConfig) -> torch.Tensor:
    half = config.head_dim // 2
    angles = position / config.rope_parameters["rope_theta"] ** (torch.arange(half) / half)
    first, second = states[:, :half], states[:, half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=1)


def observed(drafter: EagleDrafter, target: Target, texts: list[list[int]]) -> DraftContext:
    """Shows the drafter all tokens of ragged texts but the last ones, which are the roots."""
    counts = [len(text) - 1 for text in texts]
    tokens = torch.zeros(len(texts), max(counts), dtype=torch.int64)
    features = torch.zeros(len(texts), max(counts), len(drafter.taps) * target.hidden_size)
    for row, text in enumerate(texts):
        tokens[row, : counts[row]] = torch.tensor(text[:-1])
        features[row, : counts[row]] = target.features(torch.tensor([text[:-1]]), drafter.taps)[0][0]
    drafter.reset(len(texts))
    drafter.observe(tokens, features, torch.tensor(counts))
    return DraftContext(torch.tensor([text[-1] for text in texts]), torch.tensor(counts), texts, max_depth=20)


FLAGS = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_residual": True, "qk_norm": True},
    {"own_embedding": True, "attention_bias": True},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(flags) or "plain")
@pytest.mark.parametrize("draft_tokens", [None, DRAFTED], ids=["all", "some"])
@torch.no_grad()
def test_every_node_has_the_law_of_its_own_path(flags, draft_tokens):
    target = Target(make_model("qwen3"))
    head = make_eagle(target, draft_tokens, **flags)
    texts = [PROMPT, PROMPT[:4], [*PROMPT, 7, 8, 9]]
    drafter = EagleDrafter(head, target, depth=4, width=3, num_expanded=3)
    tree = drafter.propose(observed(drafter, target, texts), 14)
    for row, text in enumerate(texts):
        scores, paths = {0: 0.0}, {0: []}
        for node in range(1, int(tree.num_nodes[row])):
            parent, token = int(tree.parents[row, node]), int(tree.tokens[row, node])
            law = law_of_path(head, target, text, paths[parent])
            column = token if draft_tokens is None else draft_tokens.tolist().index(token)
            scores[node], paths[node] = scores[parent] + float(law[column]), [*paths[parent], token]
            assert float(tree.scores[row, node]) == pytest.approx(scores[node], abs=1e-4)
        assert int(tree.depths[row].max()) >= 2


@pytest.mark.parametrize("expander", [BestFirst(), Beam(2), Chain(), FixedShape([-1, 0, 0, 1], [0, 0, 1, 0])])
@pytest.mark.parametrize("draft_tokens", [None, DRAFTED], ids=["all", "some"])
def test_an_untrained_head_changes_nothing_but_speed(expander, draft_tokens):
    model = make_model("qwen3")
    target = Target(model)
    drafter = EagleDrafter(make_eagle(target, draft_tokens), target, expander, depth=4)
    for budget in (1, 2, 9):
        result = SpeculativeDecoder(target, drafter, budget=budget).generate(PROMPT, max_new_tokens=25)
        assert result.token_ids == plain_greedy(model, PROMPT, 25)


def test_every_architecture_takes_a_head(model):
    target = Target(model)
    drafter = EagleDrafter(make_eagle(target, DRAFTED), target, depth=3)
    drafted = []
    result = SpeculativeDecoder(target, drafter, budget=9).generate(
        PROMPT, max_new_tokens=20, on_round=lambda event: drafted.extend(event.tree.tokens[0, 1:].tolist())
    )
    assert result.token_ids == plain_greedy(model, PROMPT, 20)
    assert drafted
    assert set(drafted) <= set(DRAFTED.tolist())

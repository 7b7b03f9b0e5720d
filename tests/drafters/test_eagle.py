import dataclasses

import pytest
import torch
from conftest import make_model, plain_greedy

from jetflow import (
    AcceptanceTable,
    Beam,
    BestFirst,
    Chain,
    ChildSampling,
    DraftContext,
    EagleDrafter,
    EagleHead,
    EagleHeadConfig,
    FixedShape,
    RecursiveRejection,
    SpeculativeDecoder,
    Target,
    TraversalVerification,
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


@pytest.mark.parametrize("draft_tokens", [None, DRAFTED], ids=["all", "some"])
def test_a_batch_of_ragged_prompts_is_decoded_as_each_alone(draft_tokens):
    model = make_model("qwen3")
    target = Target(model)
    drafter = EagleDrafter(make_eagle(target, draft_tokens), target, depth=4)
    prompts = [PROMPT, PROMPT[3:7], [*PROMPT, 7, 8, 9]]
    plain = [
        model.generate(torch.tensor([prompt]), max_new_tokens=18, min_new_tokens=18, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    decoder = SpeculativeDecoder(target, drafter, budget=9)
    results = decoder.generate(prompts, batch_size=3, max_new_tokens=18, eos_token_id=[])
    assert [one.token_ids for one in results] == plain


@torch.no_grad()
def test_what_is_cached_round_by_round_is_what_one_pass_gives():
    target = Target(make_model("qwen3"))
    drafter = EagleDrafter(make_eagle(target), target, depth=3)
    result = SpeculativeDecoder(target, drafter, budget=9).generate(PROMPT, max_new_tokens=20, eos_token_id=[])
    text = PROMPT + result.token_ids
    # The tokens that were committed, and the root of the next round.
    seen = text[: drafter._cache.lengths[0] + drafter._waiting.counts[0] + 1]
    context = DraftContext(torch.tensor([seen[-1]]), torch.tensor([len(seen) - 1]), [seen], 9)
    after = drafter.propose(context, 12)
    fresh = drafter.propose(observed(drafter, target, [seen]), 12)
    assert after.tokens.tolist() == fresh.tokens.tolist()
    torch.testing.assert_close(after.scores, fresh.scores, atol=1e-4, rtol=0)


@torch.no_grad()
def test_only_so_many_nodes_of_a_level_get_children_and_the_best_of_all_are_kept():
    """EAGLE-2's tree, by plain loops: expand the best nodes of each level, then keep the best of all levels."""
    target = Target(make_model("qwen3"))
    head = make_eagle(target)
    drafter = EagleDrafter(head, target, depth=3, width=4, num_expanded=2)
    tree = drafter.propose(observed(drafter, target, [PROMPT]), 9)
    level, everything = [(0.0, [])], []
    for _ in range(3):
        children = []
        for score, path in level:
            law = law_of_path(head, target, PROMPT, path)
            children += [(score + float(law[token]), [*path, int(token)]) for token in law.topk(4).indices]
        children.sort(key=lambda one: -one[0])
        everything, level = everything + children, children[:2]
    best = sorted(everything, key=lambda one: -one[0])[:8]
    paths: list[list[int]] = [[]]
    for parent, token in zip(tree.parents[0, 1:].tolist(), tree.tokens[0, 1:].tolist(), strict=True):
        paths.append([*paths[parent], token])
    assert sorted(paths[1:]) == sorted(path for _, path in best)


@torch.no_grad()
def test_drawn_children_come_with_the_law_of_their_own_path():
    target = Target(make_model("qwen3"))
    head = make_eagle(target, DRAFTED)
    drafter = EagleDrafter(
        head, target, BestFirst(AcceptanceTable()), depth=3, width=6, num_expanded=2, sampling=ChildSampling(0.7)
    )
    context = dataclasses.replace(observed(drafter, target, [PROMPT]), generator=torch.Generator().manual_seed(5))
    tree = drafter.propose(context, 8)
    assert tree.laws is not None
    paths: list[list[int]] = [[]]
    for node in range(1, 8):
        paths.append([*paths[int(tree.parents[0, node])], int(tree.tokens[0, node])])
    inner = set(tree.parents[0, 1:].tolist())
    assert len(inner) >= 3
    for node in inner:
        law = law_of_path(head, target, PROMPT, paths[node])
        best = law.topk(6).indices
        expected = dict(zip(DRAFTED[best].tolist(), (law[best] / 0.7).softmax(0).tolist(), strict=True))
        recorded = dict(zip(tree.laws.tokens[0, node].tolist(), tree.laws.probs[0, node].tolist(), strict=True))
        assert recorded == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("acceptor", [RecursiveRejection(0.8), TraversalVerification(0.8)], ids=lambda one: type(one).__name__)
def test_rules_that_read_the_drafts_law_take_its_trees(acceptor):
    target = Target(make_model("qwen3"))
    drafter = EagleDrafter(
        make_eagle(target), target, BestFirst(AcceptanceTable()), depth=3, num_expanded=2, sampling=ChildSampling(0.8)
    )
    decoder = SpeculativeDecoder(target, drafter, acceptor, budget=8)
    first, again = (decoder.generate(PROMPT, max_new_tokens=15, seed=3, eos_token_id=[]) for _ in range(2))
    assert first.token_ids == again.token_ids
    assert len(first.token_ids) == 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"num_expanded": 0}, "num_expanded must be at least 1, got 0"),
        ({"expander": FixedShape([-1, 0, 1], [0, 0, 0]), "depth": 1}, "asks for 2 levels, more than depth=1"),
    ],
)
def test_bad_settings_are_refused(options, message):
    target = Target(make_model("qwen3"))
    with pytest.raises(ValueError, match=message):
        EagleDrafter(make_eagle(target), target, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 99, "draft_vocab_size": 99}, "vocab_size is 99"),
        ({"target_hidden_size": 16}, "target_hidden_size is 16"),
        ({"hidden_size": 16}, "hidden_size is 16"),
        ({"taps": (0, 1, 9)}, r"taps=\(0, 1, 9\) must be below the target's 4 layers"),
    ],
)
def test_heads_of_other_targets_are_refused(changes, message):
    target = Target(make_model("qwen3"))
    with pytest.raises(ValueError, match=message):
        EagleDrafter(make_eagle(target, **changes), target)

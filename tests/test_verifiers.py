import random

import pytest
import torch
from conftest import VOCAB_SIZE, make_model

from jetflow import Target, TokenTree, TreeVerifier
from jetflow.protocols import Acceptance

# float32 sums in another order; logits here are of order 10.
TOLERANCE = 1e-4
TAPS = (0, 2, 3)


def random_tree(num_nodes: int, seed: int, root: int) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    tokens, parents, used = [root], [-1], set()
    while len(tokens) < num_nodes:
        pair = (rng.randrange(len(tokens)), rng.randrange(VOCAB_SIZE))
        if pair not in used:
            used.add(pair)
            parents.append(pair[0])
            tokens.append(pair[1])
    return tokens, parents


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@pytest.mark.parametrize("num_nodes", [1, 2, 15, 33])
def test_every_node_has_the_logits_and_features_of_its_path(target, num_nodes):
    prompt = [5, 9, 13, 21, 9, 13, 30, 44, 5, 9, 17]
    tokens, parents = random_tree(num_nodes, num_nodes, root=8)
    verifier = TreeVerifier(target, taps=TAPS)
    verifier.prefill(torch.tensor([prompt]), torch.tensor([len(prompt)]))
    output = verifier.verify(TokenTree.from_parents([tokens], [parents]))
    for node in range(num_nodes):
        text = prompt + [tokens[n] for n in path_to(parents, node)]
        features, final = target.features(torch.tensor([text]), TAPS)
        logits = target.lm_head(final)
        torch.testing.assert_close(output.logits[0, node], logits[0, -1], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(output.features[0, node], features[0, -1], atol=TOLERANCE, rtol=0)


def test_rows_of_different_lengths_equal_single_runs(target):
    """Prefill, a tree, a commit of different paths, and another tree."""
    prompts = [[5, 9, 13, 21, 9, 13, 30, 44, 5, 9, 17, 6], [8, 3, 30], [11, 12, 13, 14, 15, 16, 17]]
    trees = [random_tree(9, seed, root=4) for seed in range(3)]
    paths = [path_to(parents, node) for (_, parents), node in zip(trees, (8, 0, 5), strict=True)]
    longest = max(len(path) for path in paths)
    acceptance = Acceptance(
        torch.tensor([path + [path[-1]] * (longest - len(path)) for path in paths]),
        torch.tensor([len(path) - 1 for path in paths]),
        torch.tensor([7, 7, 7]),
    )
    width = max(map(len, prompts))
    padded = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    verifier = TreeVerifier(target, taps=TAPS, prefill_chunk=5)
    prefill = verifier.prefill(padded, torch.tensor([len(prompt) for prompt in prompts]))
    batch = TokenTree.from_parents([tokens for tokens, _ in trees], [parents for _, parents in trees])
    first = verifier.verify(batch)
    verifier.commit(acceptance)
    second = verifier.verify(batch)
    for row, (tokens, parents) in enumerate(trees):
        text = prompts[row] + [tokens[node] for node in paths[row]]
        _, final = target.features(torch.tensor([prompts[row]]), TAPS)
        logits = target.lm_head(final)
        torch.testing.assert_close(prefill.logits[row, 0], logits[0, -1], atol=TOLERANCE, rtol=0)
        for node in range(9):
            ending = [tokens[n] for n in path_to(parents, node)]
            for output, start in ((first, prompts[row]), (second, text)):
                features, final = target.features(torch.tensor([start + ending]), TAPS)
                logits = target.lm_head(final)
                torch.testing.assert_close(output.logits[row, node], logits[0, -1], atol=TOLERANCE, rtol=0)
                torch.testing.assert_close(output.features[row, node], features[0, -1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prefill_features_equal_training_features(attention):
    target = Target(make_model("qwen3"), attention=attention)
    prompt = torch.tensor([[5, 9, 13, 21, 9, 13, 30]])
    expected, final = target.features(prompt, TAPS)
    logits = target.lm_head(final)
    hidden = target.model(prompt, output_hidden_states=True).hidden_states
    # The last layer is tapped before the final norm, which hidden_states[-1] has behind it.
    torch.testing.assert_close(expected[..., :32], hidden[TAPS[0] + 1])
    torch.testing.assert_close(expected[..., 32:64], hidden[TAPS[1] + 1])
    torch.testing.assert_close(target.model.model.norm(expected[..., 64:]), hidden[-1])
    output = TreeVerifier(target, taps=TAPS, prefill_chunk=3).prefill(prompt, torch.tensor([7]))
    torch.testing.assert_close(output.features, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(output.logits[:, 0], logits[:, -1], atol=TOLERANCE, rtol=0)


def test_padding_of_a_tree_changes_nothing():
    target = Target(make_model("qwen3"))
    verifier = TreeVerifier(target)
    verifier.prefill(torch.tensor([[5, 9, 13]]), torch.tensor([3]))
    tokens, parents = random_tree(6, 0, root=4)
    plain = verifier.verify(TokenTree.from_parents([tokens], [parents])).logits
    padded = TokenTree.from_parents([[*tokens, 0, 0, 0]], [[*parents, -1, -1, -1]], num_nodes=[6])
    wide = verifier.verify(padded).logits
    torch.testing.assert_close(wide[:, :6], plain, atol=TOLERANCE, rtol=0)
    assert wide.isfinite().all()


def test_misuse_is_refused():
    target = Target(make_model("qwen3"))
    with pytest.raises(ValueError, match=r"layer 4 must be in \[0, 4\)"):
        TreeVerifier(target, taps=(4,))
    with pytest.raises(ValueError, match="prefill_chunk"):
        TreeVerifier(target, prefill_chunk=0)
    with pytest.raises(ValueError, match="prefill must come before"):
        TreeVerifier(target).verify(TokenTree.root_only(torch.tensor([3])))

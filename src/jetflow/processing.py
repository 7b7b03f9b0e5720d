"""Logits processors on trees: every node is processed on its own path, as if its tokens had been written one by one.

Dimension key: B batch (1 here), N nodes, L path length, V vocabulary.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from jetflow.trees.token_tree import TokenTree

# (token ids int64 [M, L], scores float32 [M, V]) -> scores: transformers' own contract.
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
# Those of transformers that only forbid tokens, by the path alone.
FORBIDDING = (
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
)


class PathProcessors:
    """Applies logits processors to the nodes of a tree, all nodes of one depth together.

    Args:
        processors: called in this order.
        vocab_size: V.
        device: where they will be called.

    Raises:
        ValueError: a processor keeps state between calls, so that its answer depends on how often it was asked.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], vocab_size: int, device: torch.device | str = "cpu"):
        for one in processors:
            _refuse_state(one, vocab_size, device)
        self._processors, self._vocab_size = list(processors), vocab_size
        self._forbidding = [one for one in processors if type(one).__name__ in FORBIDDING]

    def __call__(self, before: Sequence[int], tree: TokenTree, logits: Tensor) -> Tensor:
        """Returns the processed logits, float32 [1, N, V].

        Args:
            before: token ids in front of the root.
            tree: one tree.
            logits: the target's, float [1, N, V].
        """
        return self._run(self._processors, before, tree, logits)

    def prune(self, before: Sequence[int], tree: TokenTree) -> TokenTree:
        """Drops the nodes that a processor forbids, with all below them; the target need not look at those.

        Trees of drawn children stay as they are: what is dropped by its token would bias the text.
        """
        if not self._forbidding or tree.laws is not None or tree.max_nodes == 1:
            return tree
        zeros = torch.zeros(1, tree.max_nodes, self._vocab_size, device=tree.tokens.device)
        scores = self._run(self._forbidding, before, tree, zeros)
        above = tree.parents.clamp(min=0)[0]
        allowed = scores[0, above, tree.tokens[0]] != float("-inf")
        allowed[0] = True
        kept = (tree.ancestor_mask()[0] <= allowed).all(-1) & tree.node_mask[0]
        if bool((kept == tree.node_mask[0]).all()):
            return tree
        place = kept.long().cumsum(0) - 1
        parents = torch.where(tree.parents[0] >= 0, place[above], -1)
        return TokenTree(
            tree.tokens[:, kept], parents[kept][None], tree.depths[:, kept], tree.scores[:, kept], kept.sum()[None]
        )

    def _run(self, processors: Sequence[LogitsProcessor], before: Sequence[int], tree: TokenTree, logits: Tensor) -> Tensor:
        out = logits.to(torch.float32, copy=True)
        depths, tokens, parents = tree.depths[0].tolist(), tree.tokens[0].tolist(), tree.parents[0].tolist()
        prefix = torch.tensor(before, dtype=torch.int64, device=logits.device)
        paths: list[list[int]] = []
        for node in range(int(tree.num_nodes[0])):
            paths.append([*(paths[parents[node]] if node else []), tokens[node]])
        for depth in range(max(depths[: len(paths)]) + 1):
            nodes = [node for node in range(len(paths)) if depths[node] == depth]
            tails = torch.tensor([paths[node] for node in nodes], device=logits.device)
            token_ids = torch.cat([prefix.expand(len(nodes), -1), tails], dim=1)
            scores = out[0, nodes]
            for processor in processors:
                scores = processor(token_ids, scores)
            out[0, nodes] = scores
        return out


class CountPenalty:
    """Lowers the logits of tokens that the answer holds already: the frequency and presence penalties of serving engines.

    `scores - frequency * count - presence * (count > 0)`, where count is how often the token stands in the answer so far;
    tokens of the prompt do not count (transformers' `repetition_penalty` is the one that counts them).

    Args:
        num_prompt_tokens: length of the prompt.
        frequency: logits per occurrence.
        presence: logits for any.

    Example:
        >>> penalty = CountPenalty(num_prompt_tokens=2, frequency=0.5, presence=1.0)
        >>> penalty(torch.tensor([[3, 3, 1, 1]]), torch.zeros(1, 4))
        tensor([[ 0., -2.,  0.,  0.]])
    """

    def __init__(self, num_prompt_tokens: int, *, frequency: float = 0.0, presence: float = 0.0):
        self.num_prompt_tokens, self.frequency, self.presence = num_prompt_tokens, frequency, presence

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns penalised scores [M, V]."""
        answer = token_ids[:, self.num_prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


def _refuse_state(processor: Any, vocab_size: int, device: torch.device | str) -> None:
    """Asks three times; what a processor prepares once is no state, what goes on changing is."""
    token_ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    scores = torch.zeros(1, vocab_size, device=device)
    answers, states = [], []
    for _ in range(3):
        answers.append(processor(token_ids, scores.clone()))
        states.append(_state_of(processor))
    if not torch.equal(answers[1], answers[2]) or states[1] != states[2]:
        raise ValueError(
            f"logits processor {type(processor).__name__} keeps state between calls, so its answer for a node of a tree "
            "would depend on how many were asked before; processors must be functions of token ids and scores"
        )


def _state_of(processor: Any) -> bytes | str:
    try:
        return pickle.dumps(getattr(processor, "__dict__", {}))
    except (pickle.PicklingError, AttributeError, TypeError):
        return repr(getattr(processor, "__dict__", {}))

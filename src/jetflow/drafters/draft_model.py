"""DraftModelDrafter: a small language model drafts, level by level.

Dimension key: F frontier slots, K candidates, N nodes, V vocabulary (one row at a time).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow.protocols import DraftContext, Frontier, TreeExpander
from jetflow.targets import Target
from jetflow.trees.expanders import Beam
from jetflow.trees.ranking import likeliest_tokens
from jetflow.trees.sampling import ChildSampling
from jetflow.trees.token_tree import TokenTree
from jetflow.verifiers import TreeVerifier


class DraftModelDrafter:
    """Any causal language model with the target's vocabulary as the drafter, one pass of it per level of the tree.

    Every node's law is conditional on its whole path, as the model's own. The passes of one tree start from the committed
    prefix each time, which costs little for beams and chains of a small model; a wide `BestFirst` asks for many nodes.

    Args:
        model: the small model.
        target: the model it drafts for.
        expander: how the tree is built; a beam of four when absent. `Chain()` is classic speculative decoding.
        depth: most levels.
        width: most children of one node.
        sampling: draw the children, for acceptors that make use of the draft's law.

    Raises:
        ValueError: the vocabularies or devices differ, or `depth` or `width` is below 1.

    Example:
        >>> drafter = DraftModelDrafter(Target.from_pretrained("small"), target, Chain())  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Target,
        target: Target,
        expander: TreeExpander | None = None,
        *,
        depth: int = 5,
        width: int = 8,
        sampling: ChildSampling | None = None,
    ):
        for name, value in (("depth", depth), ("width", width)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        _check_vocabularies(model, target)
        self._model, self._expander = model, expander or Beam(4)
        self._depth, self._width, self._sampling = depth, width, sampling
        self._verifier = TreeVerifier(model)
        self._is_new = True

    def reset(self, batch_size: int) -> None:
        """Forgets the text.

        Raises:
            ValueError: `batch_size` is not 1.
        """
        if batch_size != 1:
            raise ValueError(f"batch_size must be 1, got {batch_size}")
        self._is_new = True

    def observe(self, token_ids: Tensor, features: Tensor, num_tokens: Tensor) -> None:
        """Runs the model over newly committed tokens [1, T]."""
        if self._is_new:
            self._verifier.prefill(token_ids, num_tokens)
            self._is_new = False
            return
        count = token_ids.shape[1]
        parents = torch.arange(-1, count - 1)[None]
        self._verifier.verify(TokenTree.from_parents(token_ids, parents))
        self._verifier.cache.advance([count])

    def propose(self, context: DraftContext, budget: int) -> TokenTree:
        """Returns a tree of at most `budget` nodes and `depth` levels."""
        # The model's positions may end before the target's; then there is nothing to draft.
        room = self._model.max_positions - int(context.prefix_lens[0]) - 1
        depth = min(self._depth, context.max_depth, budget - 1, room)
        if depth < 1:
            return TokenTree.root_only(context.root_tokens)
        source = _ModelSource(self._verifier, depth, self._width)
        if self._sampling is not None:
            return self._sampling.build(self._expander, context.root_tokens, source, budget, context.generator)
        return self._expander(context.root_tokens, source, budget)


class _ModelSource:
    """Runs the model over all frontiers so far; the laws behind the last one are the answer."""

    def __init__(self, verifier: TreeVerifier, max_depth: int, width: int):
        self.max_depth = max_depth
        self._verifier, self._width = verifier, width
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._start = 0

    def __call__(self, level: int, frontier: Frontier) -> tuple[Tensor, Tensor]:
        before = self._start
        self._start = sum(one.shape[1] for one in self._tokens)
        self._parents.append(frontier.parents + before if level > 1 else frontier.parents - 1)
        self._tokens.append(frontier.tokens)
        tokens, parents = torch.cat(self._tokens, dim=1), torch.cat(self._parents, dim=1)
        depths = torch.cat([torch.full_like(one, depth) for depth, one in enumerate(self._tokens)], dim=1)
        count = torch.tensor([tokens.shape[1]], device=tokens.device)
        tree = TokenTree(tokens, parents, depths, torch.zeros_like(tokens, dtype=torch.float32), count)
        logits = self._verifier.verify(tree).logits[:, self._start :].float()
        best = likeliest_tokens(logits, min(self._width, logits.shape[-1]))
        return best, logits.log_softmax(-1).gather(-1, best)


def _check_vocabularies(model: Target, target: Target) -> None:
    pairs = {"vocab_size": (model.vocab_size, target.vocab_size), "device": (model.device, target.device)}
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ValueError(f"model and target must agree: the model's {name} is {ours}, the target's {theirs}")
    if model.tokenizer is not None and target.tokenizer is not None:
        ours, theirs = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        if ours != theirs:
            wrong = next(token for token in {**theirs, **ours} if ours.get(token) != theirs.get(token))
            raise ValueError(f"model and target must have one tokenizer, but they differ in {wrong!r}")

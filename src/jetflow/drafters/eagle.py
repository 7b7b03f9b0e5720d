"""EagleDrafter: an EAGLE-3 head drafts, one step of it per level of the tree.

Dimension key: B batch, F frontier slots, K candidates per parent, N drafted nodes so far, P waiting positions, S context,
H hidden size, R draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from jetflow.heads.context_cache import HeadCache
from jetflow.heads.eagle_head import EagleHead
from jetflow.kernels.masked_attention import masked_attention
from jetflow.protocols import DraftContext, Frontier, TreeExpander
from jetflow.targets import Target
from jetflow.trees.expanders import BestFirst
from jetflow.trees.growth import NEVER
from jetflow.trees.ranking import likeliest_tokens
from jetflow.trees.sampling import ChildSampling
from jetflow.trees.token_tree import TokenTree


class EagleDrafter:
    """Drafts level by level with an EAGLE-3 head: every node's law is conditional on its whole path.

    A position of the head reads the target's state there and the token behind it, so the last committed position is read
    when the root is known; that step gives the law of the first level. Below, a node reads its own token and the head's
    state of its parent.

    With `BestFirst` this is the tree of EAGLE-2 and EAGLE-3: the `num_expanded` best nodes of a level get children,
    `width` each, and the best nodes of all levels together make the tree. Tokens outside the head's draft vocabulary are
    not drafted; the text is the target's all the same.

    Args:
        head: the draft head, made for `target`.
        target: the frozen model; its embedding is used unless the head has one of its own.
        expander: how the tree is built; best-first when absent.
        depth: most levels; each costs one step of the head.
        width: most children of one node.
        num_expanded: most nodes of a level that get children, the first ones in the expander's order; all when None.
        sampling: draw the children, for acceptors that make use of the draft's law; the likeliest ones when absent.

    Raises:
        ValueError: head and target differ in vocabulary, width, dtype or device, a number is below 1, or `expander` has a
            shape deeper than `depth`.

    Example:
        >>> drafter = EagleDrafter(load_eagle_head("eagle3-head"), target)  # doctest: +SKIP
    """

    def __init__(
        self,
        head: EagleHead,
        target: Target,
        expander: TreeExpander | None = None,
        *,
        depth: int = 8,
        width: int = 10,
        num_expanded: int | None = 10,
        sampling: ChildSampling | None = None,
    ):
        for name, value in (("depth", depth), ("width", width), ("num_expanded", num_expanded)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        _check_match(head, target)
        if getattr(expander, "depth", 0) > depth:
            raise ValueError(f"expander asks for {getattr(expander, 'depth', 0)} levels, more than depth={depth}")
        self.taps = head.config.taps_in(target.num_layers)
        self._head, self._target, self._expander = head, target, expander or BestFirst()
        self._depth, self._width, self._num_expanded, self._sampling = depth, width, num_expanded, sampling
        self._cache: HeadCache | None = None

    def reset(self, batch_size: int) -> None:
        """Forgets the text of the last batch."""
        weight = self._head.fc.weight
        self._cache = self._head.new_cache(batch_size)
        self._waiting = _Waiting(batch_size, weight.new_zeros(batch_size, 0, weight.shape[1]))
        # Features of the last position of each row.
        self._last = weight.new_zeros(batch_size, 1, weight.shape[1])

    def keep_rows(self, rows: list[int]) -> None:
        """Goes on with some rows of the batch."""
        assert self._cache is not None, "reset comes before keep_rows"
        self._cache.keep_rows(rows)
        self._waiting.keep_rows(rows)
        self._last = self._last[rows]

    def observe(self, token_ids: Tensor, features: Tensor, num_tokens: Tensor) -> None:
        """Takes newly committed tokens [B, T], `num_tokens` [B] per row, and their features [B, T, k * Ht]."""
        assert self._cache is not None, "reset comes before observe"
        self._waiting.add(token_ids, features, num_tokens.tolist())

    def propose(self, context: DraftContext, budget: int) -> TokenTree:
        """Returns trees of at most `budget` nodes and `depth` levels."""
        depth = min(self._depth, context.max_depth, budget - 1)
        if depth < 1:
            return TokenTree.root_only(context.root_tokens)
        assert self._cache is not None, "reset comes before a draft"
        self._read_waiting(self._cache, context.root_tokens)
        source = _StepSource(
            self._head,
            self._embed,
            self._cache,
            self._last,
            max_depth=depth,
            width=self._width,
            num_expanded=self._num_expanded,
        )
        if self._sampling is not None:
            return self._sampling.build(self._expander, context.root_tokens, source, budget, context.generator)
        return self._expander(context.root_tokens, source, budget)

    @torch.no_grad()
    def _read_waiting(self, cache: HeadCache, root_tokens: Tensor) -> None:
        """Reads the committed positions that wait, now that the token behind the last of them is known."""
        tokens, features, counts = self._waiting.take(root_tokens)
        if not any(counts):
            return
        self._head.extend_context(cache, self._embed(tokens), features, counts)
        ends = torch.tensor(counts, device=features.device)[:, None, None]
        found = features.gather(1, (ends - 1).clamp(min=0).expand(-1, -1, features.shape[2]))
        self._last = torch.where(ends > 0, found, self._last)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., H] of `tokens` int64 [...], the head's own or the target's."""
        own = self._head.embed_tokens
        return self._target.embed(tokens) if own is None else own(tokens)


class _StepSource:
    """One step of the head for the frontier of each level; the keys of all levels so far stand behind the context's.

    Args:
        head: the head.
        embed: embeddings of tokens.
        cache: the committed positions, the one before the root included.
        last: float [B, 1, k * Ht], features of that position.
        max_depth: most levels.
        width: most children of one node.
        num_expanded: most nodes of a level that get children.
    """

    def __init__(
        self,
        head: EagleHead,
        embed: Callable[[Tensor], Tensor],
        cache: HeadCache,
        last: Tensor,
        *,
        max_depth: int,
        width: int,
        num_expanded: int | None,
    ):
        self.max_depth = max_depth
        self._head, self._embed, self._cache = head, embed, cache
        self._width, self._num_expanded = width, num_expanded
        self._last = last
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        # Which drafted nodes each node of the last frontier sees, bool [B, F, N].
        self._seen = torch.zeros(len(last), 1, 0, dtype=torch.bool, device=last.device)

    @torch.no_grad()
    def __call__(self, level: int, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Returns tokens and log-probabilities [B, F, K], best first for each parent."""
        slots = frontier.tokens.shape[1]
        count = slots if self._num_expanded is None else min(slots, self._num_expanded)
        if level == 1:
            self._step_at_root(frontier.tokens)
        else:
            self._step(level, frontier.tokens[:, :count], frontier.parents[:, :count])
        logits = self._head.lm_head(self._normed).float()
        best = likeliest_tokens(logits, min(self._width, logits.shape[-1]))
        log_probs = logits.log_softmax(-1).gather(-1, best)
        tokens = best if self._head.draft_tokens is None else self._head.draft_tokens[best]
        return pad(tokens, (0, 0, 0, slots - count)), pad(log_probs, (0, 0, 0, slots - count), value=NEVER)

    def _step_at_root(self, tokens: Tensor) -> None:
        """Runs the head over the last committed position, behind which the roots [B, 1] stand; its keys are in the cache."""
        keys, values = self._cache.view(0)
        lengths = torch.tensor(self._cache.lengths, device=tokens.device)
        mask = (torch.arange(keys.shape[2], device=tokens.device) < lengths[:, None])[:, None, None]

        def attend(queries: Tensor, *own: Tensor) -> Tensor:
            return masked_attention(queries, keys, values, mask)

        states = self._head.fuse(self._last)
        self._states, self._normed = self._head.step(self._embed(tokens), states, lengths[:, None] - 1, attend)

    def _step(self, level: int, tokens: Tensor, parents: Tensor) -> None:
        """Runs the head over nodes [B, F] of depth `level - 1`, whose parents are indices into the frontier before."""
        count = tokens.shape[1]
        # A slot that holds no node may name a parent that was not expanded; nothing comes of it.
        parents = parents.clamp(max=self._states.shape[1] - 1)[:, :, None]
        states = self._states.gather(1, parents.expand(-1, -1, self._states.shape[2]))
        own = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        self._seen = torch.cat([self._seen.gather(1, parents.expand(-1, -1, self._seen.shape[2])), own], dim=2)
        lengths = torch.tensor(self._cache.lengths, device=tokens.device)
        positions = (lengths + level - 2)[:, None].expand(-1, count)
        num_nodes = self._seen.shape[2]
        places = torch.arange(max(self._cache.lengths) + num_nodes, device=tokens.device) - lengths[:, None]
        drafted = self._seen.gather(2, places.clamp(0, num_nodes - 1)[:, None].expand(-1, count, -1))
        mask = torch.where((places < 0)[:, None], True, drafted & (places < num_nodes)[:, None])[:, None]
        self._cache.reserve(num_nodes)

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._keys.append(keys)
            self._values.append(values)
            written = self._cache.write_block(0, torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2))
            return masked_attention(queries, *written, mask)

        self._states, self._normed = self._head.step(self._embed(tokens), states, positions, attend)


class _Waiting:
    """Committed tokens and features that the head has not read, as the token behind the last of them is not known."""

    def __init__(self, batch_size: int, features: Tensor):
        self.counts = [0] * batch_size
        self.tokens = torch.zeros(batch_size, 0, dtype=torch.int64, device=features.device)
        self.features = features

    def add(self, tokens: Tensor, features: Tensor, counts: list[int]) -> None:
        if not any(self.counts):
            self.tokens, self.features, self.counts = tokens, features, counts
            return
        width = max(old + new for old, new in zip(self.counts, counts, strict=True))
        grown = (
            pad(self.tokens, (0, width - self.tokens.shape[1])),
            pad(self.features, (0, 0, 0, width - self.features.shape[1])),
        )
        for row, (old, new) in enumerate(zip(self.counts, counts, strict=True)):
            for kept, added in zip(grown, (tokens, features), strict=True):
                kept[row, old : old + new] = added[row, :new]
        self.tokens, self.features = grown
        self.counts = [old + new for old, new in zip(self.counts, counts, strict=True)]

    def keep_rows(self, rows: list[int]) -> None:
        self.counts = [self.counts[row] for row in rows]
        self.tokens, self.features = self.tokens[rows], self.features[rows]

    def take(self, root_tokens: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Returns for each waiting position the token behind it [B, P] and its features; nothing waits afterwards."""
        counts, features, width = self.counts, self.features, max(self.counts)
        behind = torch.cat([self.tokens[:, 1:width], root_tokens[:, None]], dim=1)[:, :width]
        for row, count in enumerate(counts):
            if count:
                behind[row, count - 1] = root_tokens[row]
        self.counts = [0] * len(counts)
        self.tokens, self.features = self.tokens[:, :0], features[:, :0]
        return behind, features[:, :width], counts


def _check_match(head: EagleHead, target: Target) -> None:
    config, weight = head.config, head.fc.weight
    pairs = {
        "vocab_size": (config.vocab_size, target.vocab_size),
        "target_hidden_size": (config.target_hidden_size, target.hidden_size),
        "dtype": (weight.dtype, target.dtype),
        "device": (weight.device, target.device),
    }
    if head.embed_tokens is None:
        pairs["hidden_size"] = (config.hidden_size, target.hidden_size)
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ValueError(f"head and target must agree: the head's {name} is {ours}, the target's {theirs}")

"""TreeVerifier: runs the target over prompts and token trees.

Dimension key: B batch, P prompt length, N tree nodes, S cache slots, V vocabulary, H feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from jetflow import masks
from jetflow.caches import TreeCache
from jetflow.kernels.ancestors import pack_ancestors
from jetflow.kernels.masked_attention import masked_attention
from jetflow.kernels.path_attention import path_attention, text_slots
from jetflow.kernels.tree_attention import tree_attention
from jetflow.paged_cache import PagedTreeCache, PagePool
from jetflow.protocols import Acceptance, TargetOutput
from jetflow.targets import Target
from jetflow.trees.token_tree import TokenTree

TREE_ATTENTION = "jetflow_tree"


@dataclass
class TreeStep:
    """One tree pass as the attention layers see it; travels through the model's keyword arguments."""

    tree: TokenTree
    prefix_lens: Tensor
    num_slots: int
    kernel: str
    block_table: Tensor | None = None
    # In fixed-width mode: where each node's own text lies.
    text_slots: Tensor | None = None

    @cached_property
    def packed(self) -> dict[str, Any]:
        """What the kernel needs besides queries, keys and values; every row has all nodes of the batch's width."""
        tree, device = self.tree, self.tree.tokens.device
        return {
            "bits": pack_ancestors(tree.parents).flatten(0, 1),
            "row_starts": torch.arange(tree.batch_size + 1, device=device, dtype=torch.int32) * tree.max_nodes,
            "prefix_lens": self.prefix_lens.int(),
            "depths": tree.depths.flatten().int(),
            "max_nodes": tree.max_nodes,
            "max_prefix": self.num_slots - tree.max_nodes,
            "block_table": self.block_table,
        }

    @cached_property
    def _masks(self) -> dict[int | None, Tensor | None]:
        return {}

    def mask(self, window: int | None) -> Tensor | None:
        """Returns the mask, bool [B, 1, N, S], for layers with the given sliding window; None where all is visible."""
        if window not in self._masks:
            self._masks[window] = self._build(window)
        return self._masks[window]

    def _build(self, window: int | None) -> Tensor | None:
        tree = self.tree
        if window is None and tree.batch_size == 1 and tree.max_nodes == 1:
            return None
        rule = masks.tree_causal(tree, self.prefix_lens, window=window)
        return masks.dense(rule, tree.batch_size, 1, tree.max_nodes, self.num_slots, device=tree.tokens.device)


def _tree_attention_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_step: TreeStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer in a tree pass, in the form that transformers calls."""
    if softcap is not None or s_aux is not None:
        raise ValueError("attention with soft-capping or sinks is not supported in tree passes")
    if tree_step.kernel == "triton":
        nodes = query.transpose(1, 2)
        out, _ = tree_attention(nodes.flatten(0, 1), key, value, **tree_step.packed, scale=scaling, window=sliding_window)
        return out.view_as(nodes), None
    if tree_step.text_slots is not None:
        out = path_attention(query, key, value, tree_step.text_slots, scale=scaling, window=sliding_window)
        return out.transpose(1, 2).contiguous(), None
    out = masked_attention(query, key, value, tree_step.mask(sliding_window), scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE_ATTENTION, _tree_attention_layer)


class TreeVerifier:
    """Checks whole token trees with one target pass each, over a cache of the committed prefix.

    Args:
        target: the frozen model.
        taps: target layers whose outputs are returned as features.
        prefill_chunk: most prompt tokens in one pass; bounds the memory that long prompts take.
        pages: memory that the cache takes its pages from; a contiguous cache of its own when absent.
        fixed_width: pad every tree pass to so many nodes and attend over each node's own text in its order, so that what a
            node gets does not depend on the tree around it, to the last bit where the backend's matrix products treat equal
            rows alike (the CPU's do). One row at a time, and slow.

    Raises:
        ValueError: a tap is outside the target, `prefill_chunk` or `fixed_width` is below 1, or `fixed_width` stands beside the
            target's Triton attention.
    """

    def __init__(
        self,
        target: Target,
        *,
        taps: Sequence[int] = (),
        prefill_chunk: int = 2048,
        pages: PagePool | None = None,
        fixed_width: int | None = None,
    ):
        target.check_taps(taps)
        if fixed_width is not None and fixed_width < 1:
            raise ValueError(f"fixed_width must be at least 1, got {fixed_width}")
        if fixed_width is not None and target.tree_kernel == "triton":
            raise ValueError("fixed_width has an attention of its own and does not go with attention='triton'")
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
        self._target = target
        self._taps = tuple(taps)
        self._prefill_chunk = prefill_chunk
        self._pages = pages
        self._fixed_width = fixed_width
        self._cache: TreeCache | PagedTreeCache | None = None

    @property
    def cache(self) -> TreeCache | PagedTreeCache:
        """The cache of the current batch."""
        if self._cache is None:
            raise ValueError("prefill must come before verify and commit")
        return self._cache

    @torch.no_grad()
    def prefill(self, token_ids: Tensor, lengths: Tensor) -> TargetOutput:
        """Runs whole prompts and commits them.

        Args:
            token_ids: int64 [B, P], prompts padded at their end.
            lengths: int64 [B], tokens of each prompt, at least 1.

        Returns:
            Logits [B, 1, V] after each prompt's last token, and features [B, P, H].
        """
        batch, width = token_ids.shape
        if self._cache is None or len(self._cache.lengths) != batch:
            self.release()
            pages = self._pages
            self._cache = self._target.new_cache(batch, width) if pages is None else PagedTreeCache(pages, batch)
        cache = self._cache
        cache.reset()
        cache.reserve(width)
        counts = lengths.tolist()
        # Rows are of one length while the prompt runs: the padding behind short ones is cut off at the end.
        logits = token_ids.new_zeros(batch, 1, self._target.vocab_size, dtype=self._target.dtype)
        features = []
        for start in range(0, width, self._prefill_chunk):
            chunk = token_ids[:, start : start + self._prefill_chunk]
            end = start + chunk.shape[1]
            ending = [row for row, count in enumerate(counts) if start < count <= end]
            keep = torch.tensor([counts[row] - 1 - start for row in ending] or [0], device=token_ids.device)
            positions = torch.arange(start, end, device=token_ids.device)[None].expand(batch, -1)
            last, tapped = self._target.forward(
                chunk, taps=self._taps, cache=cache, position_ids=positions, logits_to_keep=keep
            )
            for index, row in enumerate(ending):
                logits[row, 0] = last[row, index]
            cache.advance([chunk.shape[1]] * batch)
            features.append(tapped)
        cache.lengths = counts
        return TargetOutput(logits, torch.cat(features, dim=1))

    @torch.no_grad()
    def verify(self, tree: TokenTree) -> TargetOutput:
        """Runs the target over all nodes of `tree`; a node sees the committed prefix, its ancestors and itself.

        Returns:
            Logits [B, N, V] and features [B, N, H]. Nothing is committed yet.
        """
        cache = self.cache
        if tree.batch_size != len(cache.lengths):
            raise ValueError(f"tree has {tree.batch_size} rows, but {len(cache.lengths)} prompts were prefilled")
        num_nodes = tree.max_nodes
        if self._fixed_width is not None:
            tree = self._padded(tree, self._fixed_width)
        cache.reserve(tree.max_nodes)
        prefix_lens = torch.tensor(cache.lengths, device=tree.tokens.device)
        kernel = self._target.tree_kernel
        step = TreeStep(tree, prefix_lens, max(cache.lengths) + tree.max_nodes, kernel)
        if self._fixed_width is not None:
            step.text_slots = text_slots(tree, cache.lengths[0])
        if isinstance(cache, PagedTreeCache) and kernel == "triton":
            cache.hands_out_pages, step.block_table = True, cache.block_table
        logits, features = self._target.forward(
            tree.tokens,
            taps=self._taps,
            cache=cache,
            attention=TREE_ATTENTION,
            # Siblings share a position: it is given by depth, never by slot.
            position_ids=prefix_lens[:, None] + tree.depths,
            # A 4D mask keeps the model from building one of its own; the layers read `tree_step`.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tree.tokens.device),
            tree_step=step,
        )
        if isinstance(cache, PagedTreeCache):
            cache.hands_out_pages = False
        return TargetOutput(logits[:, :num_nodes], features[:, :num_nodes])

    def _padded(self, tree: TokenTree, width: int) -> TokenTree:
        """Adds nodes without parents, which see the prefix and themselves, up to `width` nodes."""
        spare = width - tree.max_nodes
        if tree.batch_size != 1 or spare < 0:
            raise ValueError(f"fixed_width={width} takes one tree of at most so many nodes, got {list(tree.tokens.shape)}")
        columns = zip((tree.tokens, tree.parents, tree.depths, tree.scores), (0, -1, 0, float("-inf")), strict=True)
        padded = [torch.cat([column, column.new_full((1, spare), filling)], dim=1) for column, filling in columns]
        return TokenTree(padded[0], padded[1], padded[2], padded[3], tree.num_nodes)

    def release(self) -> None:
        """Gives the pages of a paged cache back; a contiguous cache keeps its memory for the next prompt."""
        if isinstance(self._cache, PagedTreeCache):
            self._cache.reset()

    def keep_rows(self, rows: list[int]) -> None:
        """Drops all rows of the batch but the given ones, such as those whose text goes on."""
        self.cache.keep_rows(rows)

    def commit(self, acceptance: Acceptance) -> None:
        """Keeps root and accepted nodes of the last verified tree in the cache and drops the rest."""
        self.cache.commit(acceptance.path, [accepted + 1 for accepted in acceptance.num_accepted.tolist()])

"""TreeVerifier: runs the target over prompts and token trees.

Dimension key: B batch, P prompt length, N tree nodes, S cache slots, V vocabulary, H feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from jetflow.caches import TreeCache
from jetflow.graphs import GraphSettings, RecordedSteps
from jetflow.kernels.path_attention import text_slots
from jetflow.paged_cache import PagedTreeCache, PagePool
from jetflow.protocols import Acceptance, TargetOutput
from jetflow.target_checks import check_recordable
from jetflow.targets import Target
from jetflow.tree_pass import TREE_ATTENTION, TreeStep
from jetflow.trees.token_tree import TokenTree


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
        graphs: record tree passes as CUDA graphs, one for each bucket of node counts and prefix lengths, and replay them; none
            when absent. Needs the target's Triton attention.

    Raises:
        ValueError: a tap is outside the target, `prefill_chunk` or `fixed_width` is below 1, `fixed_width` stands beside the
            target's Triton attention, or tree passes cannot be recorded: no CUDA device, another attention, or a model that
            reads its positions or experts on the host.
    """

    def __init__(
        self,
        target: Target,
        *,
        taps: Sequence[int] = (),
        prefill_chunk: int = 2048,
        pages: PagePool | None = None,
        fixed_width: int | None = None,
        graphs: GraphSettings | None = None,
    ):
        target.check_taps(taps)
        if graphs is not None:
            if target.tree_kernel != "triton":
                raise ValueError(f"graphs need a target with attention='triton', got attention={target.attention!r}")
            graphs.check_device(target.device)
            check_recordable(target.model)
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
        self._recorded = None if graphs is None else RecordedSteps(graphs)
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
        capacity = width
        if self._recorded is not None:
            self._recorded.settings.check_room(width)
            capacity = self._recorded.settings.max_tokens
        if self._cache is None or len(self._cache.lengths) != batch:
            self.release()
            self._forget_steps()
            pages = self._pages
            self._cache = self._target.new_cache(batch, capacity) if pages is None else PagedTreeCache(pages, batch)
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
            Logits [B, N, V] and features [B, N, H]. Nothing is committed yet. With `graphs` they are the recording's own
            memory, which a later pass overwrites.

        Raises:
            ValueError: the tree has other rows than the prompts, or there is no room for it.
        """
        cache = self.cache
        if tree.batch_size != len(cache.lengths):
            raise ValueError(f"tree has {tree.batch_size} rows, but {len(cache.lengths)} prompts were prefilled")
        num_nodes = tree.max_nodes
        logits, features = self._run(tree) if self._recorded is None else self._replay(tree, self._recorded)
        return TargetOutput(logits[:, :num_nodes], features[:, :num_nodes])

    def _run(self, tree: TokenTree) -> tuple[Tensor, Tensor]:
        """A pass of its own."""
        cache, kernel = self.cache, self._target.tree_kernel
        if self._fixed_width is not None:
            if tree.batch_size != 1 or tree.max_nodes > self._fixed_width:
                shape = list(tree.tokens.shape)
                raise ValueError(f"fixed_width={self._fixed_width} takes one tree of at most so many nodes, got {shape}")
            tree = tree.padded(self._fixed_width)
        cache.reserve(tree.max_nodes)
        prefix_lens = torch.tensor(cache.lengths, device=tree.tokens.device)
        step = TreeStep(tree, prefix_lens, max(cache.lengths) + tree.max_nodes, kernel)
        if self._fixed_width is not None:
            step.text_slots = text_slots(tree, cache.lengths[0])
        if isinstance(cache, PagedTreeCache) and kernel == "triton":
            cache.hands_out_pages, step.block_table = True, cache.block_table
        output = self._forward(step)
        if isinstance(cache, PagedTreeCache):
            cache.hands_out_pages = False
        return output

    def _replay(self, tree: TokenTree, recorded: RecordedSteps) -> tuple[Tensor, Tensor]:
        """A pass from its recording, which is made when its bucket is first used."""
        cache, graphs = self.cache, recorded.settings
        size = graphs.bucket(tree.max_nodes)
        longest = max(cache.lengths)
        graphs.check_room(longest + size)
        cache.reserve(size)
        tree = tree.padded(size)
        nodes = torch.stack([tree.tokens, tree.parents, tree.depths])
        inputs = [nodes, torch.tensor(cache.lengths, device=nodes.device)]
        if isinstance(cache, PagedTreeCache):
            inputs.append(cache.padded_table(graphs.max_tokens))
        prefix = graphs.prefix_bucket(longest)
        logits, features = recorded((tree.batch_size, size, prefix), tuple(inputs), partial(self._static_pass, prefix))
        return logits, features

    def _static_pass(
        self, max_prefix: int, nodes: Tensor, prefix_lens: Tensor, block_table: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What is recorded: nothing in it may depend on the host. `nodes` int64 [3, B, N] are tokens, parents and depths."""
        tokens, parents, depths = nodes
        tree = TokenTree(tokens, parents, depths, torch.zeros_like(depths, dtype=torch.float32), prefix_lens)
        size = tree.max_nodes
        with self.cache.static_slots(prefix_lens, size, block_table):
            return self._forward(TreeStep(tree, prefix_lens, max_prefix + size, "triton", block_table))

    def _forward(self, step: TreeStep) -> tuple[Tensor, Tensor]:
        tree = step.tree
        return self._target.forward(
            tree.tokens,
            taps=self._taps,
            cache=self.cache,
            attention=TREE_ATTENTION,
            # Siblings share a position: it is given by depth, never by slot.
            position_ids=step.prefix_lens[:, None] + tree.depths,
            # A 4D mask keeps the model from building one of its own; the layers read `tree_step`.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tree.tokens.device),
            tree_step=step,
        )

    def _forget_steps(self) -> None:
        if self._recorded is not None:
            self._recorded.clear()

    def release(self) -> None:
        """Gives the pages of a paged cache back; a contiguous cache keeps its memory for the next prompt."""
        if isinstance(self._cache, PagedTreeCache):
            self._cache.reset()

    def keep_rows(self, rows: list[int]) -> None:
        """Drops all rows of the batch but the given ones, such as those whose text goes on."""
        self.cache.keep_rows(rows)
        # Recordings use the rows that were there before.
        self._forget_steps()

    def commit(self, acceptance: Acceptance) -> None:
        """Keeps root and accepted nodes of the last verified tree in the cache and drops the rest."""
        self.cache.commit(acceptance.path, [accepted + 1 for accepted in acceptance.num_accepted.tolist()])

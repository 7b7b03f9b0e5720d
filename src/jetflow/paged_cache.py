"""A tree cache whose memory is a pool of pages: rows of any length share it, and nothing is copied as they grow.

Dimension key: L layers, B batch, H key-value heads, D head dimension, T new tokens, P path length, S slots of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from jetflow.caches import TreeCacheLayer
from jetflow.kernels.commit import commit_rows


class PagePool:
    """Pages of keys and values of all layers, handed out to caches and taken back.

    Args:
        num_layers: layers L of the target.
        num_kv_heads: key-value heads H.
        head_dim: head dimension D of keys and values.
        num_pages: pages in all.
        page_size: tokens of a page.
        dtype: dtype of keys and values.
        device: device of keys and values.

    Raises:
        ValueError: `num_pages` or `page_size` is below 1.

    Example:
        >>> pool = target.new_page_pool(num_pages=256, page_size=16)  # doctest: +SKIP
        >>> decoder = SpeculativeDecoder(target, drafter, pages=pool)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_pages, self.page_size = num_pages, page_size
        # Zeros, not empty: a masked slot still enters plain attention as 0 * value, which NaN would spoil.
        self.memory = torch.zeros(num_layers, 2, num_pages, page_size, num_kv_heads, head_dim, dtype=dtype, device=device)
        self._free = list(range(num_pages))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hands out `count` pages.

        Raises:
            ValueError: fewer are free; none is handed out then.
        """
        if count > self.num_free:
            raise ValueError(
                f"{count} pages of {self.page_size} tokens are needed, but {self.num_free} of {self.num_pages} are free"
            )
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, pages: list[int]) -> None:
        """Takes pages back."""
        self._free = [*self._free, *pages]


class PagedTreeCache(Cache):
    """A tree cache over a `PagePool`, with the interface of `TreeCache`.

    Args:
        pool: where the pages come from.
        batch_size: rows B.

    Attributes:
        lengths: committed tokens of each row.
        hands_out_pages: whether a pass gets the pool's own pages, for kernels that read them through `block_table`, instead
            of a contiguous copy.
    """

    def __init__(self, pool: PagePool, batch_size: int):
        super().__init__(layers=[TreeCacheLayer(self, index) for index in range(len(pool.memory))])
        self._pool = pool
        self._tables: list[list[int]] = [[] for _ in range(batch_size)]
        self._table: Tensor | None = None
        self.lengths = [0] * batch_size
        self.hands_out_pages = False
        self._static_slots: tuple[Tensor, Tensor] | None = None

    @property
    def block_table(self) -> Tensor:
        """Pages of each row, int32 [B, most pages of a row]; 0 behind the last one."""
        if self._table is None:
            width = max(1, *(len(pages) for pages in self._tables))
            padded = [pages + [0] * (width - len(pages)) for pages in self._tables]
            self._table = torch.tensor(padded, dtype=torch.int32, device=self._pool.memory.device)
        return self._table

    def reset(self) -> None:
        """Forgets all committed tokens and gives all pages back."""
        for pages in self._tables:
            self._pool.give_back(pages)
        self._tables = [[] for _ in self._tables]
        self.lengths, self._table = [0] * len(self.lengths), None
        # A pass that broke off may have left it set.
        self.hands_out_pages = False

    def reserve(self, num_tokens: int) -> None:
        """Makes sure that every row has room for `num_tokens` tokens behind its committed ones.

        Raises:
            ValueError: the pool has too few free pages; no row gets any then.
        """
        size = self._pool.page_size
        missing = [
            max(0, -(-(length + num_tokens) // size) - len(pages))
            for length, pages in zip(self.lengths, self._tables, strict=True)
        ]
        if not any(missing):
            return
        taken = self._pool.take(sum(missing))
        for pages, count in zip(self._tables, missing, strict=True):
            pages.extend(taken[:count])
            taken = taken[count:]
        self._table = None

    def write(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes `keys` and `values` [B, H, T, D] behind the committed tokens of each row.

        Returns:
            The pool's pages of this layer [pages, page size, H, D] where `hands_out_pages` is set, else all slots in use,
            contiguous [B, H, S, D].

        Raises:
            ValueError: their shape is not that of the pool.
        """
        memory = self._pool.memory[layer_idx]
        batch, heads, new, head_dim = keys.shape
        if (batch, heads, head_dim) != (len(self.lengths), *memory.shape[-2:]) or values.shape != keys.shape:
            raise ValueError(
                f"layer {layer_idx} of the target has keys {list(keys.shape)} and values {list(values.shape)}, but the pool "
                f"holds batch, heads, head_dim = {(len(self.lengths), *memory.shape[-2:])}"
            )
        pages, places = self._static_slots or self._new_slots(new)
        memory[0, pages, places] = keys.transpose(1, 2)
        memory[1, pages, places] = values.transpose(1, 2)
        if self.hands_out_pages or self._static_slots:
            return memory[0], memory[1]
        longest = max(self.lengths) + new
        slots = torch.arange(longest, device=memory.device).expand(batch, -1)
        pages, places = self._locate(slots, self.block_table)
        return memory[0, pages, places].transpose(1, 2), memory[1, pages, places].transpose(1, 2)

    def advance(self, num_tokens: list[int]) -> None:
        """Commits the first `num_tokens[b]` tokens of the last pass as they lie."""
        self.lengths = [length + new for length, new in zip(self.lengths, num_tokens, strict=True)]

    def commit(self, path: Tensor, num_tokens: list[int]) -> None:
        """Commits the first `num_tokens[b]` nodes of `path` [B, P]: moves them behind the prefix of their row."""
        memory = self._pool.memory
        commit_rows(memory.view(-1, *memory.shape[2:]), path, self.lengths, num_tokens, self.block_table)
        self.advance(num_tokens)

    def keep_rows(self, rows: list[int]) -> None:
        """Drops all rows but the given ones, which then stand in the given order; the others' pages go back."""
        for row, pages in enumerate(self._tables):
            if row not in rows:
                self._pool.give_back(pages)
        self._tables = [self._tables[row] for row in rows]
        self.lengths, self._table = [self.lengths[row] for row in rows], None

    @contextmanager
    def static_slots(self, starts: Tensor, num_tokens: int, block_table: Tensor | None = None) -> Iterator[None]:
        """Passes of `num_tokens` tokens write behind `starts` int64 [B] instead of `lengths`, and get the pool's own pages.

        For recorded passes: nothing of them depends on the host. `block_table` int32 [B, P] is that of `padded_table`.
        """
        assert block_table is not None, "a paged pass needs the pages"
        slots = starts[:, None] + torch.arange(num_tokens, device=starts.device)
        self._static_slots = self._locate(slots, block_table)
        try:
            yield
        finally:
            self._static_slots = None

    def padded_table(self, num_tokens: int) -> Tensor:
        """Returns the block table, int32 [B, pages for `num_tokens` tokens]."""
        width = -(-num_tokens // self._pool.page_size)
        return torch.nn.functional.pad(self.block_table, (0, width - self.block_table.shape[1]))

    def _new_slots(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Pages and places [B, T] behind the committed tokens of each row."""
        device = self._pool.memory.device
        starts = torch.tensor(self.lengths, device=device)
        return self._locate(starts[:, None] + torch.arange(num_tokens, device=device), self.block_table)

    def _locate(self, slots: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Page and place within it of `slots` int64 [B, S]; those behind a row's pages are placed in its first entry."""
        size, table = self._pool.page_size, table.long()
        column = (slots // size).clamp(max=table.shape[1] - 1)
        return table.gather(1, column), slots % size

"""The target's key-value cache for tree verification.

Keys and values of all layers live in one preallocated tensor. Row b holds `lengths[b]` committed tokens; a pass writes
its tokens behind them, and `commit` moves the accepted ones to the front of that place. Nothing is concatenated.

Dimension key: L layers, B batch, H key-value heads, D head dimension, T new tokens, P path length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from jetflow.kernels.commit import commit_rows

MIN_CAPACITY = 256


class TreeCacheLayer(CacheLayerMixin):
    """One layer's view of a `TreeCache`, with the interface that transformers' models call."""

    is_sliding = False

    def __init__(self, cache: Any, layer_idx: int):
        super().__init__()
        self._cache = cache
        self._layer_idx = layer_idx
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the cache is allocated before the first pass."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes new keys and values [B, H, T, D] behind each row's committed tokens; returns all slots in use."""
        return self._cache.write(self._layer_idx, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of keys that a pass over `query_length` tokens sees, and their offset."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Returns the number of committed tokens of the longest row."""
        return max(self._cache.lengths)

    def get_max_length(self) -> int:
        """Returns -1: the cache grows when it is asked to."""
        return -1


class TreeCache(Cache):
    """A preallocated cache with per-row lengths whose commit gathers an accepted tree path in place.

    Args:
        num_layers: layers L of the target.
        num_kv_heads: key-value heads H.
        head_dim: head dimension D of keys and values.
        batch_size: rows B.
        capacity: tokens to make room for at once; `reserve` doubles it when more are needed.
        dtype: dtype of keys and values.
        device: device of keys and values.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(layers=[TreeCacheLayer(self, index) for index in range(num_layers)])
        shape = (num_layers, 2, batch_size, num_kv_heads, max(capacity, MIN_CAPACITY), head_dim)
        # Zeros, not empty: a masked slot still enters attention as 0 * value, which NaN would spoil. Memory outlives a decode
        # and its inference mode, so it is made and moved outside that.
        with torch.inference_mode(False):
            self._storage = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * batch_size
        self._last_slots: tuple[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] | None = None
        self._static_slots: tuple[Tensor, Tensor] | None = None

    @property
    def capacity(self) -> int:
        """Tokens for which each row has room."""
        return self._storage.shape[4]

    def reset(self) -> None:
        """Forgets all committed tokens and keeps the memory."""
        self.lengths = [0] * len(self.lengths)

    @torch.inference_mode(False)
    def reserve(self, num_tokens: int) -> None:
        """Makes sure that every row has room for `num_tokens` tokens behind its committed ones."""
        needed = max(self.lengths) + num_tokens
        if needed > self.capacity:
            shape = list(self._storage.shape)
            shape[4] = max(needed, 2 * self.capacity)
            grown = self._storage.new_zeros(shape)
            grown[..., : self.capacity, :] = self._storage
            self._storage = grown

    def write(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes `keys` and `values` [B, H, T, D] behind the committed tokens of each row; returns views of all slots.

        Raises:
            ValueError: their shape is not that of the cache.
        """
        storage = self._storage[layer_idx]
        static = self._static_slots
        batch, heads, new, head_dim = keys.shape
        expected = (storage.shape[1], storage.shape[2], storage.shape[4])
        if (batch, heads, head_dim) != expected or values.shape != keys.shape:
            raise ValueError(
                f"layer {layer_idx} of the target has keys {list(keys.shape)} and values {list(values.shape)}, but the "
                f"cache holds batch, heads, head_dim = {expected}; layers that differ in shape are not supported"
            )
        end = self.capacity if static else max(self.lengths) + new
        if static is None and len(set(self.lengths)) == 1:
            storage[0, :, :, end - new : end] = keys
            storage[1, :, :, end - new : end] = values
        else:
            rows, slots = static or self._slots(new)
            storage[0, rows, :, slots] = keys.transpose(1, 2)
            storage[1, rows, :, slots] = values.transpose(1, 2)
        return storage[0, :, :, :end], storage[1, :, :, :end]

    @contextmanager
    def static_slots(self, starts: Tensor, num_tokens: int, block_table: Tensor | None = None) -> Iterator[None]:
        """Passes of `num_tokens` tokens write behind `starts` int64 [B] instead of `lengths`, and get whole rows.

        For recorded passes: nothing of them depends on the host. There must be room.
        """
        rows = torch.arange(len(starts), device=starts.device)[:, None]
        self._static_slots = (rows, starts[:, None] + torch.arange(num_tokens, device=starts.device))
        try:
            yield
        finally:
            self._static_slots = None

    def _slots(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Indices [B, 1] and [B, T] of the rows and of the slots behind their committed tokens."""
        key = (num_tokens, tuple(self.lengths))
        if self._last_slots is None or self._last_slots[0] != key:
            device = self._storage.device
            starts = torch.tensor(self.lengths, device=device)
            rows = torch.arange(len(self.lengths), device=device)[:, None]
            # Every layer of a pass writes to the same slots.
            self._last_slots = (key, (rows, starts[:, None] + torch.arange(num_tokens, device=device)))
        return self._last_slots[1]

    @torch.inference_mode(False)
    def keep_rows(self, rows: list[int]) -> None:
        """Drops all rows but the given ones, which then stand in the given order."""
        self._storage = self._storage.index_select(2, torch.tensor(rows, device=self._storage.device))
        self.lengths = [self.lengths[row] for row in rows]

    def advance(self, num_tokens: list[int]) -> None:
        """Commits the first `num_tokens[b]` tokens of the last pass as they lie."""
        self.lengths = [length + new for length, new in zip(self.lengths, num_tokens, strict=True)]

    def commit(self, path: Tensor, num_tokens: list[int]) -> None:
        """Commits the first `num_tokens[b]` nodes of `path` [B, P]: gathers them behind the prefix of their row.

        It gathers by node index; cropping to the first slots would keep rejected siblings.
        """
        # A view, so that the commit is in place.
        commit_rows(self._storage.view(-1, *self._storage.shape[2:]), path, self.lengths, num_tokens)
        self.advance(num_tokens)

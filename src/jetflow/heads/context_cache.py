"""HeadCache: a draft head's keys and values of the committed context, projected once; a block's own stand behind them.

Dimension key: L draft layers, B batch, H key-value heads, T new tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MIN_CAPACITY = 256


class HeadCache:
    """Preallocated keys and values with per-row lengths; grows by doubling.

    Args:
        num_layers: draft layers L.
        num_kv_heads: key-value heads H.
        head_dim: head dimension D.
        batch_size: rows B.
        dtype: dtype of keys and values.
        device: device of keys and values.
        capacity: tokens to make room for at once.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = MIN_CAPACITY,
    ):
        shape = (num_layers, 2, batch_size, num_kv_heads, max(capacity, MIN_CAPACITY), head_dim)
        # Zeros, not empty: a masked slot still enters attention as 0 * value, which NaN would spoil. Memory outlives a decode
        # and its inference mode, so it is made and moved outside that.
        with torch.inference_mode(False):
            self._storage = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * batch_size
        self._static: tuple[Tensor, int] | None = None

    @property
    def starts(self) -> Tensor:
        """Where the block of each row begins, int64 [B]: its length, or what `static_slots` says."""
        return torch.tensor(self.lengths, device=self._storage.device) if self._static is None else self._static[0]

    @property
    def longest(self) -> int:
        """Tokens of the longest row, or more in `static_slots`."""
        return max(self.lengths) if self._static is None else self._static[1]

    @property
    def is_static(self) -> bool:
        """True in `static_slots`."""
        return self._static is not None

    @contextmanager
    def static_slots(self, starts: Tensor, longest: int) -> Iterator[None]:
        """Blocks stand behind `starts` int64 [B] instead of `lengths`, none of them above `longest`.

        For recorded passes: nothing of them depends on the host. There must be room.
        """
        self._static = (starts, longest)
        try:
            yield
        finally:
            self._static = None

    @torch.inference_mode(False)
    def keep_rows(self, rows: list[int]) -> None:
        """Drops all rows but the given ones, which then stand in the given order."""
        self._storage = self._storage.index_select(2, torch.tensor(rows, device=self._storage.device))
        self.lengths = [self.lengths[row] for row in rows]

    def reset(self) -> None:
        """Forgets all tokens and keeps the memory."""
        self.lengths = [0] * len(self.lengths)

    @property
    def is_ragged(self) -> bool:
        """True where rows differ in length."""
        return len(set(self.lengths)) > 1

    def append(self, keys_values: Tensor, num_tokens: list[int]) -> None:
        """Adds `num_tokens[b]` of the T new tokens in `keys_values` [L, 2, B, H, T, D] to each row."""
        self.reserve(max(length + new for length, new in zip(self.lengths, num_tokens, strict=True)) - max(self.lengths))
        for row, (length, new) in enumerate(zip(self.lengths, num_tokens, strict=True)):
            self._storage[:, :, row, :, length : length + new] = keys_values[:, :, row, :, :new]
        self.lengths = [length + new for length, new in zip(self.lengths, num_tokens, strict=True)]

    @torch.inference_mode(False)
    def reserve(self, num_tokens: int) -> None:
        """Makes sure that the longest row, and so each, has room for `num_tokens` more."""
        needed, capacity = max(self.lengths) + num_tokens, self._storage.shape[4]
        if needed > capacity:
            shape = list(self._storage.shape)
            shape[4] = max(needed, 2 * capacity)
            grown = self._storage.new_zeros(shape)
            grown[..., :capacity, :] = self._storage
            self._storage = grown

    def view(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns views of one layer's keys and values [B, H, longest row, D]."""
        layer, end = self._storage[index], max(self.lengths)
        return layer[0, :, :, :end], layer[1, :, :, :end]

    def write_block(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes a block's keys and values [B, H, T, D] behind each row's context, which they are not added to.

        There must be room, see `reserve`. Nothing is copied but the block.

        Returns:
            Views of one layer's keys and values [B, H, longest row + T, D], or all slots in `static_slots`; row b's block
            begins at its own length.
        """
        layer, size = self._storage[index], keys.shape[2]
        if self._static is not None:
            rows = torch.arange(len(self.lengths), device=layer.device)[:, None]
            slots = self.starts[:, None] + torch.arange(size, device=layer.device)
            layer[0, rows, :, slots], layer[1, rows, :, slots] = keys.transpose(1, 2), values.transpose(1, 2)
            return layer[0], layer[1]
        end = max(self.lengths) + size
        if self.is_ragged:
            for row, length in enumerate(self.lengths):
                layer[0, row, :, length : length + size], layer[1, row, :, length : length + size] = keys[row], values[row]
        else:
            layer[0, :, :, end - size : end], layer[1, :, :, end - size : end] = keys, values
        return layer[0, :, :, :end], layer[1, :, :, :end]

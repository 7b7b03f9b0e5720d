"""The dynamic convolution inside a block of DFlash 2.

Dimension key: B batch, T block positions, H hidden size, G groups of channels, K taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


class BlockConvolution(nn.Module):
    """A depthwise convolution before and one after a sub-layer: `y_t = sum over k of (base_k + dynamic_{t,k}) * x_{t-k}`.

    Position 0 is the root's; in front of it stand zeros. The dynamic part of both comes from the sub-layer's input, and each
    of its numbers is shared by a group of neighbouring channels (PyPI `dflash` 0.1.0). Parameter names are those of the
    public checkpoints.

    Args:
        hidden_size: H.
        num_taps: K.
        group_size: channels of a group; divides H.
    """

    def __init__(self, hidden_size: int, num_taps: int, group_size: int):
        super().__init__()
        self.num_taps, self.group_size = num_taps, group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, num_taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * num_taps * (hidden_size // group_size), bias=False)
        # A new convolution changes nothing.
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, states: Tensor) -> Tensor:
        """Returns the dynamic parts [2, B, T, K, G] for before and after, from the sub-layer's input [B, T, H]."""
        return self.kernel_projection(states).unflatten(-1, (2, self.num_taps, -1)).movedim(-3, 0)

    def forward(self, states: Tensor, dynamic: Tensor, place: int) -> Tensor:
        """Convolves `states` [B, T, H] with one of `kernels`, [B, T, K, G]; `place` is 0 before the sub-layer, 1 after."""
        size = states.shape[1]
        total = torch.zeros_like(states)
        for tap in range(self.num_taps):
            shifted = pad(states, (0, 0, tap, 0))[:, :size]
            kernel = self.base_kernel[place, tap] + dynamic[:, :, tap].repeat_interleave(self.group_size, dim=-1)
            total = total + kernel * shifted
        return total


def convolved(convolution: BlockConvolution | None, sublayer: nn.Module, states: Tensor, *args: Any) -> Tensor:
    """Runs a sub-layer, between two convolutions where there are any."""
    if convolution is None:
        return sublayer(states, *args)
    before, after = convolution.kernels(states)
    return convolution(sublayer(convolution(states, before, 0), *args), after, 1)

"""Where kernels run: on CUDA devices, if triton is there; everywhere else their plain PyTorch twins do."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


def runs_kernels(tensor: Tensor) -> bool:
    """Whether work on `tensor` goes to a Triton kernel."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None

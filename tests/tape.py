"""A stand-in for CUDA graphs on a CPU: operations are written down once and run again on the same memory, without Python."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What takes a value from the device to the host, has a size that depends on values, or takes a value from the host.
FORBIDDEN = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero", "lift_fresh", "lift"}


class Tape(TorchDispatchMode):
    """Writes down every operation; one that a CUDA graph could not hold raises RuntimeError."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        name = func.overloadpacket.__name__
        # An index of bools has as many rows as there are True.
        by_bools = name in ("index", "index_put_") and any(one.dtype == torch.bool for one in tensors[1:])
        if name in FORBIDDEN or by_bools:
            raise RuntimeError(f"{func} needs the host")
        out = func(*args, **(kwargs or {}))
        given = {memory_of(one) for one in tensors}
        fresh = [
            place for place, one in enumerate(tree_leaves(out)) if isinstance(one, torch.Tensor) and memory_of(one) not in given
        ]
        self.steps.append((func, args, kwargs or {}, tree_leaves(out), fresh))
        return out

    def replay(self):
        for func, args, kwargs, kept, fresh in self.steps:
            new = tree_leaves(func(*args, **kwargs))
            # Views and what was changed in place lie in the same memory as before.
            for place in fresh:
                kept[place].copy_(new[place])


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


def record(function):
    """A `Capture`: sizes, Python values and addresses are those of the recording for ever."""
    tape = Tape()
    with tape:
        outputs = function()
    for one in outputs:
        # As after a capture, which computes nothing.
        one.fill_(float("nan"))
    return tape.replay, outputs

"""Steps that are recorded once per bucket of sizes and then replayed on static memory, as CUDA graphs are.

A recorded step has fixed shapes, fixed addresses and no host in it: sizes are padded to a bucket, lengths are device tensors,
and whatever a launch depends on is a bucket, too. What is recorded and when is decided here; only `capture_cuda` needs a GPU,
and anything with its call may stand in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from jetflow.kernels.tree_attention import MAX_NODES, SPLIT

Outputs = tuple[Tensor, ...]
# Takes a function of no arguments; returns what runs it again on the same memory, and the outputs that then are filled.
Capture = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]


def capture_cuda(function: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """Captures `function` as a CUDA graph; it runs twice before, so that kernels are compiled and libraries set up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph.replay, outputs


@dataclass(frozen=True)
class GraphSettings:
    """How a verifier or a drafter records its steps.

    Attributes:
        max_tokens: tokens of a row that static memory is kept for: prompt, text, and a tree padded to its bucket.
        buckets: numbers of nodes, rising; a tree is padded to the next one, and each is recorded when it is first used.
        first_prefix: prefix lengths up to which the first recording of a bucket serves; each further one serves twice as long
            ones. It bounds the splits of the attention, which are launched for the whole bucket.
        capture: what records.

    Raises:
        ValueError: a number is below 1, or `buckets` do not rise or are above 1024.

    Example:
        >>> GraphSettings(max_tokens=8192).bucket(20)
        32
    """

    max_tokens: int
    buckets: Sequence[int] = (1, 8, 16, 32, 64, 128, 256)
    first_prefix: int = SPLIT
    capture: Capture = capture_cuda

    def __post_init__(self) -> None:
        for name, value in (("max_tokens", self.max_tokens), ("first_prefix", self.first_prefix)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        sizes = list(self.buckets)
        if not sizes or sizes != sorted(set(sizes)) or not 1 <= sizes[0] <= sizes[-1] <= MAX_NODES:
            raise ValueError(f"buckets must be rising numbers in [1, {MAX_NODES}], got {sizes}")

    def check_device(self, device: torch.device) -> None:
        """Raises ValueError where steps cannot be recorded on `device`, or the kernels that they need are missing."""
        if find_spec("triton") is None:
            raise ValueError("graphs need the triton package: pip install 'jetflow[triton]'")
        if self.capture is capture_cuda and device.type != "cuda":
            raise ValueError(f"graphs need a CUDA device, got {device}")

    def check_room(self, num_tokens: int) -> None:
        """Raises ValueError where a row of `num_tokens` tokens does not fit into static memory."""
        if num_tokens > self.max_tokens:
            raise ValueError(f"a row needs room for {num_tokens} tokens, but graphs keep max_tokens={self.max_tokens}")

    def bucket(self, num_nodes: int) -> int:
        """Returns the number of nodes that a tree of `num_nodes` is padded to.

        Raises:
            ValueError: no bucket is as large.
        """
        for size in self.buckets:
            if num_nodes <= size:
                return size
        raise ValueError(f"a tree of {num_nodes} nodes is above the largest of buckets={list(self.buckets)}")

    def prefix_bucket(self, longest: int) -> int:
        """Returns the prefix length that a step with prefixes up to `longest` is recorded for."""
        size = self.first_prefix
        while size < longest:
            size *= 2
        return size


class RecordedSteps:
    """Steps by their key, each with inputs and outputs of its own, recorded when first asked for.

    Args:
        settings: buckets, room, and what records.
    """

    def __init__(self, settings: GraphSettings):
        self.settings = settings
        self._steps: dict[Hashable, tuple[tuple[Tensor, ...], Callable[[], None], Outputs]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Forgets all recordings, as must be when memory that they use goes away."""
        self._steps = {}

    def __call__(self, key: Hashable, inputs: tuple[Tensor, ...], function: Callable[..., Outputs]) -> Outputs:
        """Runs `function(*inputs)`, or rather its recording under `key`.

        Args:
            key: all that the shapes and launches of `function` depend on.
            inputs: are copied into the recording's own; of one shape and dtype for a key.
            function: is called only to be recorded. It must not read anything on the host that changes.

        Returns:
            The recording's outputs, which its next replay overwrites.
        """
        if key not in self._steps:
            # They outlive a decode and its inference mode.
            with torch.inference_mode(False):
                static = tuple(one.clone() for one in inputs)
            self._steps[key] = (static, *self.settings.capture(lambda: function(*static)))
        static, replay, outputs = self._steps[key]
        for kept, given in zip(static, inputs, strict=True):
            assert kept.shape == given.shape, f"inputs of {key} changed from {list(kept.shape)} to {list(given.shape)}"
            kept.copy_(given)
        replay()
        return outputs

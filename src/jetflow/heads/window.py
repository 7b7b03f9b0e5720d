"""Sliding-window draft layers, which see the last positions alone: what they are, and how checkpoints say it.

Read: z-lab (PyPI `dflash` 0.1.0), NeMo, SpecForge and vLLM speculators, all in transformers' spelling: `layer_types`,
`sliding_window`, `use_sliding_window`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class WindowedLayers:
    """Which layers of a head have a window, and what their queries see.

    A query at position p sees context positions above `p - size`, and of its block what the in-block rule gives.

    Attributes:
        size: positions of the window, the query's own included; at least the block size, so that it never cuts a block.
        layers: the draft layers that have it, rising.
        causal: in-block rule of these layers; True where the other layers are causal, too.
    """

    size: int
    layers: tuple[int, ...]
    causal: bool = True

    def check(self, *, num_layers: int, block_size: int, causal: bool) -> None:
        """Raises ValueError where this does not fit the rest of a head's config."""
        if self.size < block_size:
            raise ValueError(f"window.size={self.size} must be at least block_size={block_size}")
        if not self.layers or list(self.layers) != sorted({one for one in self.layers if 0 <= one < num_layers}):
            raise ValueError(f"window.layers={self.layers} must be one or more rising numbers in [0, {num_layers})")
        if causal and not self.causal:
            raise ValueError("window.causal=False needs causal=False: windowed layers are causal where the others are")
        if self.causal and not causal and len(self.layers) == num_layers:
            raise ValueError(f"causal=False contradicts window.causal=True, which all {num_layers} layers have")


def read_window(raw: Mapping[str, Any], sizes: Mapping[str, Any], causal: bool | None) -> WindowedLayers | None:
    """Reads the windowed layers of a checkpoint.

    Where its `config.json` says nothing of causality, windowed layers are causal and the others are not, as in the code of
    z-lab, SpecForge, vLLM and speculators; `sliding_window_non_causal` is speculators' way to say otherwise.

    Args:
        raw: the whole `config.json`.
        sizes: where the sizes of layers are, which may be `raw`.
        causal: what it says of all layers; None where it says nothing.

    Raises:
        ValueError: the keys contradict each other, or one is missing or not supported.
    """
    kinds, used = sizes.get("layer_types"), sizes.get("use_sliding_window")
    if kinds is None:
        if used:
            raise ValueError("config.json says use_sliding_window=true, so it must hold layer_types, which say where")
        return None
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise ValueError(f"layer_types must be {FULL} or {SLIDING}, got {unknown[0]!r}")
    if len(kinds) != sizes.get("num_hidden_layers"):
        raise ValueError(f"layer_types names {len(kinds)} layers, num_hidden_layers={sizes.get('num_hidden_layers')}")
    layers = tuple(index for index, kind in enumerate(kinds) if kind == SLIDING)
    if not layers:
        return None
    if used is False:
        raise ValueError(f"config.json contradicts itself: use_sliding_window=false, layer_types has {SLIDING}")
    if not sizes.get("sliding_window"):
        raise ValueError(
            f"config.json has {SLIDING} in layer_types, so sliding_window must be above 0, got {sizes.get('sliding_window')}"
        )
    non_causal = raw.get("sliding_window_non_causal")
    if non_causal and causal:
        raise ValueError("config.json contradicts itself: sliding_window_non_causal=true, and all layers are to be causal")
    return WindowedLayers(sizes["sliding_window"], layers, not non_causal if causal is None else causal)


def write_window(window: WindowedLayers | None, num_layers: int) -> dict[str, Any]:
    """Returns the keys that `read_window` reads."""
    windowed = () if window is None else window.layers
    return {
        "layer_types": [SLIDING if index in windowed else FULL for index in range(num_layers)],
        "use_sliding_window": window is not None,
        "sliding_window": None if window is None else window.size,
    }

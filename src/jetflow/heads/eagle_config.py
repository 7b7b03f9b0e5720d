"""Configuration of EAGLE-3 heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetflow.heads.config import DEFAULT_ROPE

# Layers that an EAGLE-3 head reads.
NUM_TAPS = 3


@dataclass(frozen=True)
class EagleHeadConfig:
    """Sizes and settings of an EAGLE-3 head.

    Attributes:
        hidden_size: width of the head and of the embeddings that it reads.
        intermediate_size: width of the MLP.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: dimension of a head.
        vocab_size: the target's vocabulary.
        draft_vocab_size: tokens that the head can draft.
        target_hidden_size: width of the tapped states.
        taps: target layers whose outputs are read; layer L means the output of decoder layer L. None for
            `default_eagle_taps` of whatever target the head drafts for, as files that name no layers mean it.
        fc_norm: norm each tapped state before they are fused (EAGLE-3.1).
        norm_output: feed the final-normed state to the next step instead of the raw one (EAGLE-3.1).
        norm_before_residual: let the residual stream begin with the normed state.
        qk_norm: norm queries and keys, as Qwen3 layers do.
        own_embedding: whether the head has token embeddings of its own; the target's are read otherwise.
        attention_bias: whether the attention projections have biases.
        rms_norm_eps: epsilon of all norms.
        rope_parameters: transformers' spelling, with `rope_type` and `rope_theta`.
        max_position_embeddings: positions that the rotary embedding is made for.

    Raises:
        ValueError: a rule between these is broken; the message names the key, the rule and the value.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    qk_norm: bool = False
    own_embedding: bool = False
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_ROPE))
    max_position_embeddings: int = 32768

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "target_hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} must be in [1, vocab_size={self.vocab_size}]")
        if self.taps is not None and (not self.taps or len(set(self.taps)) != len(self.taps) or min(self.taps) < 0):
            raise ValueError(f"taps must name at least one layer from 0, each once, got {self.taps}")
        if "rope_theta" not in self.rope_parameters:
            raise ValueError(f"rope_parameters must hold rope_theta, got {dict(self.rope_parameters)}")

    @property
    def num_taps(self) -> int:
        """Tapped layers."""
        return NUM_TAPS if self.taps is None else len(self.taps)

    def taps_in(self, num_target_layers: int) -> tuple[int, ...]:
        """Returns the tapped layers of a target of that depth.

        Raises:
            ValueError: it has too few layers.
        """
        taps = default_eagle_taps(num_target_layers) if self.taps is None else self.taps
        if max(taps) >= num_target_layers:
            raise ValueError(f"taps={taps} must be below the target's {num_target_layers} layers")
        return taps

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        *,
        draft_vocab_size: int | None = None,
        taps: Sequence[int] | None = None,
        fc_norm: bool = False,
        norm_output: bool = False,
    ) -> EagleHeadConfig:
        """Derives a head's sizes from the config of a transformers model.

        Args:
            target_config: the target's text config.
            draft_vocab_size: tokens that the head can draft; all when absent.
            taps: tapped layers; `default_eagle_taps` when absent.
            fc_norm: see the class.
            norm_output: see the class.

        Raises:
            ValueError: the target has too few layers for the default taps.
        """
        width, heads = target_config.hidden_size, target_config.num_attention_heads
        return cls(
            hidden_size=width,
            intermediate_size=target_config.intermediate_size,
            num_heads=heads,
            num_kv_heads=getattr(target_config, "num_key_value_heads", None) or heads,
            head_dim=getattr(target_config, "head_dim", None) or width // heads,
            vocab_size=target_config.vocab_size,
            draft_vocab_size=draft_vocab_size or target_config.vocab_size,
            target_hidden_size=width,
            taps=tuple(taps) if taps is not None else default_eagle_taps(target_config.num_hidden_layers),
            fc_norm=fc_norm,
            norm_output=norm_output,
            rms_norm_eps=target_config.rms_norm_eps,
            rope_parameters=dict(target_config.rope_parameters),
            max_position_embeddings=target_config.max_position_embeddings,
        )


def default_eagle_taps(num_target_layers: int) -> tuple[int, int, int]:
    """Returns the layers that EAGLE-3 reads unless told otherwise: the outputs of layers 1, n // 2 - 1 and n - 4.

    The public code speaks of the inputs of layers 2, n // 2 and n - 3, which are the same states.

    Raises:
        ValueError: the target has too few layers for three different ones.

    Example:
        >>> default_eagle_taps(32)
        (1, 15, 28)
    """
    taps = (1, num_target_layers // 2 - 1, num_target_layers - 4)
    if not 1 < taps[1] < taps[2]:
        raise ValueError(f"num_target_layers={num_target_layers} leaves no three different default taps, {taps}; pass taps")
    return taps

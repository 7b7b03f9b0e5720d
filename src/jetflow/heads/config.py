"""Configuration of block draft heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetflow.heads.window import WindowedLayers

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Those that training makes, and those that are only read from others' checkpoints.
FACTORED_CORRECTIONS = ("pairwise", "gated", "recurrent")
PUBLISHED_CORRECTIONS = ("markov", "markov-gated", "markov-recurrent", "selector")


@dataclass(frozen=True)
class PublishedParts:
    """Parts of others' heads that are drafted with but neither trained nor saved here.

    Attributes:
        sample_from_anchor: slot i predicts the token at root + i + 1, so that a block drafts `block_size` tokens.
        selector_candidates: tokens of a depth that a `selector` chooses among.
        convolution: taps and channels per group of DFlash 2's convolutions; None for no convolution.
        own_embedding: the head holds an input embedding.
        own_output: the head holds an output embedding.
        embedding_scale: factor of the target's raw embedding weights; None for the target's embedding as it is.
        output_scale: factor of the logits.
        output_cap: largest size c of the logits, `c tanh(logits / c)`; None for no limit.
    """

    sample_from_anchor: bool = False
    selector_candidates: int | None = None
    convolution: tuple[int, int] | None = None
    own_embedding: bool = False
    own_output: bool = False
    embedding_scale: float | None = None
    output_scale: float = 1.0
    output_cap: float | None = None


@dataclass(frozen=True)
class DraftHeadConfig:
    """Sizes and settings of a block draft head (JetFlow or DFlash).

    Attributes:
        hidden_size: width of the head; that of the target, whose embedding and output embedding it shares.
        intermediate_size: width of the MLPs.
        num_layers: draft layers.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: dimension of a head.
        block_size: positions of a block, anchor included, so that `block_size - 1` tokens are drafted.
        taps: target layers whose outputs are read; layer L means the output of decoder layer L.
        mask_token_id: token that fills the positions to draft.
        vocab_size: the target's vocabulary.
        num_target_layers: decoder layers of the target; None where its file does not say.
        target_hidden_size: width of the tapped states.
        causal: in-block attention; True for JetFlow, False for DFlash (bidirectional).
        window: layers that see the last positions alone; None where all see everything.
        rms_norm_eps: epsilon of all norms.
        rope_parameters: transformers' spelling, with `rope_type` and `rope_theta`.
        max_position_embeddings: positions that the rotary embedding is made for.
        attention_bias: whether the attention projections have biases.
        correction: what a node's own path adds to its law, `pairwise`, `gated` or `recurrent`, or one of
            `PUBLISHED_CORRECTIONS`; None for nothing.
        correction_rank: numbers that the correction makes of a path.
        refinement: whether slots that hold a token predict the next one, for a second pass over the nodes of a tree.
        published: what a head of others has beside the DFlash backbone.

    Raises:
        ValueError: a rule between these is broken; the message names the key, the rule and the value.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    vocab_size: int
    num_target_layers: int | None
    target_hidden_size: int
    causal: bool = True
    window: WindowedLayers | None = None
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_ROPE))
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    correction: str | None = None
    correction_rank: int = 128
    refinement: bool = False
    published: PublishedParts = PublishedParts()

    @property
    def depth(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size if self.published.sample_from_anchor else self.block_size - 1

    @property
    def corrects_filled(self) -> bool:
        """Whether a slot that holds a token is corrected by it, as the correction reads the token before alone."""
        return self.correction is not None and self.correction != "recurrent"

    @property
    def is_plain(self) -> bool:
        """Whether the head is one that training makes: a backbone with a factored correction or none."""
        return self.correction not in PUBLISHED_CORRECTIONS and self.published == PublishedParts()

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.block_size < 2:
            raise ValueError(f"block_size must be at least 2 (the anchor and one draft), got {self.block_size}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id={self.mask_token_id} must be in [0, vocab_size={self.vocab_size})")
        if not self.taps or len(set(self.taps)) != len(self.taps):
            raise ValueError(f"taps must name at least one layer, each once, got {self.taps}")
        end = max(self.taps) + 1 if self.num_target_layers is None else self.num_target_layers
        wrong = [tap for tap in self.taps if not 0 <= tap < end]
        if wrong:
            raise ValueError(f"taps={self.taps}: layer {wrong[0]} must be in [0, {end})")
        if self.refinement and not self.causal:
            raise ValueError("refinement=True needs causal=True: in a bidirectional block a slot sees the token it predicts")
        if "rope_theta" not in self.rope_parameters:
            raise ValueError(f"rope_parameters must hold rope_theta, got {dict(self.rope_parameters)}")
        kinds = (*FACTORED_CORRECTIONS, *PUBLISHED_CORRECTIONS)
        if self.correction is not None and self.correction not in kinds:
            raise ValueError(f"correction must be one of {', '.join(kinds)}, got {self.correction!r}")
        if self.correction is not None and self.correction_rank < 1:
            raise ValueError(f"correction_rank must be at least 1, got {self.correction_rank}")
        if self.window is not None:
            self.window.check(num_layers=self.num_layers, block_size=self.block_size, causal=self.causal)
        self._check_published()

    def _check_published(self) -> None:
        parts = self.published
        # Convolutions run along a block's slots, not along the paths of a tree; the others are not trained with it.
        if self.refinement and not self.is_plain:
            raise ValueError(f"refinement=True needs a plain head, got correction={self.correction!r} and {parts}")
        if (self.correction == "selector") != (parts.selector_candidates is not None):
            raise ValueError(
                f"selector_candidates={parts.selector_candidates} belongs to correction='selector', got {self.correction!r}"
            )
        if parts.selector_candidates is not None and not 1 <= parts.selector_candidates <= self.vocab_size:
            raise ValueError(f"selector_candidates={parts.selector_candidates} must be in [1, vocab_size={self.vocab_size}]")
        taps, group = parts.convolution or (1, 1)
        if taps < 1 or group < 1 or self.hidden_size % group:
            raise ValueError(
                f"convolution={parts.convolution} must be taps >= 1 and channels that divide hidden_size={self.hidden_size}"
            )
        if parts.output_cap is not None and parts.output_cap <= 0:
            raise ValueError(f"output_cap must be above 0, got {parts.output_cap}")

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        *,
        num_layers: int,
        block_size: int,
        mask_token_id: int,
        taps: Sequence[int] | None = None,
        causal: bool = True,
        window: WindowedLayers | None = None,
        correction: str | None = None,
        correction_rank: int = 128,
        refinement: bool = False,
    ) -> DraftHeadConfig:
        """Derives a head's sizes from the config of a transformers model.

        Args:
            target_config: the target's text config.
            num_layers: draft layers.
            block_size: positions of a block, anchor included.
            mask_token_id: a token that texts do not hold.
            taps: tapped layers; `default_taps` when absent.
            causal: in-block attention.
            window: layers that see the last positions alone.
            correction: kind of correction.
            correction_rank: its rank.
            refinement: slots that hold a token predict the next one.
        """
        depth, width = target_config.num_hidden_layers, target_config.hidden_size
        heads = target_config.num_attention_heads
        return cls(
            hidden_size=width,
            intermediate_size=target_config.intermediate_size,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=getattr(target_config, "num_key_value_heads", None) or heads,
            head_dim=getattr(target_config, "head_dim", None) or width // heads,
            block_size=block_size,
            taps=tuple(taps) if taps is not None else default_taps(depth, num_layers),
            mask_token_id=mask_token_id,
            vocab_size=target_config.vocab_size,
            num_target_layers=depth,
            target_hidden_size=width,
            causal=causal,
            window=window,
            rms_norm_eps=target_config.rms_norm_eps,
            rope_parameters=dict(target_config.rope_parameters),
            max_position_embeddings=target_config.max_position_embeddings,
            correction=correction,
            correction_rank=correction_rank,
            refinement=refinement,
        )


def default_taps(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Returns evenly spaced layers to tap: the middle one, or `num_taps` from 1 to n - 3, rounded.

    Raises:
        ValueError: `num_taps` is below 1, or the target has too few layers to give that many.
    """
    if num_taps < 1:
        raise ValueError(f"num_taps must be at least 1, got {num_taps}")
    if num_taps == 1:
        return (num_target_layers // 2,)
    last = num_target_layers - 3
    taps = tuple(round(1 + index * (last - 1) / (num_taps - 1)) for index in range(num_taps))
    if last < 1 or len(set(taps)) < num_taps:
        raise ValueError(f"num_taps={num_taps} do not fit between layers 1 and {last} of {num_target_layers}; pass taps")
    return taps

"""BlockDraftHead: drafts a block of tokens in one pass from the target's hidden states.

The architecture of DFlash (arXiv 2602.06036) and JetFlow / JetSpec (arXiv 2606.18394): tapped target states, fused and
normed, are projected to keys and values in every draft layer and stand in front of the block's own. Parameter names are
those of the public checkpoints.

Dimension key: B batch, T block positions, Q queries, S context, k taps, Ht target width, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from jetflow.heads.block_attention import block_attention
from jetflow.heads.config import DraftHeadConfig
from jetflow.heads.context_cache import HeadCache
from jetflow.heads.convolution import BlockConvolution, convolved
from jetflow.heads.corrections import PairwiseCorrection
from jetflow.heads.rope import RotaryEmbedding, rotate
from jetflow.heads.vocabulary_corrections import make_correction
from jetflow.kernels.masked_attention import block_masked_attention, masked_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Rotation = tuple[Tensor, Tensor]
# Attention of a block's queries [B, Hq, T, D] over the context and the block's own keys and values [B, Hk, T, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32, with a learned scale."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(states.dtype)


class DraftAttention(nn.Module):
    """Attention of block queries over context keys and block keys, both made by the same projections."""

    def __init__(self, config: DraftHeadConfig):
        super().__init__()
        bias = config.attention_bias
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Returns keys and values [B, Hk, T, D] of `states` [B, T, H]."""
        keys = self.k_norm(self.k_proj(states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        values = self.v_proj(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return rotate(keys, rotation), values

    def forward(self, states: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        queries = self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        out = attend(rotate(queries, rotation), *self.project(states, rotation))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(states)) * self.up_proj(states))


class DraftLayer(nn.Module):
    """Pre-norm decoder layer of the head."""

    def __init__(self, config: DraftHeadConfig):
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        sizes = config.published.convolution
        self.attention_conv = None if sizes is None else BlockConvolution(config.hidden_size, *sizes)
        self.mlp_conv = None if sizes is None else BlockConvolution(config.hidden_size, *sizes)

    def forward(self, states: Tensor, *args: Any) -> Tensor:
        states = states + convolved(self.attention_conv, self.self_attn, self.input_layernorm(states), *args)
        return states + convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(states))


class BlockDraftHead(nn.Module):
    """A JetFlow or DFlash draft head. Its embedding and output embedding are the target's, where it does not hold its own.

    Which block positions see each other is no property of the head's code: the mask is handed in.

    Args:
        config: sizes and settings.
    """

    def __init__(self, config: DraftHeadConfig):
        super().__init__()
        self.config = config
        # Set by training: recompute each layer in the backward pass instead of keeping its activations.
        self.activation_checkpointing = False
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.correction = make_correction(config)
        words = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(*words) if config.published.own_embedding else None
        self.lm_head = nn.Linear(*words[::-1], bias=False) if config.published.own_output else None
        self._rotary = RotaryEmbedding(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    def new_cache(self, batch_size: int, capacity: int = 0) -> HeadCache:
        """Returns an empty context cache for `batch_size` rows, with room for `capacity` tokens at once."""
        return HeadCache(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            batch_size=batch_size,
            dtype=self.fc.weight.dtype,
            device=self.fc.weight.device,
            capacity=capacity,
        )

    def extend_context(self, cache: HeadCache, features: Tensor, num_tokens: Tensor | list[int]) -> None:
        """Projects newly committed positions and appends them to the cache.

        Args:
            cache: cache of B rows; the new positions follow those it holds.
            features: float [B, T, k * Ht], tapped target states, rows padded at their end.
            num_tokens: how many of the T positions are real, integers [B].

        Raises:
            ValueError: `features` has another width than the head reads.
        """
        self._check_features(features)
        counts = num_tokens.tolist() if isinstance(num_tokens, Tensor) else list(num_tokens)
        positions = cache.starts[:, None] + torch.arange(features.shape[1], device=features.device)
        rotation = self._rotary(positions, features.dtype)
        projected = self._project_context(features, rotation)
        cache.append(torch.stack([torch.stack(pair) for pair in projected]), counts)

    def draft(self, block_embeds: Tensor, cache: HeadCache, in_block_mask: Tensor, depths: Tensor | None = None) -> Tensor:
        """Runs one block, or one tree of tokens, per row behind its cached context.

        Args:
            block_embeds: float [B, T, H], embeddings of root and mask tokens, or of the nodes of a tree; for blocks T may
                be below the block size.
            cache: the rows' context; the root's position is the row's length.
            in_block_mask: bool [T, T] or [B, T, T], which slots see each other; in windowed layers that are causal beside
                bidirectional ones, only those before them.
            depths: int64 [B, T], places of the slots behind the root; 0, 1, 2, ... when absent.

        Returns:
            float [B, T, H], final-normed hidden states. A masked slot i of a block predicts the token at root + i, or at
            root + i + 1 for a head that samples from the anchor; a slot that holds a token predicts the next one, if the
            head has refinement.
        """
        size = block_embeds.shape[1]
        if depths is None:
            depths = torch.arange(size, device=block_embeds.device)[None]
        rotation = self._rotary(cache.starts[:, None] + depths, block_embeds.dtype)
        if not cache.is_static:
            cache.reserve(size)
        attend = block_attention(self.config, cache, in_block_mask, depths)
        states = block_embeds
        for index, layer in enumerate(self.layers):
            states = layer(states, rotation, partial(attend, index))
        return self.norm(states)

    def forward(
        self,
        block_embeds: Tensor,
        features: Tensor,
        block_positions: Tensor,
        mask: Tensor | BlockMask,
        previous_embeds: Tensor | None = None,
        window_mask: Tensor | BlockMask | None = None,
    ) -> Tensor:
        """Runs packed blocks over a whole context, as training does.

        Args:
            block_embeds: float [B, Q, H].
            features: float [B, S, k * Ht], tapped target states at positions 0 .. S-1.
            block_positions: int64 [B, Q], absolute positions of the block tokens.
            mask: bool [B, 1, Q, S + Q] or a BlockMask of that size; keys are context first, then blocks.
            previous_embeds: float [B, Q, H], for a head with a correction: embeddings of the tokens before those that the
                slots predict; rows of zeros leave their slots uncorrected, and so does None all slots.
            window_mask: like `mask`, for the layers of `config.window`, and only for a head that has some.

        Returns:
            float [B, Q, H], final-normed hidden states, corrected by the path before each slot.

        Raises:
            ValueError: `features` has another width than the head reads, `window_mask` is there without windowed layers or
                the other way round, or the head has parts that are not trained here.
        """
        self._check_features(features)
        if not self.config.is_plain:
            raise ValueError(
                f"a head with correction={self.config.correction!r} and {self.config.published} cannot be trained on; "
                "JetFlow and DFlash heads can"
            )
        window = self.config.window
        if (window is None) != (window_mask is None):
            given = "absent" if window_mask is None else "given"
            raise ValueError(
                f"window_mask goes with a head that has windowed layers; it is {given}, the head's window={window}"
            )
        positions = torch.arange(features.shape[1], device=features.device)[None]
        context = self._project_context(features, self._rotary(positions, features.dtype))
        rotation = self._rotary(block_positions, block_embeds.dtype)
        states = block_embeds
        near = {} if window is None or window_mask is None else dict.fromkeys(window.layers, window_mask)
        for index, (layer, keys_values) in enumerate(zip(self.layers, context, strict=True)):
            attend = partial(_attend_behind, keys_values, near.get(index, mask))
            if self.activation_checkpointing and torch.is_grad_enabled():
                states = checkpoint(layer, states, rotation, attend, use_reentrant=False)
            else:
                states = layer(states, rotation, attend)
        states = self.norm(states)
        if not isinstance(self.correction, PairwiseCorrection) or previous_embeds is None:
            return states
        blocks = (-1, self.config.block_size)
        return self.correction(states.unflatten(1, blocks), previous_embeds.unflatten(1, blocks)).flatten(1, 2)

    def _project_context(self, features: Tensor, rotation: Rotation) -> list[tuple[Tensor, Tensor]]:
        """Fuses the tapped states and projects them to every layer's keys and values; they are normed once, here."""
        fused = self.hidden_norm(self.fc(features))
        return [cast(DraftLayer, layer).self_attn.project(fused, rotation) for layer in self.layers]

    def _check_features(self, features: Tensor) -> None:
        if features.shape[-1] != self.fc.in_features:
            raise ValueError(
                f"features must be {self.fc.in_features} wide ({len(self.config.taps)} taps of "
                f"{self.config.target_hidden_size}), got {features.shape[-1]}"
            )


def _attend_behind(
    context: tuple[Tensor, Tensor], mask: Tensor | BlockMask, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Attention over a context's keys and values, then the blocks' own."""
    keys, values = torch.cat([context[0], keys], dim=2), torch.cat([context[1], values], dim=2)
    if isinstance(mask, Tensor):
        return masked_attention(queries, keys, values, mask)
    return block_masked_attention(queries, keys, values, mask)

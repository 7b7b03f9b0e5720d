"""EagleHead: drafts one token per step from the target's hidden states and its own.

The architecture of EAGLE-3 (arXiv 2503.01840) and EAGLE-3.1 (arXiv 2605.09992). A position reads the hidden state there and
the embedding of the token behind it: the fused target states where the target has computed them, the head's own output of
the step before where it has not. Parameter names are those of the public checkpoints.

Dimension key: B batch, T positions, S context, A anchors, K steps, k taps, Ht target width, H head width, R draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from jetflow.heads.block_draft_head import DraftMLP, RMSNorm, Rotation
from jetflow.heads.context_cache import HeadCache
from jetflow.heads.eagle_config import EagleHeadConfig
from jetflow.heads.rope import RotaryEmbedding, rotate
from jetflow.kernels.masked_attention import masked_attention

# Attention of queries [B, Hq, T, D] over whatever they may see, given their own keys and values [B, Hk, T, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class EagleAttention(nn.Module):
    """Attention whose input is the embedding and the hidden state of a position, side by side."""

    def __init__(self, config: EagleHeadConfig):
        super().__init__()
        bias, read = config.attention_bias, 2 * config.hidden_size
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(read, width, bias=bias)
        self.k_proj = nn.Linear(read, kv_width, bias=bias)
        self.v_proj = nn.Linear(read, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def keys_values(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Returns keys and values [B, Hk, T, D] of `states` [B, T, 2 * H]."""
        keys, values = (project(states).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
        keys = keys if self.k_norm is None else self.k_norm(keys)
        return rotate(keys.transpose(1, 2), rotation), values.transpose(1, 2)

    def forward(self, states: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        queries = self.q_proj(states).unflatten(-1, (-1, self.head_dim))
        queries = queries if self.q_norm is None else self.q_norm(queries)
        out = attend(rotate(queries.transpose(1, 2), rotation), *self.keys_values(states, rotation))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class EagleLayer(nn.Module):
    """The head's one decoder layer."""

    def __init__(self, config: EagleHeadConfig):
        super().__init__()
        self.self_attn = EagleAttention(config)
        self.mlp = DraftMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def keys_values(self, embeds: Tensor, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Returns what other positions see of these ones, without running the layer there."""
        read = torch.cat([self.input_layernorm(embeds), self.hidden_norm(states)], dim=-1)
        return self.self_attn.keys_values(read, rotation)

    def forward(self, embeds: Tensor, states: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        states = residual + self.self_attn(torch.cat([self.input_layernorm(embeds), normed], dim=-1), rotation, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


class EagleHead(nn.Module):
    """An EAGLE-3 head with an output embedding of its own, over a part of the target's vocabulary or all of it.

    Args:
        config: sizes and settings.
        draft_tokens: int64 [R], rising, the token that each column of the head's logits stands for; None where the head
            drafts from the whole vocabulary.

    Raises:
        ValueError: `draft_tokens` does not fit the config.
    """

    draft_tokens: Tensor | None

    def __init__(self, config: EagleHeadConfig, draft_tokens: Tensor | None = None):
        super().__init__()
        self.config = config
        # No part of the state: public files hold it as offsets, `d2t`.
        self.register_buffer("draft_tokens", _checked_draft_tokens(draft_tokens, config), persistent=False)
        width, target_width = config.hidden_size, config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        norms = [RMSNorm(target_width, config.rms_norm_eps) for _ in range(config.num_taps)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(config.num_taps * target_width, width, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self._rotary = RotaryEmbedding(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    def new_cache(self, batch_size: int) -> HeadCache:
        """Returns an empty cache of committed positions for `batch_size` rows."""
        return HeadCache(
            num_layers=1,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            batch_size=batch_size,
            dtype=self.fc.weight.dtype,
            device=self.fc.weight.device,
        )

    def fuse(self, features: Tensor) -> Tensor:
        """Makes one hidden state [B, T, H] of the tapped target states [B, T, k * Ht].

        Raises:
            ValueError: `features` has another width than the head reads.
        """
        if features.shape[-1] != self.fc.in_features:
            raise ValueError(
                f"features must be {self.fc.in_features} wide ({self.config.num_taps} taps of "
                f"{self.config.target_hidden_size}), got {features.shape[-1]}"
            )
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def extend_context(self, cache: HeadCache, embeds: Tensor, features: Tensor, num_tokens: list[int]) -> None:
        """Appends the keys and values of newly committed positions; nothing else of them is needed, as there is one layer.

        Args:
            cache: cache of B rows; the new positions follow those it holds.
            embeds: float [B, T, H], embeddings of the tokens behind the positions, rows padded at their end.
            features: float [B, T, k * Ht], tapped target states at the positions.
            num_tokens: how many of the T positions of each row are real.

        Raises:
            ValueError: `features` has another width than the head reads.
        """
        starts = torch.tensor(cache.lengths, device=embeds.device)
        positions = starts[:, None] + torch.arange(embeds.shape[1], device=embeds.device)
        rotation = self._rotary(positions, embeds.dtype)
        cache.append(torch.stack(self.midlayer.keys_values(embeds, self.fuse(features), rotation))[None], num_tokens)

    def step(self, embeds: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Runs the layer once.

        Args:
            embeds: float [B, T, H], embeddings of the tokens behind the positions.
            states: float [B, T, H], what is known at the positions: `fuse` of target states, or states of the step before.
            positions: int64 [B, T].
            attend: attention of the positions, given their queries, keys and values.

        Returns:
            The states that the next step reads and the final-normed ones, whose `lm_head` gives the logits of the token
            behind that of `embeds`; both float [B, T, H].
        """
        out = self.midlayer(embeds, states, self._rotary(positions, embeds.dtype), attend)
        normed = self.norm(out)
        return (normed if self.config.norm_output else out), normed

    def forward(self, embeds: Tensor, features: Tensor, mask: Tensor, anchors: Tensor, path_embeds: Tensor) -> Tensor:
        """Unrolls K steps from each anchor over a whole context, as training does (test-time training, EAGLE-3, 3.2).

        The first step reads the target's states everywhere; each later one reads the states of the one before and the
        true next token, and sees the first step's keys up to its anchor and those of its own path, as in decoding.

        Args:
            embeds: float [B, S, H], embeddings of the tokens behind positions 0 .. S-1.
            features: float [B, S, k * Ht], tapped target states at these positions.
            mask: bool [B, 1, S, S], which positions see each other.
            anchors: int64 [B, A], positions in [0, S).
            path_embeds: float [B, A, K - 1, H], embeddings of the tokens that steps 2 .. K read.

        Returns:
            float [B, A, K, H], final-normed states; those of step j predict the token j + 1 places behind the anchor.

        Raises:
            ValueError: `features` has another width than the head reads.
        """
        positions = torch.arange(embeds.shape[1], device=embeds.device)[None]
        states = self.fuse(features)
        context = self.midlayer.keys_values(embeds, states, self._rotary(positions, embeds.dtype))
        visible = mask.gather(2, anchors[:, None, :, None].expand(-1, -1, -1, mask.shape[3]))

        def over_context(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # The anchors' own keys are among the context's.
            return masked_attention(queries, *context, visible)

        # The first step is run at the anchors only: of other positions there are but keys and values to see.
        rows = anchors[:, :, None].expand(-1, -1, states.shape[-1])
        states, normed = self.step(embeds.gather(1, rows), states.gather(1, rows), anchors, over_context)
        found = [normed]
        attend = partial(_attend_along_path, context, [], visible)
        for index in range(path_embeds.shape[2]):
            states, normed = self.step(path_embeds[:, :, index], states, anchors + index + 1, attend)
            found.append(normed)
        return torch.stack(found, dim=2)


def _attend_along_path(
    context: tuple[Tensor, Tensor],
    path: list[tuple[Tensor, Tensor]],
    mask: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Attention of one query per anchor over the context [B, Hk, S, D] and the keys of its own path, this step's included.

    `path` holds the keys and values [B, Hk, A, D] of the steps before and gets this one's. Softmax in float32.
    """
    path.append((keys, values))
    groups = queries.unflatten(1, (keys.shape[1], -1))
    own_keys, own_values = (torch.stack(parts, dim=-2)[:, :, None] for parts in zip(*path, strict=True))
    before = groups @ context[0][:, :, None].mT
    own = (own_keys @ groups[..., None]).squeeze(-1)
    logits = torch.cat([before.masked_fill(~mask[:, :, None], float("-inf")), own], dim=-1).float()
    weights = (logits * queries.shape[-1] ** -0.5).softmax(dim=-1).to(queries.dtype)
    size = before.shape[-1]
    out = weights[..., :size] @ context[1][:, :, None] + (weights[..., None, size:] @ own_values).squeeze(-2)
    return out.flatten(1, 2)


def _checked_draft_tokens(draft_tokens: Tensor | None, config: EagleHeadConfig) -> Tensor | None:
    size = config.draft_vocab_size
    if draft_tokens is None:
        if size != config.vocab_size:
            raise ValueError(f"draft_vocab_size={size} of {config.vocab_size} tokens needs draft_tokens, which tokens they are")
        return None
    if draft_tokens.dtype != torch.int64 or draft_tokens.shape != (size,):
        raise ValueError(f"draft_tokens must be int64 [{size}], got {draft_tokens.dtype} {list(draft_tokens.shape)}")
    if (
        bool((draft_tokens[1:] <= draft_tokens[:-1]).any())
        or not 0 <= int(draft_tokens[0]) <= int(draft_tokens[-1]) < config.vocab_size
    ):
        raise ValueError(f"draft_tokens must rise within [0, {config.vocab_size}), each token once")
    return draft_tokens

"""What a recipe's `[head]` asks for: new heads, heads that training starts from, and the layers that they tap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetflow.cli.recipe import HeadSection, Recipe
    from jetflow.heads.block_draft_head import BlockDraftHead
    from jetflow.heads.config import DraftHeadConfig
    from jetflow.heads.eagle_head import EagleHead
    from jetflow.heads.window import WindowedLayers
    from jetflow.targets import Target
    from jetflow.training.rows import TrainingRows

# The published head.
DEFAULT_LAYERS, DEFAULT_BLOCK, DEFAULT_RANK = 5, 16, 128


def taps_of(recipe: Recipe, target: Target) -> tuple[int, ...]:
    """Returns the layers that the recipe's head taps."""
    from jetflow.heads.eagle_config import default_eagle_taps

    if recipe.head.kind == "eagle3":
        return tuple(recipe.head.taps or default_eagle_taps(target.num_layers))
    return (block_head(recipe, target).config if recipe.head.start_from else head_config(recipe.head, target)).taps


def block_head(recipe: Recipe, target: Target) -> BlockDraftHead:
    """Returns a new JetFlow or DFlash head, or what training goes on from.

    Raises:
        ValueError: `start_from` is an EAGLE-3 head, or a size does not fit the target.
    """
    import torch

    from jetflow.heads.block_draft_head import BlockDraftHead
    from jetflow.heads.checkpoint import load_head
    from jetflow.training.warm_start import warm_start

    section = recipe.head
    torch.manual_seed(recipe.train.seed)
    if section.start_from is not None:
        named = section.mask_token is not None or section.mask_token_id is not None
        mask_token_id = _mask_token_id(section, target.tokenizer) if named else None
        start = load_head(section.start_from, dtype=torch.float32)
        if not isinstance(start, BlockDraftHead):
            raise ValueError(
                f"[head] start_from={section.start_from!r} is an EAGLE-3 head; training starts from block heads only"
            )
        layers = start.config.num_layers if section.num_layers is None else section.num_layers
        causal = start.config.causal if section.causal is None else section.causal
        return warm_start(
            start, target, block_size=section.block_size,
            num_layers=section.num_layers, taps=section.taps, causal=section.causal, mask_token_id=mask_token_id,
            window=_window(section, layers, causal), correction=section.correction, correction_rank=section.correction_rank,
            refinement=section.refinement,
        )  # fmt: skip
    return BlockDraftHead(head_config(section, target))


def eagle_head(recipe: Recipe, target: Target, rows: TrainingRows) -> EagleHead:
    """Returns a new EAGLE-3 head; a reduced draft vocabulary is that of the most frequent tokens of the rows.

    Raises:
        ValueError: `draft_vocab_size` or a tap is outside the target.
    """
    import torch

    from jetflow.training.eagle import new_eagle_head

    section = recipe.head
    torch.manual_seed(recipe.train.seed)
    draft_tokens = None
    if section.draft_vocab_size is not None:
        if not 1 <= section.draft_vocab_size <= target.vocab_size:
            raise ValueError(f"[head] draft_vocab_size={section.draft_vocab_size} must be in [1, {target.vocab_size}]")
        draft_tokens = rows.frequent_tokens(target.vocab_size, section.draft_vocab_size).sort().values
    return new_eagle_head(
        target, draft_tokens=draft_tokens, taps=section.taps, fc_norm=bool(section.fc_norm),
        norm_output=bool(section.norm_output),
    )  # fmt: skip


def head_config(section: HeadSection, target: Target) -> DraftHeadConfig:
    """Returns the sizes of a new JetFlow or DFlash head."""
    from jetflow.heads.config import DraftHeadConfig

    layers = DEFAULT_LAYERS if section.num_layers is None else section.num_layers
    return DraftHeadConfig.for_target(
        target.config,
        num_layers=layers,
        block_size=DEFAULT_BLOCK if section.block_size is None else section.block_size,
        mask_token_id=_mask_token_id(section, target.tokenizer),
        taps=section.taps,
        causal=section.causal is not False,
        window=_window(section, layers, section.causal is not False),
        correction=section.correction,
        correction_rank=DEFAULT_RANK if section.correction_rank is None else section.correction_rank,
        refinement=section.refinement is True,
    )


def _window(section: HeadSection, num_layers: int, causal: bool) -> WindowedLayers | None:
    from jetflow.heads.window import WindowedLayers

    if section.sliding_window is None:
        return None
    layers = range(num_layers) if section.sliding_layers is None else section.sliding_layers
    return WindowedLayers(section.sliding_window, tuple(layers), causal)


def _mask_token_id(section: HeadSection, tokenizer: Any) -> int:
    token = section.mask_token
    if section.mask_token_id is not None:
        if token is not None:
            raise ValueError(f"[head] mask_token={token!r} and mask_token_id={section.mask_token_id} exclude each other")
        return section.mask_token_id
    if token is None:
        if getattr(tokenizer, "mask_token_id", None) is None:
            spare = ", ".join(repr(one) for one in getattr(tokenizer, "all_special_tokens", []))
            raise ValueError(f"[head] mask_token must name a token that texts never hold; special tokens here are {spare}")
        return tokenizer.mask_token_id
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or tokenizer.convert_ids_to_tokens(token_id) != token:
        raise ValueError(f"[head] mask_token {token!r} is no token of the target's tokenizer")
    return token_id

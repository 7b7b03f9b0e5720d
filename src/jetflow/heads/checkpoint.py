"""Loading and saving draft heads in the public checkpoint formats.

Read: JetSpec, z-lab DFlash, NeMo, vLLM's spelling, and vLLM speculators, where the backbone is a DFlash one, with the parts
of DSpark and DFlash 2 (`published`).
Written: one folder that JetSpec and stock vLLM read, with the causal flag in every spelling. EAGLE-3 heads have formats of
their own, in `eagle_checkpoint`; `load_head` and `save_head` know both kinds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.config import DraftHeadConfig
from jetflow.heads.eagle_checkpoint import eagle_files, is_eagle_config, read_eagle_head
from jetflow.heads.eagle_head import EagleHead
from jetflow.heads.files import CORRECTION, WEIGHTS, head_folder, need, read_rope, read_tensors
from jetflow.heads.published import FOREIGN_TENSORS, published_name, published_settings, published_tensors
from jetflow.heads.window import read_window, write_window

FREQUENT = "frequent_tokens.json"


def load_head(
    name_or_path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> BlockDraftHead | EagleHead:
    """Loads a draft head from a local folder or from the hub; `config.json` says which kind it is.

    An embedding and an output embedding that the checkpoint holds are used in place of the target's; DSpark's confidence
    head is left out.

    Args:
        name_or_path: folder or hub name.
        dtype: dtype of the weights; that of the checkpoint when absent.
        device: where to put the head; the CPU when absent.

    Raises:
        ValueError: the config lacks a key or contradicts itself, a tensor is missing, has the wrong shape, or belongs
            to a correction that this head does not have, or a setting is not supported. The message names the key.
        OSError: nothing is found under the name.
    """
    folder = head_folder(str(name_or_path))
    raw = json.loads((folder / "config.json").read_text())
    if is_eagle_config(raw):
        return read_eagle_head(raw, read_tensors(folder), dtype).to(device or "cpu").eval()
    config = read_config(raw)
    tensors = published_tensors(read_tensors(folder), config)
    if "jetflow_correction" in raw:
        tensors |= read_tensors(folder / CORRECTION)
    parts = replace(config.published, own_embedding="embed_tokens.weight" in tensors, own_output="lm_head.weight" in tensors)
    with torch.device("meta"):
        head = BlockDraftHead(replace(config, published=parts))
    tensors = _checked_tensors(head, tensors)
    head.load_state_dict({name: value.to(dtype or value.dtype) for name, value in tensors.items()}, assign=True)
    return head.to(device or "cpu").eval()


def load_config(name_or_path: str | Path) -> DraftHeadConfig:
    """Reads the config of a block draft head alone, from a local folder or from the hub.

    Raises:
        ValueError: as `load_head`, or it is that of an EAGLE-3 head.
        OSError: nothing is found under the name.
    """
    raw = json.loads((head_folder(str(name_or_path)) / "config.json").read_text())
    if is_eagle_config(raw):
        raise ValueError(f"{name_or_path} is an EAGLE-3 head; this needs a JetFlow or DFlash head")
    return read_config(raw)


def save_head(head: BlockDraftHead | EagleHead, directory: str | Path) -> None:
    """Writes `config.json` and `model.safetensors`; nothing of the target is in them.

    A block head's correction goes into a folder of its own, `correction`, so that other loaders find the plain head. An
    EAGLE-3 head is written as vLLM, SGLang and SpecForge read it.

    Raises:
        ValueError: an EAGLE-3 head has a setting for which that format has no place, or a block head has parts of others'
            formats, which are read but not written.
    """
    if isinstance(head, BlockDraftHead) and not head.config.is_plain:
        raise ValueError(
            f"a head with correction={head.config.correction!r} and {head.config.published} cannot be saved; copy its folder"
        )
    from safetensors.torch import save_file

    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(head, EagleHead):
        settings, tensors = eagle_files(head)
    else:
        settings = write_config(head.config, head.fc.weight.dtype)
        tensors = dict(head.state_dict())
    tensors = {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
    correction = {name: tensors.pop(name) for name in list(tensors) if name.startswith("correction.")}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if correction:
        (folder / CORRECTION).mkdir(exist_ok=True)
        save_file(correction, folder / CORRECTION / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def save_frequent_tokens(directory: str | Path, token_ids: Tensor) -> None:
    """Writes token ids, most frequent first, beside a head, for `ParallelDrafter(vocabulary=...)`."""
    (Path(directory) / FREQUENT).write_text(json.dumps(token_ids.tolist()) + "\n")


def load_frequent_tokens(name_or_path: str | Path, count: int) -> Tensor:
    """Returns the `count` most frequent tokens of the data that a head learned from, int64 [count].

    Raises:
        ValueError: the head comes without such a list, or `count` is below 1 or above its length.
        OSError: nothing is found under the name.
    """
    folder = head_folder(str(name_or_path))
    if not (folder / FREQUENT).exists():
        raise ValueError(f"{folder} holds no {FREQUENT}; the head then drafts from the whole vocabulary")
    token_ids = json.loads((folder / FREQUENT).read_text())
    if not 1 <= count <= len(token_ids):
        raise ValueError(f"count must be in [1, {len(token_ids)}], the length of {FREQUENT}, got {count}")
    return torch.tensor(token_ids[:count])


def read_config(raw: Mapping[str, Any]) -> DraftHeadConfig:
    """Resolves a checkpoint's `config.json` of any supported dialect.

    Raises:
        ValueError: a key is missing, two keys contradict each other, or a feature is not supported.
    """
    nested = raw.get("dflash_config") or {}
    sizes = raw.get("transformer_layer_config") or raw
    speculators = "speculators_config" in raw or "aux_hidden_state_layer_ids" in raw
    _refuse_unsupported(raw, nested, sizes)
    taps = _only_value("target_layer_ids", raw, nested, required=not speculators)
    if speculators:
        # Speculators count the embedding as layer 0.
        taps = [tap - 1 for tap in _only_value("aux_hidden_state_layer_ids", raw, nested)]
    width, heads = need(sizes, "hidden_size"), need(sizes, "num_attention_heads")
    causal = _causal(raw, nested)
    window = read_window(raw, sizes, causal)
    if causal is None:
        # Bidirectional, but for windowed layers where all of them are.
        causal = window is not None and window.causal and len(window.layers) == sizes["num_hidden_layers"]
    return DraftHeadConfig(
        hidden_size=width,
        intermediate_size=need(sizes, "intermediate_size"),
        num_layers=need(sizes, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=sizes.get("num_key_value_heads") or heads,
        head_dim=sizes.get("head_dim") or width // heads,
        block_size=_only_value("block_size", raw, nested),
        taps=tuple(taps),
        mask_token_id=_only_value("mask_token_id", raw, nested),
        vocab_size=raw.get("vocab_size") or need(sizes, "vocab_size"),
        num_target_layers=_only_value("num_target_layers", raw, nested, required=False),
        target_hidden_size=_only_value("target_hidden_size", raw, nested, required=False) or width,
        causal=causal,
        window=window,
        rms_norm_eps=sizes.get("rms_norm_eps", 1e-6),
        rope_parameters=read_rope(sizes),
        max_position_embeddings=sizes.get("max_position_embeddings", 32768),
        attention_bias=sizes.get("attention_bias", False),
        refinement=raw.get("jetflow_refinement", False),
        **_corrections(raw, nested),
    )


def write_config(config: DraftHeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the `config.json` that JetSpec, vLLM and `read_config` read."""
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    # A flag speaks for all layers; without one, readers take windowed layers as causal and the others as not.
    by_layer = config.window is not None and config.window.causal != config.causal
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        **({} if by_layer else {"is_causal": config.causal}),
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.taps),
            "target_hidden_size": config.target_hidden_size,
            # JetSpec reads the first, vLLM the second.
            **({} if by_layer else {"causal_head": config.causal, "causal": config.causal}),
        },
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
        "max_position_embeddings": config.max_position_embeddings,
        **write_window(config.window, config.num_layers),
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        **_own_settings(config),
    }


def _own_settings(config: DraftHeadConfig) -> dict[str, Any]:
    """What other loaders need not know, as the head is a plain one without it."""
    own: dict[str, Any] = {"jetflow_refinement": True} if config.refinement else {}
    if config.correction is not None:
        own["jetflow_correction"] = {"correction": config.correction, "correction_rank": config.correction_rank}
    return own


def _corrections(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that tell of published parts, and of a correction, which is either our own or a published one."""
    published, own = published_settings(raw, nested), raw.get("jetflow_correction") or {}
    if own and "correction" in published:
        raise ValueError(
            f"config.json names two corrections: jetflow_correction={own.get('correction')}, and {published['correction']}"
        )
    return {**published, **own}


def _causal(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> bool | None:
    """Resolves the in-block rule of all layers from every spelling; None where there is none of them."""
    flags = {
        "is_causal": raw.get("is_causal"),
        "dflash_config.causal": nested.get("causal"),
        "dflash_config.causal_head": nested.get("causal_head"),
    }
    given = {name: bool(value) for name, value in flags.items() if value is not None}
    # NeMo writes exactly this pair for the causal heads that it trains; the top-level flag is its model class's own.
    if given == {"is_causal": False, "dflash_config.causal": True}:
        return True
    if len(set(given.values())) > 1:
        raise ValueError("config.json contradicts itself: " + ", ".join(f"{k}={v}" for k, v in given.items()))
    return next(iter(given.values()), None)


def _only_value(key: str, raw: Mapping[str, Any], nested: Mapping[str, Any], *, required: bool = True) -> Any:
    """Returns the value of a key that files hold at the top level, under `dflash_config`, or in both places alike."""
    top, inner = raw.get(key), nested.get(key)
    if top is not None and inner is not None and top != inner:
        raise ValueError(f"config.json contradicts itself: {key}={top}, dflash_config.{key}={inner}")
    value = inner if top is None else top
    if value is None and required:
        raise ValueError(f"config.json must hold {key} at the top level or under dflash_config")
    return value


def _refuse_unsupported(raw: Mapping[str, Any], nested: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    for key in ("use_swa", "attention_sink_bias", "attention_value_scale"):
        if raw.get(key) or nested.get(key):
            raise ValueError(f"config.json asks for {key}={raw.get(key) or nested.get(key)}, which is not supported")
    draft_vocab = raw.get("draft_vocab_size")
    vocab = raw.get("vocab_size") or sizes.get("vocab_size")
    if draft_vocab is not None and draft_vocab != vocab:
        raise ValueError(f"draft_vocab_size={draft_vocab} must equal vocab_size={vocab}; reduced ones are not supported")


def _checked_tensors(head: BlockDraftHead, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    expected = head.state_dict()
    for name, value in tensors.items():
        if name not in expected:
            kinds = [kind for part, kind in FOREIGN_TENSORS.items() if part in name]
            reason = f": {kinds[0]}, which this head does not have" if kinds else ", which no DFlash head has"
            raise ValueError(f"the checkpoint holds the tensor {name!r}{reason}")
        if value.shape != expected[name].shape:
            wanted, got = list(expected[name].shape), list(value.shape)
            raise ValueError(f"tensor {published_name(name, head.config)!r} must have shape {wanted} by config.json, got {got}")
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ValueError(f"the checkpoint lacks the tensor {published_name(missing[0], head.config)!r}")
    return tensors

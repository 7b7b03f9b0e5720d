"""The public checkpoint formats of EAGLE-3 heads.

Read: SafeAILab (`midlayer.*`), SpecForge and SGLang (`LlamaForCausalLMEagle3`), NeMo (`model.layers.0.*`), vLLM speculators
(`layers.0.*`), each with EAGLE-3.1's `fc_norm` and `norm_output`. Written: the format of SpecForge, which vLLM and SGLang read.

Which states the layer ids mean differs. A top-level `eagle_aux_hidden_state_layer_ids` (vLLM, speculators) counts the
embedding as state 0, so id L is the output of decoder layer L - 1; inside `eagle_config` (SGLang, SpecForge) id L is the
output of layer L, as for taps here. Without ids the head reads `default_eagle_taps`, which are the same states in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jetflow.heads.eagle_config import EagleHeadConfig
from jetflow.heads.eagle_head import EagleHead
from jetflow.heads.files import need, read_rope

AUX = "eagle_aux_hidden_state_layer_ids"
# Settings that are supported with one value only, which is also what a file without the key means.
FIXED: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1, "logit_scale": 1.0, "is_causal": True,
    "norm_before_fc": False, "parallel_drafting": False, "use_sliding_window": False,
}  # fmt: skip


def is_eagle_config(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of an EAGLE-3 head.

    SafeAILab's files have no sign of it but the draft vocabulary, which block heads do not have.
    """
    if "dflash_config" in raw or "block_size" in raw:
        return False
    named = any("eagle3" in str(name).lower() for name in raw.get("architectures") or ())
    return named or raw.get("speculators_model_type") == "eagle3" or "draft_vocab_size" in raw


def read_eagle_head(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> EagleHead:
    """Builds a head from a parsed `config.json` and the tensors beside it.

    Raises:
        ValueError: a key is missing or unknown, keys contradict each other, or a setting is not supported.
    """
    named: dict[str, Tensor] = {}
    for name, value in tensors.items():
        short = name.removeprefix("model.")
        named["midlayer." + short.removeprefix("layers.0.") if short.startswith("layers.0.") else short] = value
    config = read_eagle_config(raw, own_embedding="embed_tokens.weight" in named)
    draft_tokens = _draft_tokens(config, named.pop("d2t", None), named.pop("t2d", None))
    with torch.device("meta"):
        head = EagleHead(config, draft_tokens)
    expected = head.state_dict()
    for name, value in named.items():
        if name not in expected:
            raise ValueError(f"the checkpoint holds the tensor {name!r}, which no EAGLE-3 head of its config.json has")
        if value.shape != expected[name].shape:
            raise ValueError(
                f"tensor {name!r} must have shape {list(expected[name].shape)} by config.json, got {list(value.shape)}"
            )
    missing = [name for name in expected if name not in named]
    if missing:
        raise ValueError(f"the checkpoint lacks the tensor {missing[0]!r}")
    head.load_state_dict({name: value.to(dtype or value.dtype) for name, value in named.items()}, assign=True)
    return head


def read_eagle_config(raw: Mapping[str, Any], *, own_embedding: bool) -> EagleHeadConfig:
    """Resolves a `config.json` of any supported format; whether there is an embedding only the weights say.

    Raises:
        ValueError: a key is missing, two keys contradict each other, or a setting is not supported.
    """
    speculators = "transformer_layer_config" in raw
    sizes = _speculators_sizes(raw["transformer_layer_config"]) if speculators else raw
    for source in (raw, sizes):
        for key, value in FIXED.items():
            if source.get(key) is not None and source[key] != value:
                raise ValueError(f"config.json says {key}={source[key]!r}; EAGLE-3 heads are supported with {value!r} only")
        if "sliding_attention" in (source.get("layer_types") or ()):
            raise ValueError("config.json says layer_types=['sliding_attention'], which is not supported for EAGLE-3 heads")
    width, heads = need(sizes, "hidden_size"), need(sizes, "num_attention_heads")
    vocab_size = need(sizes, "vocab_size")
    return EagleHeadConfig(
        hidden_size=width,
        intermediate_size=need(sizes, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=sizes.get("num_key_value_heads") or heads,
        head_dim=sizes.get("head_dim") or width // heads,
        vocab_size=vocab_size,
        draft_vocab_size=raw.get("draft_vocab_size") or vocab_size,
        target_hidden_size=raw.get("target_hidden_size") or width,
        taps=_taps(raw),
        fc_norm=bool(raw.get("fc_norm")),
        norm_output=bool(raw.get("norm_output")),
        norm_before_residual=bool(raw.get("norm_before_residual")),
        # Llama's layers have no such norms; in the other formats the layer is always a Llama one.
        qk_norm=speculators and sizes["model_type"] == "qwen3",
        own_embedding=own_embedding,
        attention_bias=bool(sizes.get("attention_bias")),
        rms_norm_eps=sizes.get("rms_norm_eps", 1e-6),
        rope_parameters=read_rope(sizes),
        max_position_embeddings=sizes.get("max_position_embeddings", 2048),
    )


def eagle_files(head: EagleHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the `config.json` and the tensors of a head in the format that SpecForge writes and vLLM and SGLang read.

    Raises:
        ValueError: the head norms queries and keys, which that format's layer does not.
    """
    config = head.config
    if config.qk_norm:
        raise ValueError("qk_norm=True: the format that EAGLE-3 heads are written in has no norms of queries and keys")
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
        "tie_word_embeddings": False,
        "dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }
    if config.taps is not None:
        settings[AUX] = [tap + 1 for tap in config.taps]
        settings["eagle_config"] = {AUX: list(config.taps), "use_aux_hidden_state": True}
    tensors = dict(head.state_dict())
    ids = torch.arange(config.vocab_size) if head.draft_tokens is None else head.draft_tokens.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return settings, tensors


def _taps(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    nested = raw.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise ValueError("config.json says eagle_config.use_aux_hidden_state=False: a head that fuses no layers is no EAGLE-3")
    top, inner = raw.get(AUX), nested.get(AUX)
    if top and min(top) < 1:
        raise ValueError(f"config.json says {AUX}={top}; id 0 is the embedding, which is no layer's output")
    taps = [layer - 1 for layer in top] if top else None
    if taps and inner and taps != list(inner):
        raise ValueError(
            f"config.json contradicts itself: {AUX}={top} means the outputs of layers {taps}, eagle_config's those of {inner}"
        )
    found = taps or inner
    return tuple(found) if found else None


def _speculators_sizes(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a speculators layer, whose file leaves out what is transformers' default."""
    kind = layer.get("model_type")
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"config.json says transformer_layer_config.model_type={kind!r}; it must be llama or qwen3")
    from transformers import AutoConfig

    return AutoConfig.for_model(**layer).to_dict()


def _draft_tokens(config: EagleHeadConfig, d2t: Tensor | None, t2d: Tensor | None) -> Tensor | None:
    """Turns the offsets of a file into token ids and checks them against its mask; None for the whole vocabulary."""
    if d2t is None:
        if config.draft_vocab_size != config.vocab_size:
            raise ValueError(f"the checkpoint lacks the tensor 'd2t', which tokens its {config.draft_vocab_size} columns are")
        return None
    if d2t.shape != (config.draft_vocab_size,) or d2t.is_floating_point():
        raise ValueError(f"tensor 'd2t' must be integers [{config.draft_vocab_size}], got {d2t.dtype} {list(d2t.shape)}")
    ids = torch.arange(len(d2t)) + d2t.long()
    if t2d is not None:
        rising = bool((ids[1:] > ids[:-1]).all())
        marked = t2d.bool().nonzero().flatten()
        if t2d.shape != (config.vocab_size,) or not rising or not torch.equal(marked, ids):
            raise ValueError(
                "tensors 'd2t' and 't2d' contradict each other: the ids of the first must be those that the second marks"
            )
    if config.draft_vocab_size < config.vocab_size:
        return ids
    if bool(d2t.any()):
        raise ValueError("tensor 'd2t' must be zeros where the draft vocabulary is the whole one")
    return None

"""What a target may be: which models and which attention tree passes can honour."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Settings with which attention or logits are more than softmax(q k) v and lm_head(hidden).
UNSUPPORTED_SETTINGS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "embedding_multiplier",
    "attention_chunk_size",
)


def checked_attention(attention: str) -> str:
    """Returns `attention` if transformers has it.

    Raises:
        ValueError: it is unknown, or its package is missing.
    """
    if attention.startswith("flash_attention_2") and not is_flash_attn_2_available():
        raise ValueError(
            f"attention={attention!r} needs the flash-attn package and a CUDA device: pip install 'jetflow[flash-attn]'"
        )
    if attention != "eager" and attention not in ALL_ATTENTION_FUNCTIONS:
        known = ", ".join(sorted(["eager", "triton", *ALL_ATTENTION_FUNCTIONS]))
        raise ValueError(f"attention={attention!r} must be one of {known}")
    return attention


def check_recordable(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose passes read something back from the device, which a recording cannot repeat."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one for each type of layer.
    parts = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    for kind in (one.get("rope_type") for one in parts if one.get("rope_type") in ("dynamic", "longrope")):
        raise ValueError(f"graphs do not go with rope_type={kind!r}, which chooses its frequencies by the positions")
    if getattr(config, "num_experts", None) and getattr(config, "_experts_implementation", None) == "eager":
        raise ValueError(
            "graphs do not go with experts that are looped over; load the model with experts_implementation='grouped_mm'"
        )


def check_supported(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose cache cannot be rolled back or whose passes mean more than we compute."""
    config = model.config.get_text_config()
    name = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(f"model type {name!r} is an encoder-decoder; a target must be decoder-only")
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or kinds - SUPPORTED_LAYER_TYPES:
        found = ", ".join(sorted(kinds - SUPPORTED_LAYER_TYPES)) or "a recurrent state"
        raise ValueError(
            f"model type {name!r} keeps {found}, which cannot be rolled back to an accepted path; a target must have "
            "full or sliding-window attention in every layer"
        )
    for setting in UNSUPPORTED_SETTINGS:
        if getattr(config, setting, None) not in (None, 1, 1.0):
            raise ValueError(f"model type {name!r} sets {setting}={getattr(config, setting)}, which is not supported yet")
    if model.training and getattr(config, "attention_dropout", None):
        raise ValueError("the model drops attention weights at random while it is in training mode; call model.eval()")
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise ValueError("the model is split over several devices; load it on one device")
    if model.get_output_embeddings() is None or not hasattr(model.get_decoder(), "layers"):
        raise ValueError(f"model type {name!r} must have a decoder with `layers` and an output embedding")

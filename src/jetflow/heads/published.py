"""What the checkpoints of DSpark and DFlash 2 hold beside a DFlash backbone: their keys and tensor names.

Read: DeepSpec, SpecForge / SGLang and vLLM speculators for DSpark (arXiv 2607.05147); z-lab and NeMo for DFlash 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from jetflow.heads.config import PUBLISHED_CORRECTIONS, DraftHeadConfig, PublishedParts

# DSpark on the DFlash backbone of this package; its other backbones have other tensors.
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator")
MARKOV_KINDS = {"vanilla": "markov", "gated": "markov-gated", "rnn": "markov-recurrent"}
# Our names of published tensors.
RENAMED = {
    "markov_head.": "correction.",
    "candidate_selector.predecessor_codebook.weight": "correction.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "correction.successor_codebook",
    "candidate_selector.": "correction.",
}
# Not needed for drafting: the predicted acceptance, and copies of the target's that training compares with.
LEFT_OUT = ("confidence_head.", "verifier_lm_head.", "verifier_norm.")
# Keys that other heads of this family carry, and what they are.
FOREIGN_TENSORS = {
    "prefix_gru": "Domino's recurrent correction",
    "embed_proj": "Domino's recurrent correction",
    "markov_head": "DSpark's Markov correction",
    "candidate_selector": "DFlash 2's path selector",
    "_conv.": "DFlash 2's convolutions",
    "d2t": "a draft vocabulary of its own",
    "t2d": "a draft vocabulary of its own",
}


def published_settings(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `DraftHeadConfig` that tell of published parts; keys may lie at either level.

    DSpark's heads predict from the anchor's slot unless `sample_from_anchor` says otherwise, DFlash's only if it says so.

    Raises:
        ValueError: a key contradicts another, or asks for something that is not supported. The message names the key.
    """

    def value(key: str) -> Any:
        top, inner = raw.get(key), nested.get(key)
        if top is not None and inner is not None and top != inner:
            raise ValueError(f"config.json contradicts itself: {key}={top}, dflash_config.{key}={inner}")
        return inner if top is None else top

    dspark = _is_dspark(raw, value)
    markov, selector = value("markov_rank"), value("selector_rank")
    if markov and selector:
        raise ValueError(f"config.json names two corrections: markov_rank={markov}, selector_rank={selector}")
    found: dict[str, Any] = {}
    if markov:
        kind = str(value("markov_head_type") or "vanilla").lower()
        if kind not in MARKOV_KINDS:
            raise ValueError(f"markov_head_type must be one of {', '.join(MARKOV_KINDS)}, got {kind!r}")
        found = {"correction": MARKOV_KINDS[kind], "correction_rank": markov}
    elif selector:
        if value("selector_top_k") is None:
            raise ValueError("config.json has selector_rank but no selector_top_k")
        found = {"correction": "selector", "correction_rank": selector}
    taps, group = value("conv_kernel_size"), value("conv_group_size")
    if (taps is None) != (group is None):
        raise ValueError(f"config.json needs both or neither of conv_kernel_size={taps} and conv_group_size={group}")
    from_anchor, cap = value("sample_from_anchor"), value("final_logit_softcapping")
    return found | {
        "published": PublishedParts(
            sample_from_anchor=dspark if from_anchor is None else bool(from_anchor),
            selector_candidates=value("selector_top_k") if selector else None,
            convolution=None if taps is None else (taps, group),
            embedding_scale=value("input_embedding_scale"),
            output_scale=1.0 if value("output_multiplier") is None else float(value("output_multiplier")),
            # Zero turns it off in the public code.
            output_cap=cap or None,
        )
    }


def published_tensors(tensors: Mapping[str, Tensor], config: DraftHeadConfig) -> dict[str, Tensor]:
    """Gives the tensors of a published correction that `config` names our names; leaves out what drafting does not need.

    DSpark's confidence head is left out: it predicts what the tree's own scores say, and no text depends on it.
    """
    kept = {name: value for name, value in tensors.items() if not name.startswith(LEFT_OUT)}
    return {_renamed(name): value for name, value in kept.items()} if config.correction in PUBLISHED_CORRECTIONS else kept


def published_name(name: str, config: DraftHeadConfig) -> str:
    """Returns the name that a tensor of ours has in the checkpoint."""
    if config.correction not in PUBLISHED_CORRECTIONS:
        return name
    return name.replace("correction.", "candidate_selector." if config.correction == "selector" else "markov_head.")


def _renamed(name: str) -> str:
    prefix = next((one for one in RENAMED if name.startswith(one)), "")
    return RENAMED.get(prefix, "") + name.removeprefix(prefix)


def _is_dspark(raw: Mapping[str, Any], value: Any) -> bool:
    names = [name for name in raw.get("architectures") or () if "DSpark" in name]
    wrong = [name for name in names if name not in DSPARK]
    if wrong:
        raise ValueError(f"architectures={wrong}: only DSpark heads on the DFlash backbone are supported ({', '.join(DSPARK)})")
    kind = value("projector_type")
    if kind not in (None, "dflash", "dspark"):
        raise ValueError(f"projector_type={kind!r}: Domino's and other projectors are not supported")
    if value("shift_label"):
        raise ValueError("shift_label=true: Domino's shifted labels are not supported")
    return bool(names) or kind == "dspark" or raw.get("speculators_model_type") == "dspark"

"""Training of draft heads, from prompts to a published head. Import what else you need from its module."""

from typing import Any

from jetflow.training.anchors import sample_anchors, supervised_slots
from jetflow.training.eagle import UnrollSettings, eagle_loss, new_eagle_head, unrolled_loss
from jetflow.training.step import Batch, StepOutput, StepSettings, TeacherStates, block_loss, draft_loss

__all__ = [
    "Batch",
    "StepOutput",
    "StepSettings",
    "TeacherStates",
    "Trainer",
    "UnrollSettings",
    "block_loss",
    "draft_loss",
    "eagle_loss",
    "new_eagle_head",
    "sample_anchors",
    "supervised_slots",
    "unrolled_loss",
]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        # Loaded when used: it needs accelerate, which the training step does not.
        from jetflow.training.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'jetflow.training' has no attribute {name!r}")

"""Training of draft heads, from prompts to a published head. Import what else you need from its module."""

from jetflow.training.anchors import sample_anchors, supervised_slots
from jetflow.training.step import Batch, StepOutput, StepSettings, TeacherStates, block_loss, draft_loss

__all__ = [
    "Batch",
    "StepOutput",
    "StepSettings",
    "TeacherStates",
    "block_loss",
    "draft_loss",
    "sample_anchors",
    "supervised_slots",
]

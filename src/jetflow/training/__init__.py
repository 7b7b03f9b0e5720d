"""Training of draft heads: anchors, the loss of one step."""

from jetflow.training.anchors import sample_anchors, supervised_slots
from jetflow.training.step import Batch, StepOutput, block_loss, draft_loss

__all__ = ["Batch", "StepOutput", "block_loss", "draft_loss", "sample_anchors", "supervised_slots"]

"""Losses: parts that compare the draft's and the target's law, one value per position, and the weights of the mean."""

from jetflow.losses.acceptance import LogAcceptance, TotalVariation
from jetflow.losses.divergences import CrossEntropy, ForwardKL, JensenShannon, ReverseKL
from jetflow.losses.mixed import MixedLoss
from jetflow.losses.tree import TreeAcceptance
from jetflow.losses.weights import exponential_position_weights, weighted_mean

__all__ = [
    "CrossEntropy",
    "ForwardKL",
    "JensenShannon",
    "LogAcceptance",
    "MixedLoss",
    "ReverseKL",
    "TotalVariation",
    "TreeAcceptance",
    "exponential_position_weights",
    "weighted_mean",
]

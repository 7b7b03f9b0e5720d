"""Acceptors: which path of a drafted tree the target follows."""

from jetflow.acceptors.choice import Choice, auto, sharpness_of
from jetflow.acceptors.match import GreedyAcceptor, SamplingAcceptor
from jetflow.acceptors.rejection import RecursiveRejection
from jetflow.acceptors.traversal import BlockVerification, TraversalVerification
from jetflow.acceptors.typical import TypicalAcceptance

__all__ = [
    "BlockVerification",
    "Choice",
    "GreedyAcceptor",
    "RecursiveRejection",
    "SamplingAcceptor",
    "TraversalVerification",
    "TypicalAcceptance",
    "auto",
    "sharpness_of",
]

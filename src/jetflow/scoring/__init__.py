"""Scoring functions, for `BestFirst(scoring=...)` and the other expanders."""

from jetflow.scoring.functions import (
    DepthPenalty,
    EntropyGuided,
    Hybrid,
    RankPenalty,
    TemperatureCalibrated,
    cumulative_log_prob,
)

__all__ = ["DepthPenalty", "EntropyGuided", "Hybrid", "RankPenalty", "TemperatureCalibrated", "cumulative_log_prob"]

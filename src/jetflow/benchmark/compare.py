"""Times decoders against each other in one process, taking turns on every prompt."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jetflow.decoding import SpeculativeDecoder
from jetflow.results import GenerationResult

RESAMPLES = 1000


@dataclass(frozen=True)
class MethodResult:
    """How one method did over all prompts and repeats.

    Attributes:
        name: the method's name.
        tau: kept tokens per verified tree, over all rounds of all prompts.
        tokens_per_second: all new tokens by all seconds, prefill included.
        speedup: median over prompts and repeats of this method's tokens per second by the first method's.
        speedup_interval: of that median, 95 % of resamples of the runs.
        texts_equal: prompts on which the token ids equal the first method's.
        num_prompts: number of prompts.
    """

    name: str
    tau: float
    tokens_per_second: float
    speedup: float
    speedup_interval: tuple[float, float]
    texts_equal: int
    num_prompts: int


def compare(
    decoders: Mapping[str, SpeculativeDecoder],
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    repeats: int = 1,
) -> list[MethodResult]:
    """Runs every decoder on every prompt; the first one is the baseline.

    The decoders take turns prompt by prompt, and who begins changes from turn to turn, so that drift of the machine hits
    all alike. One short unmeasured run of each comes first.

    Args:
        decoders: methods by name.
        prompts: token ids.
        max_new_tokens: length limit of each text.
        repeats: measured runs of each method on each prompt.

    Raises:
        ValueError: no decoder, no prompt, or `repeats` below 1.
    """
    if not decoders or not prompts or repeats < 1:
        raise ValueError(f"compare needs decoders, prompts and repeats >= 1, got {len(decoders)}, {len(prompts)} and {repeats}")
    names = list(decoders)
    runs: dict[str, list[GenerationResult]] = {name: [] for name in names}
    for name in names:
        decoders[name].generate(prompts[0], max_new_tokens=min(8, max_new_tokens))
    for turn in range(repeats * len(prompts)):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            runs[name].append(decoders[name].generate(prompts[turn % len(prompts)], max_new_tokens=max_new_tokens))
    baseline = runs[names[0]]
    return [_summary(name, runs[name], baseline, len(prompts)) for name in names]


def _summary(name: str, runs: list[GenerationResult], baseline: list[GenerationResult], num_prompts: int) -> MethodResult:
    rounds = [stats.num_kept for run in runs for stats in run.rounds]
    ratios = [run.tokens_per_second / base.tokens_per_second for run, base in zip(runs, baseline, strict=True)]
    pairs = list(zip(runs, baseline, strict=True))[:num_prompts]
    return MethodResult(
        name=name,
        tau=statistics.fmean(rounds) if rounds else 1.0,
        tokens_per_second=sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs),
        speedup=statistics.median(ratios),
        speedup_interval=_interval(ratios),
        texts_equal=sum(run.token_ids == base.token_ids for run, base in pairs),
        num_prompts=num_prompts,
    )


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[round(0.025 * (RESAMPLES - 1))], medians[round(0.975 * (RESAMPLES - 1))]

"""Ways of writing a text, under one call: jetflow's decoders, and Hugging Face's own generators on the same model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from jetflow.decoding import SpeculativeDecoder
from jetflow.targets import Target


@dataclass(frozen=True)
class Written:
    """One text and how it came about.

    Attributes:
        token_ids: new tokens.
        seconds: of the whole call.
        kept: tokens of each round; empty where it is not known.
        accepted: accepted drafted tokens of each round.
        phases: seconds by phase.
        ranks: how often the accepted node was its parent's r-th child.
    """

    token_ids: list[int]
    seconds: float
    kept: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)


class Method(Protocol):
    """Continues a prompt by at most `max_new_tokens` tokens; `seed` makes sampling repeatable."""

    def __call__(self, prompt: list[int], max_new_tokens: int, seed: int) -> Written: ...


class DecoderMethod:
    """A jetflow decoder."""

    def __init__(self, decoder: SpeculativeDecoder):
        self._decoder = decoder

    def __call__(self, prompt: list[int], max_new_tokens: int, seed: int) -> Written:
        ranks: list[int] = []
        rounds: list[Any] = []
        result = self._decoder.generate(prompt, max_new_tokens=max_new_tokens, seed=seed, on_round=rounds.append)
        for one in rounds:
            path = one.acceptance.path[0, : one.num_accepted + 1].tolist()
            parents = one.tree.parents[0].tolist()
            for node in path[1:]:
                rank = sum(parents[other] == parents[node] for other in range(1, node))
                ranks += [0] * (rank + 1 - len(ranks))
                ranks[rank] += 1
        phases: dict[str, float] = {"prefill": result.prefill_seconds}
        for stats in result.rounds:
            for name, seconds in stats.seconds.items():
                phases[name] = phases.get(name, 0.0) + seconds
        return Written(
            result.token_ids,
            result.seconds,
            [stats.num_kept for stats in result.rounds],
            [stats.num_accepted for stats in result.rounds],
            phases,
            ranks,
        )


class HuggingFaceMethod:
    """`generate` of the target's own model.

    Args:
        target: the model.
        temperature: 0 is greedy.
        options: further arguments of `generate`, such as `prompt_lookup_num_tokens` or `assistant_model`.
    """

    def __init__(self, target: Target, temperature: float = 0.0, options: Mapping[str, Any] | None = None):
        self._target = target
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
        )
        self._options = {**sampling, **(options or {})}

    def __call__(self, prompt: list[int], max_new_tokens: int, seed: int) -> Written:
        ids = torch.tensor([prompt], device=self._target.device)
        with torch.random.fork_rng(devices=[self._target.device] if self._target.device.type == "cuda" else []):
            torch.manual_seed(seed)
            begin = time.perf_counter()
            model: Any = self._target.model
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **self._options)
            token_ids = out[0, len(prompt) :].tolist()
        return Written(token_ids, time.perf_counter() - begin)

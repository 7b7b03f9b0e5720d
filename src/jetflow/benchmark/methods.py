"""Ways of writing a text, under one call: jetflow's decoders, and Hugging Face's own generators on the same model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from jetflow.decoding import SpeculativeDecoder
from jetflow.results import Round
from jetflow.targets import Target


@dataclass(frozen=True)
class Written:
    """One text and how it came about.

    Attributes:
        token_ids: new tokens.
        seconds: of the whole call, shared evenly by the texts that were written together.
        kept: tokens of each round; empty where it is not known.
        accepted: accepted drafted tokens of each round.
        phases: seconds by phase, shared likewise.
        ranks: how often the accepted node was its parent's r-th child.
    """

    token_ids: list[int]
    seconds: float
    kept: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)


class Method(Protocol):
    """Continues prompts, all of them together, by at most `max_new_tokens` tokens; `seed` makes sampling repeatable."""

    def __call__(self, prompts: list[list[int]], max_new_tokens: int, seed: int) -> list[Written]: ...


class DecoderMethod:
    """A jetflow decoder."""

    def __init__(self, decoder: SpeculativeDecoder):
        self._decoder = decoder

    def __call__(self, prompts: list[list[int]], max_new_tokens: int, seed: int) -> list[Written]:
        count = len(prompts)
        rounds: list[Round] = []
        results = self._decoder.generate(
            prompts, batch_size=count, max_new_tokens=max_new_tokens, seed=seed, on_round=rounds.append
        )
        seconds = max(result.seconds for result in results) / count
        written = []
        for index, result in enumerate(results):
            phases: dict[str, float] = {"prefill": result.prefill_seconds / count}
            for stats in result.rounds:
                for name, spent in stats.seconds.items():
                    phases[name] = phases.get(name, 0.0) + spent
            written.append(
                Written(
                    result.token_ids,
                    seconds,
                    [stats.num_kept for stats in result.rounds],
                    [stats.num_accepted for stats in result.rounds],
                    phases,
                    _ranks([one for one in rounds if one.index == index]),
                )
            )
        return written


def _ranks(rounds: Sequence[Round]) -> list[int]:
    """How often the accepted node was its parent's first, second, ... child."""
    ranks: list[int] = []
    for one in rounds:
        path = one.acceptance.path[0, : one.num_accepted + 1].tolist()
        parents = one.tree.parents[0].tolist()
        for node in path[1:]:
            rank = sum(parents[other] == parents[node] for other in range(1, node))
            ranks += [0] * (rank + 1 - len(ranks))
            ranks[rank] += 1
    return ranks


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

    def __call__(self, prompts: list[list[int]], max_new_tokens: int, seed: int) -> list[Written]:
        # Its way of batching: prompts padded in front.
        width = max(map(len, prompts))
        device = self._target.device
        ids = torch.tensor([[0] * (width - len(one)) + one for one in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts], device=device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            begin = time.perf_counter()
            model: Any = self._target.model
            out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **self._options)
            texts = out[:, width:].tolist()
        seconds = (time.perf_counter() - begin) / len(prompts)
        return [Written(self._up_to_the_end(text), seconds) for text in texts]

    def _up_to_the_end(self, token_ids: list[int]) -> list[int]:
        """Without the padding behind a text that ended before others of its batch."""
        ends = [place for place, token in enumerate(token_ids) if token in self._target.eos_token_ids]
        return token_ids[: ends[0] + 1] if ends else token_ids

"""Answers for regeneration: the target in process, batches of like length, one token of each row per pass.

Dimension key: B batch, P prompt length, V vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from jetflow.acceptors import SamplingAcceptor
from jetflow.chat import Message, chat_ids, check_template
from jetflow.protocols import Acceptor
from jetflow.targets import Target
from jetflow.training.data import Span, render, user_turns
from jetflow.training.regenerate import Answered, Job, RegenerationSettings
from jetflow.trees.token_tree import TokenTree
from jetflow.verifiers import TreeVerifier

# Batches whose jobs are sorted by length together.
POOL_BATCHES = 16


class TargetAnswerer:
    """Answers in process: batches of like length through the target, plain decoding, finished rows dropped as they end.

    Args:
        target: the frozen model, with a tokenizer.
        settings: how to answer.
        batch_size: conversations that run together.
        max_prompt_tokens: longer prompts are left out; as many as leave room for an answer when absent.

    Raises:
        ValueError: `batch_size` is below 1, or the target has no tokenizer or chat template.
    """

    def __init__(
        self, target: Target, settings: RegenerationSettings, *, batch_size: int = 32, max_prompt_tokens: int | None = None
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        check_template(target.tokenizer)
        self._target = target
        self._settings = settings
        self._batch_size = batch_size
        self._limit = target.max_positions - settings.max_new_tokens if max_prompt_tokens is None else max_prompt_tokens
        self._acceptor = SamplingAcceptor(settings.temperature, top_k=settings.top_k, top_p=settings.top_p)

    def __call__(self, jobs: list[Job]) -> Iterator[tuple[Job, Answered]]:
        """Yields each job with its answered conversation, in an order that mixes them.

        Batches are of like length, but within pools of jobs drawn from all of them: what a run has written when it is
        stopped early is a fair sample, and not the shortest prompts.
        """
        asked = [(self._ask(user_turns(job.conversation.messages)[0]), job) for job in jobs]
        mixed = sorted((pair for pair in asked if len(pair[0]) <= self._limit), key=lambda pair: _mixing_key(pair[1]))
        size = self._batch_size
        for start in range(0, len(mixed), POOL_BATCHES * size):
            pool = sorted(mixed[start : start + POOL_BATCHES * size], key=lambda pair: len(pair[0]))
            for first in range(0, len(pool), size):
                yield from self._batch([job for _, job in pool[first : first + size]])

    def _ask(self, messages: Sequence[Message]) -> list[int]:
        return chat_ids(self._target.tokenizer, messages, self._settings.template_args)

    def _batch(self, jobs: list[Job]) -> Iterator[tuple[Job, Answered]]:
        """Answers one turn of every conversation after the other."""
        # A seed of the batch's own, so that a continued run does not repeat the draws of its first batch.
        seed = self._settings.seed + _mixing_key(jobs[0])
        generator = torch.Generator(device=self._target.device).manual_seed(seed)
        turns = [user_turns(job.conversation.messages) for job in jobs]
        told: list[list[Message]] = [[] for _ in jobs]
        reasons: list[list[str]] = [[] for _ in jobs]
        last: list[tuple[list[int], list[int]]] = [([], []) for _ in jobs]
        for turn in range(max(len(one) for one in turns)):
            # Rows whose conversation has so many turns, and was answered so far.
            active = [row for row in range(len(jobs)) if turn < len(turns[row]) and len(reasons[row]) == turn]
            asked = {row: self._ask([*told[row], *turns[row][turn]]) for row in active}
            # A later turn may have outgrown the target: that conversation ends with the turn before.
            fits = [row for row in active if len(asked[row]) <= self._limit]
            answers = answer_prompts(
                self._target, [asked[row] for row in fits], self._acceptor, self._settings.max_new_tokens, generator=generator
            )
            for row, ids in zip(fits, answers, strict=True):
                text = self._target.tokenizer.decode(ids, skip_special_tokens=True)
                told[row] += [*turns[row][turn], {"role": "assistant", "content": text}]
                reasons[row].append("stop" if ids[-1] in self._target.eos_token_ids else "length")
                last[row] = (asked[row], ids)
        for row, job in enumerate(jobs):
            yield job, self._answered(told[row], last[row], reasons[row])

    def _answered(self, messages: list[Message], last: tuple[list[int], list[int]], reasons: list[str]) -> Answered:
        """The last answer keeps the very tokens that the target wrote; earlier ones are found through the template."""
        asked, ids = last
        spans: list[Span] = []
        count = len(reasons)
        if count > 1:
            answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            earlier = messages[: answers[count - 2] + 1]
            rendered, spans = render(self._target.tokenizer, earlier, self._settings.template_args)
            if asked[: spans[-1][1]] != rendered[: spans[-1][1]]:
                # A template that rewrites earlier turns: only what the target wrote last is certain.
                spans = []
        return Answered(messages, [*asked, *ids], [*spans, (len(asked), len(asked) + len(ids))], reasons)


def _mixing_key(job: Job) -> int:
    return zlib.crc32(f"{job.conversation.id}/{job.sample}".encode())


@torch.no_grad()
def answer_prompts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    acceptor: Acceptor,
    max_new_tokens: int,
    *,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Continues prompts side by side, one token of each per pass.

    Args:
        target: the frozen model.
        prompts: token ids, at least one in each.
        acceptor: draws the tokens.
        max_new_tokens: most tokens of one answer.
        generator: source of randomness, on the target's device.

    Returns:
        The new token ids of each prompt, its end token included.
    """
    if not prompts:
        return []
    answers: list[list[int]] = [[] for _ in prompts]
    verifier = TreeVerifier(target)
    lengths = torch.tensor([len(ids) for ids in prompts], device=target.device)
    token_ids = pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True).to(target.device)
    logits = verifier.prefill(token_ids, lengths).logits
    # Room for whole answers at once, so that the cache is not copied as it grows.
    verifier.cache.reserve(max_new_tokens)
    rows, going = list(range(len(prompts))), [True] * len(prompts)
    tree = TokenTree.root_only(token_ids[:, 0])
    while True:
        acceptance = acceptor(tree, logits, generator=generator)
        for place, (row, token) in enumerate(zip(rows, acceptance.bonus.tolist(), strict=True)):
            if going[place]:
                if token < 0:
                    raise ValueError("the target's logits are NaN or all -inf; check its weights and dtype")
                answers[row].append(token)
                going[place] = token not in target.eos_token_ids and len(answers[row]) < max_new_tokens
        if not any(going):
            return answers
        tokens = acceptance.bonus
        # Dropping rows copies the cache, so it waits until an eighth of them has ended.
        if sum(going) <= 0.875 * len(going):
            kept = [place for place, goes in enumerate(going) if goes]
            verifier.keep_rows(kept)
            rows, going = [rows[place] for place in kept], [True] * len(kept)
            tokens = tokens[torch.tensor(kept, device=tokens.device)]
        tree = TokenTree.root_only(tokens)
        logits = verifier.verify(tree).logits
        verifier.cache.advance([1] * len(rows))

"""Answers for regeneration from any server that speaks OpenAI's chat protocol, such as vLLM's."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from typing import Any

from jetflow.training.data import Message, render, user_turns
from jetflow.training.regenerate import Answered, Job, RegenerationSettings


class EndpointAnswerer:
    """Asks a server, many conversations at once, each turn after the other.

    The server sends text; token ids and loss spans come from the tokenizer's chat template. Failed requests are repeated
    with growing pauses by the client library; when one fails for good, the run stops and what is written stays.

    Args:
        url: base address, such as `http://localhost:8000/v1`.
        model: the name under which the server knows the model.
        tokenizer: the target's own tokenizer, with a chat template.
        settings: how to answer. `top_k` and `template_args` travel as vLLM's and SGLang's extra fields.
        concurrency: most requests at a time.
        max_retries: repetitions of a failed request.
        timeout: seconds that a request may take.
        api_key: sent to the server; most local ones ignore it.

    Raises:
        ValueError: `concurrency` is below 1, or the openai package is missing.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: Any,
        settings: RegenerationSettings,
        *,
        concurrency: int = 32,
        max_retries: int = 5,
        timeout: float = 600.0,
        api_key: str = "none",
    ):
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        try:
            import openai
        except ImportError as error:
            raise ValueError("answers from an endpoint need the openai package: pip install 'jetflow[train]'") from error
        self._make_client = lambda: openai.AsyncOpenAI(base_url=url, api_key=api_key, max_retries=max_retries, timeout=timeout)
        self._url = url
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings
        self._concurrency = concurrency

    def __call__(self, jobs: list[Job]) -> Iterator[tuple[Job, Answered]]:
        """Yields each job with its answered conversation, as answers come in.

        Raises:
            OSError: a request failed for good.
        """
        results: queue.Queue[tuple[Job, Answered] | BaseException | None] = queue.Queue()
        thread = threading.Thread(target=lambda: asyncio.run(self._ask_all(jobs, results)), daemon=True)
        thread.start()
        while (item := results.get()) is not None:
            if isinstance(item, BaseException):
                raise OSError(f"the endpoint {self._url} failed for good ({item}); what is written stays") from item
            yield item
        thread.join()

    async def _ask_all(self, jobs: list[Job], results: queue.Queue[Any]) -> None:
        """Runs `concurrency` workers over the jobs; the first error ends them all."""
        waiting = iter(jobs)

        async def worker(client: Any) -> None:
            for job in waiting:
                results.put((job, await self._ask(client, job)))

        try:
            async with self._make_client() as client:
                await asyncio.gather(*(worker(client) for _ in range(self._concurrency)))
        except Exception as error:
            results.put(error)
        else:
            results.put(None)

    async def _ask(self, client: Any, job: Job) -> Answered:
        settings = self._settings
        told: list[Message] = []
        reasons: list[str] = []
        extra: dict[str, Any] = {}
        if settings.top_k is not None:
            extra["top_k"] = settings.top_k
        if settings.template_args:
            extra["chat_template_kwargs"] = dict(settings.template_args)
        for turn in user_turns(job.conversation.messages):
            told += turn
            reply = await client.chat.completions.create(
                model=self._model,
                messages=list(told),
                max_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                top_p=1.0 if settings.top_p is None else settings.top_p,
                seed=settings.seed + job.sample,
                extra_body=extra,
            )
            choice = reply.choices[0]
            told.append({"role": "assistant", "content": choice.message.content or ""})
            reasons.append("length" if choice.finish_reason == "length" else "stop")
        token_ids, spans = render(self._tokenizer, told, settings.template_args)
        return Answered(told, token_ids, spans, reasons)

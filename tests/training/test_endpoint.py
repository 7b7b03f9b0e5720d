"""Answers from a real server on this machine, transformers' own, over OpenAI's protocol."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

pytest.importorskip("openai", reason="endpoints need the openai package")
pytest.importorskip("fastapi", reason="the server needs transformers[serving]")
pytest.importorskip("uvicorn", reason="the server needs transformers[serving]")

from transformers import AutoTokenizer

from jetflow.chat import chat_ids
from jetflow.decoding import SpeculativeDecoder
from jetflow.drafters.prompt_lookup import PromptLookupDrafter
from jetflow.targets import Target
from jetflow.training.data import Conversation, render
from jetflow.training.endpoint import EndpointAnswerer
from jetflow.training.regenerate import RegenerationSettings, regenerate

PAIR = Path(__file__).parents[2] / "models" / "tiny" / "target"
PROMPTS = ["Tom has 3 apples and buys 4 more. How many apples does he have?", "Hello!", "What is 2 + 2?"]
NEW = 12


@pytest.fixture(scope="module")
def server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--port", str(port), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [*command, "--dtype", "float32"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True
    )
    for _ in range(120):
        if process.poll() is not None:
            pytest.skip(f"the server does not start here: {process.stdout.read()[-300:]}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            break
        except OSError:
            time.sleep(0.5)
    yield f"http://127.0.0.1:{port}/v1"
    process.terminate()
    process.wait(timeout=20)


def conversations():
    return [Conversation(f"c{i}", [{"role": "user", "content": text}], "") for i, text in enumerate(PROMPTS)]


def test_server_answers_become_examples(server, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(PAIR)
    settings = RegenerationSettings(max_new_tokens=NEW)
    answer = EndpointAnswerer(server, str(PAIR), tokenizer, settings, concurrency=2)
    out = tmp_path / "a.jsonl"
    report = regenerate(conversations(), answer, out, settings=settings, fingerprint="served:tiny")
    assert report == (3, 0, 0)
    assert regenerate(conversations(), answer, out, settings=settings, fingerprint="served:tiny") == (0, 3, 0)
    target = Target.from_pretrained(str(PAIR), dtype=torch.float32)
    decoder = SpeculativeDecoder(target, PromptLookupDrafter(), budget=1)
    for job_answer in out.read_text().splitlines():
        row = json.loads(job_answer)
        asked = chat_ids(tokenizer, row["messages"][:1])
        expected = decoder.generate(asked, max_new_tokens=NEW)
        # For some templates this server repeats the prompt in front of an answer.
        assert row["messages"][1]["content"].strip().endswith(expected.text.strip())
        assert (row["token_ids"], [tuple(span) for span in row["loss_spans"]]) == render(tokenizer, row["messages"])


def test_a_server_that_is_not_there_is_an_error_and_keeps_what_is_written(tmp_path):
    settings = RegenerationSettings(max_new_tokens=NEW)
    tokenizer = AutoTokenizer.from_pretrained(PAIR)
    answer = EndpointAnswerer("http://127.0.0.1:9/v1", "tiny", tokenizer, settings, max_retries=0)
    with pytest.raises(OSError, match=r"endpoint http://127\.0\.0\.1:9/v1 failed for good"):
        regenerate(conversations(), answer, tmp_path / "a.jsonl", settings=settings, fingerprint="x")
    assert (tmp_path / "a.jsonl").read_text() == ""


def test_concurrency_must_be_positive():
    with pytest.raises(ValueError, match="concurrency must be at least 1, got 0"):
        EndpointAnswerer("http://127.0.0.1:9/v1", "tiny", None, RegenerationSettings(), concurrency=0)

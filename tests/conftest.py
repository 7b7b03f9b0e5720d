"""Shared pieces: tiny random targets of several architectures, plain decoding as the oracle, and the fixture folder."""

from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from jetflow import Target

pytest_plugins = ["site_fixtures"]

# Tiny matrices gain nothing from threads and stall on them where cores are shared.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    help_ = "look at the docs in a browser: this executable, or without PATH Playwright's own or one of the machine's"
    parser.addoption("--chromium", nargs="?", const="", metavar="PATH", help=help_)


SHARED_FIXTURES = Path(__file__).parents[2] / "shared" / "fixtures"
VOCAB_SIZE = 61
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large enough that the argmax of a random model is far from a tie and depends on the whole prefix.
    "initializer_range": 0.25,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
ARCHITECTURES = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "mistral_sliding": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=7)),
    "qwen2_mixed_sliding": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=7, max_window_layers=2)
    ),
}


def make_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return ARCHITECTURES[architecture]().eval()


def plain_greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Hugging Face's own greedy decoding, with an explicit mask."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


@pytest.fixture(params=sorted(ARCHITECTURES))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture
def target(model: PreTrainedModel) -> Target:
    return Target(model)


@pytest.fixture(scope="session")
def shared_fixtures() -> Path:
    if not SHARED_FIXTURES.exists():
        pytest.skip("the folder of reference results beside the project is absent")
    return SHARED_FIXTURES

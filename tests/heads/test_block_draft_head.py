import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from jetflow import BlockDraftHead, DraftHeadConfig, Target, load_head, masks
from jetflow.heads.config import default_taps
from jetflow.heads.rope import RotaryEmbedding

# float32 sums in another order.
TOLERANCE = 1e-5
PARITY = 1e-4
CONFIG = DraftHeadConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, block_size=5,
    taps=(0, 2), mask_token_id=60, vocab_size=61, num_target_layers=4, target_hidden_size=32,
)  # fmt: skip


def make_head(**changes) -> BlockDraftHead:
    torch.manual_seed(0)
    head = BlockDraftHead(dataclasses.replace(CONFIG, **changes)).eval()
    for name, parameter in head.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return head


def in_block(causal, size=5):
    return masks.dense(masks.in_block(causal=causal, block_size=size, context_len=0), 1, 1, size, size)[0, 0]


def decode(head, block, features, causal=True):
    cache = head.new_cache(len(block))
    head.extend_context(cache, features, [features.shape[1]] * len(block))
    return head.draft(block, cache, in_block(causal))


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_packed_training_pass_equals_decoding_each_block(causal):
    head = make_head()
    features, anchors = torch.randn(2, 11, 64), torch.tensor([[0, 4, 11], [5, 5, 2]])
    blocks = torch.randn(2, 3, 5, 32)
    positions = (anchors[:, :, None] + torch.arange(5)).flatten(1)
    mask = masks.dense(masks.anchor_blocks(anchors, 5, 11, causal=causal), 2, 1, 15, 26)
    packed = head(blocks.flatten(1, 2), features, positions, mask).unflatten(1, (3, 5))
    for row in range(2):
        for index, anchor in enumerate(anchors[row].tolist()):
            single = decode(head, blocks[row, index][None], features[row : row + 1, :anchor], causal)
            torch.testing.assert_close(packed[row, index], single[0], atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_block_never_reacts_to_features_from_its_anchor_on():
    head = make_head()
    features, blocks = torch.randn(1, 11, 64), torch.randn(1, 10, 32)
    anchors = torch.tensor([[4, 6]])
    positions = (anchors[:, :, None] + torch.arange(5)).flatten(1)
    mask = masks.dense(masks.anchor_blocks(anchors, 5, 11, causal=True), 1, 1, 10, 21)
    before = head(blocks, features, positions, mask)
    for position in range(11):
        changed = features.clone()
        changed[0, position] += 1.0
        after = head(blocks, changed, positions, mask)
        for index, anchor in enumerate((4, 6)):
            part = slice(5 * index, 5 * index + 5)
            assert torch.equal(after[:, part], before[:, part]) == (position >= anchor)


@torch.no_grad()
def test_rows_of_different_context_lengths_equal_single_rows():
    head = make_head()
    features, blocks, lengths = torch.randn(3, 9, 64), torch.randn(3, 5, 32), [9, 0, 4]
    cache = head.new_cache(3)
    head.extend_context(cache, features[:, :3], [min(3, length) for length in lengths])
    head.extend_context(cache, features[:, 3:], [max(0, length - 3) for length in lengths])
    assert cache.lengths == lengths
    together = head.draft(blocks, cache, in_block(True))
    for row, length in enumerate(lengths):
        alone = decode(head, blocks[row : row + 1], features[row : row + 1, :length])
        torch.testing.assert_close(together[row], alone[0], atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_context_grows_past_its_first_allocation():
    head = make_head()
    features, block = torch.randn(1, 700, 64), torch.randn(1, 5, 32)
    cache = head.new_cache(1)
    for start in range(0, 700, 90):
        part = features[:, start : start + 90]
        head.extend_context(cache, part, [part.shape[1]])
    torch.testing.assert_close(head.draft(block, cache, in_block(True)), decode(head, block, features), atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_flex_attention_gives_the_same_block():
    head = make_head()
    features, blocks, anchors = torch.randn(1, 11, 64), torch.randn(1, 10, 32), torch.tensor([[4, 6]])
    positions = (anchors[:, :, None] + torch.arange(5)).flatten(1)
    rule = masks.anchor_blocks(anchors, 5, 11, causal=True)
    dense = head(blocks, features, positions, masks.dense(rule, 1, 1, 10, 21))
    sparse = head(blocks, features, positions, masks.block_mask(rule, 1, 1, 10, 21))
    torch.testing.assert_close(sparse, dense, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
@torch.no_grad()
def test_parity_with_the_public_implementation(shared_fixtures, kind):
    """Three rounds of a decode by JetSpec's reference code, the context cache growing between them."""
    expected = load_file(shared_fixtures / "head_parity.safetensors")
    target = Target.from_pretrained(str(shared_fixtures / "target_qwen3"), dtype=torch.float32)
    head = load_head(shared_fixtures / f"head_qwen3_{kind}")
    assert head.config.causal == (kind == "causal")
    features, final = target.features(expected["tokens"], head.config.taps)
    logits = target.lm_head(final)
    torch.testing.assert_close(features, expected["target_features"], atol=PARITY, rtol=0)
    torch.testing.assert_close(logits, expected["target_logits"], atol=PARITY, rtol=0)
    cache, done = head.new_cache(1), 0
    for number in range(3):
        name = f"head_qwen3_{kind}.round{number}"
        length = int(expected[f"{name}.context_len"])
        head.extend_context(cache, features[:, done:length], [length - done])
        done = length
        block = torch.full((1, 6), head.config.mask_token_id)
        block[0, 0] = expected["tokens"][0, length]
        hidden = head.draft(target.embed(block), cache, in_block(kind == "causal", 6))
        torch.testing.assert_close(target.lm_head(hidden[:, 1:]), expected[f"{name}.draft_logits"], atol=PARITY, rtol=0)


def test_frequencies_stay_float32_when_the_head_is_cast():
    head = make_head().to(torch.bfloat16)
    cos, _ = head._rotary(torch.tensor([[1000]]), torch.float32)
    assert torch.equal(cos, make_head()._rotary(torch.tensor([[1000]]), torch.float32)[0])


def test_scaled_rope_is_transformers_own():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=512)
    positions = torch.arange(0, 500, 7)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = RotaryEmbedding(rope, 16, 512)(positions, torch.float32)
    torch.testing.assert_close(ours[0][:, 0], cos)
    torch.testing.assert_close(ours[1][:, 0], sin)
    with pytest.raises(ValueError, match="rope_type='odd'"):
        RotaryEmbedding({"rope_type": "odd", "rope_theta": 1.0}, 16, 512)


def test_default_taps_are_evenly_spaced():
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(36, 1) == (18,)
    assert default_taps(6, 2) == (1, 3)
    with pytest.raises(ValueError, match="do not fit"):
        default_taps(6, 4)
    with pytest.raises(ValueError, match="num_taps"):
        default_taps(6, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 61}, r"mask_token_id=61 must be in \[0, vocab_size=61\)"),
        ({"taps": ()}, "taps must name"),
        ({"taps": (1, 1)}, "each once"),
        ({"taps": (4,)}, r"layer 4 must be in \[0, 4\)"),
        ({"block_size": 1}, "block_size must be at least 2"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads=3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"rope_parameters": {}}, "rope_theta"),
    ],
)
def test_bad_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_features_of_the_wrong_width_are_refused():
    head = make_head()
    with pytest.raises(ValueError, match="features must be 64 wide"):
        head.extend_context(head.new_cache(1), torch.zeros(1, 3, 32), [3])

"""Configuration and checkpoints of EAGLE-3 heads; their numbers are tested in test_eagle_parity and drafters/test_eagle."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetflow import BlockDraftHead, EagleHead, EagleHeadConfig, load_head, save_head
from jetflow.heads.eagle_checkpoint import read_eagle_config
from jetflow.heads.eagle_config import default_eagle_taps

CONFIG = EagleHeadConfig(
    hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=61, draft_vocab_size=20,
    target_hidden_size=32, taps=(1, 3, 4), rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
)  # fmt: skip
DRAFTED = torch.arange(0, 60, 3)
RAW = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 61, "draft_vocab_size": 20,
    "rope_theta": 5000.0, "hidden_act": "silu",
}  # fmt: skip


def make_head(draft_tokens: torch.Tensor | None = DRAFTED, **changes) -> EagleHead:
    torch.manual_seed(0)
    return EagleHead(dataclasses.replace(CONFIG, **changes), draft_tokens).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
        {"own_embedding": True, "attention_bias": True, "taps": None, "target_hidden_size": 24},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    ],
)
def test_round_trip_keeps_every_bit(tmp_path, changes, dtype):
    head = make_head(**changes).to(dtype)
    save_head(head, tmp_path)
    loaded = load_head(tmp_path)
    assert isinstance(loaded, EagleHead)
    assert loaded.config == head.config
    assert torch.equal(loaded.draft_tokens, DRAFTED)
    assert not loaded.training
    for name, value in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert load_head(tmp_path, dtype=torch.float16).fc.weight.dtype == torch.float16


def test_the_file_holds_the_public_names(tmp_path):
    save_head(make_head(fc_norm=True), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"}
    layer |= {f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    layer |= {f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    fused = {"fc.weight", *(f"fc_norm.{index}.weight" for index in range(3))}
    assert set(tensors) == layer | fused | {"norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert torch.equal(torch.arange(20) + tensors["d2t"], DRAFTED)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), DRAFTED)
    raw = json.loads((tmp_path / "config.json").read_text())
    # vLLM counts the embedding, SGLang does not.
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


def test_the_whole_vocabulary_needs_no_map(tmp_path):
    head = make_head(None, draft_vocab_size=61)
    save_head(head, tmp_path)
    assert load_head(tmp_path).draft_tokens is None
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["d2t"], tensors["t2d"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_head(tmp_path).draft_tokens is None
    save_file({**tensors, "d2t": torch.ones(61, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="'d2t' must be zeros"):
        load_head(tmp_path)


@pytest.mark.parametrize("rename", ["model.", "layers.0", "pickle"])
def test_names_of_other_projects_are_read(tmp_path, rename):
    head = make_head()
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    if rename == "pickle":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        tensors = {name.replace("midlayer", "layers.0"): value for name, value in tensors.items()}
        if rename == "model.":
            outside = ("lm_head.weight", "d2t", "t2d")
            tensors = {name if name in outside else f"model.{name}": value for name, value in tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors")
    for name, value in load_head(tmp_path).state_dict().items():
        assert torch.equal(value, head.state_dict()[name])


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        ({}, None),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, (1, 15, 28)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (1, 15, 28)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, None),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28], "use_aux_hidden_state": True},
            },
            (1, 15, 28),
        ),
    ],
)
def test_layer_ids_of_each_dialect_mean_the_same_states(changes, taps):
    config = read_eagle_config({**RAW, **changes}, own_embedding=False)
    assert config.taps == taps
    assert config.taps_in(32) == (1, 15, 28) == default_eagle_taps(32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"norm_before_fc": True}, "norm_before_fc=True"),
        ({"parallel_drafting": True}, "parallel_drafting=True"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"hidden_size": None}, "must hold hidden_size"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "id 0 is the embedding"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 3, 4], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}},
            "contradicts itself",
        ),
        ({"transformer_layer_config": {"model_type": "gpt_oss"}}, "model_type='gpt_oss'"),
        ({"draft_vocab_size": 62}, "draft_vocab_size=62"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read_eagle_config({**RAW, **changes}, own_embedding=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("d2t"), "lacks the tensor 'd2t'"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "lacks the tensor 'midlayer.hidden_norm.weight'"),
        (lambda t: t.update({"mask_hidden": torch.zeros(1)}), "'mask_hidden', which no EAGLE-3 head"),
        (lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.zeros(8)}), "q_norm.weight', which no EAGLE-3 head"),
        (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(1)}), "'layers.1.mlp.up_proj.weight', which no"),
        (lambda t: t.update({"fc.weight": torch.zeros(32, 64)}), r"must have shape \[32, 96\] by config.json"),
        (lambda t: t.update({"t2d": ~t["t2d"]}), "'d2t' and 't2d' contradict each other"),
        (lambda t: t.update({"d2t": t["d2t"][:5]}), r"'d2t' must be integers \[20\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, change, message):
    save_head(make_head(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path)


def test_norms_of_queries_and_keys_have_no_place_in_the_written_format(tmp_path):
    with pytest.raises(ValueError, match="qk_norm=True"):
        save_head(make_head(qk_norm=True), tmp_path)


@pytest.mark.parametrize(
    ("draft_tokens", "message"),
    [
        (None, "draft_vocab_size=20 of 61 tokens needs draft_tokens"),
        (DRAFTED.flip(0), "must rise"),
        (DRAFTED + 4, "must rise within"),
        (DRAFTED[:5], r"must be int64 \[20\]"),
    ],
)
def test_draft_tokens_that_make_no_sense_are_refused(draft_tokens, message):
    with pytest.raises(ValueError, match=message):
        EagleHead(CONFIG, draft_tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"num_heads": 3}, "num_heads=3 must be a multiple"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"taps": (1, 1, 2)}, "each once"),
        ({"rope_parameters": {}}, "must hold rope_theta"),
    ],
)
def test_configs_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_features_of_another_width_are_refused():
    with pytest.raises(ValueError, match="features must be 96 wide"):
        make_head().fuse(torch.zeros(1, 2, 64))


def test_block_heads_are_still_block_heads(tmp_path):
    from test_block_draft_head import make_head as make_block_head

    save_head(make_block_head(), tmp_path)
    assert isinstance(load_head(tmp_path), BlockDraftHead)

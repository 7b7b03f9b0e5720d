import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_block_draft_head import CONFIG, make_head

from jetflow import load_head, save_head
from jetflow.heads.checkpoint import load_config, read_config, write_config

BASE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 61, "rope_theta": 5000.0, "block_size": 5, "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [0, 2]},
}  # fmt: skip


def config(*, drop=(), nested=None, **changes):
    raw = {**BASE, **changes}
    raw["dflash_config"] = {**BASE["dflash_config"], **(nested or {})}
    for key in drop:
        raw.pop(key, None)
        raw["dflash_config"].pop(key, None)
    return raw


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_keeps_every_bit_and_nothing_of_the_target(tmp_path, causal, dtype):
    head = make_head(causal=causal).to(dtype)
    save_head(head, tmp_path)
    loaded = load_head(tmp_path)
    assert loaded.config == head.config
    assert not loaded.training
    for name, value in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * sum(
        p.numel() for p in head.parameters()
    ) * dtype.itemsize + 5000
    assert load_head(tmp_path, dtype=torch.float32).fc.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({}, False),
        ({"nested": {"causal_head": True}}, True),
        ({"nested": {"causal": True}}, True),
        ({"is_causal": True}, True),
        ({"is_causal": False}, False),
        # NeMo's own pair for a causal head.
        ({"is_causal": False, "nested": {"causal": True}}, True),
        ({"nested": {"causal": True, "causal_head": True}, "is_causal": True}, True),
    ],
)
def test_causal_flag_of_every_dialect(changes, causal):
    assert read_config(config(**changes)).causal == causal


def test_keys_may_lie_at_either_level():
    raw = config(drop=("mask_token_id", "block_size"), nested={"block_size": 5})
    raw.update(mask_token_id=60)
    raw["dflash_config"]["block_size"] = 5
    assert read_config(raw).mask_token_id == 60
    assert read_config(raw).block_size == 5


def test_both_rope_spellings_say_the_same():
    scaling = {"rope_type": "linear", "factor": 4.0}
    old = read_config(config(rope_scaling=scaling)).rope_parameters
    legacy = read_config(config(rope_scaling={"type": "linear", "factor": 4.0})).rope_parameters
    new = read_config(config(drop=("rope_theta",), rope_parameters={**scaling, "rope_theta": 5000.0})).rope_parameters
    assert old == legacy == new == {**scaling, "rope_theta": 5000.0}


def test_speculators_count_layers_from_the_embedding():
    raw = config(drop=("target_layer_ids",), speculators_config={}, aux_hidden_state_layer_ids=[1, 3])
    layers = {key: raw.pop(key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    raw["transformer_layer_config"] = {**layers, **{key: raw[key] for key in ("num_key_value_heads", "head_dim", "rope_theta")}}
    assert read_config(raw).taps == (0, 2)


def test_a_file_may_leave_open_how_deep_the_target_is():
    assert read_config(config(drop=("num_target_layers",))).num_target_layers is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": ("mask_token_id",)}, "must hold mask_token_id"),
        ({"drop": ("target_layer_ids",)}, "must hold target_layer_ids"),
        ({"drop": ("block_size",)}, "must hold block_size"),
        ({"drop": ("hidden_size",)}, "must hold hidden_size"),
        ({"drop": ("rope_theta",)}, "rope_parameters or rope_theta"),
        ({"mask_token_id": 59}, "mask_token_id=59, dflash_config.mask_token_id=60"),
        ({"nested": {"block_size": 8}}, "block_size=5, dflash_config.block_size=8"),
        ({"is_causal": True, "nested": {"causal_head": False}}, "is_causal=True, dflash_config.causal_head=False"),
        ({"nested": {"causal": True, "causal_head": False}}, "contradicts itself"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta=5000.0, rope_parameters.rope_theta=1.0"),
        ({"nested": {"projector_type": "domino"}}, "projector_type='domino'"),
        ({"sample_from_anchor": True, "nested": {"sample_from_anchor": False}}, "sample_from_anchor=True, dflash_config"),
        ({"draft_vocab_size": 32}, "draft_vocab_size=32 must equal vocab_size=61"),
        ({"nested": {"mask_token_id": 61}}, r"mask_token_id=61 must be in"),
        ({"nested": {"target_layer_ids": [9]}}, "layer 9"),
        ({"is_causal": True, "jetflow_refinement": True, "sample_from_anchor": True}, "refinement=True needs a plain head"),
        (
            {"is_causal": True, "jetflow_refinement": True, "conv_kernel_size": 2, "conv_group_size": 1},
            "refinement=True needs a plain head",
        ),
        (
            {"markov_rank": 4, "jetflow_correction": {"correction": "gated", "correction_rank": 4}},
            "two corrections: jetflow_correction=gated, and markov",
        ),
    ],
)
def test_broken_configs_are_refused_by_key(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(config(**changes))


def write(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(write_config(CONFIG, torch.float32)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("markov_head.markov_w1.weight", "DSpark"),
        ("layers.0.attention_conv.base_kernel", "DFlash 2"),
        ("candidate_selector.predecessor_codebook", "DFlash 2"),
        ("d2t", "draft vocabulary"),
        ("surprise", "no DFlash head"),
    ],
)
def test_foreign_tensors_are_named(tmp_path, name, message):
    write(tmp_path, {**make_head().state_dict(), name: torch.zeros(2)})
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        load_head(tmp_path)


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    tensors = make_head().state_dict()
    removed = tensors.pop("layers.1.mlp.up_proj.weight")
    write(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"lacks the tensor 'layers.1.mlp.up_proj.weight'"):
        load_head(tmp_path)
    write(tmp_path, {**tensors, "layers.1.mlp.up_proj.weight": removed[:, :-1].contiguous()})
    with pytest.raises(ValueError, match=r"up_proj.weight' must have shape \[48, 32\] by config.json, got \[48, 31\]"):
        load_head(tmp_path)


def test_the_config_of_an_eagle_head_is_none_of_a_block_head():
    folder = Path(__file__).parents[1] / "data" / "eagle" / "safeai"
    with pytest.raises(ValueError, match="is an EAGLE-3 head; this needs a JetFlow or DFlash head"):
        load_config(folder)


def test_sharded_checkpoints_load(tmp_path):
    head = make_head()
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load_head(tmp_path).fc.weight, head.fc.weight)


def test_folders_without_a_head_are_errors(tmp_path):
    with pytest.raises(OSError, match=r"no config\.json"):
        load_head(tmp_path)
    with pytest.raises(OSError, match="neither a folder nor a hub name"):
        load_head(tmp_path / "absent")


def test_all_public_format_folders_load(shared_fixtures):
    folders = sorted(shared_fixtures.glob("head_*_*"))
    folders = [folder for folder in folders if folder.is_dir()]
    assert len(folders) == 6
    for folder in folders:
        head = load_head(folder)
        assert head.config.taps == (1, 3, 4)
        assert head.config.causal == folder.name.endswith("_causal")

"""Warm starts keep every weight that fits."""

import pytest
import torch

pytest.importorskip("accelerate", reason="training needs jetflow[train]")

from small_run import small_head, small_target
from transformers import Qwen3Config, Qwen3ForCausalLM

from jetflow.targets import Target
from jetflow.training.warm_start import warm_start


@pytest.fixture(scope="module")
def target():
    return small_target()


def test_same_head_is_a_float32_copy(target):
    head = small_head(target).bfloat16()
    new = warm_start(head, target)
    assert new.config == head.config
    for name, value in new.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, head.state_dict()[name].float()), name


def test_block_size_rule_and_layers_change(target):
    head = small_head(target, causal=False)
    new = warm_start(head, target, block_size=7, causal=True, num_layers=1, mask_token_id=3)
    assert (new.config.block_size, new.config.causal, new.config.num_layers, new.config.mask_token_id) == (7, True, 1, 3)
    assert torch.equal(new.layers[0].mlp.up_proj.weight, head.layers[0].mlp.up_proj.weight)
    assert len(new.layers) == 1


def test_columns_of_the_fusing_matrix_follow_their_taps(target):
    head = small_head(target)
    new = warm_start(head, target, taps=(2, 1, 0))
    first, second = head.fc.weight.chunk(2, dim=1)
    expected = torch.cat([second, torch.zeros_like(first), first], dim=1)
    assert torch.equal(new.fc.weight, expected)


def test_another_target_of_equal_width(target):
    config = Qwen3Config(**{**target.model.config.to_dict(), "vocab_size": 60, "num_hidden_layers": 6, "layer_types": None})
    other = Target(Qwen3ForCausalLM(config).eval())
    new = warm_start(small_head(target), other)
    assert (new.config.vocab_size, new.config.num_target_layers) == (60, 6)


def test_what_does_not_fit_is_named(target):
    config = Qwen3Config(
        **{**target.model.config.to_dict(), "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    )
    wide = Target(Qwen3ForCausalLM(config).eval())
    with pytest.raises(ValueError, match="head has hidden_size=16, but the target is 24 wide"):
        warm_start(small_head(target), wide)
    with pytest.raises(ValueError, match="num_layers=3 must be at most 2"):
        warm_start(small_head(target), target, num_layers=3)
    with pytest.raises(ValueError, match="layer 9 must be in"):
        warm_start(small_head(target), target, taps=(9,))

import pytest
import torch
from conftest import SMALL, make_model
from transformers import AutoModelForCausalLM, Gemma2Config, MambaConfig, T5Config, T5ForConditionalGeneration
from transformers.utils import is_flash_attn_2_available

from jetflow import Target


def test_folder_without_tokenizer_loads(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    target = Target.from_pretrained(str(tmp_path), dtype=torch.bfloat16)
    assert target.dtype == torch.bfloat16
    assert target.tokenizer is None
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 32, 61)
    assert target.eos_token_ids == (2,)


def test_several_and_missing_stop_tokens():
    model = make_model("llama")
    model.generation_config.eos_token_id = [2, 7]
    assert Target(model).eos_token_ids == (2, 7)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert Target(model).eos_token_ids == ()


def test_models_without_rollback_are_refused():
    recurrent = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2))
    with pytest.raises(ValueError, match="rolled back"):
        Target(recurrent)
    with pytest.raises(ValueError, match="encoder-decoder"):
        Target(T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=16, d_ff=16, num_layers=1, num_heads=2)))
    gemma = AutoModelForCausalLM.from_config(Gemma2Config(**SMALL, head_dim=8))
    with pytest.raises(ValueError, match="softcapping"):
        Target(gemma)


def test_hybrid_models_are_refused():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **SMALL,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    with pytest.raises(ValueError, match="linear_attention"):
        Target(Qwen3NextForCausalLM(config))


@pytest.mark.skipif(is_flash_attn_2_available(), reason="flash-attn is installed")
def test_missing_attention_packages_are_named():
    with pytest.raises(ValueError, match="flash-attn"):
        Target(make_model("llama"), attention="flash_attention_2")
    with pytest.raises(ValueError, match="must be one of"):
        Target(make_model("llama"), attention="fast")


def test_taps_outside_the_target_are_refused():
    with pytest.raises(ValueError, match=r"layer 9 must be in \[0, 4\)"):
        Target(make_model("llama")).features(torch.tensor([[3]]), [1, 9])


def test_models_that_drop_weights_at_random_are_refused_until_they_are_in_eval_mode():
    model = make_model("llama")
    model.config.attention_dropout = 0.1
    Target(model)
    with pytest.raises(ValueError, match=r"model\.eval"):
        Target(model.train())

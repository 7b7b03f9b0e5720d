"""The kernels compile for chips that are not here, without spills."""

import pytest

triton = pytest.importorskip("triton", reason="kernels need triton")

from bench.kernels import CHIPS, MODELS, compile_attention


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("page_size", [0, 16])
def test_attention_compiles_without_spills_and_uses_what_the_chip_has(chip, page_size):
    found = compile_attention(chip, MODELS["Qwen3-8B"], 256, "bf16", page_size)
    assert found.spilled_bytes == 0
    assert found.programs_per_multiprocessor >= 1
    assert found.uses_wgmma == (chip == 90)

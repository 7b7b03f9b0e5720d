"""The kernels compile for chips that are not here, without spills."""

import pytest

triton = pytest.importorskip("triton", reason="kernels need triton")

from bench.kernels import CHIPS, MODELS, compile_attention, compile_small


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("nodes", [16, 256])
def test_attention_compiles_without_spills_and_uses_what_the_chip_has(chip, page_size, model, nodes):
    found = compile_attention(chip, MODELS[model], nodes, "bf16", page_size)
    assert found.spilled_bytes == 0
    assert found.programs_per_multiprocessor >= 1
    assert found.uses_wgmma == (chip == 90)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_other_kernels_compile_without_spills(chip):
    for name, found in compile_small(chip).items():
        assert found.spilled_bytes == 0, name
        assert found.programs_per_multiprocessor >= 1, name

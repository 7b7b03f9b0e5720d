import pytest
import torch

from jetflow.kernels.masked_attention import masked_attention

TOLERANCE = 1e-5


@pytest.mark.parametrize("groups", [1, 2, 3, 7])
@pytest.mark.parametrize("nodes", [1, 5, 17])
@pytest.mark.parametrize("head_dim", [8, 24, 80])
def test_equals_attention_written_out(groups, nodes, head_dim):
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 11, 2, head_dim, generator=generator).transpose(1, 2) for _ in range(2))
    queries = torch.randn(2, 2 * groups, nodes, head_dim, generator=generator)
    mask = torch.rand(2, 1, nodes, 11, generator=generator) < 0.5
    mask[..., 0] = True
    for used, scale in ((mask, None), (None, 0.3)):
        out = masked_attention(queries, keys, values, used, scale=scale)
        for head in range(2 * groups):
            scores = queries[:, head] @ keys[:, head // groups].transpose(1, 2) * (scale or head_dim**-0.5)
            if used is not None:
                scores = scores.masked_fill(~used[:, 0], float("-inf"))
            expected = scores.softmax(-1) @ values[:, head // groups]
            torch.testing.assert_close(out[:, head], expected, atol=TOLERANCE, rtol=0)


def test_masks_that_are_not_bool_and_odd_groups_are_refused():
    q, kv = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="mask must be bool"):
        masked_attention(q, kv, kv, torch.ones(1, 1, 2, 3))
    with pytest.raises(ValueError, match="must be a multiple"):
        masked_attention(q[:, :3], kv, kv, None)

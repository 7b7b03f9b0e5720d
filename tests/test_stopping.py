import pytest

from jetflow.stopping import keep_until_stop


@pytest.mark.parametrize(
    ("tokens", "stops", "allowance", "kept", "reason"),
    [
        ([5, 6, 7], (), 9, [5, 6, 7], None),
        ([5, 2, 7], (2,), 9, [5, 2], "stop"),
        ([2], (2,), 1, [2], "stop"),
        ([5, 6, 7], (), 2, [5, 6], "length"),
        # A stop token within the allowance wins, also on its last token.
        ([5, 2, 7], (2,), 2, [5, 2], "stop"),
        ([5, 6, 2], (2,), 2, [5, 6], "length"),
        ([5, 9, 7], (2, 9), 9, [5, 9], "stop"),
    ],
)
def test_first_stop_in_order_counts(tokens, stops, allowance, kept, reason):
    assert keep_until_stop(tokens, eos_token_ids=stops, allowance=allowance) == (kept, reason)

"""Costs against counts made by hand."""

from jetflow.kernels.cost import Cost, tree_attention_cost


def test_one_row_counted_by_hand():
    # 3 nodes behind 5 tokens, 4 query heads on 2 key-value heads of dimension 8, 2 bytes an element.
    cost = tree_attention_cost([3], [5], num_heads=4, num_kv_heads=2, head_dim=8)
    keys_and_values = 2 * (8 * 2 * 8) * 2
    queries_and_outputs = 2 * (3 * 4 * 8) * 2
    bits, log_sums = 3 * 8, 3 * 4 * 4
    assert cost.num_bytes == keys_and_values + queries_and_outputs + bits + log_sums
    assert cost.num_flops == 3 * 4 * 8 * (2 * 8 + 2 * 8)


def test_rows_add_up_and_splits_cost_their_parts():
    given = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    one, other = (tree_attention_cost([3], [length], **given) for length in (5, 3000))
    both = tree_attention_cost([3, 3], [5, 3000], **given)
    assert both == Cost(one.num_bytes + other.num_bytes, one.num_flops + other.num_flops)
    unsplit = tree_attention_cost([3], [3000], **given, split=4096)
    assert other.num_bytes - unsplit.num_bytes == 2 * 2 * 3 * 4 * (8 + 1) * 4


def test_roofline_is_the_slower_of_both():
    assert Cost(100, 10).seconds(10, 10) == 10
    assert Cost(10, 100).seconds(10, 10) == 10

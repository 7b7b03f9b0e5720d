"""Log-probabilities of emitted tokens.

Dimension key: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class TokenLogProbs(NamedTuple):
    """What the target thought of one emitted token.

    Attributes:
        token: its id.
        raw: log-probability under the softmax of the target's own logits; None where none were asked for.
        processed: log-probability after the logits processors, which may be -inf for no emitted token. The acceptor's own
            temperature, top-k and top-p are not in it.
        top: the likeliest tokens and their processed log-probabilities, best first.
    """

    token: int
    raw: float | None = None
    processed: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def log_probs_of(
    logits: Tensor, processed: Tensor, nodes: Sequence[int], tokens: Sequence[int], num_likeliest: int | None
) -> list[TokenLogProbs]:
    """Looks up each token in the law of the node before it.

    Args:
        logits: the target's, float [N, V].
        processed: the same after the processors; the same object where there are none.
        nodes: for each token the node behind which it stands.
        tokens: token ids.
        num_likeliest: how many likeliest tokens to list; None to look nothing up.
    """
    if num_likeliest is None:
        return [TokenLogProbs(token) for token in tokens]
    raw = logits[list(nodes)].float().log_softmax(-1)
    after = raw if processed is logits else processed[list(nodes)].float().log_softmax(-1)
    values, ids = after.topk(num_likeliest, dim=-1)
    return [
        TokenLogProbs(
            token,
            float(raw[row, token]),
            float(after[row, token]),
            tuple(zip(ids[row].tolist(), values[row].tolist(), strict=True)),
        )
        for row, token in enumerate(tokens)
    ]

"""Stop rules, applied token by token over accepted tokens and bonus, in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

FinishReason = Literal["stop", "length"]


def keep_until_stop(
    tokens: Sequence[int],
    *,
    eos_token_ids: Collection[int],
    allowance: int,
    ends: Callable[[Sequence[int]], bool] | None = None,
) -> tuple[list[int], FinishReason | None]:
    """Cuts one round's tokens at the first stop.

    Args:
        tokens: accepted tokens, then the bonus token.
        eos_token_ids: ids that end the text; the ending token is kept.
        allowance: how many more tokens may be emitted, at least 1.
        ends: says of the tokens kept so far whether the text ends with them, such as by a stop string.

    Returns:
        The kept tokens and why the text ends, or None when it goes on. A stop wins over the length limit.
    """
    kept: list[int] = []
    for token in tokens:
        kept.append(token)
        if token in eos_token_ids or (ends is not None and ends(kept)):
            return kept, "stop"
        if len(kept) == allowance:
            return kept, "length"
    return kept, None

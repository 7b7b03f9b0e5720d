"""Ranking in which ties always go to the lowest index, which `torch.topk` leaves open.

Dimension key: M values in a row, V vocabulary, K kept, C tokens in a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Up to this many values altogether a stable sort is quicker than topk over integer keys.
SORTED_UP_TO = 1024
CHUNK = 32


def best_indices(values: Tensor, count: int) -> Tensor:
    """Returns int64 [..., count], indices of the largest of `values` float32 [..., M], best first.

    Ties go to the lowest index, -0.0 ties with 0.0, and NaN comes first so that it cannot stay unseen.
    """
    if values.numel() <= SORTED_UP_TO:
        return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    # Adding zero turns -0.0 into 0.0 and makes the copy that is changed in place; a NaN may carry either sign.
    bits = (values + 0.0).nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
    # The bits of a float, made to sort like its value, and the index form one integer, so that no two are equal.
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    keys = bits.long().mul_(1 << 32).sub_(torch.arange(values.shape[-1], device=values.device))
    return keys.topk(count, dim=-1).indices


def likeliest_tokens(logits: Tensor, count: int) -> Tensor:
    """Returns int64 [..., count], the tokens of the largest of `logits` float32 [..., V]; ties go to the lowest id.

    Only the `count` chunks of neighbouring tokens with the largest maxima can hold such tokens: each of those chunks
    has one that is larger, or equal and of a lower id, than any token of another chunk.
    """
    vocab = logits.shape[-1]
    num_chunks = -(-vocab // CHUNK)
    if num_chunks <= count:
        return best_indices(logits, count)
    if vocab % CHUNK:
        logits = torch.nn.functional.pad(logits, (0, CHUNK - vocab % CHUNK), value=-torch.inf)
    chunks = logits.unflatten(-1, (num_chunks, CHUNK))
    # In order of their tokens, so that among the values below the lower index is the lower id.
    chosen = best_indices(chunks.amax(dim=-1), count).sort(dim=-1).values
    values = chunks.gather(-2, chosen[..., None].expand(*chosen.shape, CHUNK)).flatten(-2)
    places = best_indices(values, count)
    return chosen.gather(-1, places // CHUNK) * CHUNK + places % CHUNK

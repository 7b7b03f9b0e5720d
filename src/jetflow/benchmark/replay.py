"""tau without running the target again: drafters are walked along texts that the target has written.

For a match rule the text does not depend on the trees, so what a drafter would have been granted follows from the text: the
greedy text, or one that was sampled token by token. Many prompts run side by side and only drafts are computed, which makes a
sweep over budgets cheap; `tests/benchmark/test_replay.py` holds it to real decodes, round by round.

Dimension key: B texts, S positions, N nodes, k tapped layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from jetflow.kernels.walk import accept_walk_reference
from jetflow.protocols import DraftContext
from jetflow.targets import Target


class Text(NamedTuple):
    """A text of the target: the ids of prompt and answer, and how many of them are the prompt."""

    token_ids: list[int]
    num_prompt_tokens: int


# Rows are dropped when so large a share of them has ended: the others' context is then shown to the drafter again.
ENDED_SHARE = 0.3


@torch.no_grad()
def replay(
    drafter: Any,
    target: Target,
    texts: Sequence[Text],
    budget: int,
    *,
    max_new_tokens: int,
    features: Tensor | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Returns the kept tokens of each round of each text, as decoding with a match rule would have them.

    Args:
        drafter: anything that drafts for several rows at once; it is reset.
        target: the model that wrote the texts; it gives the features, in one pass over each text.
        texts: prompts with the answers that the target wrote, their end tokens included.
        budget: most nodes of a tree, root included.
        max_new_tokens: the limit under which the answers were written; trees do not go beyond it.
        features: float [B, S, k * H], what `text_features` gives, for texts that are replayed often.
        seed: of the generator that drafters with drawn children use.

    Raises:
        ValueError: there are no texts, one has no answer, or `budget` is below 2.
    """
    if not texts or any(not 0 < one.num_prompt_tokens < len(one.token_ids) for one in texts):
        raise ValueError("texts must hold at least one text, each with a prompt and an answer")
    if budget < 2:
        raise ValueError(f"budget must be at least 2 (the root and one draft), got {budget}")
    device, token_ids = target.device, _padded(texts, target)
    lengths = torch.tensor([len(one.token_ids) for one in texts], device=device)
    prompts = torch.tensor([one.num_prompt_tokens for one in texts], device=device)
    if features is None:
        features = text_features(drafter, target, texts)
    generator = torch.Generator(device=device).manual_seed(seed)
    kept: list[list[int]] = [[] for _ in texts]
    # The first token of an answer comes from prefill and belongs to no round. A root stands at the last committed token.
    roots, rows, shown = prompts.clone(), torch.arange(len(texts), device=device), None
    while bool((going := roots < lengths - 1).any()):
        if shown is None or going[rows].float().mean() <= 1 - ENDED_SHARE:
            rows = going.nonzero()[:, 0]
            drafter.reset(len(rows))
            shown = torch.zeros_like(rows)
        here, ids = roots[rows], token_ids[rows]
        _observe(drafter, ids, features[rows], shown, here)
        shown = here
        left = int((max_new_tokens - 1 - (here - prompts[rows]))[going[rows]].max())
        histories = [one[: root + 1] for one, root in zip(ids.tolist(), here.tolist(), strict=True)]
        context = DraftContext(token_ids[rows, here], here, histories, max_depth=left - 1, generator=generator)
        tree = drafter.propose(context, budget)
        places = here[:, None] + tree.depths + 1
        chosen = torch.where(places < lengths[rows, None], ids.gather(1, places.clamp(max=ids.shape[1] - 1)), -1)
        accepted = accept_walk_reference(tree.tokens, tree.parents, tree.num_nodes, chosen, int(tree.depths.max()))[1]
        steps = torch.minimum(accepted + 1, lengths[rows] - 1 - here)
        for row, count in zip(rows.tolist(), steps.tolist(), strict=True):
            if count:
                kept[row].append(count)
        roots[rows] = here + steps
    return kept


@torch.no_grad()
def text_features(drafter: Any, target: Target, texts: Sequence[Text]) -> Tensor:
    """Returns the target's states that a drafter reads, float [B, S, k * H], rows padded at their end."""
    return target.features(_padded(texts, target), getattr(drafter, "taps", ()))[0]


def _padded(texts: Sequence[Text], target: Target) -> Tensor:
    return pad_sequence([torch.tensor(one.token_ids) for one in texts], batch_first=True).to(target.device)


def _observe(drafter: Any, token_ids: Tensor, features: Tensor, done: Tensor, roots: Tensor) -> None:
    """Shows the drafter the tokens [done, roots) of each text with their features."""
    counts = roots - done
    places = done[:, None] + torch.arange(int(counts.max()), device=done.device)
    places = places.clamp(max=token_ids.shape[1] - 1)
    shown = token_ids.gather(1, places)
    drafter.observe(shown, features.gather(1, places[:, :, None].expand(-1, -1, features.shape[2])), counts)

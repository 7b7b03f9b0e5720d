"""Which rule and tree to take, by temperature and by how sharp the target's laws are."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from jetflow.acceptors.match import GreedyAcceptor, SamplingAcceptor
from jetflow.acceptors.target_law import TargetLaw
from jetflow.acceptors.traversal import TraversalVerification
from jetflow.protocols import Acceptor, TreeExpander
from jetflow.scoring.acceptance_table import AcceptanceTable
from jetflow.trees.expanders import BestFirst
from jetflow.trees.sampling import ChildSampling

# Mean largest probability of the target's law above which fixed trees keep as many tokens as drawn ones or more
# (`python -m bench.acceptance_rules`, results/acceptance_rules.json).
SHARP = 0.65


class Choice(NamedTuple):
    """Parts that go together: `ParallelDrafter(head, target, expander, sampling=sampling)` and the decoder's acceptor."""

    acceptor: Acceptor
    expander: TreeExpander
    sampling: ChildSampling | None


def auto(temperature: float, *, sharpness: float | None = None, top_k: int | None = None, top_p: float | None = None) -> Choice:
    """Picks the rule and tree that keep most tokens.

    At temperature 0, and where the target's laws are sharp, that is the best-first tree with the match rule; where they are
    flat, a drawn tree with traversal verification.

    Args:
        temperature: of the target.
        sharpness: mean largest probability of its law at this temperature, see `sharpness_of`; needed above 0.
        top_k: keep this many most likely tokens.
        top_p: keep the smallest set of tokens with at least this probability.

    Raises:
        ValueError: `sharpness` is absent where it is needed, or not in (0, 1], or as for `SamplingAcceptor`.
    """
    if temperature == 0:
        return Choice(GreedyAcceptor(), BestFirst(), None)
    if sharpness is None or not 0 < sharpness <= 1:
        raise ValueError(f"sharpness must be in (0, 1] at temperature {temperature}, got {sharpness}; see sharpness_of")
    if sharpness > SHARP:
        return Choice(SamplingAcceptor(temperature, top_k=top_k, top_p=top_p), BestFirst(), None)
    rule = TraversalVerification(temperature, top_k=top_k, top_p=top_p)
    return Choice(rule, BestFirst(AcceptanceTable()), ChildSampling(temperature))


def sharpness_of(logits: Tensor, temperature: float, *, top_k: int | None = None, top_p: float | None = None) -> float:
    """Returns the mean largest probability of the target's law over positions.

    Args:
        logits: of the target, float [..., V], such as `target.forward(token_ids)[0]` on texts that it wrote.
        temperature: above 0.
        top_k: keep this many most likely tokens.
        top_p: keep the smallest set of tokens with at least this probability.

    Raises:
        ValueError: as for `TargetLaw`.
    """
    law = TargetLaw(temperature, top_k=top_k, top_p=top_p)
    return float(law(logits.flatten(0, -2)).amax(-1).mean())

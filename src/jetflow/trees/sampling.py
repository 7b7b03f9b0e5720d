"""Trees of drawn children, for acceptance rules that make use of the draft's law.

The contract (selection bias): whether a slot exists may depend on its ancestors, on laws and on earlier siblings, never on
the token that was drawn into it or on what hangs below it. So the children of a node come in the order of their draws, and
only expanders that are blind to tokens may choose among slots.

Dimension key: B batch, N nodes, F frontier slots, K candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jetflow.protocols import CandidateSource, Frontier, TreeExpander
from jetflow.trees.growth import NEVER, ask
from jetflow.trees.token_tree import DraftLaws, TokenTree


@dataclass(frozen=True)
class ChildSampling:
    """Draws the children of every node without replacement from the source's law (Gumbel top-k).

    The law is that of the candidates on offer, raised to 1 / temperature and normalised: tokens that the source does not
    offer are not drawn.

    Attributes:
        temperature: of the draft's law, above 0.
        num_fixed: how many of the likeliest children are taken without a draw; the others are drawn from the rest of the
            law.

    Raises:
        ValueError: a number is out of its range.
    """

    temperature: float = 1.0
    num_fixed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {self.temperature}")
        if self.num_fixed < 0:
            raise ValueError(f"num_fixed must be at least 0, got {self.num_fixed}")

    def build(
        self,
        expander: TreeExpander,
        root_tokens: Tensor,
        source: CandidateSource,
        budget: int,
        generator: torch.Generator | None = None,
    ) -> TokenTree:
        """Builds trees with `expander` and records the law behind every node.

        Args:
            expander: chooses the slots; must be blind to tokens.
            root_tokens: int64 [B].
            source: the draft's laws.
            budget: most nodes, root included.
            generator: source of randomness.

        Raises:
            ValueError: the expander looks at tokens, which would bias the text.
        """
        if not getattr(expander, "token_blind", False):
            raise ValueError(
                f"expander {type(expander).__name__} chooses slots by the tokens in them, which drawn children forbid; take "
                "FixedShape, Chain, or BestFirst with a token-blind score such as AcceptanceTable"
            )
        drawn = SampledSource(source, self, generator)
        tree = expander(root_tokens, drawn, budget)
        return replace(tree, laws=drawn.laws_of(tree))


class SampledSource:
    """A source whose children come in the order in which they were drawn.

    Args:
        source: the draft's laws.
        settings: how to draw.
        generator: source of randomness.
    """

    def __init__(self, source: CandidateSource, settings: ChildSampling, generator: torch.Generator | None = None):
        self.max_depth = source.max_depth
        self._source, self._settings, self._generator = source, settings, generator
        self._asked: list[tuple[Frontier, Tensor, Tensor]] = []

    def __call__(self, level: int, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Returns tokens and log-probabilities [B, F, K] in the order of the draws; each parent has draws of its own."""
        tokens, log_probs = ask(self._source, level, frontier)
        slots = frontier.tokens.shape[1]
        tokens, log_probs = (one.expand(-1, slots, -1) for one in (tokens, log_probs))
        # A parent that is offered nothing has no law, which softmax would make NaN.
        log_law = (log_probs / self._settings.temperature).log_softmax(dim=-1).masked_fill(log_probs == NEVER, NEVER)
        places = torch.arange(tokens.shape[2], device=tokens.device)
        fixed = places < self._settings.num_fixed
        drawable = log_law.masked_fill(fixed, NEVER)
        # Fixed children stand in front, best first.
        keys = torch.where(fixed, math.inf, drawable + self._gumbel(drawable))
        order = keys.sort(dim=-1, descending=True, stable=True).indices
        tokens, log_law = tokens.gather(-1, order), log_law.gather(-1, order)
        probs = drawable.softmax(dim=-1).nan_to_num().gather(-1, order)
        self._asked.append((frontier, tokens, probs))
        return tokens, log_law

    def laws_of(self, tree: TokenTree) -> DraftLaws:
        """Finds the law that was recorded for each node of a tree built from this source.

        Raises:
            ValueError: a drawn child stands in the tree without the one that was drawn before it.
        """
        width = max((tokens.shape[2] for _, tokens, _ in self._asked), default=1)
        all_tokens = tree.tokens.new_zeros(*tree.tokens.shape, width)
        all_probs = tree.scores.new_zeros(*tree.tokens.shape, width)
        slots = torch.zeros_like(tree.tokens)
        above = tree.parents.clamp(min=0)
        for depth, (frontier, tokens, probs) in enumerate(self._asked):
            here = (tree.depths == depth) & tree.node_mask
            # A node is known by its token and its parent's slot: siblings differ in their tokens.
            same = frontier.tokens[:, None] == tree.tokens[:, :, None]
            if depth:
                same &= frontier.parents[:, None] == slots.gather(1, above)[:, :, None]
            found = (same & (frontier.cum_log_probs[:, None] != NEVER)).int().argmax(dim=-1)
            slots = torch.where(here, found, slots)
            rows = found[:, :, None].expand(-1, -1, tokens.shape[2])
            size = tokens.shape[2]
            all_tokens[..., :size] = torch.where(here[..., None], tokens.gather(1, rows), all_tokens[..., :size])
            all_probs[..., :size] = torch.where(here[..., None], probs.gather(1, rows), all_probs[..., :size])
        laws = DraftLaws(all_tokens, all_probs)
        _check_prefixes(tree, laws)
        return laws

    def _gumbel(self, like: Tensor) -> Tensor:
        device = self._generator.device if self._generator is not None else like.device
        uniform = torch.rand(like.shape, generator=self._generator, device=device, dtype=torch.float64)
        # Kept off 0 and 1, whose logarithms are infinite.
        return -torch.log(-torch.log(uniform.clamp(1e-300, 1 - 1e-16))).to(like.device, like.dtype)


def _check_prefixes(tree: TokenTree, laws: DraftLaws) -> None:
    """The children of a node must be its first draws: leaving one out by its token would bias the text."""
    if tree.tokens.device.type != "cpu":
        # Looking would stall a GPU; expanders that are blind to tokens keep siblings in order.
        return
    above = tree.parents.clamp(min=0)
    offered = laws.tokens.gather(1, above[:, :, None].expand_as(laws.tokens))
    rank = (offered == tree.tokens[:, :, None]).int().argmax(dim=-1)
    counted = tree.node_mask & (tree.parents >= 0)
    counts = torch.zeros_like(above).scatter_add_(1, above, counted.long())
    deepest = torch.zeros_like(above).scatter_reduce_(1, above, torch.where(counted, rank + 1, 0), "amax")
    wrong = (counts != deepest).nonzero()
    if len(wrong):
        row, node = wrong[0].tolist()
        draws = sorted(rank[row][counted[row] & (tree.parents[row] == node)].tolist())
        raise ValueError(f"the children of node {node} must be its first draws, got draws {draws}")

"""TokenTree: a batch of drafted token trees. Parents come first, padding comes last.

Dimension key: B batch, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

PADDING_PARENT = -1


class DraftLaws(NamedTuple):
    """What the children of each node were drawn from, without replacement.

    Attributes:
        tokens: int64 [B, N, K], for each node the tokens that could be drawn, in the order of the draws.
        probs: float32 [B, N, K], their probabilities before the first draw, which sum to 1; 0 for tokens that could not be
            drawn, and everywhere for a node whose children were not drawn.
    """

    tokens: Tensor
    probs: Tensor


@dataclass(frozen=True)
class TokenTree:
    """A batch of token trees.

    The plain constructor trusts its tensors and never reads them back, so that it can be used on a GPU without a
    synchronisation; `TokenTree.from_parents` is the checked way in.

    Attributes:
        tokens: int64 [B, N]; node 0 is the root, the last committed token. 0 for padding.
        parents: int64 [B, N]; index of the parent, always smaller than the node's own. -1 for the root and for padding.
        depths: int64 [B, N]; 0 for the root and for padding.
        scores: float32 [B, N]; cumulative draft log-probability, 0 for the root, -inf for padding.
        num_nodes: int64 [B]; nodes in use, root included.
        laws: what children were drawn from, where they were; None for trees that are fixed without a draw.

    Example:
        >>> tree = TokenTree.from_parents([[5, 7, 8, 9]], [[-1, 0, 0, 1]])
        >>> tree.depths.tolist()
        [[0, 1, 1, 2]]
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    num_nodes: Tensor
    laws: DraftLaws | None = None

    @classmethod
    def root_only(cls, root_tokens: Tensor) -> TokenTree:
        """Returns trees of the root alone from `root_tokens`, int64 [B]."""
        tokens = root_tokens[:, None]
        zeros = torch.zeros_like(tokens)
        return cls(tokens, zeros - 1, zeros, zeros.float(), torch.ones_like(root_tokens))

    @classmethod
    def from_parents(
        cls,
        tokens: Tensor | Sequence[Sequence[int]],
        parents: Tensor | Sequence[Sequence[int]],
        scores: Tensor | Sequence[Sequence[float]] | None = None,
        num_nodes: Tensor | Sequence[int] | None = None,
    ) -> TokenTree:
        """Builds trees from tokens and parents and checks every rule that the rest of jetflow relies on.

        Args:
            tokens: integers [B, N].
            parents: integers [B, N], -1 for the root.
            scores: floats [B, N], cumulative log-probabilities; zeros when absent.
            num_nodes: integers [B]; N for every row when absent.

        Raises:
            ValueError: shapes differ, a row has no root, a parent does not come before its child, a parent has the same
                token twice below it, or a score is NaN or above its parent's.
        """
        tokens = torch.as_tensor(tokens)
        parents = torch.as_tensor(parents, device=tokens.device)
        if tokens.dim() != 2 or tokens.shape != parents.shape or tokens.shape[1] == 0:
            raise ValueError(
                "tokens and parents must share one shape [B, N] with N >= 1, got "
                f"{list(tokens.shape)} and {list(parents.shape)}"
            )
        for name, value in (("tokens", tokens), ("parents", parents)):
            if value.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"{name} must be int64 or int32, got {value.dtype}")
        batch, width = tokens.shape
        counts = torch.as_tensor(num_nodes if num_nodes is not None else [width] * batch)
        values = torch.zeros(batch, width) if scores is None else torch.as_tensor(scores, dtype=torch.float32)
        if values.shape != tokens.shape:
            raise ValueError(f"scores must have the shape of tokens {list(tokens.shape)}, got {list(values.shape)}")
        rows = zip(tokens.tolist(), parents.tolist(), values.tolist(), counts.tolist(), strict=True)
        depths = torch.tensor([_checked_depths(*row, row_index=b) for b, row in enumerate(rows)])
        device = tokens.device
        counts, depths, values = counts.to(device).long(), depths.to(device), values.to(device)
        used = torch.arange(width, device=device) < counts[:, None]
        return cls(
            tokens=torch.where(used, tokens.long(), 0),
            parents=torch.where(used, parents.long(), PADDING_PARENT),
            depths=torch.where(used, depths, 0),
            scores=torch.where(used, values, float("-inf")),
            num_nodes=counts,
        )

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return self.tokens.shape[0]

    @property
    def max_nodes(self) -> int:
        """Width N of the tensors, padding included."""
        return self.tokens.shape[1]

    @property
    def node_mask(self) -> Tensor:
        """Bool [B, N], True where a node is in use."""
        return torch.arange(self.max_nodes, device=self.tokens.device) < self.num_nodes[:, None]

    def ancestor_mask(self) -> Tensor:
        """Returns bool [B, N, N]: entry (i, j) says that j is i or an ancestor of i. Padding sees itself only."""
        return ancestor_mask(self.parents)

    def first(self, num_nodes: int) -> TokenTree:
        """Returns the trees cut to their first `num_nodes` nodes, which is again a tree as parents come first.

        Raises:
            ValueError: `num_nodes` is below 1.
        """
        if num_nodes < 1:
            raise ValueError(f"num_nodes must be at least 1 to keep the root, got {num_nodes}")
        return TokenTree(
            self.tokens[:, :num_nodes],
            self.parents[:, :num_nodes],
            self.depths[:, :num_nodes],
            self.scores[:, :num_nodes],
            self.num_nodes.clamp(max=num_nodes),
            None if self.laws is None else DraftLaws(self.laws.tokens[:, :num_nodes], self.laws.probs[:, :num_nodes]),
        )

    def row(self, row: int) -> TokenTree:
        """Returns the tree of one row, a batch of one."""
        one = slice(row, row + 1)
        laws = None if self.laws is None else DraftLaws(self.laws.tokens[one], self.laws.probs[one])
        return TokenTree(self.tokens[one], self.parents[one], self.depths[one], self.scores[one], self.num_nodes[one], laws)

    def padded(self, num_nodes: int) -> TokenTree:
        """Returns the trees with padding up to `num_nodes` nodes, or as they are where they are not narrower."""
        spare = num_nodes - self.max_nodes
        if spare <= 0:
            return self
        columns = zip((self.tokens, self.parents, self.depths, self.scores), (0, PADDING_PARENT, 0, float("-inf")), strict=True)
        tokens, parents, depths, scores = (pad(column, (0, spare), value=filling) for column, filling in columns)
        laws = None if self.laws is None else DraftLaws(*(pad(value, (0, 0, 0, spare)) for value in self.laws))
        return TokenTree(tokens, parents, depths, scores, self.num_nodes, laws)

    @classmethod
    def stack(cls, trees: Sequence[TokenTree]) -> TokenTree:
        """Returns the rows of several trees as one batch; all or none of them have laws, over equally many tokens."""
        width = max(tree.max_nodes for tree in trees)
        rows = [tree.padded(width) for tree in trees]
        laws = [tree.laws for tree in rows if tree.laws is not None]
        return cls(
            torch.cat([tree.tokens for tree in rows]),
            torch.cat([tree.parents for tree in rows]),
            torch.cat([tree.depths for tree in rows]),
            torch.cat([tree.scores for tree in rows]),
            torch.cat([tree.num_nodes for tree in rows]),
            DraftLaws(*map(torch.cat, zip(*laws, strict=True))) if laws else None,
        )

    def to(self, device: torch.device | str) -> TokenTree:
        """Returns the trees on `device`."""
        laws = None if self.laws is None else DraftLaws(*(value.to(device) for value in self.laws))
        tensors = {name: value.to(device) for name, value in vars(self).items() if name != "laws"}
        return replace(self, **tensors, laws=laws)

    def expected_acceptance_length(self) -> Tensor:
        """Returns float32 [B]: tau if the target followed the draft's own law, the sum of the nodes' probabilities.

        DDTree (arXiv 2604.12989), Proposition 1; the root stands for the bonus token.
        """
        return self.scores.exp().sum(dim=1)

    def to_networkx(self, row: int = 0) -> Any:
        """Returns one row as a `networkx.DiGraph` with node attributes `token`, `depth` and `score`."""
        import networkx

        graph = networkx.DiGraph()
        for node in range(int(self.num_nodes[row])):
            graph.add_node(
                node,
                token=int(self.tokens[row, node]),
                depth=int(self.depths[row, node]),
                score=float(self.scores[row, node]),
            )
            if node:
                graph.add_edge(int(self.parents[row, node]), node)
        return graph

    @classmethod
    def from_networkx(cls, graph: Any) -> TokenTree:
        """Builds a tree (B = 1) from a `networkx.DiGraph` whose nodes carry `token` and, if known, `score`.

        Raises:
            ValueError: the graph is not one tree with edges from parent to child, or a node lacks its token.
        """
        import networkx

        if graph.number_of_nodes() == 0 or not networkx.is_arborescence(graph):
            raise ValueError("graph must be one tree whose edges point from parent to child")
        lacking = [node for node, data in graph.nodes(data=True) if "token" not in data]
        if lacking:
            raise ValueError(f"every node needs a 'token' attribute, node {lacking[0]!r} has none")
        order = list(networkx.topological_sort(graph))
        index = {node: position for position, node in enumerate(order)}
        parents = [next((index[p] for p in graph.predecessors(node)), -1) for node in order]
        tokens = [graph.nodes[node]["token"] for node in order]
        scores = [graph.nodes[node].get("score", 0.0) for node in order]
        return cls.from_parents([tokens], [parents], [scores])


def ancestor_mask(parents: Tensor) -> Tensor:
    """Returns bool [B, N, N] from `parents` int64 [B, N], -1 for roots and padding; see `TokenTree.ancestor_mask`.

    Pointer doubling: after step t every node knows its 2^t nearest ancestors, so log2(N) steps are enough for any shape
    and nothing is read back from the device.
    """
    batch, nodes = parents.shape
    # One extra node stands for "above the root": it points to itself and is cut off at the end.
    jump = torch.where(parents >= 0, parents, nodes)
    jump = torch.cat([jump, jump.new_full((batch, 1), nodes)], dim=1)
    padded = torch.arange(nodes + 1, device=parents.device)
    mask = (padded[:, None] == padded[None, :]).expand(batch, -1, -1).clone()
    for _ in range(max(1, (nodes - 1).bit_length())):
        mask = mask | mask.gather(1, jump[:, :, None].expand(-1, -1, nodes + 1))
        jump = jump.gather(1, jump)
    return mask[:, :nodes, :nodes]


def _checked_depths(tokens: list[int], parents: list[int], scores: list[float], num_nodes: int, *, row_index: int) -> list[int]:
    """Returns the depth of every node of one row, or raises the ValueError that `from_parents` documents."""
    if not 1 <= num_nodes <= len(tokens):
        raise ValueError(f"num_nodes[{row_index}]={num_nodes} must be in [1, {len(tokens)}]")
    if parents[0] != -1:
        raise ValueError(f"parents[{row_index}, 0]={parents[0]} must be -1: node 0 is the root")
    depths = [0] * len(tokens)
    seen: set[tuple[int, int]] = set()
    for node in range(1, num_nodes):
        parent = parents[node]
        if not 0 <= parent < node:
            raise ValueError(f"parents[{row_index}, {node}]={parent} must be in [0, {node})")
        if (parent, tokens[node]) in seen:
            raise ValueError(f"token {tokens[node]} stands twice below node {parent} of row {row_index}")
        # Also catches NaN, which compares False.
        if not scores[node] <= scores[parent]:
            raise ValueError(f"scores[{row_index}, {node}]={scores[node]} must not be above its parent's {scores[parent]}")
        seen.add((parent, tokens[node]))
        depths[node] = depths[parent] + 1
    return depths

"""Draws token trees for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from jetflow.protocols import Acceptance
from jetflow.trees.token_tree import TokenTree

if TYPE_CHECKING:
    from rich.tree import Tree

ACCEPTED, PLAIN = "bold green", "dim"


def draw_tree(
    tree: TokenTree,
    row: int = 0,
    *,
    decode: Callable[[int], str] | None = None,
    acceptance: Acceptance | None = None,
) -> Tree:
    """Draws one row as a `rich.tree.Tree`, to be printed by a rich console.

    Each drafted node shows its token, its probability after its parent and that of its whole path under the draft.
    Accepted nodes carry a `*`, so that they can be told apart without colour; the bonus token hangs below the last of
    them with a `+`.

    Args:
        tree: trees [B, N].
        row: which one.
        decode: turns a token id into text; ids are shown when absent.
        acceptance: the path that the target took.

    Raises:
        ValueError: `row` is not in the batch.

    Example:
        >>> from rich.console import Console
        >>> tree = TokenTree.from_parents([[5, 7, 8]], [[-1, 0, 1]], [[0.0, -0.5, -1.0]])
        >>> Console(width=60).print(draw_tree(tree))  # doctest: +SKIP
    """
    from rich.text import Text
    from rich.tree import Tree

    if not 0 <= row < tree.batch_size:
        raise ValueError(f"row={row} must be in [0, {tree.batch_size})")
    show = decode or str
    path: list[int] = []
    if acceptance is not None:
        path = acceptance.path[row, : int(acceptance.num_accepted[row]) + 1].tolist()

    tokens, parents, scores = tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.scores[row].tolist()

    def label(node: int) -> Text:
        accepted = node in path
        text = Text(f"{'*' if accepted else ' '} {show(tokens[node])!r}")
        if node:
            after_parent = math.exp(scores[node] - scores[parents[node]])
            text.append(f"  {after_parent:.3f}  path {math.exp(scores[node]):.3f}")
        text.stylize(ACCEPTED if accepted else PLAIN)
        return text

    branches = [Tree(label(0))]
    for node in range(1, int(tree.num_nodes[row])):
        branches.append(branches[parents[node]].add(label(node)))
    if acceptance is not None:
        branches[path[-1]].add(Text(f"+ {show(int(acceptance.bonus[row]))!r}  the target's own", style="bold cyan"))
    return branches[0]

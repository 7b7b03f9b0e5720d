"""The contracts between parts. A user's own part is any object with the same call.

Dimension key: B batch, N tree nodes, F frontier slots, K candidates per parent, P path length, T tokens, V vocabulary,
H hidden size, L length of the token history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jetflow.trees.token_tree import TokenTree


class MaskMod(Protocol):
    """FlexAttention's mask rule: index tensors in, bool out; True means "may attend"."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor: ...


class Frontier(NamedTuple):
    """Parents whose children a candidate source is asked for.

    Attributes:
        tokens: int64 [B, F], the parents' tokens.
        parents: int64 [B, F], each parent's own parent as an index into the frontier of the call before
            (zeros on the first call, where the frontier is the root).
        cum_log_probs: float32 [B, F], cumulative draft log-probability; -inf marks a slot that holds no node.
    """

    tokens: Tensor
    parents: Tensor
    cum_log_probs: Tensor


class CandidateSource(Protocol):
    """Says which children the nodes of a frontier may get.

    `max_depth` is the deepest level that it can fill. Calls come in order, `level` = 1, 2, ..., where `level` is the
    depth of the children asked for. Returns `(tokens, log_probs)`, int64 and float32 [B, F, K], or [B, 1, K] when the
    answer is the same for every parent; `log_probs` are normalised and conditional on the parent's path, best first;
    -inf marks a candidate that does not exist.
    """

    max_depth: int

    def __call__(self, level: int, frontier: Frontier) -> tuple[Tensor, Tensor]: ...


class Candidates(NamedTuple):
    """Children on offer, as a scoring function sees them.

    Attributes:
        log_probs: float32 [B, F, K], log-probability given the parent's path.
        cum_log_probs: float32 [B, F, K], log-probability of the whole path from the root.
        depth: depth of these children (the root has 0).
        ranks: int64 [K], 0 for the parent's likeliest child.
        parent_priorities: float32 [B, F, 1], the priority that the parent got; 0 for the root.
    """

    log_probs: Tensor
    cum_log_probs: Tensor
    depth: int
    ranks: Tensor
    parent_priorities: Tensor


class ScoringFunction(Protocol):
    """Gives each candidate a priority, float32 [B, F, K], higher is better.

    Expanders lower a child's priority to its parent's where it is above it, so that the best nodes form a tree.
    """

    def __call__(self, candidates: Candidates) -> Tensor: ...


class TreeExpander(Protocol):
    """Builds one tree of at most `budget` nodes (root included) per row from `root_tokens`, int64 [B].

    An expander that always wants the same levels may say so by an attribute `depth`, the deepest of them. One whose shapes
    never depend on the tokens in them says so by `token_blind = True`; only such ones may build trees of drawn children.
    """

    def __call__(self, root_tokens: Tensor, source: CandidateSource, budget: int) -> TokenTree: ...


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may know when it proposes.

    Attributes:
        root_tokens: int64 [B], the last committed token of each row.
        prefix_lens: int64 [B], committed tokens before the root, which is the root's position.
        token_ids: for each row all committed token ids, prompt first, root last.
        max_depth: deepest useful level; more could not be kept within the caller's length limit.
        mark: call it with the name of a phase ("build") where that phase of the proposal begins, for the time table.
        generator: the only source of randomness of a drafter that draws; None lets torch's global one do.
    """

    root_tokens: Tensor
    prefix_lens: Tensor
    token_ids: Sequence[Sequence[int]]
    max_depth: int
    mark: Callable[[str], None] = lambda phase: None
    generator: torch.Generator | None = None


class Drafter(Protocol):
    """Proposes a tree for each row.

    Only `propose` is required. Where present, `taps` (target layers whose outputs the drafter reads) is read once,
    `reset(batch_size)` is called before each generation,
    `observe(token_ids [B, T], features [B, T, H], num_tokens [B])` after each commit with the tokens that are now
    behind the root and their features (float, the tapped layers concatenated; rows are padded at their end to T), and
    `keep_rows(rows)` with the rows that go on when other texts of the batch have ended. A drafter with `reset` but without
    `keep_rows` takes one text at a time.
    """

    def propose(self, context: DraftContext, budget: int) -> TokenTree: ...


class TargetOutput(NamedTuple):
    """What a target pass yields: `logits` [B, N, V] and `features` [B, N, H] (H = 0 columns when nothing is tapped)."""

    logits: Tensor
    features: Tensor


class Acceptance(NamedTuple):
    """Which path of each tree the target follows.

    Attributes:
        path: int64 [B, P], node indices from the root (0) down; entries after `num_accepted + 1` repeat the last node.
        num_accepted: int64 [B], accepted drafted nodes, root and bonus not counted.
        bonus: int64 [B], the target's own next token after the last accepted node; -1 where its logits were not usable
            (NaN, or -inf for every token).
    """

    path: Tensor
    num_accepted: Tensor
    bonus: Tensor


class Acceptor(Protocol):
    """Walks each tree along the target's choice. `generator` is the only source of randomness."""

    def __call__(self, tree: TokenTree, logits: Tensor, *, generator: torch.Generator | None = None) -> Acceptance: ...


class Verifier(Protocol):
    """Runs the target over prompts and trees and keeps its cache."""

    def prefill(self, token_ids: Tensor, lengths: Tensor) -> TargetOutput: ...

    def verify(self, tree: TokenTree) -> TargetOutput: ...

    def commit(self, acceptance: Acceptance) -> None: ...


class BudgetPolicy(Protocol):
    """Says how many nodes of a drafted tree to verify.

    `scores` float32 [B, N] are cumulative draft log-probabilities, best nodes first (-inf for padding); `num_accepted`
    holds the accepted counts of the rounds before, one for each row that ran. All rows are cut to the size that is returned.
    `max_nodes` is the budget that drafters are asked for.
    """

    max_nodes: int

    def __call__(self, scores: Tensor, num_accepted: Sequence[int]) -> int: ...


class Loss(Protocol):
    """Compares draft and target laws, one float32 value per position.

    `draft_logits` and `target_logits` are [..., V]; `labels` int64 [...] are the true next tokens, -100 where ignored. A loss
    may have an attribute `uses_target`; where it is False, training passes None for `target_logits`. One with
    `uses_path = True` is given whole blocks: the last dimension of `labels` [..., D] then holds the depths of a block in
    order, ignored ones last.
    """

    def __call__(self, draft_logits: Tensor, target_logits: Any, labels: Tensor) -> Tensor: ...

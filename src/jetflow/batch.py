"""RunningBatch: several prompts that share every pass, from their prefill to the last token of each.

Dimension key: B rows that still run, N nodes, P path length, T tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from jetflow.logprobs import log_probs_of
from jetflow.protocols import Acceptance, BudgetPolicy, DraftContext, Drafter
from jetflow.request import Request
from jetflow.results import Round, RoundStats
from jetflow.targets import Target
from jetflow.timing import PhaseTimer
from jetflow.trees.token_tree import TokenTree
from jetflow.verifiers import TreeVerifier


class RunningBatch:
    """Requests on their way through a decoder, one row each; rows whose text has ended leave.

    Args:
        requests: at least one.
        target: the model.
        drafter: proposes the trees.
        verifier: checks them.
        max_nodes: most nodes of a tree.
        policy: cuts the trees, if any; all rows of a round to one size.
        generator: the only source of randomness.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        target: Target,
        drafter: Drafter,
        verifier: TreeVerifier,
        max_nodes: int,
        policy: BudgetPolicy | None,
        generator: torch.Generator,
    ):
        self._running = list(requests)
        self._target, self._drafter, self._verifier = target, drafter, verifier
        self._max_nodes, self._policy, self._generator = max_nodes, policy, generator
        self._timer = PhaseTimer(target.device)
        self._num_accepted: list[int] = []
        self._begin = time.perf_counter()

    @torch.inference_mode()
    def run(self, emit: Callable[[list[int]], None], on_round: Callable[[Round], None] | None) -> None:
        """Runs every request to its end.

        Args:
            emit: gets the first row's new tokens, its prompt before.
            on_round: called for every row of each round.
        """
        emit(self._running[0].token_ids)
        self._prefill(emit)
        while self._drop_finished():
            self._round(emit, on_round)

    def _prefill(self, emit: Callable[[list[int]], None]) -> None:
        """Commits the prompts; their first new tokens come through the acceptor and trees of the root alone."""
        rows = self._running
        ids = pad_sequence([torch.tensor(row.token_ids) for row in rows], batch_first=True).to(self._target.device)
        lengths = torch.tensor([len(row.token_ids) for row in rows], device=self._target.device)
        logits, features = self._verifier.prefill(ids, lengths)
        if hasattr(self._drafter, "reset"):
            self._drafter.reset(len(rows))
        if hasattr(self._drafter, "observe"):
            self._drafter.observe(ids, features, lengths)
        tree = TokenTree.root_only(ids.gather(1, lengths[:, None] - 1)[:, 0])
        acceptance, processed = self._accept(tree, logits)
        bonus = self._checked_bonus(acceptance)
        for place, row in enumerate(rows):
            found = log_probs_of(logits[place], processed[place], [0], [bonus[place]], row.num_likeliest)
            kept = row.keep([bonus[place]], found)
            if place == 0:
                emit(kept)
            row.prefill_seconds = time.perf_counter() - self._begin

    def _drop_finished(self) -> bool:
        """Lets rows go whose text has ended; False where none is left."""
        now = time.perf_counter() - self._begin
        for row in self._running:
            row.seconds = now
        kept = [place for place, row in enumerate(self._running) if row.finish_reason is None]
        if 0 < len(kept) < len(self._running):
            self._verifier.keep_rows(kept)
            if hasattr(self._drafter, "keep_rows"):
                self._drafter.keep_rows(kept)
        self._running = [self._running[place] for place in kept]
        return bool(kept)

    def _round(self, emit: Callable[[list[int]], None], on_round: Callable[[Round], None] | None) -> None:
        self._timer.mark("draft")
        tree = self._propose()
        self._timer.mark("verify")
        logits, features = self._verifier.verify(tree)
        self._timer.mark("accept")
        acceptance, processed = self._accept(tree, logits)
        bonus = self._checked_bonus(acceptance)
        self._timer.mark("commit")
        self._verifier.commit(acceptance)
        counts = acceptance.num_accepted.tolist()
        path = acceptance.path[:, : max(counts) + 1]
        committed = tree.tokens.gather(1, path)
        if hasattr(self._drafter, "observe"):
            path_features = features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))
            self._drafter.observe(committed, path_features, acceptance.num_accepted + 1)
        paths, tokens = path.tolist(), committed.tolist()
        # What a round costs is shared by its rows.
        seconds = {phase: spent / len(counts) for phase, spent in self._timer.stop().items()}
        self._num_accepted += counts
        for place, (row, count) in enumerate(zip(self._running, counts, strict=True)):
            new = [*tokens[place][1 : count + 1], bonus[place]]
            nodes = paths[place][: count + 1]
            kept = row.keep(new, log_probs_of(logits[place], processed[place], nodes, new, row.num_likeliest))
            row.rounds.append(RoundStats(tree.max_nodes, count, len(kept), seconds))
            if place == 0:
                emit(kept)
            if on_round:
                one = slice(place, place + 1)
                mine = Acceptance(path[one], acceptance.num_accepted[one], acceptance.bonus[one])
                on_round(Round(tree.row(place), mine, kept, row.rounds[-1], row.index))

    def _propose(self) -> TokenTree:
        ids = [row.token_ids for row in self._running]
        lasts = [one[-1] for one in ids]
        roots = torch.tensor(lasts, device=self._target.device)
        if self._max_nodes == 1:
            return TokenTree.root_only(roots)
        positions = torch.tensor([len(one) - 1 for one in ids], device=self._target.device)
        # Deep enough for the row that needs most, and within the target's positions for all.
        room = self._target.max_positions - max(map(len, ids))
        depth = min(max(row.left for row in self._running) - 1, room)
        context = DraftContext(roots, positions, ids, depth, mark=self._timer.mark, generator=self._generator)
        tree = self._drafter.propose(context, self._max_nodes)
        check_trees(tree, lasts, self._max_nodes)
        if self._policy is not None:
            if tree.laws is not None:
                raise ValueError("a budget policy cuts trees by the scores of their tokens, which drawn children forbid")
            tree = tree.first(self._policy(tree.scores, self._num_accepted))
        if not any(row.has_processors for row in self._running):
            return tree
        return TokenTree.stack([row.prune(tree.row(place)) for place, row in enumerate(self._running)])

    def _accept(self, tree: TokenTree, logits: Tensor) -> tuple[Acceptance, Tensor]:
        """The path of each row, and the processed logits [B, N, V], which are the very same where nothing changes them."""
        processed = logits
        if any(row.has_processors for row in self._running):
            parts = [row.process(tree.row(place), logits[place : place + 1]) for place, row in enumerate(self._running)]
            processed = torch.cat(parts)
        # One call of `generate` has one rule.
        return self._running[0].acceptor(tree, processed, generator=self._generator), processed

    def _checked_bonus(self, acceptance: Acceptance) -> list[int]:
        bonus: list[int] = acceptance.bonus.tolist()
        for row, token in zip(self._running, bonus, strict=True):
            if token < 0:
                length = len(row.token_ids)
                raise ValueError(f"the target's logits after {length} tokens are NaN or all -inf; check its weights and dtype")
        return bonus


def check_trees(tree: TokenTree, roots: list[int], budget: int) -> None:
    """Guards the seam where users plug in drafters of their own.

    Raises:
        ValueError: there are more or fewer trees than `roots`, other roots, too many nodes, or NaN scores.
    """
    count = len(roots)
    if tree.batch_size != count or tree.max_nodes > budget:
        trees = "one tree" if count == 1 else f"{count} trees"
        raise ValueError(f"the drafter must return {trees} of at most {budget} nodes, got shape {list(tree.tokens.shape)}")
    for wanted, token in zip(roots, tree.tokens[:, 0].tolist(), strict=True):
        if token != wanted:
            raise ValueError(f"node 0 of the drafter's tree must be the root token {wanted}, got {token}")
    if bool(tree.scores.isnan().any()):
        raise ValueError("the drafter's tree has NaN scores; check the draft head's weights and dtype")

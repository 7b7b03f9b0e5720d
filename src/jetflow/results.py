"""What a generation returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from jetflow.logprobs import TokenLogProbs
from jetflow.protocols import Acceptance
from jetflow.stopping import FinishReason
from jetflow.trees.token_tree import TokenTree


@dataclass(frozen=True)
class RoundStats:
    """One round in numbers.

    Attributes:
        num_nodes: nodes that the target verified, root included.
        num_accepted: accepted drafted nodes, before any cut at a stop.
        num_kept: tokens that the round added to the output: accepted ones and the bonus, up to the first stop.
        seconds: seconds by phase: draft, build (where the drafter tells it apart), verify, accept, commit. In a batch, this
            text's even share of them.
    """

    num_nodes: int
    num_accepted: int
    num_kept: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Round:
    """One round of one text as `on_round` sees it: tree, accepted path, and the tokens kept (bonus last).

    Attributes:
        tree: the verified tree, a batch of one.
        acceptance: the path that the target took through it.
        kept: the tokens that the round added to the text.
        stats: the round in numbers.
        index: which prompt of the call it belongs to.
    """

    tree: TokenTree
    acceptance: Acceptance
    kept: list[int]
    stats: RoundStats
    index: int = 0

    @property
    def expected_kept(self) -> float:
        """Tokens that the tree's own scores expected the round to keep: the sum of its nodes' probabilities."""
        return float(self.tree.expected_acceptance_length()[0])

    @property
    def num_accepted(self) -> int:
        """Kept tokens that were drafted: those that the round emits before its bonus token."""
        return min(self.stats.num_accepted, len(self.kept))


@dataclass
class GenerationResult:
    """One finished text.

    Attributes:
        token_ids: new tokens, prompt not included, the stop token included.
        text: the decoded tokens without special ones; None when the target has no tokenizer.
        finish_reason: "stop" at a stop token, "length" at the length limit.
        num_prompt_tokens: length of the prompt.
        rounds: one entry per verified tree; the token that prefill yields belongs to no round.
        prefill_seconds: seconds until the first token.
        seconds: seconds until the last token; in a batch, from the beginning of the batch.
        log_probs: one entry per token of `token_ids`, where they were asked for.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    num_prompt_tokens: int
    rounds: list[RoundStats] = field(default_factory=list)
    prefill_seconds: float = 0.0
    seconds: float = 0.0
    log_probs: list[TokenLogProbs] | None = None

    @property
    def tau(self) -> float | None:
        """Mean acceptance length: kept tokens per verified tree. None when there was no round."""
        return sum(stats.num_kept for stats in self.rounds) / len(self.rounds) if self.rounds else None

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the whole generation, prefill included."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

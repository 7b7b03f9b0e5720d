"""ParallelDrafter: a pass of a block draft head, or several, then a tree expander.

Dimension key: B batch, D draft levels, N tree nodes, T block positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from jetflow import masks
from jetflow.drafters.conditional import ConditionalLaws
from jetflow.drafters.words import HeadWords
from jetflow.graphs import GraphSettings, RecordedSteps
from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.context_cache import HeadCache
from jetflow.protocols import CandidateSource, DraftContext, TreeExpander
from jetflow.targets import Target
from jetflow.trees.expanders import BestFirst
from jetflow.trees.refined import RefinedSource
from jetflow.trees.sampling import ChildSampling
from jetflow.trees.sources import MarginalSource
from jetflow.trees.token_tree import TokenTree

# Candidates of a depth, or children of a node, where laws are conditional, unless told otherwise.
CONDITIONAL_WIDTH = 32


class ParallelDrafter:
    """Drafts a whole tree from one pass of a JetFlow or DFlash head.

    With more passes a head with refinement reads the nodes of the tree so far, each behind its own path, and says which
    children follow them; the tree is then built anew.

    Args:
        head: the draft head, made for `target`.
        target: the frozen model; its embedding and output embedding are used.
        expander: how the tree is built from the per-depth laws; the exact best-first tree when absent.
        width: most children of one node; as many as the budget could hold when absent, which keeps best-first exact, with
            several passes 32 at most. For a head with a correction these are the candidates of a depth, whatever the budget:
            32 when absent, or as many as the correction chooses among.
        vocabulary: int64 [R], the only tokens that are drafted, such as the most frequent ones, each once. The output
            embedding then costs R / V as much, and the text stays the same; all tokens when absent.
        sampling: draw the children, for acceptors that make use of the draft's law; the likeliest ones when absent.
        passes: of the head per tree; more than one needs a head with refinement.
        refine_nodes: nodes, root included, that each pass after the first reads: the likeliest ones; as many as the budget
            when absent.
        graphs: record the pass of the head, with its output embedding, as CUDA graphs, one for each bucket of prefix lengths,
            and replay them; none when absent. The pass is always that of a whole block.

    Raises:
        ValueError: head and target differ in vocabulary, width, layers, dtype or device, a number is below 1, `expander` has
            a shape deeper than the head drafts, `vocabulary` is not made of different tokens of the target, the head has no
            refinement for the passes asked for, or `graphs` are asked for without a CUDA device or with several passes.

    Example:
        >>> drafter = ParallelDrafter(load_head("models/tiny/head"), target)  # doctest: +SKIP
    """

    def __init__(
        self,
        head: BlockDraftHead,
        target: Target,
        expander: TreeExpander | None = None,
        *,
        width: int | None = None,
        vocabulary: Tensor | None = None,
        sampling: ChildSampling | None = None,
        passes: int = 1,
        refine_nodes: int | None = None,
        graphs: GraphSettings | None = None,
    ):
        if graphs is not None:
            graphs.check_device(target.device)
            if passes > 1:
                raise ValueError(f"graphs record one pass over a block, got passes={passes}")
        for name, value in (("width", width), ("passes", passes), ("refine_nodes", refine_nodes)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if passes > 1 and not head.config.refinement:
            raise ValueError(f"passes={passes} needs a head that was trained with refinement=True; this one takes one pass")
        if passes == 1 and refine_nodes is not None:
            raise ValueError(f"refine_nodes={refine_nodes} needs passes of at least 2, got passes=1")
        _check_match(head, target)
        depth = getattr(expander, "depth", 0)
        if depth > head.config.depth:
            raise ValueError(
                f"expander asks for {depth} levels, but a head of block_size={head.config.block_size} drafts "
                f"{head.config.depth}"
            )
        self.taps = head.config.taps
        self._head = head
        self._expander = expander or BestFirst()
        self._width = width
        self._sampling = sampling
        self._passes, self._refine_nodes = passes, refine_nodes
        self._vocabulary = None if vocabulary is None else _checked_vocabulary(vocabulary, target)
        self._words = HeadWords(head, target, self._vocabulary)
        self._laws = None if head.correction is None else ConditionalLaws(head, self._words)
        self._cache: HeadCache | None = None
        self._recorded = None if graphs is None else RecordedSteps(graphs)
        size = head.config.block_size
        rule = masks.in_block(causal=head.config.causal, block_size=size, context_len=0)
        self._in_block_mask = masks.dense(rule, 1, 1, size, size, device=target.device)[0, 0]

    def reset(self, batch_size: int) -> None:
        """Forgets the context of the last batch."""
        if self._recorded is None:
            self._cache = self._head.new_cache(batch_size)
        elif self._cache is not None and len(self._cache.lengths) == batch_size:
            # Recordings use its memory.
            self._cache.reset()
        else:
            self._recorded.clear()
            room = self._recorded.settings.max_tokens + self._head.config.block_size
            self._cache = self._head.new_cache(batch_size, room)

    def keep_rows(self, rows: list[int]) -> None:
        """Goes on with some rows of the batch."""
        assert self._cache is not None, "reset comes before keep_rows"
        self._cache.keep_rows(rows)
        if self._recorded is not None:
            # Recordings use the rows that were there before.
            self._recorded.clear()

    @torch.no_grad()
    def observe(self, token_ids: Tensor, features: Tensor, num_tokens: Tensor) -> None:
        """Adds the features [B, T, H] of newly committed tokens, `num_tokens` [B] per row, to the head's context.

        Raises:
            ValueError: with `graphs`, there is no room for them.
        """
        assert self._cache is not None, "reset comes before observe"
        if self._recorded is not None:
            self._recorded.settings.check_room(max(self._cache.lengths) + features.shape[1])
        self._head.extend_context(self._cache, features, num_tokens)

    @torch.no_grad()
    def draft_logits(self, root_tokens: Tensor, depth: int) -> Tensor:
        """Returns the head's logits for the `depth` positions after `root_tokens` int64 [B], without its correction.

        They are float [B, depth, V], or [B, depth, R] over the tokens of `vocabulary` where there is one.
        """
        return self._words.logits(self._draft(root_tokens, depth))

    def propose(self, context: DraftContext, budget: int) -> TokenTree:
        """Returns trees of at most `budget` nodes and at most as many levels as a block drafts."""
        depth = min(self._head.config.depth, context.max_depth, budget - 1)
        if depth < 1:
            return TokenTree.root_only(context.root_tokens)
        source = self._source(context, depth, budget)
        if self._sampling is not None:
            return self._sampling.build(self._expander, context.root_tokens, source, budget, context.generator)
        return self._expander(context.root_tokens, source, budget)

    @torch.no_grad()
    def _source(self, context: DraftContext, depth: int, budget: int) -> CandidateSource:
        width = self._width or self._default_width(budget)
        source = self._first_source(context, depth, width)
        for _ in range(self._passes - 1):
            tree = BestFirst()(context.root_tokens, source, self._refine_nodes or budget)
            context.mark("draft")
            states = self._read(tree)
            if self._laws is not None and self._head.config.corrects_filled:
                logits = self._laws.logits(states, tree.tokens)[1]
            else:
                logits = self._words.logits(states)
            context.mark("build")
            laws = MarginalSource.from_logits(logits, width, token_ids=self._vocabulary)
            source = RefinedSource(tree, (laws.tokens, laws.log_probs), source)
        return source

    def _default_width(self, budget: int) -> int:
        # Children come in the order of their laws, so that no more than the budget holds are needed; where laws are
        # corrected, any candidate may come first.
        if self._laws is not None:
            return max(CONDITIONAL_WIDTH, self._laws.num_candidates or 0)
        return min(budget - 1, CONDITIONAL_WIDTH) if self._passes > 1 else budget - 1

    def _first_source(self, context: DraftContext, depth: int, width: int) -> CandidateSource:
        """What one pass over masked slots says."""
        if self._recorded is None:
            gates, logits = self._run(context.root_tokens, depth)
        else:
            gates, logits = self._replay(self._recorded, context.root_tokens, depth)
        context.mark("build")
        if self._laws is not None:
            return self._laws.source(gates, logits, width)
        return MarginalSource.from_logits(logits, width, token_ids=self._vocabulary)

    def _run(self, root_tokens: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Gates [B, depth, *] of a correction, or states, and logits [B, depth, V]: level 1 corrected, its path is known."""
        states = self._draft(root_tokens, depth)
        if self._laws is None:
            return states, self._words.logits(states)
        return self._laws.logits(states, root_tokens[:, None])

    def _replay(self, recorded: RecordedSteps, root_tokens: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """The same from a recording, which is made when its bucket of prefix lengths is first used."""
        assert self._cache is not None, "reset comes before a draft"
        longest = recorded.settings.prefix_bucket(max(self._cache.lengths))
        starts = torch.tensor(self._cache.lengths, device=root_tokens.device)
        key = (len(root_tokens), longest)
        gates, logits = recorded(key, (root_tokens, starts), partial(self._static_run, longest))
        return gates[:, :depth], logits[:, :depth]

    def _static_run(self, longest: int, root_tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """What is recorded: nothing in it may depend on the host."""
        assert self._cache is not None, "reset comes before a draft"
        with self._cache.static_slots(starts, longest):
            return self._run(root_tokens, self._head.config.depth)

    def _draft(self, root_tokens: Tensor, depth: int) -> Tensor:
        """One pass of the head: hidden states [B, depth, H] of the positions after the roots."""
        assert self._cache is not None, "reset comes before a draft"
        config = self._head.config
        # The slot that predicts the first token.
        first = 0 if config.published.sample_from_anchor else 1
        # In a causal block no position depends on later ones, so those need not be computed.
        size = depth + first if config.causal else config.block_size
        block = root_tokens.new_full((len(root_tokens), size), config.mask_token_id)
        block[:, 0] = root_tokens
        hidden = self._head.draft(self._words.embed(block), self._cache, self._in_block_mask[:size, :size])
        # Rows that are not next to each other would be multiplied one by one.
        return hidden[:, first : first + depth].contiguous()

    def _read(self, tree: TokenTree) -> Tensor:
        """One pass of the head over the nodes of a tree, each behind its own path: hidden states [B, N, H]."""
        assert self._cache is not None, "reset comes before a draft"
        return self._head.draft(self._words.embed(tree.tokens), self._cache, tree.ancestor_mask(), tree.depths)


def _checked_vocabulary(vocabulary: Tensor, target: Target) -> Tensor:
    tokens = vocabulary.to(target.device).sort().values
    if vocabulary.dim() != 1 or vocabulary.dtype != torch.int64 or not len(tokens) or bool((tokens[1:] == tokens[:-1]).any()):
        raise ValueError(f"vocabulary must be int64 [R], each token once, got {vocabulary.dtype} {list(vocabulary.shape)}")
    if not 0 <= int(tokens[0]) <= int(tokens[-1]) < target.vocab_size:
        raise ValueError(f"vocabulary must be in [0, {target.vocab_size}), got {int(tokens[0])} to {int(tokens[-1])}")
    return tokens


def _check_match(head: BlockDraftHead, target: Target) -> None:
    config, weight = head.config, head.fc.weight
    pairs = {
        "vocab_size": (config.vocab_size, target.vocab_size),
        "target_hidden_size": (config.target_hidden_size, target.hidden_size),
        "hidden_size": (config.hidden_size, target.hidden_size),
        "num_target_layers": (config.num_target_layers, target.num_layers),
        "dtype": (weight.dtype, target.dtype),
        "device": (weight.device, target.device),
    }
    for name, (ours, theirs) in pairs.items():
        # Some files do not say how many layers the target has.
        if ours != theirs and ours is not None:
            raise ValueError(f"head and target must agree: the head's {name} is {ours}, the target's {theirs}")
    target.check_taps(config.taps)

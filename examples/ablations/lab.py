"""What the ablation scripts share: a target, its answers, heads that train in about a minute, and tau by replay.

The laboratory's default target is the tiny one in `models/tiny`, with answers that it writes itself to the prompts of
`examples/tiny_corpus.py`. `--target NAME --prompts FILE --heldout FILE` puts any other model and any conversations in its
place. Whatever has been computed lies in `--work-dir` and is not computed again: answers, states, heads.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]

from tiny_corpus import documents
from tiny_loop import Row, answers, orders, pad, train

from jetflow import losses
from jetflow.acceptors import GreedyAcceptor, SamplingAcceptor
from jetflow.benchmark.replay import Text, replay, text_features
from jetflow.drafters.parallel import ParallelDrafter
from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.checkpoint import load_head, save_head
from jetflow.heads.config import DraftHeadConfig
from jetflow.heads.eagle_head import EagleHead
from jetflow.targets import Target
from jetflow.training import Batch, TeacherStates
from jetflow.training.anchors import sample_anchors
from jetflow.training.data import read_rows
from jetflow.training.eagle import UnrollSettings, new_eagle_head, unrolled_loss
from jetflow.training.step import StepSettings, block_loss

# Documents that the tiny target was trained on; those that follow are held out.
NUM_TAUGHT = 40000
LOSSES = {
    "cross-entropy": losses.CrossEntropy(),
    "forward-kl": losses.ForwardKL(),
    "reverse-kl": losses.ReverseKL(),
    "jensen-shannon": losses.JensenShannon(),
    "total-variation": losses.TotalVariation(),
    "log-acceptance": losses.LogAcceptance(),
    "tree-acceptance": losses.TreeAcceptance(16),
}


@dataclass(frozen=True)
class HeadSpec:
    """A head and how it is trained; equal specs with equal seeds are trained once.

    Attributes:
        kind: `block`, or `eagle3` for a head that drafts step by step; then only loss, data, rate and steps count.
        causal: in-block rule; False is DFlash's.
        correction: kind of correction, or none.
        loss: name of a loss as in recipes.
        decay_rate: slots after which a slot's weight falls by e; 0 for none.
        marginal_share: blocks that a head with a correction learns without it.
        refinement: half of the blocks show true tokens, so that further passes can read the nodes of a tree.
        tree_weight: weight of the expected acceptance length of the best tree of 16 nodes, added to the loss.
        data: who wrote the answers: `greedy` or `sampled` (the target itself) or `corpus`.
        rate: factor on the learning rates of `examples/tiny_loop.py`.
        steps: optimizer steps; the laboratory's own number when absent.
    """

    kind: str = "block"
    causal: bool = True
    correction: str | None = None
    loss: str = "forward-kl"
    decay_rate: float = 0.0
    marginal_share: float = 0.0
    refinement: bool = False
    tree_weight: float = 0.0
    data: str = "greedy"
    rate: float = 1.0
    steps: int | None = None


@dataclass(frozen=True)
class Variant:
    """One line of an ablation: a head and how it drafts."""

    name: str
    spec: HeadSpec
    budgets: tuple[int, ...]
    temperatures: tuple[float, ...] = (0.0,)
    build: Callable[[BlockDraftHead, Target], Any] = ParallelDrafter


@dataclass(frozen=True)
class Cell:
    """What one variant did with one seed, budget and temperature: kept tokens and rounds of each prompt."""

    variant: str
    seed: int
    budget: int
    temperature: float
    kept: list[int]
    rounds: list[int]


@cache
def load_target(name: str, dtype: str, device: str) -> Target:
    return Target.from_pretrained(name, dtype=getattr(torch, dtype), device=device)


@dataclass(frozen=True)
class Lab:
    """Settings of a laboratory, and what is made from them."""

    target_name: str
    work: Path
    prompts: Path | None = None
    heldout: Path | None = None
    dtype: str = "float32"
    device: str = "cpu"
    steps: int = 300
    num_answers: int = 4000
    num_heldout: int = 60
    max_new_tokens: int = 160
    rows_per_step: int = 16
    num_anchors: int = 8
    num_layers: int = 2
    block_size: int = 16
    taps: tuple[int, ...] | None = (0, 2, 4)

    @property
    def target(self) -> Target:
        return load_target(self.target_name, self.dtype, self.device)

    def run(self, variants: Sequence[Variant], seeds: Sequence[int], workers: int) -> list[Cell]:
        """Trains and measures every variant with every seed, `workers` of them side by side, one thread each."""
        for temperature in {one for variant in variants for one in variant.temperatures}:
            self.texts(temperature)
        jobs = [(variant, seed) for seed in seeds for variant in variants]
        # Heads first, so that variants that share one do not train it twice.
        self.train([(variant.spec, seed) for variant, seed in jobs], workers)
        return [cell for cells in _side_by_side(self.measure, jobs, workers) for cell in cells]

    def train(self, heads: Sequence[tuple[HeadSpec, int]], workers: int) -> None:
        """Trains those heads of (spec, seed) that have not been trained yet."""
        for data in {spec.data for spec, _ in heads}:
            self.states(data)
        _side_by_side(self.head, [one for one in dict.fromkeys(heads) if not self._folder(*one).exists()], workers)

    def measure(self, variant: Variant, seed: int) -> list[Cell]:
        drafter = variant.build(self.head(variant.spec, seed), self.target)
        cells = []
        for temperature in variant.temperatures:
            texts = self.texts(temperature)
            given = {"max_new_tokens": self.max_new_tokens, "features": text_features(drafter, self.target, texts)}
            for budget in variant.budgets:
                kept = replay(drafter, self.target, texts, budget, **given)
                sums, counts = [sum(one) for one in kept], [len(one) for one in kept]
                cells.append(Cell(variant.name, seed, budget, temperature, sums, counts))
        return cells

    def head(self, spec: HeadSpec, seed: int) -> BlockDraftHead | EagleHead:
        """Trains a head, or loads it where it has been trained before."""
        folder = self._folder(spec, seed)
        if not folder.exists():
            begin = time.perf_counter()
            self._train(spec, seed, folder)
            print(f"trained {spec} seed {seed}: {time.perf_counter() - begin:.0f} s", flush=True)
        return load_head(folder, dtype=self.target.dtype, device=self.device)

    def _folder(self, spec: HeadSpec, seed: int) -> Path:
        """Where a head lies; what does not change its training does not change its name."""
        named = {key: value for key, value in asdict(spec).items() if value != getattr(HeadSpec(), key)}
        names = [key for key in asdict(self) if key not in ("work", "num_heldout", "heldout", "device")]
        return self._file("head", json.dumps([named, seed], sort_keys=True), *names)

    def _file(self, kind: str, extra: str, *settings: str) -> Path:
        """A path in the work folder that is another one for other values of the named settings."""
        key = json.dumps([extra, *(str(getattr(self, name)) for name in settings)])
        return self.work / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"

    def _train(self, spec: HeadSpec, seed: int, folder: Path) -> None:
        torch.manual_seed(seed)
        head = self._new_head(spec).to(self.device)
        loss = LOSSES[spec.loss]
        if spec.tree_weight:
            loss = losses.MixedLoss([loss, losses.TreeAcceptance(16)], [1.0, spec.tree_weight])
        settings = StepSettings(loss, spec.decay_rate, marginal_share=spec.marginal_share)
        generator, stream = torch.Generator().manual_seed(seed), self._batches(spec.data, seed)

        def loss_of() -> tuple[Tensor, str]:
            batch, states = next(stream)
            anchors, valid = sample_anchors(batch.loss_mask, self.num_anchors, generator)
            shared: dict[str, Any] = {"anchors": anchors, "valid": valid, "states": states}
            if spec.kind == "eagle3":
                out = unrolled_loss(head, self.target, batch, settings=UnrollSettings(loss), **shared)
            else:
                out = block_loss(head, self.target, batch, settings=settings, generator=generator, **shared)
            return out.loss, f"  expected acceptance length {out.expected_acceptance_length.item():.2f}"

        steps = self.steps if spec.steps is None else spec.steps
        train(head, steps, lambda done: spec.rate * (0.5 + 0.5 * math.cos(math.pi * done)), loss_of, warmup=15)
        # A name appears when the head is whole.
        save_head(head, folder.with_suffix(".part"))
        folder.with_suffix(".part").rename(folder)

    def _new_head(self, spec: HeadSpec) -> BlockDraftHead | EagleHead:
        if spec.kind == "eagle3":
            return new_eagle_head(self.target, taps=self.taps)
        config = DraftHeadConfig.for_target(
            self.target.config, num_layers=self.num_layers, block_size=self.block_size, mask_token_id=self._mask_token,
            taps=self.taps, causal=spec.causal, correction=spec.correction, correction_rank=64, refinement=spec.refinement,
        )  # fmt: skip
        return BlockDraftHead(config)

    def _batches(self, data: str, seed: int) -> Iterator[tuple[Batch, TeacherStates | None]]:
        rows, states = self.states(data)
        for chosen in orders(rows, self.rows_per_step, seed):
            token_ids, loss_mask, _ = pad([rows[i] for i in chosen])
            batch, both = Batch(token_ids.to(self.device), loss_mask.to(self.device)), None
            if states is not None:
                parts = (pad_sequence([states[i][part] for i in chosen], batch_first=True) for part in (0, 1))
                both = TeacherStates(*(part.to(self.device) for part in parts))
            yield batch, both

    @property
    def _mask_token(self) -> int:
        known = self.target.tokenizer.mask_token_id
        return self.target.vocab_size - 1 if known is None else known

    @cache  # noqa: B019
    def states(self, data: str) -> tuple[list[Row], list[tuple[Tensor, Tensor]] | None]:
        """Answers and the tiny target's states over them, bfloat16; those of other targets are computed when they are read."""
        path = self._file(data, "pt", "target_name", "prompts", "num_answers", "max_new_tokens", "taps", "num_layers", "dtype")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = self._answer(self.asked("train"), data)
            states = [self._states(ids) for ids, _ in rows] if self.prompts is None else None
            torch.save((rows, states), path)
        return torch.load(path)

    def _states(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        config = DraftHeadConfig.for_target(
            self.target.config, num_layers=self.num_layers, block_size=2, mask_token_id=0, taps=self.taps
        )
        with torch.no_grad():
            found = self.target.features(torch.tensor([ids], device=self.device), config.taps)
        return tuple(one[0].to(torch.bfloat16).cpu() for one in found)

    def texts(self, temperature: float) -> list[Text]:
        """The target's own answers to the held-out prompts."""
        names = ("target_name", "heldout", "num_heldout", "max_new_tokens", "dtype")
        path = self._file(f"heldout-{temperature:g}", "pt", *names)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self._answer(self.asked("heldout"), "sampled" if temperature else "greedy", temperature or 1.0), path)
        return [Text(*row) for row in torch.load(path)]

    def asked(self, part: str) -> list[tuple[list[int], str]]:
        """Prompts as token ids, with the corpus's own answers."""
        file, count = (self.prompts, self.num_answers) if part == "train" else (self.heldout, self.num_heldout)
        if file is not None:
            found = list(islice(read_rows(str(file)), count))
            for where, row in found:
                if not isinstance(row.get("prompt"), str):
                    raise ValueError(f"{where} needs a `prompt`, got the keys {', '.join(row)}")
            turns = [row for _, row in found]
        else:
            docs = documents(NUM_TAUGHT + self.num_heldout, seed=0)
            turns = docs[60 : 60 + count] if part == "train" else docs[NUM_TAUGHT:]
        return [(self.target.chat_ids(one["prompt"]), one.get("answer", "")) for one in turns]

    def _answer(self, asked: list[tuple[list[int], str]], data: str, temperature: float = 1.0) -> list[Row]:
        tokenizer = self.target.tokenizer
        if data == "corpus":
            if not all(answer for _, answer in asked):
                raise ValueError(f"every line of {self.prompts} needs an `answer`, as heads are trained on corpus answers")
            ends = [tokenizer.encode(answer + tokenizer.eos_token, add_special_tokens=False) for _, answer in asked]
            return [(ids + end, len(ids)) for (ids, _), end in zip(asked, ends, strict=True)]
        acceptor = GreedyAcceptor() if data == "greedy" else SamplingAcceptor(temperature)
        generator = torch.Generator(device=self.device).manual_seed(0)
        return answers(self.target, [ids for ids, _ in asked], acceptor, self.max_new_tokens, size=250, generator=generator)


def _side_by_side(function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], workers: int) -> list[Any]:
    """Calls `function` with each job, in processes of one thread each where there are several workers."""
    if workers == 1 or len(jobs) < 2:
        return [function(*job) for job in jobs]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(function, *zip(*jobs, strict=True)))

"""Rows: which sequences a step trains on, how they are packed, and where their anchors lie.

Everything here is a function of the seed and of the step number, so that a run that goes on after a restart, or on
another number of devices, sees the very same rows and anchors.

Dimension key: B batch, S sequence, A anchors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jetflow.training.anchors import sample_anchors
from jetflow.training.data import Example
from jetflow.training.step import Batch

# Rows that are open at a time while documents are packed; more fill rows better and mix documents less.
NUM_OPEN_ROWS = 32
# Steps whose documents are sorted by length together, so that the rows of a step are of like length.
POOL_STEPS = 32


class AnchoredBatch(NamedTuple):
    """A batch with its anchors.

    Attributes:
        batch: token ids, loss mask, document ids.
        anchors: int64 [B, A].
        valid: bool [B, A].
        documents: for each row the documents in it: index of the example, and where it begins and ends in the row.
    """

    batch: Batch
    anchors: Tensor
    valid: Tensor
    documents: list[list[tuple[int, int, int]]]

    def to(self, device: torch.device | str) -> AnchoredBatch:
        """Returns the batch with its tensors on `device`."""
        token_ids, loss_mask, document_ids = self.batch
        documents = None if document_ids is None else document_ids.to(device)
        moved = Batch(token_ids.to(device), loss_mask.to(device), documents)
        return self._replace(batch=moved, anchors=self.anchors.to(device), valid=self.valid.to(device))


class TrainingRows:
    """The rows of a training run.

    Args:
        examples: sequences with their loss spans; those without a token to predict are left out.
        max_length: longer sequences are cut.
        rows_per_step: rows of one optimizer step, over all devices and passes.
        num_anchors: A, most anchors drawn in one document and epoch.
        pack: fill rows of `max_length` tokens with several documents, which do not see each other; otherwise each
            document is a row, and the rows of a step are of like length.
        seed: order of the rows and choice of the anchors.

    Attributes:
        num_left_out: examples without a token to predict.
        num_cut: examples cut to `max_length`.
        fingerprint: 16 hex digits over sequences and settings; equal ones give equal rows and anchors in every step.

    Raises:
        ValueError: a setting is below 1, `max_length` below 2, no example is left, or fewer than one step's rows are.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        max_length: int,
        rows_per_step: int,
        num_anchors: int,
        pack: bool = False,
        seed: int = 0,
    ):
        for name, value, least in (
            ("max_length", max_length, 2),
            ("rows_per_step", rows_per_step, 1),
            ("num_anchors", num_anchors, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        usable = [(one.token_ids[:max_length], _loss_mask(one, max_length)) for one in examples]
        self._documents = [(ids, mask) for ids, mask in usable if bool(mask.any())]
        self.num_left_out = len(usable) - len(self._documents)
        self.num_cut = sum(len(one.token_ids) > max_length for one in examples)
        if not self._documents:
            raise ValueError(f"examples: none of {len(usable)} has a token to predict within max_length={max_length}")
        self.source_index = [i for i, (_, mask) in enumerate(usable) if bool(mask.any())]
        self._max_length, self._rows_per_step, self._num_anchors = max_length, rows_per_step, num_anchors
        self._pack, self._seed = pack, seed
        self.fingerprint = self._digest()
        self._epoch: tuple[int, list[list[list[int]]]] | None = None
        self._first_steps = [0]

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch."""
        return sum(len(ids) for ids, _ in self._documents)

    def frequent_tokens(self, vocab_size: int, count: int) -> Tensor:
        """Returns the `count` most frequent tokens of an epoch, int64 [count], most frequent first."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for ids, _ in self._documents:
            counts += torch.bincount(torch.tensor(ids), minlength=vocab_size)
        return counts.argsort(descending=True, stable=True)[:count]

    def _digest(self) -> str:
        digest = hashlib.sha256(
            repr((self._max_length, self._rows_per_step, self._num_anchors, self._pack, self._seed)).encode()
        )
        for ids, mask in self._documents:
            digest.update(repr((ids, mask.tolist())).encode())
        return digest.hexdigest()[:16]

    def rows_of_step(self, step: int) -> tuple[int, list[list[int]]]:
        """Returns the epoch that `step` (from 0) belongs to, and its rows, each a list of documents."""
        while step >= self._first_steps[-1]:
            epoch = len(self._first_steps) - 1
            self._first_steps.append(self._first_steps[-1] + len(self._steps_of_epoch(epoch)))
        epoch = next(i for i, first in enumerate(self._first_steps) if first > step) - 1
        return epoch, self._steps_of_epoch(epoch)[step - self._first_steps[epoch]]

    def collate(self, rows: Sequence[Sequence[int]], epoch: int) -> AnchoredBatch:
        """Lays rows of documents out as one padded batch with anchors."""
        lengths = [sum(len(self._documents[doc][0]) for doc in row) for row in rows]
        shape = (len(rows), max(lengths))
        token_ids, document_ids = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
        loss_mask = torch.zeros(shape, dtype=torch.bool)
        found: list[list[Tensor]] = [[] for _ in rows]
        documents: list[list[tuple[int, int, int]]] = [[] for _ in rows]
        for row, members in enumerate(rows):
            begin = 0
            for doc in members:
                ids, mask = self._documents[doc]
                end = begin + len(ids)
                token_ids[row, begin:end], loss_mask[row, begin:end] = torch.tensor(ids), mask
                document_ids[row, begin:end] = len(documents[row])
                found[row].append(begin + self._anchors(doc, epoch))
                documents[row].append((self.source_index[doc], begin, end))
                begin = end
        anchors, valid = _stack([torch.cat(parts) for parts in found])
        batch = Batch(token_ids, loss_mask, document_ids if self._pack else None)
        return AnchoredBatch(batch, anchors, valid, documents)

    def _anchors(self, doc: int, epoch: int) -> Tensor:
        """Anchors of one document, int64 [up to A]; they depend on seed, epoch and document alone."""
        seed = (self._seed * 1_000_003 + epoch) * 1_000_003 + doc
        generator = torch.Generator().manual_seed(seed % 2**63)
        anchors, valid = sample_anchors(self._documents[doc][1][None], self._num_anchors, generator)
        return anchors[valid]

    def _steps_of_epoch(self, epoch: int) -> list[list[list[int]]]:
        """The rows of each step of an epoch; rows that do not fill a last step are left out of it."""
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(len(self._documents), generator=generator).tolist()
            rows = self._packed(order) if self._pack else self._alike(order)
            size = self._rows_per_step
            # A data set smaller than one step is one step.
            whole = range(0, max(1, len(rows) - len(rows) % size), size)
            steps = [rows[start : start + size] for start in whole]
            mixed = torch.randperm(len(steps), generator=generator).tolist()
            self._epoch = (epoch, [steps[i] for i in mixed])
        return self._epoch[1]

    def _alike(self, order: list[int]) -> list[list[int]]:
        pool = POOL_STEPS * self._rows_per_step
        rows: list[list[int]] = []
        for start in range(0, len(order), pool):
            part = order[start : start + pool]
            rows += [[doc] for doc in sorted(part, key=lambda doc: len(self._documents[doc][0]))]
        return rows

    def _packed(self, order: list[int]) -> list[list[int]]:
        """First fit: a document goes into the oldest open row with room for it."""
        full: list[list[int]] = []
        opened: list[tuple[list[int], int]] = []
        for doc in order:
            length = len(self._documents[doc][0])
            place = next((i for i, (_, used) in enumerate(opened) if used + length <= self._max_length), None)
            if place is not None:
                members, used = opened[place]
                opened[place] = ([*members, doc], used + length)
                continue
            if len(opened) == NUM_OPEN_ROWS:
                full.append(opened.pop(0)[0])
            opened.append(([doc], length))
        return full + [members for members, _ in opened]


def _loss_mask(example: Example, max_length: int) -> Tensor:
    """bool [S]; the first token of a document has nothing in front of it that could predict it."""
    mask = torch.zeros(min(len(example.token_ids), max_length), dtype=torch.bool)
    for begin, end in example.loss_spans:
        mask[begin:end] = True
    mask[:1] = False
    return mask


def _stack(anchors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pads rows of anchors to one length; returns them and which are real, both [B, A]."""
    width = max(len(one) for one in anchors)
    stacked = torch.zeros(len(anchors), width, dtype=torch.int64)
    valid = torch.zeros(len(anchors), width, dtype=torch.bool)
    for row, one in enumerate(anchors):
        stacked[row, : len(one)], valid[row, : len(one)] = one, True
    return stacked, valid

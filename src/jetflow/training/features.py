"""The target's states on disk, so that a long training run does not compute them in every epoch.

A store holds, for each example, the tapped states and the final-normed hidden state of every token in bfloat16. From the
final state the target's output embedding gives the teacher's whole law, so that nothing is lost by cutting it to its
likeliest tokens, at the cost of one more tap.

Dimension key: B batch, S sequence, T tokens of a shard, k taps, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from jetflow.targets import Target
from jetflow.training.data import Example
from jetflow.training.regenerate import target_fingerprint
from jetflow.training.rows import AnchoredBatch
from jetflow.training.step import TeacherStates

INDEX = "index.json"
EXAMPLES_PER_SHARD = 256
# Tokens of one pass of the target.
TOKENS_PER_PASS = 8192


def estimate_bytes(examples: Sequence[Example], num_taps: int, hidden_size: int, max_length: int) -> int:
    """Returns how many bytes the states of `examples` will take."""
    tokens = sum(min(len(one.token_ids), max_length) for one in examples)
    return tokens * (num_taps + 1) * hidden_size * 2


@torch.no_grad()
def write_features(
    target: Target,
    examples: Sequence[Example],
    folder: Path,
    *,
    taps: Sequence[int],
    max_length: int,
    on_shard: Callable[[int, int], None] | None = None,
) -> int:
    """Writes the states of all examples; shards that an earlier run finished are kept.

    Args:
        target: the frozen model.
        examples: sequences, in the order in which training will read them.
        folder: where the shards go.
        taps: tapped layers.
        max_length: longer sequences are cut.
        on_shard: called with the numbers of shards done and wanted.

    Returns:
        How many shards were written now.

    Raises:
        ValueError: the folder holds the states of another target, other taps, another length or other examples, or a tap is
            outside the target.
        OSError: the disk has too little room; nothing is written then.
    """
    target.check_taps(taps)
    folder.mkdir(parents=True, exist_ok=True)
    stamp = _stamp(target_fingerprint(target), taps, max_length, examples)
    index = _read_index(folder) or {**stamp, "num_shards": 0}
    _check_stamp(index, stamp, folder)
    total = -(-len(examples) // EXAMPLES_PER_SHARD)
    first = index["num_shards"]
    left = examples[first * EXAMPLES_PER_SHARD :]
    needed, free = estimate_bytes(left, len(taps), target.hidden_size, max_length), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"the states of {len(left)} examples take {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB left"
        )
    for shard in range(first, total):
        part = examples[shard * EXAMPLES_PER_SHARD : (shard + 1) * EXAMPLES_PER_SHARD]
        tensors = _states_of(target, [one.token_ids[:max_length] for one in part], taps)
        temporary = folder / f".shard-{shard:05d}.tmp"
        save_file(tensors, temporary)
        temporary.rename(folder / _shard_name(shard))
        index["num_shards"] = shard + 1
        _write_index(folder, index)
        if on_shard:
            on_shard(shard + 1, total)
    return total - first


class FeatureStore:
    """Reads the states of batches from disk, in place of passes of the target.

    Args:
        folder: a folder that `write_features` filled.
        target: the model that training uses; its fingerprint must be that of the store.
        examples: the sequences that training uses, in the same order.
        taps: tapped layers of the head.
        max_length: length that training cuts sequences to.

    Raises:
        ValueError: the store is missing, not finished, or of another target, other taps, another length or other examples.
    """

    def __init__(self, folder: Path, target: Target, examples: Sequence[Example], *, taps: Sequence[int], max_length: int):
        index = _read_index(folder)
        if index is None:
            raise ValueError(f"{folder} holds no states; write them with `jetflow features`")
        _check_stamp(index, _stamp(target_fingerprint(target), taps, max_length, examples), folder)
        total = -(-len(examples) // EXAMPLES_PER_SHARD)
        if index["num_shards"] < total:
            raise ValueError(f"{folder} holds {index['num_shards']} of {total} shards; let `jetflow features` finish")
        self._files = [safe_open(folder / _shard_name(shard), framework="pt") for shard in range(total)]
        lengths = [min(len(one.token_ids), max_length) for one in examples]
        self._begins: list[int] = []
        for i in range(len(lengths)):
            self._begins.append(0 if i % EXAMPLES_PER_SHARD == 0 else self._begins[-1] + lengths[i - 1])
        self._target = target

    def __call__(self, anchored: AnchoredBatch) -> TeacherStates:
        """Returns the states [B, S, ...] of a batch, zeros in padding, in the target's dtype and on its device."""
        parts = [self._row(documents, anchored.batch.token_ids.shape[1]) for documents in anchored.documents]
        features, final = (torch.stack(one) for one in zip(*parts, strict=True))
        device, dtype = self._target.device, self._target.dtype
        return TeacherStates(features.to(device, dtype), final.to(device, dtype))

    def _row(self, documents: Sequence[tuple[int, int, int]], length: int) -> tuple[Tensor, Tensor]:
        pieces: list[list[Tensor]] = [[], []]
        for example, begin, end in documents:
            first = self._begins[example]
            file = self._files[example // EXAMPLES_PER_SHARD]
            for piece, name in zip(pieces, ("features", "final"), strict=True):
                piece.append(file.get_slice(name)[first : first + end - begin])
        whole = [torch.cat(piece) for piece in pieces]
        padded = [torch.nn.functional.pad(one, (0, 0, 0, length - len(one))) for one in whole]
        return padded[0], padded[1]


def _states_of(target: Target, sequences: list[list[int]], taps: Sequence[int]) -> dict[str, Tensor]:
    """States of all tokens of a shard, bfloat16 [T, k * H] and [T, H]; sequences of like length run together."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    found: dict[int, tuple[Tensor, Tensor]] = {}
    while order:
        part = [order.pop(0)]
        # In rising order the next sequence is the longest.
        while order and len(sequences[order[0]]) * (len(part) + 1) <= TOKENS_PER_PASS:
            part.append(order.pop(0))
        token_ids = pad_sequence([torch.tensor(sequences[i]) for i in part], batch_first=True)
        features, final = target.features(token_ids.to(target.device), taps)
        for row, i in enumerate(part):
            length = len(sequences[i])
            found[i] = (features[row, :length].bfloat16().cpu(), final[row, :length].bfloat16().cpu())
    states = [found[i] for i in range(len(sequences))]
    return {"features": torch.cat([one for one, _ in states]), "final": torch.cat([one for _, one in states])}


def _stamp(fingerprint: str, taps: Sequence[int], max_length: int, examples: Sequence[Example]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for one in examples:
        digest.update(json.dumps(one.token_ids).encode())
    return {"target": fingerprint, "taps": list(taps), "max_length": max_length, "examples": digest.hexdigest()}


def _check_stamp(index: dict[str, Any], stamp: dict[str, Any], folder: Path) -> None:
    for name, value in stamp.items():
        if index[name] != value:
            raise ValueError(f"the states in {folder} were written for {name} {index[name]}, not {value}; write them anew")


def _read_index(folder: Path) -> dict[str, Any] | None:
    path = folder / INDEX
    return json.loads(path.read_text()) if path.exists() else None


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    temporary = folder / f".{INDEX}.tmp"
    temporary.write_text(json.dumps(index))
    os.replace(temporary, folder / INDEX)


def _shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"

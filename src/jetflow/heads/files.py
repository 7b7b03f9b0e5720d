"""The files of a head's folder, and what all public formats share.

Read are `config.json` and weights as safetensors, in one file or several, or else as a PyTorch pickle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WEIGHTS, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
# Folder of a block head's correction, which is no part of the public format.
CORRECTION = "correction"


def head_folder(name_or_path: str) -> Path:
    """Returns the folder of a head, from the hub where the name is none here.

    Raises:
        OSError: nothing is found under the name.
    """
    folder = Path(name_or_path)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder} holds no config.json; a draft head's folder needs one")
        return folder
    if folder.is_absolute() or name_or_path.count("/") != 1:
        raise FileNotFoundError(f"{name_or_path} is neither a folder nor a hub name like owner/head")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name_or_path, allow_patterns=["*.json", "*.safetensors", PICKLE, f"{CORRECTION}/*"]))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a folder's weights.

    Raises:
        FileNotFoundError: there are none.
    """
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        pickled = file.name == PICKLE
        tensors.update(torch.load(file, map_location="cpu", weights_only=True) if pickled else load_file(file))
    return tensors


def weights_sha256(name_or_path: str) -> str:
    """Names a head by its weights: 16 hex digits over the bytes of their files, a correction's included.

    Raises:
        OSError: nothing is found under the name.
    """
    folder, digest = head_folder(name_or_path), hashlib.sha256()
    parts = [folder, folder / CORRECTION] if (folder / CORRECTION).is_dir() else [folder]
    for file in [file for part in parts for file in _weight_files(part)]:
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    else:
        names = [name for name in (WEIGHTS, PICKLE) if (folder / name).exists()][:1]
    if not names:
        raise FileNotFoundError(f"{folder} holds neither {WEIGHTS} nor {INDEX} nor {PICKLE}")
    return [folder / name for name in names]


def read_rope(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the new spelling (`rope_parameters`) or the old one (`rope_theta`, `rope_scaling`)."""
    new, theta, scaling = sizes.get("rope_parameters"), sizes.get("rope_theta"), sizes.get("rope_scaling")
    if new is None:
        if theta is None:
            raise ValueError("config.json must hold rope_parameters or rope_theta, found neither")
        scaling = dict(scaling or {})
        kind = scaling.pop("type", None)
        return {"rope_type": kind or "default", **scaling, "rope_theta": theta}
    if "rope_theta" not in new and theta is not None:
        new = {**new, "rope_theta": theta}
    if theta is not None and new.get("rope_theta") != theta:
        raise ValueError(
            f"config.json contradicts itself: rope_theta={theta}, rope_parameters.rope_theta={new.get('rope_theta')}"
        )
    return dict(new)


def need(sizes: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a key that must be there."""
    if sizes.get(key) is None:
        raise ValueError(f"config.json must hold {key}")
    return sizes[key]

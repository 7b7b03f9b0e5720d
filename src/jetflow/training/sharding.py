"""Sharding over processes with FSDP2: each holds a part of the weights and gathers a layer's while it computes it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.targets import Target


def shard_head(head: BlockDraftHead) -> None:
    """Shards the head as one piece, in place: the context is projected by all layers before the first of them runs.

    Raises:
        ValueError: there is no process group, as under `torchrun`.
    """
    fully_shard(head, mesh=_mesh(head.fc.weight.device))


def shard_target(target: Target) -> None:
    """Shards the target's decoder layers, in place; its embeddings, which training reads directly, stay whole.

    Raises:
        ValueError: there is no process group, as under `torchrun`.
    """
    mesh = _mesh(target.device)
    for layer in target.decoder.layers:
        assert isinstance(layer, nn.Module)
        fully_shard(layer, mesh=mesh)


def _mesh(device: torch.device) -> torch.distributed.device_mesh.DeviceMesh:
    if not torch.distributed.is_initialized():
        raise ValueError("sharding needs several processes; start with torchrun --nproc-per-node N -m jetflow train ...")
    return init_device_mesh(device.type, (torch.distributed.get_world_size(),))

"""Optimizers for draft heads. The trainer sets the rate of each step from the `peak_lr` of every parameter group."""

from __future__ import annotations

import torch
from torch import nn


def adamw(module: nn.Module, learning_rate: float, *, weight_decay: float = 0.0) -> list[torch.optim.Optimizer]:
    """AdamW over all parameters, betas (0.9, 0.95)."""
    return [_with_peak(torch.optim.AdamW(module.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay))]


def muon(module: nn.Module, learning_rate: float, *, weight_decay: float = 0.0) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the norms, at one learning rate."""
    matrices = [weight for weight in module.parameters() if weight.dim() == 2]
    others = [weight for weight in module.parameters() if weight.dim() != 2]
    return [
        _with_peak(torch.optim.Muon(matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")),
        _with_peak(torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)),
    ]


def _with_peak(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer

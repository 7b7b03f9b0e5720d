"""Heads for a small target, and batches of random tokens, for the tests of a training step."""

import torch
from small_run import VOCAB

from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.config import DraftHeadConfig
from jetflow.training import Batch, sample_anchors

BLOCK, TAPS = 5, (0, 1, 2)


def make_head(target, *, causal, window=None):
    config = DraftHeadConfig(
        hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, block_size=BLOCK,
        taps=TAPS, mask_token_id=VOCAB - 1, vocab_size=VOCAB, num_target_layers=3, target_hidden_size=16, causal=causal,
        window=window, rope_parameters=dict(target.config.rope_parameters), max_position_embeddings=64,
    )  # fmt: skip
    return BlockDraftHead(config)


def make_batch(*lengths, prompt=3, seed=0, width=None):
    """Rows of random tokens of these lengths; all tokens after the prompt are supervised."""
    generator = torch.Generator().manual_seed(seed)
    width = width or max(lengths)
    token_ids = torch.randint(VOCAB - 1, (len(lengths), width), generator=generator)
    places = torch.arange(width)
    return Batch(token_ids, (places >= prompt) & (places < torch.tensor(lengths)[:, None]))


def all_anchors(batch):
    return sample_anchors(batch.loss_mask, batch.loss_mask.shape[1])

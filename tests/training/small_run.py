"""A small training run that takes seconds: `python small_run.py FOLDER [--steps N]`, alone or under torchrun.

The tests kill it, resume it and split it over processes; in float32 it always ends with the same weights.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM

from jetflow.heads.block_draft_head import BlockDraftHead
from jetflow.heads.config import DraftHeadConfig
from jetflow.losses import ForwardKL
from jetflow.targets import Target
from jetflow.training import StepSettings, UnrollSettings, new_eagle_head
from jetflow.training.data import Example
from jetflow.training.rows import TrainingRows
from jetflow.training.settings import TrainSettings
from jetflow.training.trainer import Trainer

VOCAB, BLOCK, TAPS = 40, 4, (0, 2)


def small_target(dtype=torch.float32, num_layers=4):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=num_layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, max_position_embeddings=128, eos_token_id=None,
        initializer_range=0.3,
    )  # fmt: skip
    return Target(Qwen3ForCausalLM(config).to(dtype).eval())


def small_head(target, seed=1, **changes):
    torch.manual_seed(seed)
    sizes = {"num_layers": 2, "block_size": BLOCK, "mask_token_id": VOCAB - 1, "taps": TAPS} | changes
    return BlockDraftHead(DraftHeadConfig.for_target(target.config, **sizes))


def small_eagle_head(target, seed=1):
    torch.manual_seed(seed)
    return new_eagle_head(target, draft_tokens=torch.arange(0, VOCAB, 2), taps=(0, 1, 2), fc_norm=True, norm_output=True)


def small_examples(count=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for i in range(count):
        length = int(torch.randint(8, 20, (1,), generator=generator))
        ids = torch.randint(VOCAB - 1, (length,), generator=generator).tolist()
        examples.append(Example(f"example-{i}", ids, [(3, length)]))
    return examples


def small_rows(**changes):
    given = {"max_length": 64, "rows_per_step": 8, "num_anchors": 4, "seed": 3} | changes
    return TrainingRows(small_examples(), **given)


def small_trainer(
    folder, *, rows=None, steps=6, step_settings=None, accelerator=None, refinement=False, eagle=False, **changes
):
    target = small_target()
    given = {"rows_per_pass": 8, "learning_rate": 1e-2, "warmup_steps": 2, "precision": "float32", "checkpoint_every": 2}
    settings = TrainSettings(**({"steps": steps, "seed": 3} | given | changes))
    kind = UnrollSettings(ForwardKL(), num_unroll=3) if eagle else StepSettings(ForwardKL())
    return Trainer(
        small_eagle_head(target) if eagle else small_head(target, refinement=refinement),
        target, rows or small_rows(), folder=Path(folder),
        settings=settings, step_settings=step_settings or kind, accelerator=accelerator or Accelerator(cpu=True),
    )  # fmt: skip


def weights_of(trainer):
    return trainer.finished_head(torch.float32).state_dict()


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def run_script(folder, *arguments, kill_after=None, processes=1):
    """Runs this file as a process of its own, and kills it after so many steps and then so many seconds."""
    command = [sys.executable, __file__]
    if processes > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", "29541"]
        command.append(__file__)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, str(folder), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    if kill_after is not None:
        # Counted in steps, so that a fast machine is not at the end before the kill.
        steps, seconds = kill_after
        for _ in range(steps):
            process.stdout.readline()
        time.sleep(seconds)
        process.kill()
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows-per-pass", type=int, default=8)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--eagle", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    trainer = small_trainer(
        args.folder, steps=args.steps, rows_per_pass=args.rows_per_pass, accelerator=accelerator, checkpoint_every=3,
        shard_head=args.shard, shard_target=args.shard, eagle=args.eagle,
    )  # fmt: skip
    args.folder.mkdir(parents=True, exist_ok=True)
    trainer.resume()
    losses = []

    def on_step(report):
        losses.append(report.loss)
        print(report.step, report.loss, flush=True)

    trainer.on_step = on_step
    trainer.run()
    head = trainer.finished_head()
    if head is not None and not trainer.stopped:
        torch.save({"weights": head.state_dict(), "losses": losses}, args.folder / "end.pt")


if __name__ == "__main__":
    main()

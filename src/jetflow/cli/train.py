"""The commands `train` and `features`: a recipe becomes parts, and the parts a head."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

    from jetflow.cli.recipe import Recipe
    from jetflow.heads.block_draft_head import BlockDraftHead
    from jetflow.heads.eagle_head import EagleHead
    from jetflow.targets import Target
    from jetflow.training.data import Example
    from jetflow.training.progress import TrainingLog
    from jetflow.training.rows import TrainingRows
    from jetflow.training.trainer import Trainer


def add_train_commands(commands: Any) -> None:
    """Adds `train` and `features` to the command line."""
    train = commands.add_parser("train", help="train a draft head by a recipe (TOML)")
    train.add_argument("recipe", help="TOML file; see docs/training.md")
    train.add_argument("--out", required=True, help="the run's folder; a run that was stopped there goes on")
    train.set_defaults(run=_train)

    features = commands.add_parser("features", help="write the target's states to disk, for a recipe that trains from them")
    features.add_argument("recipe", help="TOML file; its [data] features says where they go")
    features.set_defaults(run=_features)


def _train(args: argparse.Namespace) -> int:
    from accelerate import Accelerator

    from jetflow.cli.recipe import read_recipe
    from jetflow.training.features import FeatureStore
    from jetflow.training.progress import TrainingLog

    recipe, out = read_recipe(Path(args.recipe)), Path(args.out)
    accelerator = Accelerator()
    target = _target(recipe, accelerator)
    examples = _examples(recipe, target)
    rows = _rows(recipe, target, examples)
    trainer = _trainer(recipe, target, rows, out, accelerator)
    if recipe.data.features is not None:
        trainer.states = FeatureStore(
            Path(recipe.data.features), target, examples, taps=trainer.head_config.taps, max_length=_max_length(recipe, target)
        )
    resumed = trainer.resume()
    if accelerator.is_main_process:
        left_out = f", {rows.num_left_out} left out without a token to predict" if rows.num_left_out else ""
        cut = f", {rows.num_cut} cut to {recipe.data.max_length} tokens" if rows.num_cut else ""
        print(f"{rows.num_tokens} tokens per epoch{left_out}{cut}", file=sys.stderr)
        if resumed:
            print(f"going on after step {trainer.step} of {recipe.train.steps}", file=sys.stderr)
    log: Any = nullcontext()
    # Only the first process writes the run's records.
    if accelerator.is_main_process:
        log = TrainingLog(out, num_steps=recipe.train.steps, first_step=trainer.step, tensorboard=recipe.tensorboard)
        _attach(recipe, trainer, target, log)
    with log:
        trainer.run()
    if trainer.stopped:
        if accelerator.is_main_process:
            print(f"stopped after step {trainer.step}; the same command goes on from there", file=sys.stderr)
        return 0
    _publish(args, recipe, trainer, target, accelerator)
    return 0


def _target(recipe: Recipe, accelerator: Accelerator) -> Target:
    import torch

    from jetflow.targets import Target

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if recipe.target.dtype not in known:
        raise ValueError(f"[target] dtype must be one of {', '.join(known)}, got {recipe.target.dtype!r}")
    dtype = known[recipe.target.dtype]
    target = Target.from_pretrained(recipe.target.name, dtype=dtype, device=recipe.target.device or accelerator.device)
    # Frozen in earnest: a target whose weights ask for gradients would keep the activations of its pass.
    target.model.requires_grad_(False)
    return target


def _examples(recipe: Recipe, target: Target) -> list[Example]:
    from jetflow.training.data import read_examples

    data = recipe.data
    examples = [
        one for source in data.train for one in read_examples(source, target.tokenizer, template_args=data.template_args)
    ]
    if not examples:
        raise ValueError(f"[data] train: {', '.join(data.train)} hold no examples")
    for one in examples:
        if max(one.token_ids, default=0) >= target.vocab_size:
            raise ValueError(f"example {one.id!r} has token {max(one.token_ids)}, outside the target's {target.vocab_size}")
    return examples


def _max_length(recipe: Recipe, target: Target) -> int:
    return min(recipe.data.max_length, target.max_positions)


def _rows(recipe: Recipe, target: Target, examples: list[Example]) -> TrainingRows:
    from jetflow.training.rows import TrainingRows

    return TrainingRows(
        examples, max_length=_max_length(recipe, target), rows_per_step=recipe.data.rows_per_step,
        num_anchors=recipe.loss.num_anchors, pack=recipe.data.pack, seed=recipe.train.seed,
    )  # fmt: skip


def _features(args: argparse.Namespace) -> int:
    from accelerate import Accelerator

    from jetflow.cli.heads import taps_of
    from jetflow.cli.recipe import read_recipe
    from jetflow.training.features import estimate_bytes, write_features

    recipe = read_recipe(Path(args.recipe))
    if recipe.data.features is None:
        raise ValueError(f"{args.recipe}: [data] features must say where the states go")
    target = _target(recipe, Accelerator())
    examples, max_length = _examples(recipe, target), _max_length(recipe, target)
    taps = taps_of(recipe, target)
    size = estimate_bytes(examples, len(taps), target.hidden_size, max_length)
    print(f"{len(examples)} examples, {size / 1e9:.2f} GB in {recipe.data.features}", file=sys.stderr)
    written = write_features(
        target, examples, Path(recipe.data.features), taps=taps, max_length=max_length,
        on_shard=lambda done, total: print(f"shard {done} of {total}", file=sys.stderr, flush=True),
    )  # fmt: skip
    print(f"{written} shards written", file=sys.stderr)
    return 0


def _trainer(recipe: Recipe, target: Target, rows: TrainingRows, out: Path, accelerator: Accelerator) -> Trainer:
    from jetflow.cli.heads import block_head, eagle_head
    from jetflow.cli.recipe import step_settings, unroll_settings
    from jetflow.cli.recipe_checks import check_head_keys
    from jetflow.training.optimizers import adamw, muon
    from jetflow.training.trainer import Trainer

    known = {"adamw": adamw, "muon": muon}
    if recipe.optimizer not in known:
        raise ValueError(f"optimizer must be one of {', '.join(known)}, got {recipe.optimizer!r}")
    if recipe.optimizer == "muon" and recipe.train.shard_head:
        raise ValueError("[train] shard_head does not go with optimizer muon, which needs whole matrices; use adamw")
    eagle = recipe.head.kind == "eagle3"
    head = eagle_head(recipe, target, rows) if eagle else block_head(recipe, target)
    check_head_keys(recipe, head.config)
    return Trainer(
        head, target, rows, folder=out, settings=recipe.train,
        step_settings=unroll_settings(recipe.loss) if eagle else step_settings(recipe.loss, target, rows),
        make_optimizers=partial(known[recipe.optimizer], weight_decay=recipe.weight_decay),
        accelerator=accelerator,
    )  # fmt: skip


def _attach(recipe: Recipe, trainer: Trainer, target: Target, log: TrainingLog) -> None:
    """Connects the trainer's events with the log and with real decodes of held-out prompts."""
    from jetflow.training.evaluation import measure_tau

    trainer.on_step = log.on_step
    prompts = _heldout(recipe, target)

    def evaluate(step: int, head: BlockDraftHead | EagleHead) -> None:
        begin = time.perf_counter()
        section = recipe.evaluation
        reports = measure_tau(
            head, target, prompts, budgets=section.budgets, max_new_tokens=section.max_new_tokens, passes=section.passes
        )
        log.on_evaluation(step, reports, time.perf_counter() - begin)

    if prompts:
        trainer.on_evaluation = evaluate


def _heldout(recipe: Recipe, target: Target) -> list[list[int]]:
    from jetflow.chat import chat_ids
    from jetflow.training.data import read_conversations, user_turns

    prompts = []
    for source in recipe.evaluation.prompts:
        for one in islice(read_conversations(source), recipe.evaluation.per_file):
            prompts.append(chat_ids(target.tokenizer, user_turns(one.messages)[0], recipe.data.template_args))
    return prompts


def _publish(args: argparse.Namespace, recipe: Recipe, trainer: Trainer, target: Target, accelerator: Accelerator) -> None:
    from jetflow.cli.recipe import write_recipe
    from jetflow.heads.checkpoint import save_frequent_tokens
    from jetflow.training.progress import read_metrics
    from jetflow.training.publish import RunFacts, file_sha256, write_card
    from jetflow.training.regenerate import target_fingerprint

    out = Path(args.out)
    trainer.save_head(out / "head")
    if not accelerator.is_main_process:
        return
    metrics = read_metrics(out)
    steps = [one for one in metrics if "loss" in one]
    evaluations = [one for one in metrics if "tau" in one]
    facts = RunFacts(
        target=Path(recipe.target.name).name,
        fingerprint=target_fingerprint(target),
        data={Path(name).name: file_sha256(Path(name)) for name in recipe.data.train if Path(name).is_file()},
        recipe=write_recipe(recipe),
        # Names without their folders, which mean nothing elsewhere.
        command=f"jetflow train {Path(args.recipe).name} --out {out.name}",
        head=trainer.head_config,
        num_parameters=sum(weight.numel() for weight in trainer.head.parameters()),
        num_steps=trainer.step,
        num_tokens=steps[-1]["tokens_seen"],
        seconds=sum(one["seconds"] for one in steps),
        taus=evaluations[-1]["tau"] if evaluations else {},
    )
    write_card(out / "head", facts, metrics)
    if recipe.loss.num_frequent is not None:
        save_frequent_tokens(out / "head", trainer.rows.frequent_tokens(target.vocab_size, recipe.loss.num_frequent))
    print(f"the head is in {out / 'head'}", file=sys.stderr)

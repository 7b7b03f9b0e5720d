"""The end of a training run: the head in the public format, with a card that says where it comes from."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jetflow.heads.config import DraftHeadConfig
from jetflow.heads.eagle_config import EagleHeadConfig


@dataclass(frozen=True)
class RunFacts:
    """What the card says of a run.

    Attributes:
        target: name of the target.
        fingerprint: of its weights.
        data: name and SHA-256 of each data file.
        recipe: all settings.
        command: the command line.
        head: sizes of the head.
        num_parameters: of the head.
        num_steps: optimizer steps done.
        num_tokens: tokens that the steps went through, repetitions included.
        seconds: of training, evaluations not included.
        taus: measured tau of each budget in the last evaluation.
    """

    target: str
    fingerprint: str
    data: Mapping[str, str]
    recipe: Mapping[str, Any]
    command: str
    head: DraftHeadConfig | EagleHeadConfig
    num_parameters: int
    num_steps: int
    num_tokens: int
    seconds: float
    taus: Mapping[str, float | None]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_card(folder: Path, facts: RunFacts, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Writes `README.md`, `result.json` and `curves.png` beside the weights of a head."""
    result = {
        "target": {"name": facts.target, "fingerprint": facts.fingerprint},
        "data_sha256": dict(facts.data),
        "recipe": dict(facts.recipe),
        "command": facts.command,
        "num_parameters": facts.num_parameters,
        "num_steps": facts.num_steps,
        "tokens_seen": facts.num_tokens,
        "training_seconds": round(facts.seconds),
        "tau": dict(facts.taus),
        "evaluations": [one for one in metrics if "tau" in one],
        "versions": {name: version(name) for name in ("jetflow", "torch", "transformers")},
        "machine": platform.machine(),
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    draw_curves(metrics, folder / "curves.png")
    (folder / "README.md").write_text(_card(facts, result))


def draw_curves(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws loss, accuracy by depth and measured tau over the tokens seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [one for one in metrics if "loss" in one]
    evaluations = [one for one in metrics if "tau" in one]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    millions = [one["tokens_seen"] / 1e6 for one in steps]
    left.plot(millions, _smooth([one["loss"] for one in steps]))
    left.set(title="loss", xlabel="million tokens", ylabel="nats per slot")
    depth = len(steps[0]["accuracy_by_depth"]) if steps else 0
    for place in range(depth):
        middle.plot(millions, _smooth([one["accuracy_by_depth"][place] for one in steps]), label=f"depth {place + 1}")
    middle.set(title="accuracy", xlabel="million tokens", ylabel="share of labels")
    budgets = list(evaluations[-1]["tau"]) if evaluations else []
    for budget in budgets:
        points = [(one["tokens_seen"] / 1e6, one["tau"].get(budget)) for one in evaluations]
        right.plot(*zip(*points, strict=True), marker="o", label=f"budget {budget}")
    right.set(title="tau, decoded", xlabel="million tokens", ylabel="tokens per target pass")
    for axis in (middle, right):
        if axis.has_data():
            axis.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _smooth(values: Sequence[float], share: float = 0.02) -> list[float]:
    """A running mean over a share of the whole curve."""
    width = max(1, int(len(values) * share))
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    starts = [max(0, i + 1 - width) for i in range(len(values))]
    return [(sums[i + 1] - sums[start]) / (i + 1 - start) for i, start in enumerate(starts)]


def _card(facts: RunFacts, result: Mapping[str, Any]) -> str:
    rows = "\n".join(f"| {budget} | {'-' if tau is None else f'{tau:.2f}'} |" for budget, tau in facts.taus.items())
    data = "\n".join(f"- `{name}`: sha256 `{digest[:16]}...`" for name, digest in facts.data.items())
    size = f"{facts.num_parameters / 1e6:.1f} million parameters"
    title, sizes, correction = _described(facts.head)
    start = facts.recipe.get("head", {}).get("start_from")
    begun = f" They began with the head `{'/'.join(Path(start).parts[-2:])}`." if start else ""
    tokens, hours = f"{facts.num_tokens / 1e6:.2f} million tokens", f"{facts.seconds / 3600:.1f} hours"
    return f"""# {title} for {facts.target}

{size}, {sizes}, weights in bfloat16.
It holds nothing of the target and works with its very weights only (fingerprint `{facts.fingerprint}`).{correction}

```
{facts.command}
```

{facts.num_steps} steps over {tokens} in {hours}, evaluations not included.{begun}
All settings are in `result.json`.

| budget | tau, greedy, held-out prompts |
|---|---|
{rows}

tau is the number of tokens kept per target pass, over all rounds of all prompts, best-first trees.

![loss, accuracy by depth and measured tau over the tokens seen](curves.png)

Trained on:

{data}

Made with {", ".join(f"{name} {number}" for name, number in result["versions"].items())}.
"""


def _described(head: DraftHeadConfig | EagleHeadConfig) -> tuple[str, str, str]:
    """Title, sizes, and what is to be said of a correction."""
    if isinstance(head, EagleHeadConfig):
        flags = [name for name in ("fc_norm", "norm_output") if getattr(head, name)]
        sizes = f"one layer, drafts {head.draft_vocab_size} of {head.vocab_size} tokens"
        return "An EAGLE-3 draft head", ", ".join([sizes, *flags]), ""
    kind = "causal" if head.causal else "bidirectional"
    sizes = f"{head.num_layers} layers, block size {head.block_size}, {kind} in the block"
    if head.window is not None:
        sizes += f", sliding window of {head.window.size} in layers {', '.join(map(str, head.window.layers))}"
    correction = ""
    if head.correction is not None:
        kind_and_rank = f"{head.correction} correction of rank {head.correction_rank}"
        correction = f"\nA {kind_and_rank} lies in `correction/`; other loaders find the plain head."
    if head.refinement:
        correction += "\nIt was trained for refinement: `ParallelDrafter(head, target, passes=2)` reads its own trees."
    return "A JetFlow draft head", sizes, correction

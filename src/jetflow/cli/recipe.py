"""The recipe of `jetflow train`: a TOML file, checked key by key, and the parts that its names stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetflow.cli.recipe_checks import check_recipe
from jetflow.training.settings import TrainSettings

try:
    import tomllib
except ModuleNotFoundError:
    # Before Python 3.11.
    import tomli as tomllib  # type: ignore[no-redef]


@dataclass(frozen=True)
class TargetSection:
    """`[target]`: the model that the head is for."""

    name: str
    dtype: str = "bfloat16"
    device: str | None = None


@dataclass(frozen=True)
class DataSection:
    """`[data]`: answers (or conversations) to train on, and how rows are made of them."""

    train: list[str]
    max_length: int = 2048
    rows_per_step: int = 16
    pack: bool = False
    features: str | None = None
    template_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadSection:
    """`[head]`: sizes of the head. With `start_from`, what is left out is as in the head that training starts from.

    `sliding_window` is that of the draft layers `sliding_layers`, all of them unless said; its causality is `causal`.
    `kind` is "block" (JetFlow, DFlash) or "eagle3", for which `fc_norm`, `norm_output` and `draft_vocab_size` are.
    """

    kind: str = "block"
    block_size: int | None = None
    num_layers: int | None = None
    taps: list[int] | None = None
    mask_token: str | None = None
    mask_token_id: int | None = None
    causal: bool | None = None
    sliding_window: int | None = None
    sliding_layers: list[int] | None = None
    correction: str | None = None
    correction_rank: int | None = None
    refinement: bool | None = None
    start_from: str | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    draft_vocab_size: int | None = None


@dataclass(frozen=True)
class LossSection:
    """`[loss]`: what is compared, in how many places, over which vocabulary.

    Keys that are None unless given belong to something that must be there: a sample of the vocabulary (`num_random`), a
    correction (`marginal_share`), refinement (`filled_share`), a loss of trees (`tree_budget`, `tree_temperature`).
    """

    name: str = "forward-kl"
    temperature: float = 1.0
    decay_rate: float = 0.0
    num_anchors: int = 512
    chunk_size: int = 1024
    num_frequent: int | None = None
    num_random: int | None = None
    marginal_share: float | None = None
    filled_share: float | None = None
    tree_weight: float = 0.0
    tree_budget: int | None = None
    tree_temperature: float | None = None
    num_unroll: int | None = None


@dataclass(frozen=True)
class EvaluationSection:
    """`[evaluation]`: held-out prompts that are really decoded."""

    prompts: list[str] = field(default_factory=list)
    per_file: int = 4
    budgets: list[int] = field(default_factory=lambda: [16, 64])
    max_new_tokens: int = 128
    passes: int = 1


@dataclass(frozen=True)
class Recipe:
    """All sections of a recipe."""

    target: TargetSection
    data: DataSection
    train: TrainSettings
    head: HeadSection = field(default_factory=HeadSection)
    loss: LossSection = field(default_factory=LossSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    tensorboard: bool = False


if TYPE_CHECKING:
    from jetflow.protocols import Loss
    from jetflow.targets import Target
    from jetflow.training.eagle import UnrollSettings
    from jetflow.training.rows import TrainingRows
    from jetflow.training.step import StepSettings

DEFAULT_NUM_RANDOM, DEFAULT_TREE_BUDGET = 1024, 16
SECTIONS = {
    "target": TargetSection,
    "data": DataSection,
    "head": HeadSection,
    "loss": LossSection,
    "train": TrainSettings,
    "evaluation": EvaluationSection,
}


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe.

    Raises:
        ValueError: the file is no TOML, a section or key is unknown, missing or of the wrong type, or nothing reads a key.
        FileNotFoundError: there is no such file.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: is not TOML ({error})") from error
    plain = {key: value for key, value in raw.items() if not isinstance(value, Mapping)}
    sections = {key: value for key, value in raw.items() if isinstance(value, Mapping)}
    unknown = sorted(set(sections) - set(SECTIONS))
    if unknown:
        raise ValueError(f"{path}: [{unknown[0]}] is no section; known are {', '.join(SECTIONS)}")
    built = {name: _section(SECTIONS[name], value, f"{path}: [{name}]") for name, value in sections.items()}
    recipe = _section(Recipe, {**plain, **built}, str(path))
    check_recipe(recipe, path)
    return recipe


def write_recipe(recipe: Recipe) -> dict[str, Any]:
    """Returns a recipe as plain values, for the model card."""
    return asdict(recipe)


def step_settings(section: LossSection, target: Target, rows: TrainingRows) -> StepSettings:
    """Builds what `[loss]` asks for.

    Raises:
        ValueError: the loss is unknown or has no temperature, or a number is out of its range.
    """
    from jetflow import masks
    from jetflow.training.step import StepSettings
    from jetflow.training.vocabulary import SampledVocabulary

    vocabulary = None
    if section.num_frequent is not None:
        frequent = rows.frequent_tokens(target.vocab_size, section.num_frequent)
        num_random = DEFAULT_NUM_RANDOM if section.num_random is None else section.num_random
        vocabulary = SampledVocabulary(frequent, target.vocab_size, num_random=num_random)
    form = masks.block_mask if target.device.type == "cuda" else masks.dense
    shares = {"marginal_share": section.marginal_share, "filled_share": section.filled_share}
    given = {name: value for name, value in shares.items() if value is not None}
    return StepSettings(_loss(section), section.decay_rate, form, section.chunk_size, vocabulary, **given)


def unroll_settings(section: LossSection) -> UnrollSettings:
    """Builds what `[loss]` asks for, for an EAGLE-3 head.

    Raises:
        ValueError: as for `step_settings`.
    """
    from jetflow.training.eagle import UnrollSettings

    num_unroll = 7 if section.num_unroll is None else section.num_unroll
    return UnrollSettings(_loss(section), num_unroll, section.decay_rate, section.chunk_size)


def _loss(section: LossSection) -> Loss:
    from jetflow import losses

    budget = DEFAULT_TREE_BUDGET if section.tree_budget is None else section.tree_budget
    tree = losses.TreeAcceptance(budget, temperature=section.tree_temperature or 0.0)
    known: dict[str, Any] = {
        "forward-kl": losses.ForwardKL,
        "reverse-kl": losses.ReverseKL,
        "jensen-shannon": losses.JensenShannon,
        "total-variation": losses.TotalVariation,
        "log-acceptance": losses.LogAcceptance,
    }
    without = {"cross-entropy": losses.CrossEntropy(), "tree-acceptance": tree}
    if section.name in without:
        if section.temperature != 1.0:
            raise ValueError(f"[loss] temperature={section.temperature}: {section.name} has none")
        loss: Any = without[section.name]
    elif section.name in known:
        loss = known[section.name](section.temperature)
    else:
        raise ValueError(f"[loss] name must be one of {', '.join([*without, *known])}, got {section.name!r}")
    if section.tree_weight == 0:
        return loss
    if section.name == "tree-acceptance":
        raise ValueError(f"[loss] tree_weight={section.tree_weight} goes with another loss, not with tree-acceptance itself")
    return losses.MixedLoss([loss, tree], [1.0, section.tree_weight])


def _section(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    known = {one.name: one for one in fields(kind)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{where} has the key {unknown[0]!r}, which is unknown; known are {', '.join(known)}")
    for name, value in values.items():
        expected = str(known[name].type)
        if not _fits(value, expected):
            raise ValueError(f"{where} {name} must be {expected}, got {value!r}")
    try:
        return kind(**{name: float(v) if str(known[name].type).startswith("float") else v for name, v in values.items()})
    except TypeError as error:
        raise ValueError(f"{where}: {str(error).split('__init__() ')[-1]}") from error


def _fits(value: Any, expected: str) -> bool:
    """Whether a TOML value fits a field's type, as it is written in this file."""
    if expected.startswith(("list", "dict")):
        return isinstance(value, list if expected.startswith("list") else dict)
    kinds: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}
    allowed = kinds.get(expected.split(" ")[0])
    return allowed is None or (isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool)))

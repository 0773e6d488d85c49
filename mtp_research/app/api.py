"""Training and evaluation as functions, for a notebook: the runs of `train.py` and `eval.py`.

    trained = train_heads(target="assets/lab_tiny/target", settings={"trainer.max_steps": 50})
    print(evaluate(trained).acceptance_length)

Settings are the keys of the command line and are composed and checked as there (`cli`); a run has
the same folder, so that a command can go on with it. Faults are raised, not printed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from mtp_research.app.cli import compose_config, run_folder
from mtp_research.app.preflight import check_inputs, described_target
from mtp_research.config.schema import EvalConfig, ModelConfig, TrainConfig
from mtp_research.runtime.errors import (
    ArgumentTypeError,
    ConfigError,
    extras_needed,
    keys_are_settings,
)
from mtp_research.runtime.provenance import describe_run, resolve_path

if TYPE_CHECKING:
    from mtp_research.heads.stack import MTPHeads
    from mtp_research.models.target import Target

Settings = Mapping[str, object]
ConfigT = TypeVar("ConfigT", TrainConfig, EvalConfig)
_PLAIN = re.compile(r"[\w./+-]+")  # of a text that needs no quotes in a list


@dataclass(frozen=True, repr=False)
class TrainedHeads:
    """A finished training.

    Attributes:
        output_dir: the run's folder: `metrics.jsonl`, `config.json`, checkpoints and `head/`.
        figures: what `train.py` prints as its last line.
        model: the target, as it was configured.
    """

    output_dir: Path
    figures: Mapping[str, object]
    model: ModelConfig = field(repr=False)

    def __repr__(self) -> str:
        figures = self.figures
        before = cast(float, figures["acceptance_length_before"])
        return (
            f"TrainedHeads({str(self.folder)!r}, {figures['num_mtp_modules']} modules, "
            f"{figures['unroll']} unroll, {figures['num_steps']} steps, acceptance length "
            f"{before:.3f} -> {self.acceptance_length:.3f})"
        )

    @property
    def folder(self) -> Path:
        """The best heads, as `load_heads` and `spec.head` take them."""
        return self.output_dir / "head"

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round of the best heads on held-out text, by the replay walk."""
        return cast(float, self.figures["acceptance_length"])

    @cached_property
    def target(self) -> "Target":
        """The frozen model, loaded when it is first used."""
        from mtp_research.models.target import load_target

        model = self.model
        return load_target(model.path, dtype=model.dtype, device=model.device)

    @cached_property
    def heads(self) -> "MTPHeads":
        """The best heads on `target`, loaded when they are first used."""
        from mtp_research.heads.weights import load_heads

        return load_heads(self.folder, self.target)


@dataclass(frozen=True, repr=False)
class Evaluation:
    """A finished evaluation.

    Attributes:
        output_dir: the run's folder, with `results.json`.
        figures: what `eval.py` prints as its last line.
    """

    output_dir: Path
    figures: Mapping[str, object]

    def __repr__(self) -> str:
        lengths = ", ".join(f"{name} {value:.3f}" for name, value in self.acceptance_length.items())
        return (
            f"Evaluation({str(self.output_dir)!r}, {self.figures['num_prompts']} prompts, "
            f"acceptance length: {lengths})"
        )

    @property
    def conditions(self) -> Mapping[str, Mapping[str, object]]:
        """Main figures of each condition, by its label, such as `baseline` or `training`."""
        return cast(Mapping[str, Mapping[str, object]], self.figures["conditions"])

    @property
    def acceptance_length(self) -> dict[str, float]:
        """Mean tokens a round, by condition."""
        estimates = {name: one["acceptance_length"] for name, one in self.conditions.items()}
        return {name: cast(list[float], estimate)[0] for name, estimate in estimates.items()}


def train_heads(
    *,
    target: str | Path | None = None,
    data: str | Path | None = None,
    output_dir: str | Path | None = None,
    settings: Settings | None = None,
) -> TrainedHeads:
    """Train MTP heads on a frozen target, or go on where `output_dir` stopped.

    Args:
        target: folder or hub id of the model (`model.path`); None for the shipped one.
        data: training text (`data.path`); None for what the shipped target wrote.
        output_dir: the run's folder; None for a new one below `runs/`.
        settings: further keys of `train.py` and their values, such as
            `{"trainer.max_steps": 50, "objective": "ttt", "objective.loss": "kl"}`.

    Raises:
        ConfigError: a key or value is wrong, one line per fault; or the GPU is too small.
        EnvironmentFault: the extra `train` is not installed, or a GPU is missing.
        IntegrityError: data or a checkpoint is damaged.
    """
    given = {"model.path": target, "data.path": data, "output_dir": output_dir}
    with extras_needed(), keys_are_settings():
        config = _compose(TrainConfig, given, settings)
        if config.task != "heads" or config.launcher.kind != "local":
            raise ConfigError(
                "train_heads takes task=heads and launcher=local, got "
                f"task={config.task} and launcher={config.launcher.kind}; run train.py for others."
            )
        check_inputs(config)
        from mtp_research.app.training_fit import require_memory
        from mtp_research.studies.matrix_cell import decode_probe
        from mtp_research.training import loop

        require_memory(config)
        with run_folder(config) as folder:
            figures = loop.train_heads(
                config,
                folder,
                decode_eval=decode_probe(config),
                on_start=partial(describe_run, config, folder),
            )
    return TrainedHeads(folder, figures, config.model)


def evaluate(
    heads: "str | Path | TrainedHeads | None",
    *,
    target: str | Path | None = None,
    prompts: str | Path | None = None,
    output_dir: str | Path | None = None,
    settings: Settings | None = None,
) -> Evaluation:
    """Decode prompts under each policy and without drafts, print the tables, write `results.json`.

    Args:
        heads: folder of heads, what `train_heads` returned, or "oracle" (every draft right); None
            makes every draft wrong.
        target: folder or hub id of the model; None for the one that `heads` were trained on just
            now, else the shipped one.
        prompts: file or folder (`prompts.path`); None for the shipped ones.
        output_dir: the run's folder; None for a new one below `results/`.
        settings: further keys of `eval.py` and their values, such as
            `{"spec.k": 3, "spec.policy": ["eagle", "training"]}`.

    Raises:
        ConfigError: a key or value is wrong, one line per fault.
        EnvironmentFault: the extra `train` is not installed, or a GPU is missing.
        IntegrityError: a file is damaged.
    """
    if isinstance(heads, TrainedHeads):
        target, heads = target or heads.model.path, heads.folder
    elif heads is not None and not isinstance(heads, str | Path):
        raise ArgumentTypeError(
            "heads must be a folder, what train_heads returned, 'oracle' or None, got one of type "
            f"{type(heads).__name__}; write it with heads.save_pretrained(FOLDER)."
        )
    given = {"model.path": target, "prompts.path": prompts, "output_dir": output_dir}
    with extras_needed(), keys_are_settings():
        config = _compose(EvalConfig, given, {**(settings or {}), "spec.head": heads})
        if config.task != "evaluate":
            raise ConfigError(
                f"evaluate takes task=evaluate, got task={config.task}; run eval.py for others."
            )
        check_inputs(config)
        from mtp_research.evaluation.run import evaluate as evaluation

        with run_folder(config) as folder:
            start = partial(describe_run, config, folder)
            figures = evaluation.evaluate(config, folder, on_start=start)
    return Evaluation(folder, figures)


def _compose(
    schema: type[ConfigT], given: Mapping[str, str | Path | None], settings: Settings | None
) -> ConfigT:
    """The configuration of named arguments and settings, by the rules of the command line."""
    settings = dict(settings or {})
    for key, value in given.items():
        if value is None:
            continue
        if not isinstance(value, str | Path):
            raise ArgumentTypeError(
                f"{key} must be a path as text, got one of type {type(value).__name__}; pass the "
                "folder, such as target.path."
            )
        if key in settings:
            raise ConfigError(f"{key} is given twice, in settings too; leave it out of settings.")
        settings[key] = value
    if given["model.path"] is not None and "model" not in settings:
        name, family = described_target(resolve_path(str(given["model.path"])))
        settings = {"model.name": name, "model.family": family} | settings
    return compose_config(schema, [f"{key}={_spelled(value)}" for key, value in settings.items()])


def _spelled(value: object, *, is_item: bool = False) -> str:
    """A Python value as a word of the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(_spelled(one, is_item=True) for one in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{key}:{_spelled(one, is_item=True)}" for key, one in value.items())
        return "{" + ",".join(pairs) + "}"
    if not isinstance(value, str | int | float | Path):
        raise ArgumentTypeError(
            "settings take text, numbers, paths, True, False, None, and lists and mappings of "
            f"them, got one of type {type(value).__name__}; write it as on the command line."
        )
    text = str(value)
    is_list = text.startswith(("[", "{"))  # written as on the command line
    if (is_item and not _PLAIN.fullmatch(text)) or ("," in text and not is_list):
        return "'" + text.replace("'", "\\'") + "'"
    return text

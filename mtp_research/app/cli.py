"""From a command line to a checked configuration, and from a failure to one line and an exit code.

`train.py` and `eval.py` are one call of `run_entry` each. Hydra (`hydra.main`) composes the YAML
groups under `conf/` on the schema of `mtp_research.config` and starts the jobs; below this file
there is no DictConfig. Ours around it: names are checked first, a run that is refused leaves
nothing behind, and `output_dir` owns the folder: `hydra.run.dir` and `hydra.sweep.dir` follow it.

With `-m` every job runs, whatever became of those before it: each has its folder
(`output_dir/0`, `output_dir/1`, ...) and its error line; the exit code is the highest of the jobs.
Only a request to stop (75, 130) ends the others as well.

With `launcher=slurm` the same command becomes a batch script, one torchrun a node (`app.slurm`).
Hydra's launcher for submitit works with `-m` only, and runs a pickled function in each Slurm task
where we need torchrun.
"""

import argparse
import functools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from safetensors import SafetensorError

from mtp_research.app import preflight
from mtp_research.app.overrides import (
    CONF_DIR,
    ENTRIES,
    Overrides,
    check_overrides,
    help_text,
    hydra_words,
    quote,
    read_flags,
)
from mtp_research.app.preflight import SPECIAL_HEADS, check_inputs
from mtp_research.app.slurm import launch
from mtp_research.config.launched import adopt_launch
from mtp_research.config.ranges import ALIASES, fault_line, schema_keys
from mtp_research.config.rules import validate
from mtp_research.config.schema import EvalConfig, TrainConfig
from mtp_research.models.loading.source import CONFIG_FILE, local_file, may_hold_modules
from mtp_research.runtime.errors import (
    CLOSED_OUTPUT_EXIT_CODE,
    CTRL_C_EXIT_CODE,
    ConfigError,
    EnvironmentFault,
    IntegrityError,
    Interrupted,
    NumericFault,
    drops_closed_output,
    escape_warnings,
    escaped,
    extras_needed,
)
from mtp_research.runtime.files import is_full_disk, run_lock
from mtp_research.runtime.provenance import (
    check_kind,
    is_first_rank,
    redact,
    resolve_path,
    write_error,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

STOPPED = (Interrupted.exit_code, CTRL_C_EXIT_CODE)
# We store the configuration ourselves and leave logging as Python has it.
HYDRA_SETTINGS = (
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.output_subdir=null",
    "hydra.job.chdir=false",
)

ConfigT = TypeVar("ConfigT", TrainConfig, EvalConfig)


def run_entry(
    schema: type[ConfigT],
    run: Callable[[ConfigT, Path], None],
    *,
    argv: Sequence[str] | None = None,
) -> int:
    """Run one command of the project.

    Args:
        schema: `TrainConfig` or `EvalConfig`.
        run: the work; takes the checked configuration and the run folder, prints its own result.
        argv: command-line words; those of the process by default.

    Returns:
        The process exit code: 0 fine, 2 configuration, 3 integrity, 4 environment, 5 numeric,
        75 interrupted but resumable, 130 Ctrl-C; with `-m` the highest one of the jobs.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        sys.stdout.write(f"{help_text(schema)}\n")
        return 0
    is_traced = "--traceback" in words
    escape_warnings()
    return _exit_code(lambda: _Command(schema, run, read_flags(words)).start(), is_traced)


def compose_config(schema: type[ConfigT], words: Sequence[str]) -> ConfigT:
    """Compose, type and check a configuration; relative paths also count from the repository root.

    Args:
        schema: `TrainConfig` or `EvalConfig`.
        words: overrides as typed, such as `spec.k=3` or `model=lab_tiny`.

    Returns:
        A plain dataclass.

    Raises:
        ConfigError: one line per fault.
    """
    flags = read_flags([])
    overrides = _with_target_name(check_overrides(schema, words).fixed)
    return _checked(schema, _compose(schema, overrides, flags), overrides)


class _Command(Generic[ConfigT]):
    """One command line: what Hydra is asked for, and what a job does."""

    def __init__(
        self, schema: type[ConfigT], run: Callable[[ConfigT, Path], None], flags: argparse.Namespace
    ) -> None:
        self.schema, self.run, self.flags = schema, run, flags

    def start(self) -> int:
        """Print what is asked for, or run one job or many."""
        flags = self.flags
        if flags.shell_completion or flags.hydra_help:
            line = os.environ.get("COMP_LINE", "")  # whole words as Hydra knows them
            os.environ["COMP_LINE"] = re.sub(r"(?<= )spec\.k(?==\S* )", ALIASES["spec.k"], line)
            return self._hydra(flags.overrides, lambda composed: None)
        is_many = flags.multirun or "hydra.mode=MULTIRUN" in flags.overrides
        folders = [Path(folder) for folder in (flags.config_path, flags.config_dir) if folder]
        overrides = check_overrides(self.schema, flags.overrides, is_many=is_many, folders=folders)
        overrides = overrides._replace(fixed=_with_target_name(overrides.fixed))
        composed = _compose(self.schema, overrides.fixed, flags)
        if is_many or str(composed.hydra.mode).endswith("MULTIRUN"):
            return self._run_many(overrides, _output_dir(_typed(self.schema, composed)))
        config = _checked(self.schema, composed, overrides.fixed)
        if flags.cfg or flags.info:
            return self._hydra(overrides.fixed, lambda composed: None)
        return self._run_one(config, overrides.fixed)

    def _run_one(self, config: ConfigT, overrides: Sequence[str]) -> int:
        check_inputs(config)
        _name_target(config, overrides)
        if _is_submitted(config, overrides, self.flags):
            return 0
        codes: list[int] = []
        with run_folder(config) as folder:

            def job(_: "DictConfig") -> None:
                codes.append(self._exit_code(lambda: self.run(config, folder)))

            place = folder if folder.is_dir() else Path.cwd()  # ranks that write nothing make none
            self._hydra([*overrides, f"hydra.run.dir={quote(str(place))}"], job)
        return codes[0]

    def _run_many(self, overrides: Overrides, base: Path) -> int:
        """Run every combination of the swept values, each as a job of its own."""
        from hydra.core.hydra_config import HydraConfig

        jobs: list[dict[str, object]] = []
        codes = [0]
        swept = {word.lstrip("+").partition("=")[0] for word in overrides.swept}

        def job(composed: "DictConfig") -> None:
            hydra = HydraConfig.get()
            typed = list(hydra.overrides.task)
            words = [word for word in typed if word.partition("=")[0] in swept]
            place = f"job {hydra.job.num} ({' '.join(words)}): "
            sys.stderr.write(f"{escaped(redact(place))}starts\n")
            code = self._exit_code(lambda: self._run_job(composed, typed, overrides), place=place)
            codes.append(code)
            jobs.append({"job": words, "folder": hydra.runtime.output_dir, "exit_code": code})
            if code in STOPPED:
                raise SystemExit(code)

        folder = f"hydra.sweep.dir={quote(str(base))}"
        self.flags.multirun = True
        try:
            with run_lock(base) if is_first_rank() else nullcontext():
                self._hydra([*overrides.fixed, *overrides.swept, folder], job)
        finally:  # a fault of the program itself, which Hydra raises after the last job, as well
            if jobs and is_first_rank():
                sys.stdout.write(f"{redact(json.dumps({'jobs': jobs}))}\n")
        return max(codes)

    def _run_job(self, composed: "DictConfig", typed: Sequence[str], overrides: Overrides) -> None:
        """One job of many: its folder is Hydra's, unless output_dir itself is swept."""
        from hydra.core.hydra_config import HydraConfig

        config = _checked(self.schema, composed, typed)
        if not any(word.startswith("output_dir=") for word in overrides.swept):
            config.output_dir = str(HydraConfig.get().runtime.output_dir)
            preflight.require_inside(HydraConfig.get().sweep.dir, config.output_dir)
        check_inputs(config)
        _name_target(config, typed)
        if not _is_submitted(config, typed, self.flags):
            with run_folder(config) as folder:
                self.run(config, folder)

    def _exit_code(self, work: Callable[[], int | None], place: str = "") -> int:
        return _exit_code(work, self.flags.traceback, place)

    def _hydra(self, overrides: Sequence[str], job: "Callable[[DictConfig], None]") -> int:
        import hydra

        flags, argv = self.flags, sys.argv

        def with_own_words(composed: "DictConfig") -> None:
            sys.argv = argv  # what a run records of itself is what was typed
            job(composed)

        name = flags.config_name or ENTRIES[self.schema]
        main = hydra.main(config_path=flags.config_path, config_name=name, version_base="1.3")
        _store(self.schema)
        words = [*overrides, *hydra_words(flags)]
        if not flags.shell_completion:
            words = [*HYDRA_SETTINGS, f"hydra.job.name={ENTRIES[self.schema]}", *words]
        sys.argv = [argv[0], *words]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # its exceptions come here, as one line
        try:
            with _hydra_faults(self.schema, overrides):
                main(with_own_words)()
        except SystemExit as stop:
            return int(stop.code or 0)
        finally:
            sys.argv = argv
            del os.environ["HYDRA_FULL_ERROR"]
        return 0


def _exit_code(work: Callable[[], int | None], is_traced: bool, place: str = "") -> int:
    """Do the work; a failure that a user can cause becomes a line and its exit code."""
    try:
        with extras_needed():
            code = work() or 0
            sys.stdout.flush()
            return code
    except (ConfigError, IntegrityError, EnvironmentFault, NumericFault, Interrupted) as fault:
        if is_traced:
            traceback.print_exc()
        write_error("\n".join(f"{place}{line}" for line in str(fault).splitlines()))
        return fault.exit_code
    except (OSError, SafetensorError) as fault:
        if isinstance(fault, BrokenPipeError) and drops_closed_output():
            return CLOSED_OUTPUT_EXIT_CODE
        if not is_full_disk(fault):
            raise
        if is_traced:
            traceback.print_exc()
        write_error(
            f"{place}output_dir must have room, got {' '.join(str(fault).split())}; free some and "
            "run the same command again, which goes on, or set output_dir=FOLDER."
        )
        return EnvironmentFault.exit_code
    except KeyboardInterrupt:
        write_error(f"{place}stopped by Ctrl-C.")
        return CTRL_C_EXIT_CODE


@functools.cache  # building it takes as long as reading all files of conf/
def _structured(schema: type) -> "DictConfig":
    from omegaconf import OmegaConf

    return OmegaConf.structured(schema)


@functools.cache  # Hydra's store is one of the process
def _store(schema: type) -> None:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name=f"{ENTRIES[schema]}_schema", node=schema)


def _compose(schema: type, overrides: Sequence[str], flags: argparse.Namespace) -> "DictConfig":
    """What a run would get, Hydra's own keys included; nothing is written."""
    from hydra import compose, initialize_config_dir  # more than the whole of --help

    _store(schema)
    name = flags.config_name or ENTRIES[schema]
    folders = [flags.config_path, *([flags.config_dir] if flags.config_dir else [])]
    folders.sort(key=lambda folder: not (Path(folder) / f"{name}.yaml").is_file())
    more = [f"hydra.searchpath=[{quote(f'file://{folder}')}]" for folder in folders[1:]]
    with _hydra_faults(schema, overrides), initialize_config_dir(folders[0], version_base="1.3"):
        return compose(name, overrides=[*more, *overrides], return_hydra_config=True)


def _typed(schema: type[ConfigT], composed: "DictConfig") -> ConfigT:
    """The plain dataclass; also of a file that names no schema, such as one of --cfg job."""
    from omegaconf import OmegaConf

    keys = [str(key) for key in composed if key != "hydra"]
    with _hydra_faults(schema, []):
        own = OmegaConf.masked_copy(composed, keys)
        config = OmegaConf.to_object(OmegaConf.merge(_structured(schema), own))
    assert isinstance(config, schema), f"compose must give {schema.__name__}, got {type(config)}"
    return config


def _checked(schema: type[ConfigT], composed: "DictConfig", overrides: Sequence[str]) -> ConfigT:
    config = _typed(schema, composed)
    _resolve_paths(config)
    if _is_own_target(overrides) and config.task != "target":
        _forget_architecture(config, overrides)
    if isinstance(config, TrainConfig) and _may_start_native(config):
        _adopt_conventions(config, overrides)
    for line in adopt_launch(config, typed=overrides, environ=os.environ):
        if is_first_rank():
            sys.stderr.write(f"{escaped(redact(line))}\n")
    validate(config)
    return config


@contextmanager
def _hydra_faults(schema: type, overrides: Sequence[str]) -> Iterator[None]:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as fault:
        raise ConfigError(_compose_fault(schema, fault, overrides)) from None


def _may_start_native(config: TrainConfig) -> bool:
    """Whether the target's own modules may be the start; needs no torch."""
    if config.head.init != "auto":
        return config.head.init == "native"
    file = local_file(config.model.path, CONFIG_FILE)
    uses_head = config.task != "target" and config.head.path is None
    return uses_head and file is not None and may_hold_modules(file.parent)


def _adopt_conventions(config: TrainConfig, words: Sequence[str]) -> None:
    """Take what the target's own modules need from its files, unless it was typed, in place."""
    from mtp_research.heads.native import adopt_conventions  # imports torch

    keys = _keys(words)
    typed = {key.removeprefix("head.") for key in keys if key.startswith("head.")}
    if "head" in keys:  # a file of the group, which is chosen for its number of modules
        typed.add("num_mtp_modules")
    adopt_conventions(config.head, path=config.model.path, typed=typed)


def _is_own_target(words: Sequence[str]) -> bool:
    """Whether the overrides give the target by `model.path`, and no model of `conf/`."""
    return "model.path" in _keys(words) and "model" not in _keys(words)


def _forget_architecture(config: TrainConfig | EvalConfig, words: Sequence[str]) -> None:
    """Take the default model's away, in place, unless some of it was typed."""
    if not any(key.startswith("model.architecture") for key in _keys(words)):
        config.model.architecture = {}


def _with_target_name(words: Sequence[str]) -> list[str]:
    """The overrides, and the name of a target of its own.

    Named before anything is composed, paths that hold the name are not those of the default model.
    """
    if not _is_own_target(words) or "model.name" in _keys(words) or "task=target" in words:
        return list(words)
    from hydra.core.override_parser.overrides_parser import OverridesParser

    paths = [word for word in words if word.lstrip("+").startswith("model.path=")]
    with _hydra_faults(EvalConfig, words):
        path = OverridesParser.create().parse_override(paths[-1]).value()
    name = preflight.target_name(str(path))
    return [*words, f"model.name={quote(name)}"] if name else list(words)


def _keys(words: Sequence[str]) -> set[str]:
    return {word.lstrip("+").partition("=")[0] for word in words}


def _name_target(config: TrainConfig | EvalConfig, words: Sequence[str]) -> None:
    """Take family and, where it has none yet, name of a target of its own from it, in place."""
    keys = _keys(words)
    if not _is_own_target(words) or "model.family" in keys or config.task == "target":
        return
    name, config.model.family = preflight.described_target(config.model.path)
    if "model.name" not in keys:
        config.model.name = name


def _compose_fault(schema: type, fault: Exception, overrides: Sequence[str]) -> str:
    cause: BaseException = fault
    while cause.__cause__ is not None:
        cause = cause.__cause__
    key = str(getattr(cause, "full_key", None) or "").split("[")[0]
    item = schema_keys(schema).get(key)
    if item is None:
        return f"conf/ and overrides must compose, got: {str(cause).splitlines()[0]}"
    values = [word.partition("=")[2] for word in overrides if word.partition("=")[0] == key]
    return fault_line(key, item, values[-1] if values else f"a wrong type in conf/ ({cause})")


def _resolve_paths(config: TrainConfig | EvalConfig) -> None:
    preflight.require_possible_paths(config)
    config.model.path = resolve_path(config.model.path)
    config.model.pretrain.corpus_dir = resolve_path(config.model.pretrain.corpus_dir)
    if isinstance(config, TrainConfig):
        config.data.path = resolve_path(config.data.path)
        config.data.hidden_cache = config.data.hidden_cache and resolve_path(
            config.data.hidden_cache
        )
        imported = config.data.import_hidden
        config.data.import_hidden = imported and resolve_path(imported)
        config.head.path = config.head.path and resolve_path(config.head.path)
        deepspeed = config.trainer.deepspeed_config
        config.trainer.deepspeed_config = deepspeed and resolve_path(deepspeed)
    else:
        config.prompts.path = config.prompts.path and resolve_path(config.prompts.path)
        config.spec.head = _resolve_head(config.spec.head)
        profile = config.spec.synthetic_profile
        config.spec.synthetic_profile = profile and resolve_path(profile)
        config.grid.head = [_resolve_head(head) for head in config.grid.head]


@contextmanager
def run_folder(config: TrainConfig | EvalConfig) -> Iterator[Path]:
    """Hold the folder of a run, which the run itself describes once it knows that it can go on.

    Ranks above 0 of a training only read.
    """
    folder = _output_dir(config)
    is_writer = is_first_rank()
    if isinstance(config, EvalConfig) and not is_writer:  # with model.tp_plan all ranks decode
        folder = folder / f"rank_{os.environ['RANK']}"
        folder.mkdir(parents=True, exist_ok=True)
    with run_lock(folder) if is_writer else nullcontext():
        if is_writer:
            check_kind(folder, config)
        if is_writer and isinstance(config, EvalConfig):
            # Other settings may not overwrite an evaluation. Imports torch.
            from mtp_research.evaluation.run.journal import check_resumable

            check_resumable(folder, config)
        yield folder


def _is_submitted(
    config: TrainConfig | EvalConfig, overrides: Sequence[str], flags: argparse.Namespace
) -> bool:
    if isinstance(config, EvalConfig) or config.launcher.kind == "local":
        return False
    given = {"--config-dir": flags.config_dir, "--config-name": flags.config_name}
    if flags.config_path != str(CONF_DIR):
        given["--config-path"] = flags.config_path
    words = [*overrides, *(word for pair in given.items() if pair[1] for word in pair)]
    output_dir = _output_dir(config)
    found = launch(config.launcher, words=words, output_dir=output_dir)
    sys.stdout.write(f"{json.dumps(found)}\n")
    return True


def _resolve_head(head: str | None) -> str | None:
    return head if head in SPECIAL_HEADS else resolve_path(str(head))


def _output_dir(config: TrainConfig | EvalConfig) -> Path:
    if config.output_dir is not None:
        preflight.require_possible("output_dir", config.output_dir)
        return Path(config.output_dir)
    preflight.require_file_name("model.name", config.model.name)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    if isinstance(config, TrainConfig):
        return Path("runs") / f"{config.task}-{config.model.name}-{stamp}"
    return Path("results") / f"eval-{config.model.name}-{stamp}"

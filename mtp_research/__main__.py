"""`mtp COMMAND ...`, or `python -m mtp_research COMMAND ...`: one door to every command.

Each has its own --help. `train` and `eval` are `train.py` and `eval.py`. Each task imports torch
itself: `--help` and refusals do without.
"""

import importlib
import json
import shlex
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from mtp_research import __version__
from mtp_research.config.schema import EvalConfig, TrainConfig
from mtp_research.runtime.compiling import keep_compiled_code
from mtp_research.runtime.errors import (
    CLOSED_OUTPUT_EXIT_CODE,
    CTRL_C_EXIT_CODE,
    EnvironmentFault,
    drops_closed_output,
    extras_needed,
)
from mtp_research.runtime.provenance import describe_run, is_first_rank, write_error
from mtp_research.runtime.threads import wait_passively

ConfigT = TypeVar("ConfigT", TrainConfig, EvalConfig)


class Command(NamedTuple):
    """What a word stands for; its module is imported when it is asked for."""

    module: str
    function: str
    about: str


COMMANDS = {
    "train": Command("mtp_research.__main__", "train", "heads on a frozen target (train.py)"),
    "eval": Command(
        "mtp_research.__main__", "evaluate", "decode prompts, measure length and speed (eval.py)"
    ),
    "regenerate": Command(
        "mtp_research.studies.regenerate", "main", "let a target write text that heads learn from"
    ),
    "report": Command("mtp_research.studies.draw_report", "main", "a page and charts of runs"),
    "tables": Command("mtp_research.studies.tables", "main", "compare runs; tables of studies"),
    "export": Command(
        "mtp_research.app.export_command", "main", "heads for vLLM, SGLang or transformers"
    ),
    "plan": Command(
        "mtp_research.app.plan_command", "main", "memory and time of a model, without weights"
    ),
    "doctor": Command("mtp_research.app.doctor", "main", "what this machine can run"),
    "trace": Command(
        "mtp_research.policy.simulate", "trace_main", "the rows of a policy, round by round"
    ),
    "audit": Command("mtp_research.policy.simulate", "main", "faulty KV slots of a policy"),
}


def main() -> int:
    """Run the command that the first word names; 2 when it names none."""
    wait_passively()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    door = "mtp" if Path(sys.argv[0]).stem == "mtp" else "python -m mtp_research"
    if name in ("-h", "--help", ""):
        lines = [f"  {word:<12}{command.about}" for word, command in COMMANDS.items()]
        usage = [f"usage: {door} COMMAND ...", "", *lines, "", f"{door} COMMAND --help says more."]
        (sys.stdout if name else sys.stderr).write("\n".join(usage) + "\n")
        return 0 if name else 2
    if name == "--version":
        sys.stdout.write(f"mtp-research {__version__}\n")
        return 0
    if name not in COMMANDS:
        near = "".join(f"; nearest: {word}" for word in get_close_matches(name, COMMANDS, n=1))
        write_error(f"{name} is not a command{near}; {door} --help lists {', '.join(COMMANDS)}.")
        return 2
    command = COMMANDS[name]
    sys.argv = [f"{door} {name}", *sys.argv[2:]]
    try:
        with extras_needed():
            code = getattr(importlib.import_module(command.module), command.function)()
            sys.stdout.flush()
            return code
    except EnvironmentFault as fault:
        write_error(str(fault))
        return fault.exit_code
    except BrokenPipeError:
        if not drops_closed_output():
            raise
        return CLOSED_OUTPUT_EXIT_CODE
    except KeyboardInterrupt:
        write_error("stopped by Ctrl-C.")
        return CTRL_C_EXIT_CODE


def train() -> int:
    """`train.py`: heads, a small target, cached hidden states or a matrix, by `task`."""
    return _enter(TrainConfig, run_training)


def evaluate() -> int:
    """`eval.py`: decode the prompts under each condition, or price faulty slots, by `task`."""
    return _enter(EvalConfig, run_evaluation)


def _enter(schema: type[ConfigT], run: Callable[[ConfigT, Path], None]) -> int:
    wait_passively()
    keep_compiled_code()
    try:
        with extras_needed():
            from mtp_research.app.cli import run_entry
    except EnvironmentFault as fault:
        write_error(str(fault))
        return fault.exit_code
    return run_entry(schema, run)


def run_training(config: TrainConfig, output_dir: Path) -> None:
    """Train, then print one JSON line; heads on a terminal: where they are, and what is next."""
    describe = partial(describe_run, config, output_dir)
    if config.task == "target":
        from mtp_research.pretrain.pretrain import pretrain_target

        result = pretrain_target(
            config.model,
            output_dir=output_dir,
            seed=config.seed,
            on_start=describe,
        )
    elif config.task == "cache":
        from mtp_research.training.setup import cache_hidden

        describe()
        result = cache_hidden(config)
    elif config.task == "matrix":
        from mtp_research.studies.policy_matrix import run_policy_matrix

        result = run_policy_matrix(config, output_dir, on_start=describe)
    else:
        from mtp_research.app.training_fit import require_memory
        from mtp_research.studies.matrix_cell import decode_probe
        from mtp_research.training.loop import train_heads

        require_memory(config)
        probe = decode_probe(config)
        result = train_heads(config, output_dir, decode_eval=probe, on_start=describe)
    if not is_first_rank():
        return
    if config.task == "heads" and sys.stdout.isatty():
        program = "python eval.py" if Path(sys.argv[0]).name == "train.py" else "mtp eval"
        words = [f"model.path={config.model.path}", f"spec.head={result['head']}", "spec.k=3"]
        sys.stdout.write(f"heads: {result['head']}\nnext:  {program} {shlex.join(words)}\n")
    else:
        sys.stdout.write(f"{json.dumps(result)}\n")


def run_evaluation(config: EvalConfig, output_dir: Path) -> None:
    """Evaluate; the last printed line is one JSON object, but on a terminal only where asked."""
    describe = partial(describe_run, config, output_dir)
    if config.task == "fault_price":
        from mtp_research.studies.fault_price import price_faults

        result = price_faults(config, output_dir, on_start=describe)
    else:
        from mtp_research.evaluation.run.evaluate import evaluate as measure

        result = measure(config, output_dir, on_start=describe)
        if sys.stdout.isatty() and not config.verbose:
            return
    if is_first_rank():
        sys.stdout.write(f"{json.dumps(result)}\n")


if __name__ == "__main__":
    raise SystemExit(main())

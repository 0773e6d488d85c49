"""The failures a user can cause or meet, each with the exit code of `train.py` and `eval.py`.

Exit codes: 0 fine, 2 configuration, 3 integrity, 4 environment, 5 numeric, 75 resumable. A message
says what was expected, what was got and which key or call fixes it.
"""

import difflib
import logging
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

CTRL_C_EXIT_CODE = 130  # where nothing goes on
CLOSED_OUTPUT_EXIT_CODE = 141  # that of a program which SIGPIPE ends

# The call that takes what a section of the configuration holds.
_PYTHON_CALLS = {
    "engine": "EngineConfig",
    "model": "load_target",
    "sampling": "SamplingParams",
    "spec": "SpecSettings",
}
_VERIFY_OPTIONS = (
    *("relaxed_top_n", "relaxed_delta", "relaxed_thinking_token_ids", "typical_epsilon"),
    *("typical_delta", "synthetic_rates", "synthetic_length", "synthetic_schedule"),
    *("synthetic_profile", "synthetic_condition"),
)
# Keys that another name stands for in Python, or none.
_PYTHON_NAMES = {
    "spec.k": "SpecSettings(num_speculative_tokens=...)",
    "spec.head": "the heads of SpecDecoder, from load_heads(PATH)",
    "spec.draft_p_min": "ConfidenceLength(p_min=...)",
    "spec.draft_table": "BatchTableLength(table=...)",
    "spec.draft_cost_ratio": "ExpectedGainLength(cost_ratio=...)",
    "spec.draft_vocabulary_size": "SpecSettings(draft_token_ids=...)",
    **{f"spec.{name}": f"VerifyOptions({name}=...)" for name in _VERIFY_OPTIONS},
    **dict.fromkeys(f"model.{name}" for name in ("architecture", "family", "keep_fp8", "name")),
    **dict.fromkeys(("model.pretrain", "sampling.ignore_eos")),
}
# What other programs call a key: what this one calls it, to be named where it is asked for.
_ELSEWHERE = {
    "lr": "learning_rate",
    "epochs": "max_steps",
    "num_epochs": "max_steps",
    "max_seq_length": "seq_len",
    "max_tokens": "max_new_tokens",
    "max_num_seqs": "max_num_requests",
    "gpu_memory_utilization": "memory_fraction",
}
_OPTION = "(command line:"  # of a message that names the argument itself
_KEY = re.compile(rf"(?<![\w.])(?:{'|'.join(_PYTHON_CALLS)})\.[a-z_]+\b(?!\.)")


class ConfigError(ValueError):
    """A configuration or argument is wrong.

    Messages name keys of the command line. A traceback, which is what a user of Python sees, has a
    note under it that says where each is set there; a command prints the message alone.
    """

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        keys = dict.fromkeys(_KEY.findall(message))
        named = [f"{key} is {name}" for key in keys if (name := _in_python(key)) is not None]
        if named and _OPTION not in message:
            self.add_note(f"In Python: {'; '.join(named)}.")


class ArgumentTypeError(ConfigError, TypeError):
    """An argument of a Python call is of another type than the call takes."""


class IntegrityError(ValueError):
    """A file is not what it claims to be: cut off, changed, lacking a tensor, invalid at a line."""

    exit_code = 3


class EnvironmentFault(RuntimeError):
    """The machine lacks something that was asked for: a GPU, a package, a reachable hub."""

    exit_code = 4


class DecoderClosed(EnvironmentFault):
    """A step of the decoder failed before; what its live requests hold cannot be trusted."""


class NumericFault(RuntimeError):
    """Training met non-finite values too many times in a row."""

    exit_code = 5


class Interrupted(RuntimeError):
    """The run was asked to stop, saved its state and can be resumed."""

    exit_code = 75


@contextmanager
def stopped_by_signals(phrase: str) -> Iterator[None]:
    """End the block as resumable at Ctrl-C, and at SIGTERM, which schedulers send before they kill.

    Args:
        phrase: what goes on how, behind "stopped by Ctrl-C; ".

    Raises:
        Interrupted: one of the two came.
    """
    # Python hands signals to the main thread alone, which alone may ask for them.
    is_main = threading.current_thread() is threading.main_thread()
    came = []

    def stop(*_: object) -> None:
        came.append("SIGTERM")
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop) if is_main else None
    try:
        yield
    except KeyboardInterrupt:
        name = came[0] if came else "Ctrl-C"
        raise Interrupted(f"stopped by {name}; {phrase}") from None
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: not Python's


# The module that an import asks for -> the extra of pyproject.toml that brings it.
EXTRAS = {
    "accelerate": "train",
    "datasets": "train",
    "filelock": "train",
    "hydra": "train",
    "markupsafe": "report",
    "matplotlib": "report",
    "omegaconf": "train",
    "pandas": "report",
    "rich": "train",
    "tokenizers": "train",
    "wandb": "train",
}

# What every environment of the project has: one without them is another environment.
CORE = (
    *("httpx", "huggingface_hub", "jinja2", "numpy", "packaging", "safetensors", "torch"),
    "transformers",
)


@contextmanager
def extras_needed() -> Iterator[None]:
    """Turn the failed import of a package into the line that says what brings it.

    Raises:
        EnvironmentFault: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as fault:
        package = (fault.name or "").split(".")[0]
        if package in CORE:
            raise EnvironmentFault(
                f"{package} must be installed for this, {sys.executable} has none; run it with the "
                "Python that `make venv` builds (source .venv/bin/activate), or pip install ."
            ) from fault
        extra = EXTRAS.get(package)
        if extra is None:
            raise
        raise EnvironmentFault(
            f"{fault.name} must be installed for this, got none; "
            f"pip install 'mtp-research[{extra}]'."
        ) from fault


def _in_python(key: str) -> str | None:
    section, _, name = key.partition(".")
    return _PYTHON_NAMES.get(key, f"{_PYTHON_CALLS[section]}({name}=...)")


@contextmanager
def keys_are_settings() -> Iterator[None]:
    """Faults name keys that the caller gave as settings: notes on other calls would mislead."""
    try:
        yield
    except ConfigError as error:
        error.__notes__ = []
        raise


def escaped(text: str) -> str:
    r"""Text of a file or an override for a terminal: control characters as `\x1b`."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _Escaping(logging.Formatter):
    """What a terminal gets of a log record, which may have several lines."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's text."""
        return "\n".join(map(escaped, super().format(record).splitlines()))


def escape_warnings() -> None:
    """Escape what Python prints of a warning where no logging is set up: they quote files too."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Escaping())


def rule_line(key: str, expected: str, got: object, fix: str) -> str:
    """The line for `key`, which must be as `expected` beside others; `fix` are the overrides."""
    return f"{key} {expected}, got {got}; set {fix}."


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `; nearest: a, b` for the closest valid names, or nothing when none is close."""
    known = sorted(set(choices))
    section, _, tail = word.rpartition(".")
    tails = {name.rpartition(".")[2] for name in known}
    tail = _ELSEWHERE.get(tail, tail)
    close_tails = difflib.get_close_matches(tail, sorted(tails), n=1, cutoff=0.75)
    found = [name for name in known if name.rpartition(".")[2] in close_tails]
    found.sort(key=lambda name: name.rpartition(".")[0] != section)
    found += difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    names = list(dict.fromkeys(found))[:3]
    return f"; nearest: {', '.join(names)}" if names else ""


def drops_closed_output() -> bool:
    """Whether nobody reads standard output any more (`| head`); then it goes nowhere from now on.

    Python would else write to it once more when it ends.
    """
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    gone = select.POLLERR | select.POLLHUP
    is_closed = any(flags & gone for _, flags in poll.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return is_closed

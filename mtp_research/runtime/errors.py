"""The failures a user can cause or meet, each with the exit code of `train.py` and `eval.py`.

Exit codes: 0 fine, 2 configuration, 3 integrity, 4 environment, 5 numeric, 75 resumable. A message
says what was expected, what was got and which key or call fixes it.
"""

import logging


class ConfigError(ValueError):
    """A configuration or argument is wrong."""

    exit_code = 2


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

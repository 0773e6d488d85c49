"""The parser of options such as `--out`, and a type of theirs.

Only the standard library is imported, so `--help` stays instant.
"""

import argparse
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from mtp_research.runtime.errors import nearest
from mtp_research.runtime.provenance import write_error


class OptionParser(argparse.ArgumentParser):
    """As argparse's; a fault is one line, which names what is near a misspelt option or choice."""

    _words: Sequence[str] = ()

    def __init__(self, prog: str | None = None, **settings: Any) -> None:
        super().__init__(prog, **settings, allow_abbrev=False)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """The options; ends the program with a line and code 2 where they are not legal.

        The parser of a subcommand is entered here, so that the line names the page of that.
        """
        self._words = sys.argv[1:] if args is None else args
        found, others = super().parse_known_args(self._words, namespace or argparse.Namespace())
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return found, others

    def error(self, message: str) -> NoReturn:
        """End the program with one line, without the usage, and code 2."""
        if unknown := self._unknown():  # first: what else is wrong may follow from it
            near = "".join(nearest(name, self._option_string_actions) for name in unknown)
            message = f"unrecognized arguments: {' '.join(unknown)}{near}"
        write_error(f"{message.removesuffix('.')}; {self.prog} --help lists the options.")
        self.exit(2)

    def _unknown(self) -> list[str]:
        words: Iterable[str] = self._words
        if self._subparsers:  # the words behind a subcommand are those of its own parser
            words = itertools.takewhile(lambda word: word.startswith("-"), words)
        found = (re.match(r"--?[A-Za-z][\w-]*(?==|$)", word) for word in words)
        names = dict.fromkeys(match[0] for match in found if match)
        return [name for name in names if name not in self._option_string_actions]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as fault:
            fault.message += nearest(str(value), map(str, action.choices or ()))
            raise


def positive(word: str) -> int:
    """The number that an option's word is, at least 1."""
    if not word.isdigit() or int(word) == 0:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {word!r}")
    return int(word)

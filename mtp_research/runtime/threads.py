"""How idle threads of torch wait: the one place that knows `OMP_WAIT_POLICY`.

By default they spin, and beside another process spinning takes the cores from those that work: 22
training steps in 6 minutes against 75 in 65 s. The library that reads the variable does so once,
when torch is imported, so every command sets it before. Importing this package sets nothing.
"""

import itertools
import os
from collections.abc import Sequence

_PACKAGE = "mtp_research"


def wait_passively() -> None:
    """Let idle threads sleep after a short wait, unless the user has set `OMP_WAIT_POLICY`.

    Sleeping at once more than halves the speed of small steps; the wait keeps most of it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def wait_passively_as_command(argv: Sequence[str], words: Sequence[str]) -> None:
    """`wait_passively` if a module of this package is being started by `python -m`.

    Python imports the package first, with `sys.argv` (`argv`) beginning with `-m`; the module may
    import torch on its first line. `words` are `sys.orig_argv`.
    """
    if list(argv[:1]) != ["-m"]:
        return
    pairs = itertools.pairwise(words)
    module = next((name for flag, name in pairs if _is_module_flag(flag)), "")
    if module.partition(".")[0] == _PACKAGE:
        wait_passively()


def _is_module_flag(word: str) -> bool:
    """`-m`, alone or behind other letters, as in `-um`."""
    return word.startswith("-") and not word.startswith("--") and word.endswith("m")

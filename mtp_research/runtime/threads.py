"""How idle threads of torch wait, and how many there are: the place that knows `OMP_WAIT_POLICY`.

By default they spin, and beside another process spinning takes the cores from those that work. To
sleep at once costs up to half of the speed where no other process runs. So commands look whether
one does; figures are in docs/log.md. The library that reads the variables does so once, when torch
is imported, so every command sets them before. Importing this package sets nothing.
"""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PACKAGE = "mtp_research"
_LOAD = Path("/proc/loadavg")
_NUM_LOOKS, _LOOK_EVERY_S = 10, 0.002
_QUIET_SPINS = "20000"  # about a tenth of a millisecond, more than most gaps between two operations
_SMALL = 20_000_000  # parameters; lab_deep has 7.6 M, SmolLM2-135M wants every core


def wait_passively() -> None:
    """Let idle threads sleep, unless the user has set `OMP_WAIT_POLICY`.

    Where no other process is at work they wait a little before, which keeps the speed of spinning.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        if not others_run():
            os.environ.setdefault("GOMP_SPINCOUNT", _QUIET_SPINS)


@contextmanager
def one_thread_if_small(num_parameters: int) -> Iterator[None]:
    """One thread while a small model decodes on a CPU, unless the user has set `OMP_NUM_THREADS`.

    Its products are too short to share: handing them over costs more than the second core gives,
    and a core that another process holds stalls every one of them (docs/log.md).
    """
    import torch  # not at the top: commands set the variables above before torch is imported

    if num_parameters > _SMALL or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    num_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_before)


def others_run() -> bool:
    """Whether another thread than this one is on a core most of the time, seen for 20 ms.

    True where the system does not tell (only Linux does, in /proc/loadavg): it is the safe answer.
    """
    num_busy = 0
    for _ in range(_NUM_LOOKS):
        try:
            running = int(_LOAD.read_text().split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):
            return True
        num_busy += running > 1
        time.sleep(_LOOK_EVERY_S)
    return num_busy > _NUM_LOOKS // 2


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

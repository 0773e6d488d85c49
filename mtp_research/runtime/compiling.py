"""Code that is compiled while a process runs: where it is kept, who compiles it, how much it was.

torch.compile turns graphs into kernels, whose sources its worker processes compile; Triton compiles
our own kernels in the process that launches them. Both keep what they made on disk, so that a later
process only has to look it up.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtp_research.runtime.files import user_cache

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_ASSEMBLER = "TRITON_PTXAS_PATH"
_FROZEN_BY_PYTHON = 1000  # at most: 375 objects in 3.12, none in 3.11 and 3.13
_are_ours_frozen = _are_others_frozen = False
_num_kernels = 0


def keep_compiled_code() -> None:
    """Let torch.compile keep its code in the user's cache folder, unless the user names another.

    Its own default lies among temporary files, which a machine loses when it starts anew.
    """
    os.environ.setdefault(_CACHE, str(user_cache("compiled")))


def start_compilers() -> None:
    """Start the workers of torch.compile beside what this thread goes on to do, such as loading.

    Each of them imports torch first, for which the first compilation would wait.
    """
    if importlib.util.find_spec("triton") is not None:  # else there is nothing for them to do
        name = "torch._inductor.async_compile"
        threading.Thread(target=lambda: importlib.import_module(name).maybe_warm_pool()).start()


def share_assembler() -> None:
    """Let Triton assemble all kernels with the program that comes with torch, if one does.

    torch.compile names it to Triton only once it compiles a graph, and it is part of what Triton
    knows a kernel by: our own kernels, compiled after that, would not be found by the next process,
    which finds its graphs on disk and so never names it.
    """
    import torch

    assembler = Path(torch.__file__).parent / "bin" / "ptxas"
    if os.access(assembler, os.X_OK):
        os.environ.setdefault(_ASSEMBLER, str(assembler))


@contextlib.contextmanager
def old_objects_kept() -> Iterator[None]:
    """Python's cycle collector leaves alone what is there already, for which it is run in vain.

    Those are the objects of libraries and compiled code. Compilers make so many new ones that all
    would be looked through again and again, at .4 s each time; decoding makes few, but one such
    time is as long as forty steps. Where the process has set objects aside by itself nothing is
    done from then on: they could not be told from ours when these are given back. Python counts
    them one by one, 40 ms for those of torch and transformers, so that it is asked once.
    """
    global _are_others_frozen, _are_ours_frozen
    if not (_are_ours_frozen or _are_others_frozen):
        _are_others_frozen = gc.get_freeze_count() > _FROZEN_BY_PYTHON
    if _are_ours_frozen or _are_others_frozen:
        yield
        return
    gc.freeze()
    _are_ours_frozen = True
    try:
        yield
    finally:
        gc.unfreeze()
        _are_ours_frozen = False


def count_kernels() -> None:
    """Let `num_compilations` count our own kernels from here on; others may listen as well."""
    from triton import knobs

    others = knobs.compilation.listener
    if getattr(others, "counts_for_us", False):
        return

    def listen(**facts: Any) -> None:  # Triton's own, handed on
        global _num_kernels
        _num_kernels += not facts["cache_hit"]
        if others is not None:
            others(**facts)

    listen.counts_for_us = True
    knobs.compilation.listener = listen


def num_since(before: int | None, now: int | None) -> int | None:
    """How many more there are; None where nothing is counted."""
    return None if before is None or now is None else now - before


def num_compilations() -> int:
    """Compilations in this process so far: graphs of torch.compile, and kernels of our own.

    Kernels that were found on disk do not count.
    """
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"] + _num_kernels

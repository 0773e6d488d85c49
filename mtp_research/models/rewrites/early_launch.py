"""Compiled kernels that start early, and that wait before they touch anything.

With Inductor's programmatic dependent launch a kernel starts while the one in front of it ends, and
waits for it where it first touches what that one wrote. Between kernels A, B, C that is not enough:
a B that touches nothing of A's (it fills a tensor, say) never waits and may end before A does, and
C, which waits for B, then reads what A has not written yet.

Here every generated kernel waits first. A kernel that has waited knows that the one in front has
ended, which had waited too, and so on: the order of a stream, with the launches themselves hidden.
Kernels launched the ordinary way begin after the end of the one in front and fit into the chain.
"""

from collections.abc import Callable
from typing import Any

import torch

from mtp_research.runtime.errors import ConfigError

_WRAPPED = ("_filter_pdl", "_enable_pdl_codegen", "GDC_WAIT")
_HOPPER = (9, 0)
_CACHE_TAG = "mtp_research: kernels wait first"


def compile_options(*, overlaps: bool) -> dict[str, str | int | bool | Callable[..., object]]:
    """Options of `torch.compile`, from here on with kernels that wait first where they overlap.

    Args:
        overlaps: kernels start while the one in front ends; before Hopper that changes nothing.

    Raises:
        ConfigError: on Hopper, a PyTorch that writes its waits in another way than known here.
    """
    overlaps = overlaps and _wait_first()
    return {"triton.enable_pdl": overlaps}


def _wait_first() -> bool:
    """Move the wait of Inductor's kernels to their first line, once and for all in this process.

    Returns False where that cannot be done and nothing would overlap anyway.
    """
    from torch._inductor.codegen.triton import TritonKernel

    known = [hasattr(TritonKernel, name) for name in _WRAPPED]
    if not all(known):
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < _HOPPER:
            return False
        raise ConfigError(
            f"engine.overlap_launches: expected a PyTorch whose TritonKernel has {_WRAPPED} (2.11 "
            f"to 2.13 do), got {torch.__version__}; set engine.overlap_launches=false."
        )
    keep_one, wait = TritonKernel._filter_pdl, TritonKernel.GDC_WAIT
    if hasattr(keep_one, "moves_the_wait"):
        return True

    def filter_then_move(kernel: TritonKernel, code: Any) -> None:
        keep_one(kernel, code)
        if kernel._enable_pdl_codegen():
            others = [line for line in code._lines if not (isinstance(line, str) and wait in line)]
            code._lines = [wait, *others]

    filter_then_move.moves_the_wait = True
    TritonKernel._filter_pdl = filter_then_move
    # Kernels that an earlier process left in the disk cache have their waits elsewhere.
    torch.compiler.config.cache_key_tag += _CACHE_TAG
    return True

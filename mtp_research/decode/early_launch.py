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

from mtp_research.errors import ConfigError


def compile_options(*, overlaps: bool) -> dict[str, str | int | bool | Callable[..., object]]:
    """Options of `torch.compile`, from here on with kernels that wait first where they overlap.

    Args:
        overlaps: kernels start while the one in front ends; before Hopper that changes nothing.

    Raises:
        ConfigError: this PyTorch writes its waits in another way than those known here.
    """
    if overlaps:
        _wait_first()
    return {"triton.enable_pdl": overlaps}


def _wait_first() -> None:
    """Move the wait of Inductor's kernels to their first line, once and for all in this process."""
    from torch._inductor.codegen.triton import TritonKernel

    keep_one = getattr(TritonKernel, "_filter_pdl", None)
    wait = getattr(TritonKernel, "GDC_WAIT", None)
    if keep_one is None or wait is None:
        raise ConfigError(
            "engine.overlap_launches: expected a PyTorch whose compiled kernels wait by "
            "TritonKernel._filter_pdl (2.11 to 2.13 do), got another; set "
            "engine.overlap_launches=false."
        )
    if hasattr(keep_one, "moves_the_wait"):
        return

    def filter_then_move(kernel: TritonKernel, code: Any) -> None:
        keep_one(kernel, code)
        if kernel._enable_pdl_codegen():
            others = [line for line in code._lines if not (isinstance(line, str) and wait in line)]
            code._lines = [wait, *others]

    filter_then_move.moves_the_wait = True
    TritonKernel._filter_pdl = filter_then_move

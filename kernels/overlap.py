"""Parts of programs that start before the kernel in front of them has ended.

Where it sits: called by the programs of products, experts and attention whose launches overlap on
Hopper (`checks.overlapping`). What a kernel further in front wrote is there from the first line:
the one just in front has waited for it. What that one itself writes is there behind
`wait_in_front`.
"""

from __future__ import annotations

from mtp_research.kernels import checks

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    tl = None

LINE_BYTES = 128  # of the L2 cache


@checks.kernel_jit
def wait_in_front(OVERLAPS: tl.constexpr):
    """Wait for the end of the kernel in front; the next one may begin, and waits for this one."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@checks.kernel_jit
def ask_for(lines):
    """Have the cache lines at some addresses brought into the L2 cache, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )

"""Checks shared by the kernel wrappers, parts of launches that overlap, and `part_mark`.

Where it sits: every public wrapper in `kernels/` calls these before it launches anything, so that
a wrong call ends in one sentence instead of an illegal memory access. Each raises a `ValueError`
that names the argument, what was expected and what was got, reads host-side metadata only and never
synchronises with a device.
Letters: H / Hkv heads, Dk / Dv head dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, TypeVar

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without Triton runs the references
    triton = tl = None

if TYPE_CHECKING:
    from torch import Tensor

INVARIANT = "invariant"
BACKENDS = ("auto", INVARIANT, "reference", "triton")
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 512
MIN_BLOCK_SIZE = 16
LINE_BYTES = 128  # of the L2 cache
MAX_SHARED_TILES = 16_384  # tiles of a launch that several programs share

Kernel = TypeVar("Kernel", bound=Callable[..., None])


def kernel_jit(function: Kernel) -> Kernel:
    """`triton.jit`, or the bare function where Triton is missing (it is then never called)."""
    return function if triton is None else triton.jit(function)


def kernel_jit_once(*counts: str) -> Callable[[Kernel], Kernel]:
    """As `kernel_jit`, with code for any value of these arguments.

    Triton compiles anew where an argument is 1, and where it is a multiple of 16. Batch sizes are
    both, and a program takes up to a second to compile; for strides it is worth that.
    """
    if triton is None:
        return lambda function: function
    return triton.jit(do_not_specialize=counts)


def overlapping_rows(device: torch.device, *, are_settled: bool) -> dict[str, bool]:
    """As `overlapping`, for attention; `are_settled` as that of `AttentionRows`."""
    return {"READS_EARLY": are_settled, **overlapping(device)}


def overlapping(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch whose kernel waits by itself for the one in front of it.

    `OVERLAPS` says whether it may begin before that has ended (on Hopper); if so, Triton is told.
    """
    overlaps = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAPS": overlaps} | ({"launch_pdl": True} if overlaps else {})


@kernel_jit
def wait_in_front(OVERLAPS: tl.constexpr):
    """Wait for the end of the kernel in front; then the next one may begin, and waits for this one.

    So once the next one runs, all that is in front of this one has ended. A kernel may read before
    its own wait what is older than the nearest one in front that waits in this order, or was
    launched the ordinary way, and what no kernel writes. Nothing else.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@kernel_jit
def start_next_and_wait(OVERLAPS: tl.constexpr):
    """The other order, of small kernels: the next one has longer to ask for its weights.

    When the next one runs it knows no more than this one did in its first line: see
    `wait_in_front` for what it may read.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@kernel_jit
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


def is_interpreted(kernel: object) -> bool:
    """True if `kernel` runs in Triton's CPU interpreter (TRITON_INTERPRET=1 at its import)."""
    return triton is not None and not isinstance(kernel, triton.runtime.JITFunction)


def resolve_backend(
    backend: str, *, tensor: Tensor, kernel: object
) -> Literal["reference", "triton"]:
    """Turns `auto` into the backend that runs `tensor`, and refuses one that cannot.

    Args:
        backend: `auto` (Triton for CUDA tensors, else the reference), `invariant` (the same, with
            results that do not depend on the batch), `reference` or `triton`.
        tensor: any input of the call; its device decides.
        kernel: the jitted kernel, which knows whether it is interpreted.
    """
    if backend not in BACKENDS:
        choices = ", ".join(BACKENDS)
        raise ValueError(f"backend must be one of {choices}, got {backend!r}; use 'auto'.")
    if backend in ("auto", INVARIANT):
        return "triton" if tensor.is_cuda and triton is not None else "reference"
    if backend == "reference":
        return "reference"
    if triton is None:
        raise ValueError(
            "backend 'triton' needs the triton package, which does not import here; "
            "install triton or use backend='reference'."
        )
    if not tensor.is_cuda and not is_interpreted(kernel):
        raise ValueError(
            f"backend 'triton' needs CUDA tensors, got {tensor.device}; use backend='reference', "
            "or set TRITON_INTERPRET=1 before the first import of mtp_research.kernels to run "
            "Triton's interpreter."
        )
    return "triton"


def check_kernel_dtype(name: str, tensor: Tensor, *, kernel: object) -> None:
    """Refuses a dtype that the Triton kernels do not compute correctly."""
    if tensor.dtype not in KERNEL_DTYPES:
        supported = ", ".join(str(dtype) for dtype in KERNEL_DTYPES)
        raise ValueError(
            f"{name} dtype must be one of {supported} for backend 'triton', got {tensor.dtype}; "
            "use backend='reference'."
        )
    if tensor.dtype == torch.bfloat16 and is_interpreted(kernel):
        raise ValueError(
            f"{name} dtype torch.bfloat16 is computed wrongly by Triton's interpreter, "
            "expected torch.float16 or torch.float32; use backend='reference'."
        )


def check_head_dim(name: str, head_dim: int, *, high: int = MAX_HEAD_DIM) -> None:
    """Refuses head dims outside the multiples of 8 in [8, `high`]."""
    if head_dim % 8 or not 8 <= head_dim <= high:
        raise ValueError(
            f"{name} must be a multiple of 8 in [8, {high}] for backend 'triton', "
            f"got {head_dim}; use backend='reference'."
        )


def check_block_size(block_size: int) -> None:
    """Refuses page sizes that are not a power of two of at least 16 tokens."""
    if block_size < MIN_BLOCK_SIZE or block_size & (block_size - 1):
        fix = max(MIN_BLOCK_SIZE, 1 << max(0, block_size).bit_length())
        raise ValueError(
            f"block_size must be a power of two >= {MIN_BLOCK_SIZE} for backend 'triton', "
            f"got {block_size}; set engine.block_size={fix} or use backend='reference'."
        )


def check_shape(name: str, tensor: Tensor, *, shape: tuple[int, ...], letters: str) -> None:
    """Refuses any shape but `shape`; `letters` names the dimensions, e.g. `[T, Hkv, Dk]`."""
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must have shape {letters} = {list(shape)}, got {list(tensor.shape)}."
        )


def check_rank(name: str, tensor: Tensor, *, letters: str) -> None:
    """Refuses a tensor whose number of dimensions differs from `letters`, e.g. `[T, H, Dk]`."""
    if tensor.dim() != letters.count(",") + 1:
        raise ValueError(f"{name} must have shape {letters}, got {list(tensor.shape)}.")


def check_dtype(name: str, tensor: Tensor, *, dtype: torch.dtype) -> None:
    """Refuses any dtype but `dtype`."""
    if tensor.dtype != dtype:
        raise ValueError(
            f"{name} must have dtype {dtype}, got {tensor.dtype}; convert it with .to({dtype})."
        )


def check_device(name: str, tensor: Tensor, *, device: torch.device) -> None:
    """Refuses a tensor on another device than the call's first argument."""
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}; move it there.")


def check_last_dim_contiguous(name: str, tensor: Tensor) -> None:
    """Refuses a tensor whose last dimension has a stride; the kernels take any stride elsewhere."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension for backend 'triton', "
            f"got strides {tensor.stride()}; call .contiguous() or use backend='reference'."
        )


def check_paged_cache(key_cache: Tensor, value_cache: Tensor, *, rows: Tensor) -> None:
    """Refuses a K/V pool whose layout, dtype or device does not fit the rows written or attending.

    `rows` is the call's first argument, `[T, Hkv or H, Dk]`.
    """
    letters = "[num_blocks, block_size, Hkv, D]"
    check_rank("key_cache", key_cache, letters=letters)
    check_rank("value_cache", value_cache, letters=letters)
    pool, value_dim = key_cache.shape[:3], value_cache.shape[3]
    check_shape("key_cache", key_cache, shape=(*pool, rows.shape[2]), letters=letters)
    check_shape("value_cache", value_cache, shape=(*pool, value_dim), letters=letters)
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_dtype(name, tensor, dtype=rows.dtype)
        check_device(name, tensor, device=rows.device)


def check_kernel_layout(
    rows: Tensor,
    *,
    key_cache: Tensor,
    value_cache: Tensor,
    kernel: object,
    max_head_dim: int = MAX_HEAD_DIM,
) -> None:
    """Refuses what the Triton kernels cannot run: dtypes, head dims, page sizes, strides."""
    check_kernel_dtype("key_cache", key_cache, kernel=kernel)
    check_head_dim("Dk", key_cache.shape[3], high=max_head_dim)
    check_head_dim("Dv", value_cache.shape[3], high=max_head_dim)
    check_block_size(key_cache.shape[1])
    tensors = {"query or key": rows, "key_cache": key_cache, "value_cache": value_cache}
    for name, tensor in tensors.items():
        check_last_dim_contiguous(name, tensor)


def launch_device(tensor: Tensor) -> AbstractContextManager[None]:
    """The context that makes Triton launch on `tensor`'s GPU; does nothing for a CPU tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 132, the H200's, for a CPU (interpreted kernels)."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache
def arrivals(device: torch.device) -> Tensor:
    """`[MAX_SHARED_TILES]` int32: programs that have done their part of a tile of a launch.

    Zeros between launches, as the last program of a tile puts its count back; so one stream at a
    time may use them, and a kernel only once the one in front of it has ended.
    """
    return torch.zeros(MAX_SHARED_TILES, dtype=torch.int32, device=device)


def check_optional_range(name: str, value: int | None, *, low: int, high: int | None) -> None:
    """Refuses an int outside `[low, high]`; None passes, and `high=None` leaves it open above."""
    if value is not None and (value < low or (high is not None and value > high)):
        allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {allowed} or None, got {value}.")


def triton_version() -> str:
    """Triton's version, or `none` where it does not import."""
    return "none" if triton is None else triton.__version__


MARK_KERNEL_NAME = "_part_mark_kernel"
MARK_BLOCK, MARK_WARPS = 4096, 4


def part_mark_ref(values: Tensor) -> Tensor:
    """Plain PyTorch, see `part_mark`; any dtype, any device."""
    return values.clone()


@kernel_jit
def _part_mark_kernel(
    values,  # [num_values]
    out,  # [num_values], written
    num_values,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < num_values
    tl.store(out + place, tl.load(values + place, mask=mask), mask=mask)


def part_mark(values: Tensor, *, backend: str = "auto") -> Tensor:
    """A copy of `values`, of any shape, that marks a place in a captured step on a GPU.

    `bench_decode --split` puts one between the parts of a step and cuts the replay's trace where it
    finds `MARK_KERNEL_NAME`; a step that is not measured in this way has none.

    Args:
        values: copied whole, so that nothing that reads the result can start before the mark.
        backend: `auto`, `reference` or `triton`.
    """
    if resolve_backend(backend, tensor=values, kernel=_part_mark_kernel) == "reference":
        return part_mark_ref(values)
    values = values.contiguous()
    out = torch.empty_like(values)
    if values.numel():
        with launch_device(values):
            grid = (triton.cdiv(values.numel(), MARK_BLOCK),)
            _part_mark_kernel[grid](
                values, out, values.numel(), BLOCK=MARK_BLOCK, num_warps=MARK_WARPS
            )
    return out

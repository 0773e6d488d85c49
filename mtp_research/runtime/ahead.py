"""Our own Triton programs compiled ahead, by another process, while this one compiles a step.

Triton compiles a program when it is first launched, in the process that launches it: .2 to 1.3 s
each, one after the other. What will be launched is known earlier, when torch.compile traces the
code of a step: an op's fake implementation then says which kernel wrappers it will call
(`foresee`), for the numbers of rows of all steps to come. The other process calls them on tensors
without memory, and a launch there only compiles. Triton keeps its programs on disk, where this
process finds them. What was not foreseen, or is not ready yet, is compiled here as ever, so that
nothing but time depends on it.

Letters: T packed rows, R requests.
"""

import contextlib
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor

_LEAST_CPUS = 4  # with fewer the other process would only slow this one down
_FREE_BYTES = 2 << 30  # of GPU memory that must be left: the other process has a context there
_MOST_COMPILERS = 8


class PassSize(NamedTuple):
    """What the launches of a pass are sized by."""

    num_rows: int  # T
    num_requests: int  # R
    longest: int  # rows of one request at most


class _Foresight:
    """The passes to come, and where calls are sent."""

    def __init__(self, passes: Collection[PassSize], send: Callable[[bytes], object]) -> None:
        self.passes = passes
        self._send, self._sent = send, set[bytes]()

    def send(self, call: bytes) -> None:
        if call not in self._sent:  # code is traced several times
            self._sent.add(call)
            self._send(call)


_active: _Foresight | None = None


def foreseen_passes() -> Collection[PassSize]:
    """Passes of the steps that are being compiled; none where nobody compiles ahead."""
    return () if _active is None else _active.passes


def foreseen_rows() -> list[int]:
    """Numbers of rows of these passes, ascending."""
    return sorted({size.num_rows for size in foreseen_passes()})


def foresee(
    rows: int | SymInt, num_rows: int, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Say that `function` will be called so, with `num_rows` where tensors have `rows` of them.

    Args:
        rows: as the compiler traces it: a symbol, or a number if the code holds for it alone.
        num_rows: of a pass to come.
        function: of a module that is quick to import; it must launch Triton kernels of ours and
            read no tensor on the host.
        args: of the call; of their tensors sizes, strides and dtypes count. A call with other
            symbols than `rows` in it is not sent.
        kwargs: likewise.
    """
    if _active is None or (isinstance(rows, int) and rows != num_rows):
        return
    with contextlib.suppress(TypeError):  # another symbol, which is no number
        _active.send(_packed((function, args, kwargs), rows=rows, num_rows=num_rows))


@contextlib.contextmanager
def programs_ahead(
    passes: Collection[PassSize],
    device: torch.device,
    *,
    send: Callable[[bytes], object] | None = None,
) -> Iterator[None]:
    """Foresee these passes on `device` while code is traced in the block.

    `send` takes the calls in place of another process (for tests). Without a GPU, with too few
    processors, where the GPU's memory is taken or no process starts, nothing is compiled ahead.
    """
    global _active
    with contextlib.ExitStack() as stack:
        if send is None and passes and _pays_on(device):
            with contextlib.suppress(OSError):  # no process could be started
                send = stack.enter_context(_compiler())
        _active = None if send is None else _Foresight(passes, send)
        try:
            yield
        finally:
            _active = None


def _pays_on(device: torch.device) -> bool:
    if device.type != "cuda" or (os.cpu_count() or 1) < _LEAST_CPUS:
        return False
    # Ranks of one machine launch the same: one of them compiles for all.
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    return is_first and torch.cuda.mem_get_info(device)[0] >= _FREE_BYTES


@contextlib.contextmanager
def _compiler() -> Iterator[Callable[[bytes], Future[None]]]:
    """Another process, ended with the block, and how it is sent a call without waiting for it."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdin is not None
    stdin, writer = process.stdin, ThreadPoolExecutor(1)

    def write(call: bytes) -> None:
        stdin.write(call)
        stdin.flush()

    try:
        yield lambda call: writer.submit(write, call)
    finally:
        process.kill()  # all that is needed is there; a writer that waits for it is released
        writer.shutdown(cancel_futures=True)
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        process.wait()


def _packed(call: object, *, rows: int | SymInt, num_rows: int) -> bytes:
    """`call` pickled, with the sizes of its tensors in place of their values."""

    def value(size: int | SymInt) -> int:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if isinstance(rows, SymInt):
            expression = expression.subs(rows.node.expr, num_rows)
        return int(expression)

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            if isinstance(obj, Tensor):
                sizes = tuple(map(value, obj.shape)), tuple(map(value, obj.stride()))
                return *sizes, obj.dtype, str(obj.device)
            return value(obj) if isinstance(obj, SymInt) else None

    packed = io.BytesIO()
    Pickler(packed).dump(call)
    return packed.getvalue()


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            return pid
        size, stride, dtype, device = pid
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


def main() -> None:
    """The other process: make the calls that come in, until they end."""
    import triton
    from torch._subclasses import FakeTensor, FakeTensorMode

    def compile_only(kernel: Any, grid: object) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            kernel.run(*args, grid=grid, warmup=True, **kwargs).future.add_done_callback(finish)

        return launch

    def finish(compiled: Future[Any]) -> None:
        """Build what Triton before 3.7 launches a program with, in C, too."""
        kernel = compiled.result()
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)

    triton.JITFunction.__getitem__ = compile_only
    FakeTensor.data_ptr = lambda _: 0  # as aligned as what torch allocates
    pool = ThreadPoolExecutor(min(_MOST_COMPILERS, (os.cpu_count() or 2) // 2))
    with pool, triton.AsyncCompileMode(pool), FakeTensorMode(), contextlib.suppress(EOFError):
        while True:
            function, args, kwargs = _Unpickler(sys.stdin.buffer).load()
            with contextlib.suppress(Exception):  # the others are of use without it
                function(*args, **kwargs)


if __name__ == "__main__":
    main()

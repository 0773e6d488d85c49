"""Triton kernels that Inductor writes for a function on a Hopper GPU, on a machine without one.

The function is traced on the CPU. Just before code is generated, its graph is moved to a GPU that
is described but not there; the kernels are compiled for sm_90, never loaded.
"""

import copy
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

_GPU = torch.device("cuda", 0)
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=227 * 1024,
    warp_size=32,
)
_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


class _GeneratedError(Exception):
    """The code is there; nothing is to be loaded."""


def generated_kernels(function: Callable[..., object], *args: object) -> dict[str, str]:
    """Source of each Triton kernel by name, of `function` compiled in one graph."""
    found: list[dict[str, str]] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> NoReturn:
        found.append(kernels_of_graph(graph, inputs))
        raise _GeneratedError

    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="_GeneratedError"):
        torch.compile(function, backend=backend, dynamic=False, fullgraph=True)(*args)
    torch._dynamo.reset()
    (kernels,) = found
    return kernels


def kernels_of_graph(graph: fx.GraphModule, inputs: list[Tensor]) -> dict[str, str]:
    """The same of a traced graph, as a backend of `torch.compile` is given it."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    wrappers: list[str] = []
    run = GraphLowering.run

    def run_on_gpu(lowering: GraphLowering, *inputs: object) -> object:
        assert isinstance(lowering.module, fx.GraphModule)
        return run(lowering, *_to_gpu(lowering.module, inputs))

    def generate(lowering: GraphLowering) -> None:
        wrappers.append(lowering.codegen()[0].value)
        raise _GeneratedError

    with (
        _described_gpu(),
        mock.patch.object(GraphLowering, "run", run_on_gpu),
        mock.patch.object(GraphLowering, "compile_to_module", generate),
        pytest.raises(Exception, match="_GeneratedError"),
    ):
        compile_fx(copy.deepcopy(graph), inputs)
    (wrapper,) = wrappers
    return dict(_KERNEL.findall(wrapper))


def watch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, Any]]:
    """What the compiler compares from here on, where kernels end with a reduction.

    Numbers that an operation makes, rows of its kernel, and numbers that a row is made of. Torch
    2.11 fails where these are not spelled alike: R (K + 1) and R K + R.
    """
    from torch._inductor import tiling_utils
    from torch._inductor.utils import sympy_product

    splits_of, found = tiling_utils.get_pw_red_splits, list[tuple[Any, Any, Any]]()

    def watch(node: Any, num_rows: Any, row_size: Any, **options: Any) -> object:
        if not node.is_reduction() and row_size != 1:
            found.append((sympy_product(node._body.sizes[0]), num_rows, row_size))
        return splits_of(node, num_rows, row_size, **options)

    monkeypatch.setattr(tiling_utils, "get_pw_red_splits", watch)
    return found


def are_spelled_alike(found: list[tuple[Any, Any, Any]]) -> bool:
    """Whether torch 2.11 takes what `watch_sizes` found."""
    return all(size in (num_rows, num_rows * row_size) for size, num_rows, row_size in found)


def compile_kernel(name: str, source: str, *, folder: Path) -> int:
    """Compile a kernel for sm_90 in every configuration that would be tried; how many these are."""
    from torch._inductor.runtime import triton_helpers

    path = folder / f"{name[:100]}.py"  # Triton reads the text of a kernel from its file
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    cache = mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder))
    with _described_gpu(), cache, mock.patch.object(triton_helpers, "set_driver_to_gpu"):
        spec.loader.exec_module(module)
        tuner = getattr(module, name)
        for config in tuner.configs:
            tuner._precompile_config(config)
    return len(tuner.configs)


@contextmanager
def _described_gpu() -> Iterator[None]:
    """Inductor and Triton are told of an H200; the test is skipped where they ask otherwise."""
    triton = pytest.importorskip("triton")
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton as triton_facts
    from triton.backends.compiler import GPUTarget

    answers = {
        "get_device_properties": _PROPERTIES,
        "get_compute_capability": 90,
        "current_device": 0,
        "is_available": True,
        "is_bf16_supported": True,
        "is_triton_capable": True,
    }
    driver = mock.Mock()
    driver.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    with ExitStack() as stack:
        try:
            patches = [(CudaInterface, name, answer) for name, answer in answers.items()]
            patches += [(CudaInterface.Worker, *patch[1:]) for patch in patches[:1]]
            patches.append((torch.cuda, "get_device_properties", _PROPERTIES))
            patches.append((torch.cuda, "get_device_capability", (9, 0)))
            for owner, name, answer in patches:
                # A function, also in a class: it is called on either, with a device or without.
                known = mock.Mock(return_value=answer)
                stack.enter_context(mock.patch.object(owner, name, known))
            stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        except AttributeError as error:
            pytest.skip(f"this PyTorch or Triton asks for its GPU in another way: {error}")
        # Answers that earlier tests were given, and later ones must not be.
        facts = [fact for fact in vars(triton_facts).values() if hasattr(fact, "cache_clear")]
        for fact in (*facts, DeviceProperties.create):
            fact.cache_clear()
            stack.callback(fact.cache_clear)
        yield


def _to_gpu(graph: fx.GraphModule, inputs: tuple[object, ...]) -> list[object]:
    """Move a traced graph, in place, and return its inputs on the GPU."""

    def moved(value: object) -> object:
        if isinstance(value, FakeTensor):
            value.fake_device = _GPU
        return _GPU if isinstance(value, torch.device) else value

    for node in graph.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
        tree_map(moved, node.meta.get("val"))
    return [moved(value) for value in inputs]

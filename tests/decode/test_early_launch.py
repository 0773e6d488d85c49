"""Inductor's overlapping kernels start the next one, and wait before they touch memory."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config as inductor
from torch._inductor.codecache import compiled_fx_graph_hash
from torch._inductor.codegen.triton import TritonKernel

from mtp_research.models.rewrites.apply_rewrites import compile_options
from mtp_research.runtime.errors import ConfigError
from tests.inductor_kernels import compile_kernel, generated_kernels

WAIT = "tl.extra.cuda.gdc_wait()"
START_NEXT = "tl.extra.cuda.gdc_launch_dependents()"


def chain(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Kernels that read, fill, reduce in a loop and scatter, with library products between them."""
    first = torch.softmax(x @ weight, dim=-1)
    filled = torch.full((4096, 64), 3.0, device=x.device)
    counts = torch.zeros(64, device=x.device).index_add(0, first.argmax(-1) % 64, first[:, 0])
    return first @ weight + 1, filled, counts


@pytest.fixture
def sources() -> dict[str, str]:
    options = compile_options(overlaps=True)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(4096, 4096, generator=generator) for _ in range(2))
    with inductor.patch(options):
        return generated_kernels(chain, x[:64], weight)


def test_every_kernel_starts_the_next_one_and_waits_once(
    sources: dict[str, str], tmp_path: Path
) -> None:
    assert len(sources) >= 3
    assert [name for name, source in sources.items() if "tl.load" not in source]  # one only fills
    for name, source in sources.items():
        assert "'launch_pdl': True" in source
        before, wait, _ = source.split("@triton.jit")[1].partition(WAIT)
        assert wait, name
        assert START_NEXT in before, name
        assert "tl.load" not in before
        assert "tl.store" not in before
        assert source.count(WAIT) == 1
        assert source.count(START_NEXT) == 1
        assert compile_kernel(name, source, folder=tmp_path) >= 1


def test_without_overlap_nothing_waits() -> None:
    compile_options(overlaps=True)  # an earlier engine of this process
    x = torch.ones(64, 4096)
    with inductor.patch(compile_options(overlaps=False)):
        sources = generated_kernels(lambda x: torch.softmax(x, dim=-1), x)
    assert sources
    assert not [name for name, source in sources.items() if WAIT in source]


def test_pytorch_that_waits_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TritonKernel, "_enable_pdl_codegen")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert compile_options(overlaps=True) == {"triton.enable_pdl": False}  # nothing would overlap
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ConfigError, match=r"set engine\.overlap_launches=false"):
        compile_options(overlaps=True)
    assert compile_options(overlaps=False) == {"triton.enable_pdl": False}


def test_kernels_in_the_disk_cache_that_wait_elsewhere_are_not_taken() -> None:
    graph = fx.symbolic_trace(lambda x: x + 1)

    def key() -> str:
        return compiled_fx_graph_hash(graph, [torch.ones(8)], {}, [])[0]

    compile_options(overlaps=True)
    ours = key()
    assert ours == key()
    with torch.compiler.config.patch(cache_key_tag=""):  # as other processes have it
        assert ours != key()
    assert ours == key()


@pytest.mark.gpu
def test_captured_kernels_read_what_was_written() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(64, 4096, device="cuda", generator=generator) for _ in range(2))
    weight = weight.repeat(64, 1)
    expected = chain(x, weight)
    compiled = torch.compile(chain, dynamic=False, options=compile_options(overlaps=True))
    compiled(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compiled(x, weight)
    for _ in range(100):
        for tensor in found:
            tensor.fill_(float("nan"))  # what an earlier replay wrote must not do
        graph.replay()
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

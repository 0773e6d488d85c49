"""Programs compiled ahead: steps launch what was said before, and the other process compiles it.

The other process is tested with a stand-in for the GPU's driver and without an assembler; whether
programs are then found on disk shows on a GPU (docs/benchmarks.md, "From the command to the first
request").
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
import torch
from mtp_research.kernels.attention.attention_rows import AttentionRows, PagedKV, Scoring
from mtp_research.kernels.attention.paged_attention import attend_pages
from mtp_research.kernels.products.few_rows_product import FewRowsConfig, few_rows_product
from torch._subclasses import FakeTensorMode

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.graphs import decode_graphs
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.rewrites import products, region_pass
from mtp_research.runtime import ahead
from mtp_research.runtime.ahead import PassSize, foresee, programs_ahead
from tests import tiny
from tests.models.test_regions import count_compilations

ROOT = Path(__file__).parents[2]
CONFIG = FewRowsConfig(16, 16, 1, 2)
CUDA = torch.device("cuda", 0)
HALF = {"dtype": torch.bfloat16, "device": CUDA}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    yield from count_compilations(monkeypatch, lambda graph, _: graph.forward)


def said(call: tuple[object, ...]) -> bytes:
    """A call as it is sent, of tensors without symbols."""
    return ahead._packed(call, rows=0, num_rows=0)


class Watched:
    """A kernel wrapper whose calls, when a step makes them, must have been foreseen."""

    def __init__(self, function: Callable[..., object], foreseen: Collection[bytes]) -> None:
        self._function, self._foreseen = function, foreseen
        self.num_calls = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        assert said((self, args, kwargs)) in self._foreseen, (args, kwargs)
        self.num_calls += 1
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return str, (self._function.__name__,)


def choose(num_rows: int, num_outputs: int, *_: object, **__: object) -> FewRowsConfig | None:
    return CONFIG if num_rows <= 64 and num_outputs > 40 else None


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "policy", ["eagle", pytest.param("training", marks=pytest.mark.every_case)]
)
def test_what_steps_launch_was_foreseen(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    foreseen = set[bytes]()
    attention, product = Watched(attend_pages, foreseen), Watched(few_rows_product, foreseen)
    monkeypatch.setattr(
        decode_graphs, "programs_ahead", lambda *of: programs_ahead(*of, send=foreseen.add)
    )
    monkeypatch.setattr(region_pass, "attend_pages", attention)
    monkeypatch.setattr(products, "few_rows_product", product)
    monkeypatch.setattr(products, "runs_on", lambda _: True)
    monkeypatch.setattr(products, "has_config", lambda *of, **how: choose(1, *of) is not None)
    monkeypatch.setattr(products, "choose_config", choose)
    decoder = _decoder(policy)
    decoder.warm_up(SamplingParams(max_new_tokens=8, seed=0))
    assert attention.num_calls > 0
    assert product.num_calls > 0
    list(decoder.generate([[5, 6, 7, 8], [3, 4], [9, 8, 7]], max_new_tokens=8))


def _decoder(policy: str) -> SpecDecoder:
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    heads = tiny.tiny_heads(target, num_mtp_modules=2)
    engine = EngineConfig(
        **{"max_num_requests": 4, "max_model_len": 64, "deferred_output": True, "audit": False},
        **{"cuda_graphs": True, "compile": True, "capture_mixed": True},
        max_num_batched_tokens=64,
    )
    spec = SpecSettings(policy=policy, num_speculative_tokens=2)
    return SpecDecoder(target, heads, spec=spec, engine=engine)


# The other process on a machine without GPU: it says for which kernels it built a launcher.
_WITHOUT_GPU = """
import contextlib
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from mtp_research.runtime import ahead

class Driver:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    launcher_cls = lambda self, source, metadata: print(source.fn.__name__, flush=True)

CUDABackend.make_cubin = lambda *_: b""
triton.runtime.driver.set_active(Driver())
torch.cuda.device = contextlib.nullcontext
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
ahead.main()
"""


def test_other_process_compiles_each_program_once_whatever_else_fails(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    calls: list[bytes] = []
    with FakeTensorMode(), programs_ahead([PassSize(4, 2, 2)], CUDA, send=calls.append):
        weight, wrong = (torch.empty(64, depth, **HALF) for depth in (128, 64))
        for num_rows, of in ((4, wrong), (4, weight), (2, weight)):
            x = torch.empty(num_rows, 128, **HALF)
            foresee(num_rows, num_rows, few_rows_product, x, of, config=CONFIG)
        ints = {"dtype": torch.int32, "device": CUDA}
        rows = (torch.empty(2, 3, **ints), torch.empty(2, **ints), torch.empty(3, **ints))
        pages = PagedKV(*(torch.empty(8, 16, 2, 64, **HALF) for _ in range(2)))
        query = torch.empty(4, 4, 64, **HALF)
        attention = (query, pages, AttentionRows(*rows, 2), Scoring(0.1))
        foresee(4, 4, attend_pages, *attention, backend="auto")
        foresee(5, 4, attend_pages, *attention, backend="auto")  # code for 5 rows alone
    assert len(calls) == 4
    environment = {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "TRITON_INTERPRET": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_GPU],
        input=b"".join(calls),
        env=os.environ | environment,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    # Programs for 4 and 2 rows are the same.
    assert set(done.stdout.decode().split()) == {"few_rows_kernel", "attention_kernel"}
    assert len(list(tmp_path.rglob("few_rows_kernel.ptx"))) == 1


@pytest.mark.parametrize("program", ["/bin/false", "/no/such/python"])
def test_process_that_ends_at_once_or_never_starts_changes_nothing(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_pays_on", lambda _: True)
    monkeypatch.setattr(ahead.sys, "executable", program)
    large = [PassSize(n, n, 1) for n in range(1, 2000)]  # more than a pipe holds
    with programs_ahead(large, CUDA):
        for size in large:
            foresee(size.num_rows, size.num_rows, print, torch.empty(size.num_rows))
    assert ahead.foreseen_passes() == ()


@pytest.mark.parametrize(
    ("device", "cpus", "free", "rank", "pays"),
    [
        ("cuda", 4, 2 << 30, "0", True),
        ("cpu", 4, 2 << 30, "0", False),
        ("cuda", 3, 2 << 30, "0", False),
        ("cuda", 4, (2 << 30) - 1, "0", False),
        ("cuda", 4, 2 << 30, "1", False),
    ],
)
def test_where_it_pays(
    device: str, cpus: int, free: int, rank: str, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 0))
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert ahead._pays_on(torch.device(device)) == pays

"""What Triton's kernels cannot run is refused by key, before a pool is planned."""

import re

import pytest
import torch
from mtp_research.kernels import checks

from mtp_research.config.schema import EngineConfig
from mtp_research.decode import build
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.family import NO_PAGES, LayerGeometry
from mtp_research.runtime.errors import ConfigError
from tests import tiny

HEADS = LayerGeometry("heads", 2, 64, 64)
LATENT = LayerGeometry("latent", 1, 576, 512)
CPU = torch.device("cpu")


@pytest.fixture
def triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where `auto` is Triton."""

    def resolve(backend: str, **_: object) -> str:
        return "reference" if backend == "reference" else "triton"

    monkeypatch.setattr(checks, "resolve_backend", resolve)


def require(*layers: LayerGeometry, dtype: torch.dtype = torch.float16, **engine: object) -> None:
    build.require_kernel_support(
        layers or (HEADS,), dtype=dtype, device=CPU, engine=EngineConfig(**engine)
    )


@pytest.mark.parametrize(
    ("layers", "settings", "message"),
    [
        (
            [HEADS],
            {"dtype": torch.float64},
            "model.dtype=float64 does not fit engine.backend=auto: the KV pool's dtype must be one "
            "of torch.bfloat16, torch.float16, torch.float32 for backend 'triton', got "
            "torch.float64; use engine.backend=reference.",
        ),
        (
            [HEADS],
            {"block_size": 24, "backend": "triton"},
            "engine.block_size=24 does not fit engine.backend=triton: block_size must be a power "
            "of two >= 16",
        ),
        (
            [HEADS, HEADS._replace(key_dim=20)],
            {},
            "model.path with a size of 20 in KV layer 1 does not fit engine.backend=auto: Dk must "
            "be a multiple of 8 in [8, 256]",
        ),
        ([HEADS._replace(value_dim=264)], {}, "Dv must be a multiple of 8 in [8, 256]"),
        ([LATENT._replace(key_dim=1088, value_dim=1024)], {}, "L must be a multiple of 8 in [8, 5"),
        ([LATENT._replace(key_dim=516)], {}, "P must be a multiple of 8 in [8, 256]"),
    ],
    ids=["dtype", "block-size", "key", "value", "latent", "rotary"],
)
@pytest.mark.usefixtures("triton_runs")
def test_unsupported_value_is_refused_by_key_and_value(layers, settings, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        require(*layers, **settings)
    require(*layers, **settings | {"backend": "reference"})


@pytest.mark.usefixtures("triton_runs")
def test_what_the_kernels_run_passes() -> None:
    require(HEADS, LATENT, NO_PAGES)


def test_reference_runs_everything() -> None:
    require(HEADS._replace(key_dim=20), dtype=torch.float64, block_size=4)


@pytest.mark.usefixtures("triton_runs")
def test_decoder_refuses_before_the_pool_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*_: object, **__: object) -> int:
        raise AssertionError("the pool was planned")

    monkeypatch.setattr(build, "plan_num_blocks", plan)
    target = tiny.tiny_target("qwen3", dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"model\.dtype=float64 does not fit"):
        SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0))

"""Fixtures of the decode tests."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """On matrices this small a second thread only waits, and on a busy machine for long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[False, True], ids=["at_once", "deferred"])
def output_timing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test twice: the host learns tokens at once, or one step late. Returns whether late."""
    init = SpecDecoder.__init__

    def init_with_timing(self: SpecDecoder, *args, engine=None, **kwargs) -> None:
        engine = dataclasses.replace(engine or EngineConfig(), deferred_output=request.param)
        init(self, *args, engine=engine, **kwargs)

    monkeypatch.setattr(SpecDecoder, "__init__", init_with_timing)
    return request.param

"""Fixtures of the decode tests."""

import dataclasses
import math
from collections import defaultdict
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a grid that runs with both timings keep every other cell: each value meets both.

    A grid is all combinations of two or more parameters beside the timing; other tests keep all.
    """
    grids: dict[tuple[object, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and "output_timing" in item.fixturenames:
            grids[item.path, item.originalname].append(item)
    dropped = set()
    for cells in grids.values():
        params = [cell.callspec.params for cell in cells]
        columns = {_numbered([one[name] for one in params]) for name in params[0]}
        axes = [column for column in columns if max(column)]
        if len(axes) > 2 and math.prod(max(axis) + 1 for axis in axes) == len(cells):
            rows = zip(*axes, strict=True)
            dropped |= {cell for cell, row in zip(cells, rows, strict=True) if sum(row) % 2}
    items[:] = [item for item in items if item not in dropped]


def _numbered(values: list[object]) -> tuple[int, ...]:
    """Each value as its place among the different ones."""
    places: dict[int, int] = {}
    return tuple(places.setdefault(id(value), len(places)) for value in values)


@pytest.fixture(params=[False, True], ids=["at_once", "deferred"])
def output_timing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test twice: the host learns tokens at once, or one step late. Returns whether late."""
    init = SpecDecoder.__init__

    def init_with_timing(self: SpecDecoder, *args, engine=None, **kwargs) -> None:
        engine = dataclasses.replace(engine or EngineConfig(), deferred_output=request.param)
        init(self, *args, engine=engine, **kwargs)

    monkeypatch.setattr(SpecDecoder, "__init__", init_with_timing)
    return request.param

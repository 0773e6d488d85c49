"""Fixtures of the evaluation tests."""

from collections.abc import Iterator

import pytest

from mtp_research.evaluation.backends import own_backend
from mtp_research.evaluation.run import timed_decode


@pytest.fixture(scope="module", autouse=True)
def _no_warm_ups() -> Iterator[None]:
    """Few tests look at times, and warm-ups take as long as the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_backend, "warm_up", lambda *_, **__: 1)
        yield


@pytest.fixture
def warm_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of what is decoded before the clock runs."""
    monkeypatch.setattr(own_backend, "warm_up", timed_decode.warm_up)

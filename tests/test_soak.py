"""The soak in small, and that it finds a planted fault."""

import json

import pytest

from mtp_research.decode import build
from mtp_research.decode.schedule.blocks import PrefixCache
from tools import soak


@pytest.mark.parametrize("options", [[], ["--deferred", "--policy", "eagle"]], ids=["", "deferred"])
def test_soak_of_a_few_requests_finds_nothing(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert soak.main(["--requests", "200", *options]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["num_requests"] == 200
    assert report["num_preemptions"] > 5
    assert report["num_cached_tokens"] > 100
    assert report["num_aborted"] > 5
    assert report["violations"] == []


def test_soak_finds_blocks_shared_without_regard_to_the_tokens_behind_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Hasty(PrefixCache):
        """Forgets that module rows look K tokens ahead."""

        @property
        def num_following_tokens(self) -> int:
            return 0

    monkeypatch.setattr(build, "PrefixCache", Hasty)
    assert soak.main(["--requests", "100"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["num_dirty_rounds"] > 0


def test_slope_of_a_line_is_its_slope() -> None:
    assert soak.slope([(1, 2.0), (2, 4.0), (5, 10.0)]) == pytest.approx(2.0)
    assert soak.slope([(1, 2.0)]) == 0.0

"""The guard's comparison and its record; decoding itself is `make accept-guard`."""

import json
from pathlib import Path

import pytest

from mtp_research.evaluation import accept_guard
from mtp_research.evaluation.accept_guard import CASES, Measured, compare_rates, main, read_record
from mtp_research.evaluation.stats.bootstrap import Estimate

SHIPPED = accept_guard.REPOSITORY_ROOT / "assets" / "lab_tiny" / "acceptance_guard.json"


def changed(measured: list[Measured], value: float | None) -> list[Measured]:
    first = measured[0]
    rates = (Estimate(value), *first.rates[1:])
    return [first._replace(rates=rates), *measured[1:]]


def test_shipped_record_is_of_the_shipped_files_and_says_its_command() -> None:
    recorded = read_record(SHIPPED)
    assert tuple((one.head, one.policy) for one in recorded) == CASES
    assert all(len(one.rates) == 3 and one.num_rounds > 0 for one in recorded)
    assert json.loads(SHIPPED.read_text())["command"] == accept_guard.RECORD_COMMAND


def test_equal_rates_pass_and_a_moved_one_drifts() -> None:
    recorded = read_record(SHIPPED)
    grid, num_drifted = compare_rates(recorded, recorded)
    assert num_drifted == 0
    assert {row[-1] for row in grid.rows} == {"as recorded"}
    value = recorded[0].rates[0].value
    assert compare_rates(changed(recorded, value - 0.019), recorded)[1] == 0
    grid, num_drifted = compare_rates(changed(recorded, value - 0.021), recorded)
    assert num_drifted == 1
    assert grid.rows[0][-1] == "DRIFT"
    assert compare_rates(changed(recorded, None), recorded)[1] == 1
    assert compare_rates(recorded, recorded[1:])[1] == 3


def test_rate_outside_a_narrow_interval_drifts() -> None:
    then = [Measured("chain_n3", "eagle", 9, (Estimate(0.01, 0.008, 0.012),))]
    assert compare_rates(changed(then, 0.0079), then)[1] == 1
    assert compare_rates(changed(then, 0.0081), then)[1] == 0


@pytest.mark.parametrize(("shift", "code"), [(0.0, 0), (-0.3, 1)], ids=["same", "drift"])
def test_command_exits_by_the_comparison(
    shift: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded = read_record(SHIPPED)
    now = changed(recorded, recorded[0].rates[0].value + shift)
    monkeypatch.setattr(accept_guard, "measure", lambda: now)
    assert main([]) == code
    assert "p_3" in capsys.readouterr().out


def test_recorded_file_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = read_record(SHIPPED)
    monkeypatch.setattr(accept_guard, "measure", lambda: recorded)
    path = tmp_path / "guard.json"
    assert main(["--record", "--file", str(path)]) == 0
    assert read_record(path) == recorded


def test_record_of_other_files_or_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "guard.json"
    assert main(["--file", str(path)]) == 2
    stored = json.loads(SHIPPED.read_text())
    for text in ("{", "[]", json.dumps(stored | {"files": {}}), json.dumps(stored | {"schema": 9})):
        path.write_text(text)
        assert main(["--file", str(path)]) == 3
    errors = capsys.readouterr().err.splitlines()
    assert all("--record" in error for error in errors)

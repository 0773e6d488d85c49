import dataclasses
import json
from pathlib import Path

import pytest

from mtp_research.evaluation.report.stored import (
    Report,
    build_report,
    read_checked,
    read_runs,
    recompute,
    to_json,
    write_results,
)
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from tests.evaluation.generations import some_prompts, three_conditions


@pytest.fixture(scope="module")
def report() -> Report:
    return build_report(
        three_conditions(30),
        prompts=some_prompts(30),
        dtype="float32",
        seed=3,
        config={"spec": {"num_speculative_tokens": 3}},
        run={"command": "python eval.py"},
        skipped_prompts=("too-long",),
    )


def test_recomputed_figures_equal_the_stored_ones(tmp_path: Path, report: Report):
    path = write_results(tmp_path, report)
    stored = json.loads(path.read_text())
    again = json.loads(json.dumps(to_json(recompute(path))))
    assert again == stored
    assert recompute(path) == report


def test_file_from_before_full_batches_were_timed_still_loads(tmp_path: Path, report: Report):
    path = write_results(tmp_path, report)
    stored = json.loads(path.read_text())
    fields = ("full_wall_s", "num_full_tokens")
    for part in stored["conditions"]:
        assert all(part.pop(name) for name in fields)
        part["repeats"] = [{
            "wall_s": 4.0, "decode_wall_s": 2.0, "num_decode_tokens": 90, "device_s": None,
            "num_texts_equal": 30,
        }]  # fmt: skip
    path.write_text(json.dumps(stored))
    again = recompute(path)
    assert [s.speed.full.value for s in again.summaries] == [None] * 3
    assert again.summaries[1].speed.decode.value is not None
    stored["summary"] = to_json(again)["summary"]
    for summary in stored["summary"]["conditions"]:
        for name in [name for name in summary["speed"] if "full" in name]:
            assert summary["speed"].pop(name) is None
    path.write_text(json.dumps(stored))
    assert read_checked(path) == again


def test_recomputation_uses_the_counters_and_not_the_stored_summary(tmp_path: Path, report: Report):
    path = write_results(tmp_path, report)
    stored = json.loads(path.read_text())
    stored["conditions"][1]["records"][0]["num_accepted_per_round"][0] = 3
    stored["conditions"][1]["records"][1]["num_accepted_per_round"] = [0] * 20
    path.write_text(json.dumps(stored))
    figures = recompute(path).summaries[1].acceptance
    assert figures.num_accepted != report.summaries[1].acceptance.num_accepted


def test_results_keep_hashes_and_no_prompt_text(tmp_path: Path, report: Report):
    content = write_results(tmp_path, report).read_text()
    assert some_prompts(1)[0].sha256 in content
    assert "question 0" not in content


def test_tau_identity_holds_in_the_file(tmp_path: Path, report: Report):
    stored = json.loads(write_results(tmp_path, report).read_text())
    for summary in stored["summary"]["conditions"][1:]:
        figures = summary["acceptance"]
        positions = [figure["value"] for figure in figures["acceptance_rate_per_position"]]
        assert abs(figures["acceptance_length_micro"]["value"] - 1 - sum(positions)) < 1e-9


def test_rewriting_puts_a_new_file_in_place(tmp_path: Path, report: Report):
    """A reader that opened the old file keeps a whole one."""
    with write_results(tmp_path, report).open() as opened:
        write_results(tmp_path, dataclasses.replace(report, dtype="bfloat16"))
        assert json.load(opened)["dtype"] == "float32"


def test_failed_write_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
):
    path = write_results(tmp_path, report)
    before = path.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mtp_research.runtime.files.os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_results(tmp_path, dataclasses.replace(report, dtype="bfloat16"))
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["results.json"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "not a readable results file"),
        ('{"schema_version": 1}', "expected schema_version 2, got 1"),
        ('{"schema_version": 2}', "lacks or misnames a field: 'config'"),
        ('{"schema_version": 2, "conditions": [{"records": 3}]}', "lacks or misnames"),
    ],
    ids=["no json", "other version", "no field", "wrong type"],
)
def test_bad_results_file_is_refused(tmp_path: Path, content: str, fault: str):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(IntegrityError) as caught:
        recompute(path)
    assert fault in str(caught.value)


@pytest.mark.parametrize("content", ["[]", '{"machine": "one", "rows": []}'])
def test_file_of_another_kind_is_a_fault_of_the_command_line(tmp_path: Path, content: str):
    path = tmp_path / "speed.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="of an evaluation, got another file"):
        recompute(path)


def test_missing_results_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no results file"):
        recompute(tmp_path / "results.json")


def test_schema_page_names_every_stored_field(tmp_path: Path, report: Report):
    page = (REPOSITORY_ROOT / "docs" / "results_schema.md").read_text(encoding="utf8")
    stored = json.loads(write_results(tmp_path, report).read_text())
    parts = [
        stored,
        stored["bootstrap"],
        stored["prompts"][0],
        stored["conditions"][0],
        stored["conditions"][0]["records"][0],
        stored["formulas"],
    ]
    missing = {key for part in parts for key in part if f"`{key}`" not in page}
    assert not missing, f"docs/results_schema.md does not name {sorted(missing)}"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("config",), None),
        (("run",), "text"),
        (("prompts", 0, "sha256"), 1.5),
        (("prompts", 0, "category"), []),
        (("conditions", 1, "records", 0, "num_prompt_tokens"), -1),
        (("conditions", 1, "records", 0, "num_target_forwards"), "many"),
        (("conditions", 1, "records", 0, "num_accepted_per_round"), ["<b>"]),
        (("conditions", 1, "records"), []),
        (("conditions", 1, "records", 0, "request_id"), "nobody"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_field_of_another_kind_is_refused(
    tmp_path: Path, report: Report, place: tuple[str | int, ...], value: object
):
    path = write_results(tmp_path, report)
    stored = node = json.loads(path.read_text())
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    path.write_text(json.dumps(stored))
    with pytest.raises(IntegrityError):
        recompute(path)


def test_every_stored_figure_is_checked_against_the_counters(
    tmp_path: Path, report: Report
) -> None:
    path = write_results(tmp_path, report)
    assert read_checked(path) == report
    stored = json.loads(path.read_text())
    figure = stored["summary"]["conditions"][1]["acceptance"]["acceptance_length_micro"]
    figure["value"] += 1e-6
    path.write_text(json.dumps(stored))
    with pytest.raises(IntegrityError, match="1 stored figures are not what the counters give"):
        read_checked(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("summary", "conditions"), []),
        (("summary",), None),
        (("summary", "conditions", 1, "acceptance", "num_accepted"), "many"),
        (("summary", "conditions", 1, "acceptance", "acceptance_rate"), None),
        (("summary", "paired", 0, "differences", "p_1", "low"), 0.5),
    ],
    ids=["no conditions", "no summary", "text", "null", "paired"],
)
def test_changed_summary_is_refused(
    tmp_path: Path, report: Report, place: tuple[str | int, ...], value: object
) -> None:
    path = write_results(tmp_path, report)
    stored = json.loads(path.read_text())
    node = stored
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    path.write_text(json.dumps(stored))
    with pytest.raises(IntegrityError, match="stored figures"):
        read_checked(path)


def test_other_formula_is_refused_by_name(tmp_path: Path, report: Report) -> None:
    path = write_results(tmp_path, report)
    stored = json.loads(path.read_text())
    stored["formulas"]["acceptance_rate"] = "accepted / rounds"
    path.write_text(json.dumps(stored))
    with pytest.raises(IntegrityError, match="got others for acceptance_rate"):
        read_checked(path)


def test_not_a_number_is_refused(tmp_path: Path, report: Report) -> None:
    path = write_results(tmp_path, report)
    path.write_text(path.read_text().replace('"wall_s":8.0', '"wall_s":NaN'))
    with pytest.raises(IntegrityError, match="NaN is no number"):
        read_checked(path)


def test_names_are_unique_and_come_from_the_folder(tmp_path: Path, report: Report) -> None:
    for name in ("a/same", "b/same"):
        write_results(tmp_path / name, report)
    alone = tmp_path / "kept.json"
    alone.write_bytes((tmp_path / "a/same/results.json").read_bytes())
    runs = read_runs([tmp_path / "a/same", tmp_path / "b/same/results.json", alone])
    assert [run.name for run in runs] == ["same", "same-2", "kept"]

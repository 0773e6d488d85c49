import dataclasses
from pathlib import Path

import pytest

from mtp_research.config.schema import SamplingConfig
from mtp_research.evaluation.report.stored import Report, build_report, write_results
from mtp_research.runtime.errors import ConfigError
from mtp_research.studies.tables import compare, main
from tests.evaluation.generations import some_prompts, three_conditions


def _report(**changes: object) -> Report:
    built = build_report(
        three_conditions(12), prompts=some_prompts(12), dtype="float32", config={}, run={}
    )
    return dataclasses.replace(built, **changes)


def test_same_results_differ_by_zero():
    pairs = compare(_report(), _report())
    assert list(pairs) == ["eagle", "training"]
    assert tuple(pairs["eagle"].differences["acceptance_length_micro"]) == (0.0, 0.0, 0.0)


def test_conditions_of_one_setting_are_compared_whatever_their_labels_are():
    """A run of K = 1 and 3 names K in its labels; one of K = 3 alone does not."""
    alone = _report().conditions
    others = [dataclasses.replace(one, num_speculative_tokens=1) for one in alone[1:]]
    grid = [alone[0], *alone[1:], *others]
    named = [
        dataclasses.replace(one, label=f"{one.label} K={one.num_speculative_tokens}")
        for one in grid[1:]
    ]
    ours = _report(conditions=(alone[0], *named))
    assert list(compare(ours, _report())) == ["eagle K=3", "training K=3"]
    assert list(compare(_report(), ours)) == ["eagle", "training"]
    twice = dataclasses.replace(named[0], label="eagle of another head")
    ours = _report(conditions=(*ours.conditions, twice))
    assert list(compare(ours, _report())) == ["training K=3"], "two might be meant"
    with pytest.raises(ConfigError, match=r"that drafts \(baseline, eagle K=3 and baseline, train"):
        compare(_report(conditions=ours.conditions[:2]), _report(conditions=alone[::2]))


def test_other_prompt_text_is_refused_with_the_ids():
    prompts = list(_report().prompts)
    prompts[4] = dataclasses.replace(prompts[4], sha256="0" * 64)
    with pytest.raises(ConfigError, match=r"1 prompts with other hashes \(q4\)"):
        compare(_report(), _report(prompts=tuple(prompts)))


def test_long_list_of_prompts_is_cut():
    with pytest.raises(ConfigError, match=r"12 prompts with other hashes \(.*q2 and 7 more\)"):
        compare(_report(), _report(prompts=()))


def test_other_dtype_and_k_are_refused_together():
    conditions = tuple(
        dataclasses.replace(c, num_speculative_tokens=5) if c.label == "eagle" else c
        for c in _report().conditions
    )
    with pytest.raises(ConfigError) as caught:
        compare(_report(), _report(dtype="bfloat16", conditions=conditions))
    assert "K = 3 and 5 for eagle" in str(caught.value)
    assert "dtype float32 and bfloat16" in str(caught.value)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ({"target": {"weights_sha256": "1" * 64}}, {}, "model.path /ours and /theirs"),
        (
            {"target": {"config_sha256": "0", "weights_sha256": "1" * 64}},
            {"target": {"config_sha256": "0", "weights_sha256": "2" * 64}},
            f"target weights_sha256 {'1' * 16} and {'2' * 16};",
        ),
    ],
    ids=["path", "hash"],
)
def test_another_target_is_refused(
    ours: dict[str, object], theirs: dict[str, object], message: str
) -> None:
    sides = [
        _report(run=run, config={"model": {"path": path}})
        for run, path in ((ours, "/ours"), (theirs, "/theirs"))
    ]
    with pytest.raises(ConfigError, match="same prompts, target, dtype") as caught:
        compare(*sides)
    assert message in str(caught.value)


def test_target_of_equal_hashes_may_have_moved() -> None:
    run = {"target": {"weights_sha256": "1" * 64, "tokenizer_sha256": None}}
    sides = [_report(run=run, config={"model": {"path": path}}) for path in ("/a", "/b")]
    assert list(compare(*sides)) == ["eagle", "training"]


def test_results_without_a_common_condition_are_refused():
    with pytest.raises(ConfigError, match="no common condition that drafts"):
        compare(_report(), _report(conditions=_report().conditions[:1]))


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ({}, {"temperature": 0.6}, "sampling.temperature 0.0 and 0.6 for eagle, training"),
        ({"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, "sampling.top_p 1.0 and 0.9"),
        ({"ignore_eos": True}, {}, "sampling.ignore_eos True and False"),
        ({}, {"max_new_tokens": 32}, "sampling.max_new_tokens 64 and 32"),
        ({}, {"repetition_penalty": 1.1}, "sampling.repetition_penalty 1.0 and 1.1"),
        ({}, {"verify": "typical"}, "spec.verify a lossless rule and typical"),
        (
            {"verify": "typical"},
            {"verify": "typical", "typical_delta": 0.5},
            "spec.typical_delta 0.3 and 0.5",
        ),
        (
            {"verify": "of one's own"},
            {"verify": "of one's own", "typical_delta": 0.5},
            "spec.typical_delta 0.3 and 0.5",
        ),
    ],
)
def test_other_law_of_the_text_is_refused_with_both_values(
    ours: dict[str, object], theirs: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compare(_with_settings(ours), _with_settings(theirs))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "idle",
    [
        {"top_k": 20, "top_p": 0.9},  # at temperature 0
        {"dry_base": 2.0},  # without its multiplier
        {"verify": "standard"},  # as lossless as greedy
        {"typical_delta": 0.5},  # read by another rule
        {"policy": ["training"]},
    ],
)
def test_settings_that_leave_the_law_alone_are_compared(idle: dict[str, object]) -> None:
    assert list(compare(_with_settings({}), _with_settings(idle))) == ["eagle", "training"]


def test_temperature_of_a_condition_counts_and_not_the_one_of_the_file() -> None:
    warm = tuple(dataclasses.replace(c, temperature=0.6) for c in _report().conditions)
    with pytest.raises(ConfigError, match=r"sampling\.temperature 0\.0 and 0\.6 for eagle"):
        compare(_report(), _report(conditions=warm))
    assert compare(_report(conditions=warm), _with_settings({"temperature": 0.6}))


def _with_settings(settings: dict[str, object]) -> Report:
    """A report whose configuration has these settings, of sampling or of spec."""
    sampling = {key: value for key, value in settings.items() if hasattr(SamplingConfig, key)}
    spec = {key: value for key, value in settings.items() if key not in sampling}
    return _report(config={"sampling": sampling, "spec": spec})


def _stored(folder: Path, report: Report) -> str:
    return str(write_results(folder, report))


def test_command_prints_the_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _stored(tmp_path / "a", _report())
    assert main(["compare", path, _stored(tmp_path / "b", _report())]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("a - b, 12 prompts\n")
    assert "eagle - eagle" in shown
    assert "warning: only 12 prompts" in shown
    assert "+0.000 [+0.000, +0.000]" in shown


def test_command_warns_of_policies_that_share_a_name_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for rows in ("fresh", "anchored"):
        policies = {"eagle": f"rows={rows}", "training": "rows=anchored"}
        report = _report(run={"inputs": {"policies": policies}})
        paths.append(_stored(tmp_path / rows, report))
    assert main(["compare", *paths]) == 0
    shown = capsys.readouterr().out
    known = "policy eagle is not the same in both: rows=fresh and rows=anchored"
    assert f"warning: {known}\n" in shown
    assert "policy training" not in shown


def test_command_warns_of_other_rules_for_the_number_of_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        _stored(tmp_path / name, _report(config={"spec": spec}))
        for name, spec in (("old", {}), ("same", {"draft_length": "fixed"}),
                           ("other", {"draft_length": "confidence"}))
    ]  # fmt: skip
    assert main(["compare", paths[0], paths[1]]) == 0
    assert "makes drafts by" not in capsys.readouterr().out
    assert main(["compare", paths[0], paths[2]]) == 0
    shown = capsys.readouterr().out
    assert "warning: eagle makes drafts by spec.draft_length=fixed and confidence; " in shown
    assert "baseline makes" not in shown


def test_command_lists_every_differing_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [dataclasses.replace(p, sha256="0" * 64) for p in _report().prompts]
    other = _report(prompts=tuple(prompts))
    ours = _stored(tmp_path / "a", _report())
    assert main(["compare", ours, _stored(tmp_path / "b", other)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + 12
    assert f"error:   q4: {_report().prompts[4].sha256[:16]} and {'0' * 16}" in lines


def test_command_refuses_other_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, path = _stored(tmp_path / "a", _report()), tmp_path / "b" / "results.json"
    _stored(path.parent, _report())
    path.write_text(path.read_text().replace("sum(accepted)/sum(drafted)", "accepted/rounds"))
    assert main(["compare", ours, str(path)]) == 3
    assert "formulas of this version, got others for acceptance_rate" in capsys.readouterr().err

"""What an evaluation leaves for others: its rates by position, and its accepted drafts by round."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from mtp_research.decode.verify.profile_reader import PROFILE_FILE, profile_rates
from mtp_research.evaluation.report.profile import GOLDEN_FILE, write_profile
from mtp_research.evaluation.report.stored import Report, build_report
from tests.evaluation.generations import generation, some_prompts, three_conditions


@pytest.fixture(scope="module")
def report() -> Report:
    baseline, *drafting = three_conditions(30)
    return build_report(
        [baseline, *drafting],
        prompts=some_prompts(30),
        dtype="float32",
        config={"sampling": {"temperature": [0.0], "top_p": 1.0}},
        run={"target": {"weights": "ab"}, "heads": {}, "git": {"sha": "cd"}},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, report: Report) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    write_profile(folder, report)
    return folder


def test_profile_holds_the_figures_of_the_results(folder: Path, report: Report) -> None:
    stored = json.loads((folder / PROFILE_FILE).read_text())
    assert stored["target"] == {"weights": "ab"}
    assert stored["commit"] == "cd"
    assert stored["sampling"] == {"top_p": 1.0}
    summaries = {item.result.label: item for item in report.summaries[1:]}
    assert [one["label"] for one in stored["conditions"]] == list(summaries)
    for one in stored["conditions"]:
        summary = summaries[one["label"]]
        domains = {"all": (one, summary.acceptance)} | {
            name: (one["per_domain"][name], figures) for name, figures in summary.per_domain.items()
        }
        for measured, figures in domains.values():
            unconditional = [x.value for x in figures.acceptance_rate_per_position]
            conditional = [x.value for x in figures.conditional_acceptance_rate_per_position]
            assert measured["num_rounds"] == figures.num_rounds
            assert measured["acceptance_rate_per_position"] == pytest.approx(unconditional)
            assert measured["conditional_acceptance_rate_per_position"] == pytest.approx(
                conditional
            )
            assert measured["acceptance_length"] == pytest.approx(
                figures.acceptance_length_micro.value
            )


def test_rates_are_what_vllm_takes(folder: Path) -> None:
    # vLLM 0.24.0, SpeculativeConfig: as many rates as drafts, each in [0, 1], none above the last.
    for one in json.loads((folder / PROFILE_FILE).read_text())["conditions"]:
        config = one["vllm_speculative_config"]
        rates = config.pop("synthetic_acceptance_rates")
        assert config == {"num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
        assert len(rates) == 3
        assert all(1 >= before >= after >= 0 for before, after in itertools.pairwise(rates))
        assert 1 + sum(rates) == pytest.approx(one["acceptance_length"])
        read = profile_rates(
            str(folder / PROFILE_FILE), condition=one["label"], num_speculative_tokens=3
        )
        assert read == tuple(rates)


def test_golden_file_holds_every_round_by_prompt_hash(folder: Path, report: Report) -> None:
    lines = [json.loads(line) for line in (folder / GOLDEN_FILE).read_text().splitlines()]
    expected = [
        (condition.label, record.request_id, list(record.num_accepted_per_round))
        for condition in report.conditions[1:]
        for record in condition.records
    ]
    assert [(one["condition"], one["id"], one["accepted"]) for one in lines] == expected
    hashes = {prompt.question_id: prompt.sha256 for prompt in report.prompts}
    assert all(one["sha256"] == hashes[one["id"]] for one in lines)


def test_rounds_cut_short_and_unfinished_prompts(tmp_path: Path, report: Report) -> None:
    records = (
        generation("q0", [2, 0, 1], drafted=[2, 1, 1]),
        generation("q1", [3], finish_reason="abort"),
    )
    aborted = tuple(generation(name, [1], finish_reason="abort") for name in ("q0", "q1"))
    _, condition, empty = report.conditions
    short = build_report(
        [
            dataclasses.replace(condition, records=records),
            dataclasses.replace(empty, records=aborted),
        ],
        prompts=some_prompts(2),
        dtype="float32",
        config={},
        run={},
    )
    write_profile(tmp_path, short)
    measured, nothing = json.loads((tmp_path / PROFILE_FILE).read_text())["conditions"]
    assert measured["num_requests"] == 1
    assert measured["num_drafted_per_position"] == [3, 1, 0]
    assert measured["num_reached_per_position"] == [3, 1, 0]
    assert measured["num_accepted_per_position"] == [2, 1, 0]
    assert measured["acceptance_length"] == 2.0
    assert measured["conditional_acceptance_rate_per_position"] == [2 / 3, 1.0, None]
    assert nothing["num_rounds"] == 0
    assert nothing["vllm_speculative_config"] is None
    assert len((tmp_path / GOLDEN_FILE).read_text().splitlines()) == 1
    path = str(tmp_path / PROFILE_FILE)
    rates = profile_rates(path, condition=None, num_speculative_tokens=3)
    assert rates == (2 / 3, 1 / 3, 0.0)


def test_later_turns_have_their_prompts_domain_and_hash(tmp_path: Path, report: Report) -> None:
    records = tuple(generation(name, [1, 0]) for name in ("q0", "q0/2", "q1"))
    condition = dataclasses.replace(
        report.conditions[1], records=records, prompt_of={"q0/2": "q0"}, scores=None
    )
    turns = build_report([condition], prompts=some_prompts(2), dtype="float32", config={}, run={})
    write_profile(tmp_path, turns)
    (measured,) = json.loads((tmp_path / PROFILE_FILE).read_text())["conditions"]
    hashes = {prompt.question_id: prompt.sha256 for prompt in turns.prompts}
    lines = [json.loads(line) for line in (tmp_path / GOLDEN_FILE).read_text().splitlines()]
    assert [(one["id"], one["sha256"]) for one in lines] == [
        ("q0", hashes["q0"]),
        ("q0/2", hashes["q0"]),
        ("q1", hashes["q1"]),
    ]
    by_domain = {name: one["num_requests"] for name, one in measured["per_domain"].items()}
    domains = {prompt.question_id: prompt.category for prompt in turns.prompts}
    expected: dict[str, int] = {}
    for name in ("q0", "q0", "q1"):
        expected[domains[name]] = expected.get(domains[name], 0) + 1
    assert by_domain == expected

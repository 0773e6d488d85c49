"""The keys of results.json and of the journal, and that nothing is lost on the way."""

import dataclasses
import json
import lzma

import pytest

from mtp_research.evaluation.report.stored import build_report, to_json
from mtp_research.evaluation.stats.outcome import ConditionResult, PassRecord, StepParts
from mtp_research.evaluation.stats.summary import plain, read_condition, read_pass
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from tests.evaluation.generations import repeated, some_prompts, three_conditions, timed

PASS_KEYS = """wall_s decode_wall_s num_decode_tokens full_wall_s num_full_tokens device_s
    num_late_builds"""
FIRST_KEYS = f"""{PASS_KEYS} num_steps rows_per_step peak_memory_bytes is_resumed num_warm_ups
    backend engine_counters"""
CONDITION_KEYS = f"""label policy num_speculative_tokens records lossless audit head verify repeats
    max_num_requests temperature draft_sampling draft_length parts capture_s prompt_of cut_prompts
    scores conventions
    {FIRST_KEYS}"""
SUMMARY_KEYS = """label policy num_speculative_tokens acceptance per_domain speed cost num_prompts
    num_outputs_equal_to_baseline num_steps rows_per_step lossless audit peak_memory_bytes head
    max_num_requests temperature verify draft_sampling draft_length is_resumed thinking score
    backend conventions"""
SPEED_KEYS = """wall_s decode_wall_s full_wall_s tokens_per_s_end_to_end tokens_per_s_decode
    tokens_per_s_full ratio_end_to_end ratio_decode ratio_full ttft_s_median inter_token_s_median
    inter_token_s_p95 num_passes tokens_per_s_end_to_end_low tokens_per_s_end_to_end_high
    tokens_per_s_decode_low tokens_per_s_decode_high tokens_per_s_full_low tokens_per_s_full_high
    device_s drift"""
PARTS = StepParts(num_steps=4, target_s=1.0, verify_s=0.5, draft_s=0.25, host_s=2.0)


@pytest.fixture
def twice() -> ConditionResult:
    """A condition of two passes, with a figure of its own in every field of a pass."""
    first = timed(
        three_conditions(6)[1],
        device_s=4.5,
        peak_memory_bytes=7,
        num_warm_ups=3,
        capture_s=9.0,
        num_late_builds=1,
        parts=PARTS,
    )
    later = PassRecord(
        wall_s=6.0,
        decode_wall_s=3.5,
        num_decode_tokens=11,
        full_wall_s=0.5,
        num_full_tokens=2,
        device_s=5.5,
        num_late_builds=2,
        num_texts_equal=5,
    )
    return repeated(first, later)


def stored(value: object) -> dict:
    return json.loads(json.dumps(plain(value)))


def test_condition_of_two_passes_is_read_back_whole(twice: ConditionResult) -> None:
    assert read_condition(stored(twice)) == twice
    (later,) = stored(twice)["repeats"]
    assert set(later) == {*PASS_KEYS.split(), "num_texts_equal"}
    assert (later["wall_s"], stored(twice)["wall_s"]) == (6.0, 5.0)


def test_parts_are_stored_as_sums_over_passes(twice: ConditionResult) -> None:
    both = dataclasses.replace(
        twice, passes=tuple(dataclasses.replace(one, parts=PARTS) for one in twice.passes)
    )
    assert stored(both)["parts"] == {name: 2 * value for name, value in vars(PARTS).items()}
    again = read_condition(stored(both))
    assert again.parts == both.parts
    assert stored(again) == stored(both)


def test_keys_are_those_that_readers_know(twice: ConditionResult) -> None:
    assert set(stored(twice)) == set(CONDITION_KEYS.split())
    report = build_report(
        [twice], prompts=some_prompts(6), dtype="float32", config={"seed": 0}, run={}
    )
    (summary,) = json.loads(json.dumps(to_json(report)["summary"]))["conditions"]
    assert set(summary) == set(SUMMARY_KEYS.split())
    assert set(summary["speed"]) == set(SPEED_KEYS.split())


def test_condition_without_a_required_key_is_refused(twice: ConditionResult) -> None:
    for name in ("wall_s", "label", "records", "repeats", "parts"):
        fields = stored(twice)
        del fields[name]
        with pytest.raises((KeyError, TypeError), match=name):
            read_condition(fields)
    with pytest.raises(TypeError, match="speed"):
        read_condition({**stored(twice), "speed": 1.0})


def test_pass_of_the_journal_is_read_back(twice: ConditionResult) -> None:
    resumed = PassRecord(wall_s=None, is_resumed=True)
    for one in (*twice.passes, resumed):
        assert read_pass(stored(one)) == one


def test_every_shipped_results_file_is_written_again_as_it_is() -> None:
    files = sorted((REPOSITORY_ROOT / "docs" / "results").rglob("results.json.xz"))
    assert files
    for file in files:
        for condition in json.loads(lzma.decompress(file.read_bytes()))["conditions"]:
            again = stored(read_condition(condition))
            for name in (
                "full_wall_s",
                "num_full_tokens",
                "num_late_builds",
            ):  # newer than some of the files
                for times, ours in zip(
                    (condition, *condition["repeats"]), (again, *again["repeats"]), strict=True
                ):
                    times.setdefault(name, ours[name])
            for record in condition["records"]:
                record.setdefault("error", None)  # newer than all of them
            newer = {"prompt_of": {}, "cut_prompts": [], "scores": None}
            newer |= dict.fromkeys(("backend", "engine_counters", "conventions", "draft_length"))
            condition |= {name: one for name, one in newer.items() if name not in condition}
            assert again == condition, f"{file}: {condition['label']}"

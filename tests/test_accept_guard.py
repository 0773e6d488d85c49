"""Regression guard: the shipped heads must still be accepted as often as when this was recorded.

    make accept-guard
    python -m tests.test_accept_guard     records anew, after a change that is meant

Decodes a fixed subset of the shipped prompts greedily in float32 on the CPU and compares the
acceptance of every draft position with the record in `assets/lab_tiny/acceptance_guard.json`. A
position has drifted if it left its 95 % bootstrap interval or moved by more than 0.02: the texts
are the same, so only another machine's rounding may move it, and a text that it turns is about one
in 80 of the rounds. Letters: K drafts per step, p_i share of rounds with >= i accepted drafts.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import pytest

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.evaluation.run.prompts import (
    SHIPPED_PROMPTS,
    ChatTokenizer,
    EncodedPrompts,
    encode_prompts,
    load_prompts,
)
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.statistics import acceptance_statistics
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import Target, load_target, load_tokenizer
from mtp_research.runtime.files import sha256_of, write_atomically
from mtp_research.runtime.provenance import run_record

RECORD_COMMAND = "python -m tests.test_accept_guard"
SCHEMA = 1
HEADS, POLICIES = ("chain_n1", "chain_n3", "ttt_n1"), ("eagle", "training")
CASES = tuple((head, policy) for head in HEADS for policy in POLICIES)
NUM_DRAFTS, NUM_PROMPTS, NUM_TOKENS = 3, 80, 32
MAX_CHANGE = 0.02
_LAB = Path(__file__).resolve().parent.parent / "assets" / "lab_tiny"
_RECORD = _LAB / "acceptance_guard.json"


class Measured(NamedTuple):
    """Acceptance of one head under one policy: p_1 .. p_K with intervals, and the rounds."""

    head: str
    policy: str
    num_rounds: int
    rates: tuple[Estimate, ...]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES[:1] + CASES[3:5], id="each_head"),
        pytest.param(CASES[1:3] + CASES[5:], id="other_policy", marks=pytest.mark.every_case),
    ],
)
def test_shipped_heads_are_accepted_as_recorded(cases: Sequence[tuple[str, str]]) -> None:
    lines = drifted(measure(cases), read_record())
    assert not lines, "\n".join([*lines, f"if this is meant, run {RECORD_COMMAND}"])


def test_record_is_of_the_shipped_files_and_settings() -> None:
    stored = json.loads(_RECORD.read_text(encoding="utf8"))
    assert stored["schema"] == SCHEMA
    assert (stored["num_speculative_tokens"], stored["max_new_tokens"]) == (NUM_DRAFTS, NUM_TOKENS)
    assert stored["files"] == file_hashes(), f"recorded with other files; run {RECORD_COMMAND}"
    assert stored["command"] == RECORD_COMMAND
    recorded = read_record()
    assert tuple((one.head, one.policy) for one in recorded) == CASES
    assert all(len(one.rates) == 3 and one.num_rounds > 0 for one in recorded)


def test_equal_rates_pass_and_a_moved_one_drifts() -> None:
    recorded = read_record()
    assert drifted(recorded, recorded) == []
    value = recorded[0].rates[0].value
    assert value is not None
    assert drifted(changed(recorded, value - 0.019), recorded) == []
    (line,) = drifted(changed(recorded, value - 0.021), recorded)
    assert line.startswith("chain_n1 eagle p_1")
    assert len(drifted(changed(recorded, None), recorded)) == 1
    assert len(drifted(recorded, recorded[1:])) == 3


def test_rate_outside_a_narrow_interval_drifts() -> None:
    then = [Measured("chain_n3", "eagle", 9, (Estimate(0.01, 0.008, 0.012),))]
    assert len(drifted(changed(then, 0.0079), then)) == 1
    assert drifted(changed(then, 0.0081), then) == []


def test_record_reads_back() -> None:
    recorded = read_record()
    made = record_of(recorded)
    stored = json.loads(_RECORD.read_text(encoding="utf8"))
    assert json.loads(json.dumps(made["cases"])) == stored["cases"]
    assert made.keys() == stored.keys()


def changed(measured: Sequence[Measured], value: float | None) -> list[Measured]:
    first = measured[0]
    return [first._replace(rates=(Estimate(value), *first.rates[1:])), *measured[1:]]


def drifted(measured: Sequence[Measured], expected: Sequence[Measured]) -> list[str]:
    """A line for every position that has drifted; all of a case without a counterpart have."""
    recorded = {(one.head, one.policy): one.rates for one in expected}
    return [
        f"{one.head} {one.policy} p_{i}: measured {now.value}, recorded {then}"
        for one in measured
        for i, now in enumerate(one.rates, start=1)
        for then in [(*recorded.get((one.head, one.policy), ()), *[Estimate(None)] * i)[i - 1]]
        if has_drifted(now, then)
    ]


def has_drifted(now: Estimate, then: Estimate) -> bool:
    if now.value is None or then.value is None or then.low is None or then.high is None:
        return True
    return not then.low <= now.value <= then.high or abs(now.value - then.value) > MAX_CHANGE


def read_record() -> list[Measured]:
    return [
        Measured(
            case["head"],
            case["policy"],
            case["num_rounds"],
            tuple(Estimate(**rate) for rate in case["rates"]),
        )
        for case in json.loads(_RECORD.read_text(encoding="utf8"))["cases"]
    ]


def measure(cases: Sequence[tuple[str, str]] = CASES) -> list[Measured]:
    """Decode the fixed prompts with every head and policy of `cases`; about 40 s on one core."""
    target = load_target(str(_LAB / "target"), dtype="float32", device="cpu")
    tokenizer = cast(ChatTokenizer, load_tokenizer(str(_LAB / "target")))  # fields set at run time
    prompts = load_prompts(str(SHIPPED_PROMPTS), max_prompts=NUM_PROMPTS, seed=0)
    encoded = encode_prompts(prompts, tokenizer, max_model_len=512)
    return [_measure_case(target, encoded, head, policy) for head, policy in cases]


def record_of(measured: Sequence[Measured]) -> dict[str, object]:
    """The content of the record file: how it was made, of which files, and the intervals."""
    run = run_record()
    return {
        "schema": SCHEMA,
        "command": RECORD_COMMAND,
        "recorded_at": run["started_at"],
        "versions": run["versions"],
        "num_speculative_tokens": NUM_DRAFTS,
        "num_prompts": NUM_PROMPTS,
        "max_new_tokens": NUM_TOKENS,
        "files": file_hashes(),
        "cases": [
            {
                "head": one.head,
                "policy": one.policy,
                "num_rounds": one.num_rounds,
                "rates": [rate._asdict() for rate in one.rates],
            }
            for one in measured
        ],
    }


def file_hashes() -> dict[str, str]:
    """sha256 of the weights and prompt files that the figures depend on, by path in the assets."""
    paths = [
        _LAB / "target" / "model.safetensors",
        *(_LAB / "heads" / head / "model.safetensors" for head in HEADS),
        *sorted(SHIPPED_PROMPTS.glob("*.jsonl")),
    ]
    return {path.relative_to(_LAB).as_posix(): sha256_of(path) for path in paths}


def _measure_case(target: Target, encoded: EncodedPrompts, head: str, policy: str) -> Measured:
    decoder = SpecDecoder(
        target,
        load_heads(str(_LAB / "heads" / head), target),
        spec=SpecSettings(policy=policy, num_speculative_tokens=NUM_DRAFTS),
        engine=EngineConfig(max_num_requests=80, max_num_batched_tokens=4096, audit=False),
    )
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, stop_token_ids=target.stop_token_ids)
    for prompt, token_ids in zip(encoded.prompts, encoded.token_ids, strict=True):
        decoder.add_request(token_ids, sampling=sampling, request_id=prompt.question_id)
    while decoder.has_work:
        decoder.step()
    records = sorted(decoder.stats.records, key=lambda record: record.request_id)
    statistics = acceptance_statistics(records, num_speculative_tokens=NUM_DRAFTS, seed=0)
    rates = statistics.acceptance_rate_per_position
    return Measured(head, policy, statistics.num_rounds, rates)


if __name__ == "__main__":
    write_atomically(_RECORD, json.dumps(record_of(measure()), indent=1) + "\n")

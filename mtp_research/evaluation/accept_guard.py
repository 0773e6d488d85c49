"""Regression guard: the shipped heads must still be accepted as often as when this was recorded.

    make accept-guard
    python -m mtp_research.evaluation.accept_guard --record     after a change that is meant

Decodes a fixed subset of the shipped prompts greedily in float32 on the CPU and compares the
acceptance of every draft position with the record in `assets/lab_tiny/acceptance_guard.json`. A
position has drifted (exit 1) if it left its 95 % bootstrap interval or moved by more than 0.02: the
texts are the same, so only another machine's rounding may move it, and a text that it turns is
about one in 80 of the rounds.
Letters: K drafts per step, p_i share of rounds with at least i accepted drafts.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

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
from mtp_research.evaluation.tables import Grid, interval, number, plain_text
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import Target, load_target, load_tokenizer
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.files import sha256_of, write_atomically
from mtp_research.runtime.provenance import REPOSITORY_ROOT, run_record

RECORD_COMMAND = "python -m mtp_research.evaluation.accept_guard --record"
SCHEMA = 1
CASES = (
    ("chain_n1", "eagle"),
    ("chain_n1", "training"),
    ("chain_n3", "eagle"),
    ("chain_n3", "training"),
    ("ttt_n1", "eagle"),
    ("ttt_n1", "training"),
)
NUM_DRAFTS, NUM_PROMPTS, NUM_TOKENS = 3, 80, 32
MAX_CHANGE = 0.02
DRIFT_EXIT_CODE = 1
_LAB = REPOSITORY_ROOT / "assets" / "lab_tiny"
_RECORD = _LAB / "acceptance_guard.json"


class Measured(NamedTuple):
    """Acceptance of one head under one policy: p_1 .. p_K with intervals, and the rounds."""

    head: str
    policy: str
    num_rounds: int
    rates: tuple[Estimate, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, or record; returns 0, 1 on drift, 2 without a record, 3 if it is of other files."""
    parser = argparse.ArgumentParser(prog="python -m mtp_research.evaluation.accept_guard")
    parser.add_argument("--record", action="store_true", help="write the intervals anew")
    parser.add_argument("--file", type=Path, default=_RECORD, help="the recorded intervals")
    options = parser.parse_args(argv)
    try:
        expected = None if options.record else read_record(options.file)
        measured = measure()
    except (ConfigError, IntegrityError) as fault:
        sys.stderr.write(f"error: {fault}\n")
        return fault.exit_code
    if expected is None:
        write_atomically(options.file, json.dumps(record_of(measured), indent=1) + "\n")
        sys.stdout.write(f"recorded: {options.file}\n")
        return 0
    grid, num_drifted = compare_rates(measured, expected)
    sys.stdout.write(plain_text(grid) + "\n")
    if num_drifted:
        sys.stderr.write(
            f"error: {num_drifted} positions are not accepted as recorded; find the change, or if "
            f"it is meant, run {RECORD_COMMAND}.\n"
        )
    return DRIFT_EXIT_CODE if num_drifted else 0


def measure() -> list[Measured]:
    """Decode the fixed prompts with every head and policy of `CASES`; about 40 s on one core."""
    target = load_target(str(_LAB / "target"), dtype="float32", device="cpu")
    tokenizer = cast(ChatTokenizer, load_tokenizer(str(_LAB / "target")))  # fields set at run time
    prompts = load_prompts(str(SHIPPED_PROMPTS), max_prompts=NUM_PROMPTS, seed=0)
    encoded = encode_prompts(prompts, tokenizer, max_model_len=512)
    return [_measure_case(target, encoded, head, policy) for head, policy in CASES]


def compare_rates(measured: Sequence[Measured], expected: Sequence[Measured]) -> tuple[Grid, int]:
    """A table of every position, and how many positions have drifted.

    Args:
        measured: now.
        expected: as recorded; every position of a case without a counterpart has drifted.
    """
    recorded = {(one.head, one.policy): one for one in expected}
    rows, num_drifted = [], 0
    for one in measured:
        known = recorded.get((one.head, one.policy))
        rates = known.rates if known else (Estimate(None),) * len(one.rates)
        for i, (now, then) in enumerate(zip(one.rates, rates, strict=True), start=1):
            verdict = _verdict(now, then)
            num_drifted += verdict == "DRIFT"
            rows.append((one.head, one.policy, f"p_{i}", number(now.value, ".4f"),
                         interval(then, ".4f"), verdict))  # fmt: skip
    header = ("head", "policy", "position", "measured", "recorded [95 %]", "verdict")
    title = f"Acceptance of the shipped heads, {NUM_PROMPTS} prompts, K={NUM_DRAFTS}, greedy"
    return Grid(title, header, tuple(rows)), num_drifted


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


def read_record(path: Path) -> list[Measured]:
    """Recorded intervals, which must be of the weights and prompts that are there now.

    Raises:
        ConfigError: no such file.
        IntegrityError: not a record, or one of other files or settings.
    """
    if not path.is_file():
        raise ConfigError(f"expected recorded intervals at {path}; run {RECORD_COMMAND}.")
    try:
        stored = json.loads(path.read_text(encoding="utf8"))
        settings = [stored[k] for k in ("schema", "num_speculative_tokens", "max_new_tokens")]
        files = stored["files"]
        measured = [
            Measured(
                case["head"],
                case["policy"],
                case["num_rounds"],
                tuple(Estimate(**rate) for rate in case["rates"]),
            )
            for case in stored["cases"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise IntegrityError(f"{path} is no record ({fault}); run {RECORD_COMMAND}.") from None
    if settings != [SCHEMA, NUM_DRAFTS, NUM_TOKENS] or files != file_hashes():
        raise IntegrityError(
            f"{path} was recorded with other weights, prompts or settings; run {RECORD_COMMAND}."
        )
    return measured


def file_hashes() -> dict[str, str]:
    """sha256 of the weights and prompt files that the figures depend on, by path in the assets."""
    heads = sorted({head for head, _ in CASES})
    paths = [
        _LAB / "target" / "model.safetensors",
        *(_LAB / "heads" / head / "model.safetensors" for head in heads),
        *sorted(SHIPPED_PROMPTS.glob("*.jsonl")),
    ]
    return {path.relative_to(_LAB).as_posix(): sha256_of(path) for path in paths}


def _measure_case(target: Target, encoded: EncodedPrompts, head: str, policy: str) -> Measured:
    decoder = SpecDecoder(
        target,
        load_heads(str(_LAB / "heads" / head), target),
        spec=SpecSettings(policy=policy, num_speculative_tokens=NUM_DRAFTS),
        engine=EngineConfig(max_num_requests=16, audit=False),
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


def _verdict(now: Estimate, then: Estimate) -> str:
    if now.value is None or then.value is None or then.low is None or then.high is None:
        return "DRIFT"
    is_inside = then.low <= now.value <= then.high
    if not is_inside or abs(now.value - then.value) > MAX_CHANGE:
        return "DRIFT"
    return "as recorded" if now.value == then.value else "near"


if __name__ == "__main__":
    raise SystemExit(main())

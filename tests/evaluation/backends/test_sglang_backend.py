"""SGLang's backend over written outputs and a played engine: what it reads, asks for and refuses.

The outputs were written from SGLang's source (`sglang_0_5_23.json` says so), not recorded.
"""

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.backends import sglang_backend
from mtp_research.evaluation.backends.protocol import StepLog
from mtp_research.evaluation.backends.sglang_backend import check_rounds, drive, sampling_params
from mtp_research.evaluation.report.stored import Report, read_checked
from mtp_research.evaluation.run.evaluate import evaluate
from mtp_research.evaluation.run.settings_check import check_settings, load_engine
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from tests.evaluation.backends.played_sglang import WRITTEN, PlayedEngine, PlayedSglang
from tests.evaluation.generations import asked_file

WORDS = [
    *(
        "backend=[own,sglang]",
        "model=lab_tiny",
        "model.dtype=float32",
        "model.device=cpu",
        "spec.k=3",
    ),
    *("spec.head=assets/lab_tiny/heads/ttt_n1", "engine.audit=false"),
    *("sampling.max_new_tokens=12", "engine.max_num_requests=2", "prompts.max_prompts=null"),
]
QUESTIONS = ("What is 48 + 37?", "What is 12 * 12?", "What is 3 + 4?")
PLAYED_WORDS = {
    **{"incremental_streaming_output": True, "skip_tokenizer_init": True},
    **{"batch_notify_size": 1, "max_running_requests": 2},
}


def driven(names: list[str], **changes: Any) -> tuple[dict[str, RequestRecord], dict[str, Mapping]]:
    """Records and last words of written requests; `changes` are to the last chunk's meta_info."""
    written = copy.deepcopy({name: WRITTEN["requests"][name] for name in names})
    for request in written.values():
        request["chunks"][-1]["meta_info"] |= changes
    engine = PlayedEngine(
        lambda name, *_: written[name]["chunks"], PLAYED_WORDS, on_shutdown=lambda: None
    )
    asked = {name: request["input_ids"] for name, request in written.items()}
    log = StepLog("sglang", num_drafts=3)
    told = drive(engine, asked, sampling_params(max_new_tokens=12, stop_token_ids=[9]), log=log)
    engine.shutdown()
    return {name: log.record(name) for name in names}, told


# Outputs as the source writes them.


def test_chunks_are_rounds_and_the_engine_s_own_counts_agree() -> None:
    found, told = driven(["length", "stop at once"])
    record = found["length"]
    assert record.output_token_ids == tuple(range(11, 23))
    assert record.num_accepted_per_round == (2, 0, 3, 2)  # the last one is cut: it counted 3
    assert record.num_drafted_per_round == (3,) * 4
    assert (record.finish_reason, record.num_prompt_tokens) == ("length", 3)
    check_rounds(record, told["length"])
    at_once = found["stop at once"]
    assert (at_once.output_token_ids, at_once.num_target_forwards) == ((9,), 0)
    assert at_once.finish_reason == "stop"
    check_rounds(at_once, told["stop at once"])


@pytest.mark.parametrize("first", [1, 2, 3], ids=["small", "large", "last"])
def test_joined_chunks_are_refused(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks in one, also where it is no larger than a step's may be."""
    written = copy.deepcopy(WRITTEN)
    chunks = written["requests"]["length"]["chunks"]
    tokens = chunks[first]["output_ids"] + chunks.pop(first + 1)["output_ids"]
    is_last = first == len(chunks) - 1
    last = WRITTEN["requests"]["length"]["chunks"][-1]
    chunks[first] = (last if is_last else chunks[first]) | {"output_ids": tokens}
    monkeypatch.setitem(WRITTEN, "requests", written["requests"])
    with pytest.raises(IntegrityError, match=r"sglang, request length: .* (4 rounds|at most 4)"):
        check_rounds(*(one["length"] for one in driven(["length"])))


@pytest.mark.parametrize(
    ("histogram", "verifies"),
    [([1, 0, 1, 2], 5), ([0, 1, 1, 2], 4), ([2, 0, 2, 0], 4), ([1, 1, 1, 1], 4)],
    ids=["count", "another-round", "no-threes", "last-too-small"],
)
def test_rounds_that_the_engine_counted_otherwise_are_refused(
    histogram: list[int], verifies: int
) -> None:
    changes = {"spec_correct_drafts_histogram": histogram, "spec_verify_ct": verifies}
    found, told = driven(["length"], **changes, num_retractions=1)
    with pytest.raises(IntegrityError, match=rf"the {verifies} rounds .*\(1 times put back"):
        check_rounds(found["length"], told["length"])


def test_end_that_is_none_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match=r"request abort to its end, got KV cache pool is"):
        driven(["abort"])
    with pytest.raises(IntegrityError, match=r"expected a prompt of 3 token ids, got 4"):
        driven(["length"], prompt_tokens=4)
    foreign = {"type": "stop", "matched": 22}
    with pytest.raises(IntegrityError, match=r"an end at one of \[9\], got 22"):
        driven(["length"], finish_reason=foreign)


def test_named_ends_are_looked_at() -> None:
    """SGLang looks at no end at all where `ignore_eos` is set."""
    assert sampling_params(max_new_tokens=4, stop_token_ids=[7])["ignore_eos"] is False
    assert sampling_params(max_new_tokens=4, stop_token_ids=[])["ignore_eos"] is True


# Whole evaluations.


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> str:
    return asked_file(tmp_path_factory.mktemp("asked") / "prompts.jsonl", QUESTIONS)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedSglang:
    module = PlayedSglang()
    monkeypatch.setitem(sys.modules, "sglang", module)
    monkeypatch.setattr(sglang_backend, "warm_up", lambda *_: None)
    return module


def run(folder: Path, *words: str) -> Report:
    evaluate(compose_config(EvalConfig, [*WORDS, *words]), folder)
    return read_checked(folder / "results.json")


class Whole(NamedTuple):
    """An evaluation, the module that it met and its folder."""

    report: Report
    played: PlayedSglang
    folder: Path


@pytest.fixture(scope="module")
def whole(asked: str, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder, module = tmp_path_factory.mktemp("whole"), PlayedSglang()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sglang", module)
        return Whole(run(folder, asked), module, folder)


def test_engine_stands_beside_our_loop_and_agrees_round_by_round(whole: Whole) -> None:
    found = {one.label: one for one in whole.report.conditions}
    assert list(found)[-3:] == ["own as sglang", "sglang baseline", "sglang"]
    assert found["sglang"].first.backend == "sglang 0.5.23"
    assert found["sglang"].first.num_steps is None
    assert found["sglang"].lossless == "identical 3/3"
    plain, drafted = whole.report.agreements
    assert plain.num_equal_texts == 3
    assert drafted.num_equal_rounds == drafted.num_rounds > 5
    counted, records = found["sglang"].first.engine_counters, found["sglang"].records
    assert counted is not None
    assert counted["num_drafts"] == sum(one.num_target_forwards for one in records)
    assert counted["num_draft_tokens"] == 3 * counted["num_drafts"]
    assert found["sglang baseline"].first.engine_counters is None
    assert whole.played.num_open == 0
    text = " ".join((whole.folder / "table.txt").read_text().split())
    assert f"sglang: the engine's own counters say {counted['num_drafts']} rounds" in text
    assert "warning: sglang" not in text


def test_arguments_are_those_that_make_steps_readable(whole: Whole) -> None:
    plain, drafting = whole.played.words
    assert not [key for key in plain if key.startswith("speculative_")]
    chain = {key: value for key, value in drafting.items() if key.startswith("speculative_")}
    checkpoint = str(whole.folder / "exported" / "sglang-0")
    assert chain == {
        "speculative_algorithm": "NEXTN",
        "speculative_draft_model_path": checkpoint,
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    for words in (plain, drafting):
        assert words["model_path"] == checkpoint  # lab_tiny ties lm_head: K = 0 needs it too
        assert (words["stream_interval"], words["batch_notify_size"]) == (1, 1)
        assert (words["dtype"], words["attention_backend"]) == ("float32", "triton")
        assert (words["max_running_requests"], words["device"]) == (2, "cpu")
        assert words["disable_radix_cache"]
        assert words["disable_cuda_graph"]
        *_, found = whole.report.conditions
        assert words["context_length"] > 12 + max(r.num_prompt_tokens for r in found.records)


def test_chunks_that_wait_are_joined_and_refused(
    tmp_path: Path, played: PlayedSglang, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = sglang_backend.engine_words
    monkeypatch.setattr(
        sglang_backend, "engine_words", lambda *a, **k: plain(*a, **k) | {"batch_notify_size": 16}
    )
    with pytest.raises(IntegrityError, match=r"sglang, request .* additions|that it counted"):
        run(tmp_path, asked, "baseline=false")


def test_run_whose_rounds_were_counted_otherwise_is_refused(
    tmp_path: Path, played: PlayedSglang, asked: str
) -> None:
    played.lost_rounds = 1
    with pytest.raises(IntegrityError, match=r"sglang, request .* rounds that it counted"):
        run(tmp_path, asked, "baseline=false", "sampling.max_new_tokens=4")


def test_engine_of_other_conventions_is_seen(
    tmp_path: Path, played: PlayedSglang, asked: str
) -> None:
    played.played_engine = "vllm"
    (drafted,) = run(tmp_path, asked, "baseline=false").agreements
    assert drafted.num_equal_texts == 3
    assert drafted.num_equal_rounds < drafted.num_rounds


# Refusals.


def test_missing_engine_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(EnvironmentFault, match=r"must find SGLang 0\.5\.23, got none; pip install"):
        check_settings(compose_config(EvalConfig, WORDS))


@pytest.mark.parametrize("version", ["0.5.9", "0.6.0"])
def test_other_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", PlayedSglang(version))
    with pytest.raises(EnvironmentFault, match=rf"SGLang 0\.5\.23, .* got {version}"):
        load_engine("sglang")


def test_head_of_several_modules_is_refused(
    tmp_path: Path, played: PlayedSglang, asked: str
) -> None:
    with pytest.raises(ConfigError, match=r"at most 1 module for backend=sglang"):
        run(tmp_path, asked, "spec.head=assets/lab_tiny/heads/chain_n3")
    assert not list(tmp_path.iterdir())

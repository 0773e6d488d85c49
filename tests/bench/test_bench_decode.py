"""bench_decode on the tiny shape without a GPU: its options reach the loop and the byte count."""

import json
import re
import statistics
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from mtp_research.bench import bench_decode, bench_row
from mtp_research.bench.bench_row import EXTRAS, context_limit, time_steps
from mtp_research.decode import decoder as decoder_file
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.runtime.errors import NumericFault

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tries the commands on a CPU")


def rows(tmp_path: Path, *words: str) -> list[dict]:
    path = tmp_path / "rows.json"
    few = ["--shapes", "tiny", "--batch", "2", "--k", "2", "--steps", "5", "--context", "8"]
    assert bench_decode.main([*few, "--cpu", "--json", str(path), *words]) == 0
    return json.loads(path.read_text())["rows"]


def test_without_a_gpu_the_command_exits_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_decode.main([]) == 4
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_draft_vocabulary_is_drafted_from_and_counted(tmp_path: Path) -> None:
    (whole,), (part,) = rows(tmp_path), rows(tmp_path, "--draft-vocab", "32")
    assert (whole["draft_vocab"], part["draft_vocab"]) == (None, 32)
    saved = whole["bytes"]["draft_weights"] - part["bytes"]["draft_weights"]
    assert saved == 2 * (256 - 32) * 64 * 4  # K passes over [V, D] or [V', D] in float32
    assert part["bytes"]["target_weights"] == whole["bytes"]["target_weights"]


def test_deterministic_rows_say_so_and_run_in_the_mode(tmp_path: Path, monkeypatch) -> None:
    seen = []
    build = decoder_file.build_products
    monkeypatch.setattr(
        decoder_file,
        "build_products",
        lambda *args, engine: seen.append(engine.deterministic) or build(*args, engine=engine),
    )
    (row,) = rows(tmp_path, "--deterministic")
    assert row["arithmetic"] == "invariant"
    assert seen == [True]


def test_table_of_deterministic_steps_is_what_is_stored() -> None:
    stored = json.loads((ROOT / "docs" / "results" / "deterministic.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    pairs = zip(stored["rows"][::2], stored["rows"][1::2], strict=True)
    for usual, fixed in pairs:
        assert (usual["deterministic"], fixed["deterministic"]) == (False, True)
        steps, replays = (
            [median(row[name]) for row in (usual, fixed)] for name in ("step_ms", "graph_ms")
        )
        cells = [usual["shape"], usual["batch"], *(f"{ms:.3f}".lstrip("0") for ms in steps)]
        cells += [f"{100 * ours / other - 100:.0f} %" for other, ours in (steps, replays)]
        cells += [f"{usual['launches']:.0f}, {fixed['launches']:.0f}"]
        assert f"| {' | '.join(map(str, cells))} |" in page
        assert steps[1] <= 1.4 * steps[0], "the page says that the aim is reached"
    for texts in stored["texts"].values():
        assert len(texts["deterministic"]) == 5
        assert all(loop["match_rate"] == 1.0 for loop in texts["deterministic"].values())


def test_table_of_last_sums_is_what_is_stored() -> None:
    stored = json.loads((ROOT / "docs" / "results" / "bench_decode.json").read_text())["last_sum"]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    names = {"mimo_7b": "MiMo-7B", "dense_1b": "dense 1B"}
    for row in stored["rows"]:
        before, since, share = (
            f"{row[name]:.3f}".removeprefix("0") for name in ("before_ms", "step_ms", "share")
        )
        cells = [names[row["shape"]], row["batch"], row["num_drafts"], before, since]
        cells += [f"{100 * row['step_ms'] / row['before_ms'] - 100:.1f} %", share]
        cells += [f"{row['before_launches']}, {row['launches']}"]
        assert f"| {' | '.join(map(str, cells))} |" in page
        assert row["share"] == pytest.approx(row["limit_ms"] / row["step_ms"], abs=6e-4)
    missed = [0.85 - stored["rows"][0]["share"], 0.82 - stored["rows"][2]["share"]]
    assert f"at K = 0 by {missed[0]:.3f} and {missed[1]:.3f}".replace("0.", ".") in page


def test_table_of_launches_that_begin_early_is_what_is_stored() -> None:
    everything = json.loads((ROOT / "docs" / "results" / "bench_decode.json").read_text())
    stored = everything["start_next"]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    names = {"mimo_7b": "MiMo-7B", "glm47_flash": "GLM-4.7-Flash"}
    for row in stored["rows"]:
        before = statistics.mean(row["before_ms"])
        cells = [names[row["shape"]], row["batch"], row["num_drafts"]]
        cells += [", ".join(f"{ms:.3f}" for ms in row["before_ms"]), f"{row['step_ms']:.3f}"]
        cells += [f"{100 * row['step_ms'] / before - 100:.1f} %"]
        cells += [f"{row['share']:.3f}".removeprefix("0")]
        assert f"| {' | '.join(map(str, cells))} |" in page
        assert row["share"] == pytest.approx(row["limit_ms"] / row["step_ms"], abs=6e-4)
    for row in stored["other_calls"]:
        share = f"{row['share']:.3f}".removeprefix("0")
        assert re.search(rf"\b{row['step_ms']:.3f}( ms)?, \{share}\b", page), row
    missed, again = (0.85 - row["share"] for row in (stored["rows"][1], stored["other_calls"][-1]))
    latest = [0.85 - share for share in everything["one_stream"]["rows"][1]["share"]]
    words = f"**misses** it by {missed:.3f} at K = 3 ({again:.3f} in a call at f771d67, "
    words += f"{latest[0]:.3f} and {latest[1]:.3f} at bc0d8b3)"
    assert words.replace("0.", ".") in page


def test_steps_with_the_kernel_for_the_best_token_are_what_is_stored() -> None:
    stored = json.loads((ROOT / "docs" / "results" / "bench_decode.json").read_text())[
        "best_tokens"
    ]
    page, row = (ROOT / "docs" / "benchmarks.md").read_text(), stored["row"]
    words = "takes {} and {} ms where 9fc8a54 takes {} and {}".format
    change = 100 * sum(row["step_ms"]) / sum(row["before_ms"]) - 100
    shares = "{} and {} after {} and {}".format(*row["share"], *row["before_share"])
    assert words(*(f"{ms:.3f}" for ms in row["step_ms"] + row["before_ms"])) in page
    assert f"{change:.1f} %, shares {shares}".replace("0.7", ".7") in page


def test_latest_steps_are_what_is_stored() -> None:
    stored = json.loads((ROOT / "docs" / "results" / "bench_decode.json").read_text())["one_stream"]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    found = []
    for row in stored["rows"]:
        times, shares = (
            " and ".join(map(form, row[name]))
            for name, form in (
                ("step_ms", "{:.3f}".format),
                ("share", lambda share: f"{share:.3f}".removeprefix("0")),
            )
        )
        unit = " ms" * (not found)
        found.append(
            f"{times}{unit} ({row['before_ms'][0]:.3f}), {'shares ' * (not found)}{shares}"
        )
    one, three, many, many_three, flash, flash_three = found
    assert f"MiMo-7B at batch 1 {one}, and at K = 3 {three}; at batch 32 {many}, and at" in page
    assert f"and at K = 3 {many_three}; GLM-4.7-Flash at batch 1 {flash}, and at K = 3" in page
    assert f"K = 3 {flash_three}.\n" in page


def test_extras_reach_the_requests_and_are_compared_with_none(tmp_path: Path, monkeypatch) -> None:
    seen = []
    measure = bench_row.measure_bytes

    def note(decoder, heads, *, num_tokens):
        seen.append(decoder.live_requests[0].sampling)
        return measure(decoder, heads, num_tokens=num_tokens)

    monkeypatch.setattr(bench_row, "measure_bytes", note)
    found = rows(tmp_path, "--extras", "none", *(name for name in EXTRAS if name != "none"))
    assert [row["extras"] for row in found] == list(EXTRAS)
    assert [row["of_none"] for row in found] == [
        None,
        *(row["tok_per_s"] / found[0]["tok_per_s"] for row in found[1:]),
    ]
    used = [(s.uses_processors, s.logprobs, s.grammar is not None) for s in seen]
    assert used[:4] == [(False, None, False), *[(True, None, False)] * 3]
    assert used[4:] == [(False, 5, False), (False, None, True), (True, 5, True)]


@pytest.mark.parametrize("context", [14, 16])
def test_step_that_is_looked_at_has_blocks_of_its_own(tmp_path: Path, context: int) -> None:
    # At these lengths the step after the last timed one writes into a block that it adds.
    words = ["--shapes", "tiny_experts", "--k", "3", "--context", str(context)]
    (row,) = rows(tmp_path, *words)
    assert row["experts"] > 1


def test_every_step_of_a_request_fits_its_context(monkeypatch, tmp_path: Path) -> None:
    seen = []
    measure = bench_row.measure_bytes  # is handed the decoder after the last timed step

    def note(decoder, heads, *, num_tokens):
        seen.append(decoder)
        return measure(decoder, heads, num_tokens=num_tokens)

    monkeypatch.setattr(bench_row, "measure_bytes", note)
    (row,) = rows(tmp_path, "--steps", "60", "--accept", "1.0", "--strict-sync")
    (decoder,) = seen
    assert (row["num_steps"], row["tau"], row["syncs"]) == (60, 3.0, None)
    longest = max(request.num_tokens for request in decoder.scheduler.running)
    assert decoder.max_model_len >= 8 + 3 * (60 + 38)  # 22 of the other steps are still to come
    assert longest <= 8 + 3 * (60 + 2 * bench_row.NUM_WARM_UP_STEPS + 2)
    assert context_limit(context=1024, num_steps=1000, num_drafts=3, num_positions=32768) == 5376


def test_steps_beyond_the_positions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cpu", "--shapes", "tiny", "--batch", "1", "--k", "3", "--steps", "9000"]
    assert bench_decode.main(words) == 2
    assert "--steps must be at most 7872 for --context 1024 and --k 3" in capsys.readouterr().err


def test_pool_that_would_preempt_is_refused() -> None:
    engine = SimpleNamespace(block_size=16, max_num_requests=4)
    decoder = SimpleNamespace(engine=engine, max_model_len=100, num_blocks=27)
    with pytest.raises(ValueError, match="need 28 blocks of 16 tokens, the free memory gives 27"):
        bench_row.require_blocks(cast(SpecDecoder, decoder))


def test_step_that_waits_is_named_and_the_mode_is_put_back(monkeypatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    done: list[int] = []

    def step() -> None:
        done.append(1)
        if len(done) == 3:
            raise RuntimeError("called a synchronizing CUDA operation")

    decoder = SimpleNamespace(
        step=step,
        target=SimpleNamespace(device=torch.device("cuda")),
        stats=SimpleNamespace(num_emitted_tokens=0),
    )
    with pytest.raises(NumericFault, match="no wait for the device in 10 steps, got one in step 3"):
        time_steps(cast(SpecDecoder, decoder), num_steps=10, strict_sync=True)
    assert modes == ["error", "default"]


def test_words_of_a_strict_row_name_launches_and_syncs() -> None:
    row = {"syncs": 0, "launches": 374.25, "replays": 1.0, "num_steps": 1000}
    line = bench_decode._strict_line(row)
    assert line == "374.25 launches and 1 graph replays a step, 0 syncs in 1000 steps"


def test_limit_is_that_of_the_mean_length_of_the_timed_steps(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, "--k", "0", "--steps", "10")
    first = 8 + 1 + 2 * bench_row.NUM_WARM_UP_STEPS
    assert row["text_tokens"] == pytest.approx(first + 10 / 2, abs=2)
    per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dims, bytes
    assert row["bytes"]["keys_values"] == 2 * row["text_tokens"] * per_token


def test_json_names_machine_and_dtype(tmp_path: Path) -> None:
    rows(tmp_path, "--k", "0")
    report = json.loads((tmp_path / "rows.json").read_text())
    assert report["dtype"] == "float32"
    assert report["machine"]["device"] == "cpu"
    assert report["machine"].keys() >= {"driver", "python", "transformers", "commit", "dirty"}

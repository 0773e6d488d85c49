"""The split of a benchmark's step: marks, the cut of a trace, experts counted by pass."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mtp_research.kernels.checks import MARK_KERNEL_NAME, _part_mark_kernel

from mtp_research.bench import bench_decode, bench_row, bench_split
from mtp_research.bench.bench_split import DeviceRun
from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.runtime.errors import NumericFault
from tests import tiny


def run(name: str, begin_us: float, end_us: float) -> DeviceRun:
    return DeviceRun(name, begin_us, end_us)


TRACE = [
    run("gemm", 100, 140),
    run(MARK_KERNEL_NAME, 142, 144),
    run("triton_red_fused_argmax_part_mark_where_18", 145, 150),  # reads a mark, is none
    run(MARK_KERNEL_NAME, 152, 153),
    run("scatter", 154, 160),
    run(MARK_KERNEL_NAME, 162, 163),
    run("gemm", 162.5, 199),  # launched before the mark's end
    run("argmax", 199, 200),
]


def test_mark_s_name_is_its_kernel_s() -> None:
    kernel = getattr(_part_mark_kernel, "fn", _part_mark_kernel)
    assert kernel.__name__ == MARK_KERNEL_NAME


def test_trace_is_cut_at_the_marks_and_scaled_to_the_replay() -> None:
    split = bench_split.split_traces([TRACE, TRACE], graph_ms=2.0, step_ms=2.5)
    assert split == bench_split.StepSplit(
        target=pytest.approx(0.84),
        verify=pytest.approx(0.16),
        bookkeeping=pytest.approx(0.18),
        draft=pytest.approx(0.74),
        marks=pytest.approx(0.08),
        host=pytest.approx(0.5),
    )


def test_trace_without_drafts_has_two_marks_and_no_draft_part() -> None:
    split = bench_split.split_traces([TRACE[:5]], graph_ms=0.06, step_ms=0.01)
    assert split.draft is None
    assert split.bookkeeping == pytest.approx(0.007)
    assert split.host == 0.0


def test_trace_without_marks_is_refused() -> None:
    with pytest.raises(NumericFault, match="expected 2 or 3 marks of --split in a replay, got 0"):
        bench_split.split_traces([TRACE[:1]], graph_ms=1, step_ms=1)


def test_kernels_of_a_name_are_added_up() -> None:
    totals = bench_split.kernel_totals(TRACE)
    assert totals[0] == ("gemm", 2, 76.5)
    assert sum(count for _, count, _ in totals) == len(TRACE)


def texts(monkeypatch: pytest.MonkeyPatch, *, is_marked: bool) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    heads = tiny.tiny_heads(target, num_mtp_modules=1)
    engine = EngineConfig(max_num_requests=2, deferred_output=True, audit=False)
    decoder = SpecDecoder(target, heads, spec=SpecSettings(num_speculative_tokens=2), engine=engine)
    seen: list[int] = []
    mark = bench_split.mark
    if is_marked:

        def noted(values: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
            seen.append(len(made))
            return mark(values, made)

        monkeypatch.setattr(bench_split, "mark", noted)
        decoder.observe(bench_split.marked_parts)
    sampling = SamplingParams(max_new_tokens=6)
    records = list(decoder.generate([[1, 2, 3], [4, 5]], sampling=sampling))
    assert set(zip(seen[::3], seen[1::3], seen[2::3], strict=True)) <= {(0, 2, 1)}
    assert bool(seen) == is_marked
    return [tuple(record.output_token_ids) for record in records]


def test_marked_step_decodes_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    marked, plain = (texts(monkeypatch, is_marked=is_marked) for is_marked in (True, False))
    assert marked == plain


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the command on a CPU")
def test_split_without_graphs_gives_parts_and_the_models_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--shapes", "tiny", "--batch", "2", "--k", "0", "2", "--steps", "5", "--context", "8"]
    path = tmp_path / "rows.json"
    assert bench_decode.main([*words, "--cpu", "--split", "--json", str(path)]) == 0
    plain, drafted = json.loads(path.read_text())["rows"]
    assert plain["split"]["draft"] is None
    assert plain["costs"] is None
    found, unit = drafted["split"], plain["split"]["target"] + plain["split"]["verify"]
    assert found["bookkeeping"] is None
    assert drafted["costs"]["c"] == pytest.approx(found["draft"] / 2 / unit)
    assert drafted["costs"]["v"] == pytest.approx((found["target"] + found["verify"]) / unit - 1)
    assert "; c " in capsys.readouterr().out


def test_unique_experts_are_the_targets_and_a_module_has_all_its_passes_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny.tiny_target("glm4_moe", dtype=torch.float32)
    heads = tiny.tiny_heads(target, num_mtp_modules=1)
    engine = EngineConfig(max_num_requests=2, deferred_output=True, audit=False)
    decoder = SpecDecoder(target, heads, spec=SpecSettings(num_speculative_tokens=3), engine=engine)
    for prompt in ([1, 2, 3, 4], [5, 6, 7]):
        decoder.add_request(prompt, sampling=SamplingParams(max_new_tokens=64))
    for _ in range(4):
        decoder.step()
    passes: list[list[int]] = []
    note = bench_row._note_experts

    def keep(counts: list[int]) -> Callable:
        passes.append(counts)
        return note(counts)

    monkeypatch.setattr(bench_row, "_note_experts", keep)
    needed = bench_row.measure_bytes(decoder, heads, num_tokens=10.5)
    assert {len(counts) for counts in passes} == {1, 3}  # the target once, the module K times
    counts = [counts[0] for counts in passes if len(counts) == 1]
    assert needed.unique_experts == sum(counts) / len(counts)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [["--no-compile"], []], ids=["eager", "compiled"])
def test_captured_step_is_cut_at_its_marks(tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "rows.json"
    few = ["--shapes", "tiny", "--batch", "2", "--k", "0", "2", "--steps", "10", "--context", "8"]
    assert bench_decode.main([*few, *words, "--split", "--json", str(path)]) == 0
    plain, drafted = json.loads(path.read_text())["rows"]
    for row in (plain, drafted):
        parts = [ms for name, ms in row["split"].items() if name != "host" and ms is not None]
        assert sum(parts) == pytest.approx(row["graph_ms"], rel=0.05)
        assert min(parts) > 0
        assert row["replays"] == 1
        assert row["launches"] >= sum(count for _, count, _ in row["kernels"])
    assert drafted["split"]["draft"] > 0
    assert drafted["costs"]["c"] > 0

"""What the GPU tools decide by themselves: prompts, verdicts, and the surroundings of a world."""

import argparse
import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mtp_research.evaluation.backends.vllm_backend import SWITCHES
from mtp_research.evaluation.run.engine_effect import DecodeTask
from mtp_research.heads.engines import ENGINES
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.provenance import REPOSITORY_ROOT as ROOT
from tests.evaluation.backends.played_vllm import PlayedVllm
from tests.test_lab_tiny import ASSETS
from tools import gpu_deterministic, gpu_engines, gpu_regenerate, gpu_tensor_parallel

NAMES = ["K=0", "K=3 eagle"]


def row(match_rate: float = 1.0, seconds: float = 2.0) -> dict[str, object]:
    return {"match_rate": match_rate, "seconds": seconds}


@pytest.mark.parametrize(
    ("fixed", "is_equal"),
    [
        ([row(), row()], True),
        ([row(), row(0.99)], False),
        ([row()], False),  # no time for the second one
    ],
)
def test_texts_are_equal_only_if_every_deterministic_loop_ran(fixed: list, is_equal: bool) -> None:
    usual = {"K=0": row(0.5, 1.6)}
    found = {True: dict(zip(NAMES, fixed, strict=False)), False: usual}
    result = gpu_deterministic.summarise(found, NAMES)
    assert result["all_equal"] == is_equal
    assert result["cost_percent"] == {"K=0": pytest.approx(25)}
    assert "usual K=3 eagle" in cast(list, result["missing"])
    assert ("deterministic K=3 eagle" in cast(list, result["missing"])) == (len(fixed) < 2)


def test_trained_target_decodes_two_hundred_different_shipped_prompts() -> None:
    options = argparse.Namespace(target=str(ASSETS / "target"), prompts=200, prompt_tokens=192)
    unused = cast(Target, SimpleNamespace())
    prompts = gpu_deterministic.make_prompts(unused, options)
    assert len({tuple(prompt) for prompt in prompts}) == 200
    assert max(map(len, prompts)) == 192
    assert min(map(len, prompts)) >= 1


def test_step_of_ranks_is_the_slowest_beside_the_limit_of_the_most_bytes_and_the_link() -> None:
    common = {"num_drafts": 3, "batch": 2, "tok_per_s": 10.0, "tau": 2.0, "experts": 7.5}
    common |= {"launches": 5, "ready_s": 1.0}
    rows = [
        common | {"step_ms": step, "limit_ms": limit} for step, limit in ((4.0, 1.5), (5.0, 1.0))
    ]
    row = gpu_tensor_parallel.combined(rows, link_ms=0.5)
    assert (row["step_ms"], row["limit_ms"], row["share"]) == (5.0, 2.0, 0.4)
    assert "step 5.000 ms  limit 2.000 ms (link 0.500), share 40.0%" in (
        gpu_tensor_parallel.describe(row)
    )
    without = gpu_tensor_parallel.combined([rows[0] | {"limit_ms": None}], link_ms=0.5)
    assert without["share"] is None
    dealt = gpu_tensor_parallel.combined(rows, link_ms=0.5, is_dealt=True)
    assert (row["batch"], row["tok_per_s"]) == (2, 10.0)
    assert (dealt["batch"], dealt["tok_per_s"], dealt["step_ms"]) == (4, 20.0, 5.0)


def test_result_is_written_after_every_loop_and_the_usual_ones_can_be_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ran = tmp_path / "deterministic.json", []

    def decode(*args: object) -> None:
        written = json.loads(path.read_text())["rows"] if path.exists() else {}
        ran.append((args[-1], sum(map(len, written.values()))))

    target = SimpleNamespace(dtype=torch.float32)
    monkeypatch.setattr(gpu_deterministic, "load", lambda _: (target, None))
    monkeypatch.setattr(gpu_deterministic, "make_prompts", lambda *_: [])
    monkeypatch.setattr(gpu_deterministic, "decode", decode)
    monkeypatch.setattr(gpu_deterministic, "compare", lambda *_: row())
    words = ["tool", "--out", str(tmp_path), "--shape", "tiny", "--usual-loops", "1"]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu_deterministic.main() == 0
    assert ran == [*((True, number) for number in range(5)), (False, 5)]
    result = json.loads(path.read_text())
    assert result["cost_percent"] == {"K=0": 0}
    assert len(result["missing"]) == 4
    monkeypatch.setattr(sys, "argv", [*words, "--limit-s", "-1"])
    assert gpu_deterministic.main() == 1


def test_loops_decode_with_drafts_in_another_batch_and_order_too() -> None:
    loops = gpu_deterministic._loops_of(3)
    other = [(loop.num_drafts, loop.policy) for loop in loops if loop.batch_share < 1]
    assert other == [(0, "training"), (3, "training")]
    assert all(loop.order == -1 for loop in loops if loop.batch_share < 1)
    assert len({loop.name for loop in loops}) == len(loops)


def test_divergent_texts_are_all_counted_and_their_gaps_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_deterministic, "MAX_GAPS", 2)
    monkeypatch.setattr(
        gpu_deterministic, "divergences", lambda *_: iter([{"prompt": n} for n in (1, 2, 3)])
    )
    base, found = (
        gpu_deterministic.Decoded({n: (0, n * times) for n in range(4)}, 2.0, None)
        for times in (1, 2)
    )
    row = gpu_deterministic.compare(cast(Target, None), [[0]] * 4, base, found)
    assert (row["match_rate"], row["num_divergent"]) == (0.25, 3)
    assert row["divergences"] == [{"prompt": 1}, {"prompt": 2}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("tool", [gpu_deterministic, gpu_tensor_parallel])
def test_tool_without_the_devices_it_needs_says_so_and_exits_4(
    tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", "--out", str(tmp_path)])
    assert tool.main() == 4
    assert capsys.readouterr().err.startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_engine_rounds_count_in_equal_texts_and_without_the_last() -> None:
    one = gpu_engines.Decoded((7, 1, 2, 3, 4, 5, 6), (2, 0, 1))
    cut = one._replace(accepted=(2, 0, 0))  # the last round ends with the text
    other = one._replace(accepted=(2, 1, 1))
    elsewhere = gpu_engines.Decoded((8,), (3, 3, 3))
    longer = one._replace(accepted=(2, 0, 0, 0))
    found = gpu_engines.agreement([one] * 4, [cut, other, elsewhere, longer])
    # In each equal text the first rounds are compared: the second one differs once, and one side
    # has a third.
    assert found[:5] == (4, 3, 1, 7, 5)
    assert found.lengths == (2.0, pytest.approx(1 + 13 / 9))


def test_engine_tool_passes_only_with_vllm_s_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM is played by our loop, under its own conventions and under those of another engine."""
    exported: list[Path] = []
    habit = "vllm"

    def played(folder: Path, task: DecodeTask, *_: object) -> list[gpu_engines.Decoded]:
        exported.append(folder)
        target = load_target(folder, dtype="float32", device="cpu")
        run = ENGINES[habit]["glm4_moe"].run
        return gpu_engines.our_side(load_heads(folder, target), run, task)

    monkeypatch.setattr(gpu_engines, "vllm_side", played)
    monkeypatch.setattr(gpu_engines, "prepare", functools.cache(gpu_engines.prepare))
    words = ["--out", str(tmp_path), "--cases", "glm4_moe", "--k", "3", "--prompts", "3"]
    for engine, code in (("vllm", 0), ("sglang", 1)):
        habit = engine
        assert gpu_engines.main([*words, "--max-new-tokens", "32"]) == code
        assert exported.pop() == tmp_path / "glm4_moe" / "exported"
        (row,) = json.loads((tmp_path / "engines.json").read_text())
        assert row["passed"] == (code == 0)
        assert row["num_equal_texts"] == 3
        for name in ("control", "recycling", "position_0"):
            assert row[name]["num_equal_rounds"] != row["num_equal_rounds"]


def test_engine_tool_reads_rounds_from_the_steps_of_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SWITCHES:  # so that they are taken back
        monkeypatch.setenv(name, "1")
    monkeypatch.setitem(sys.modules, "vllm", PlayedVllm())
    monkeypatch.setattr(gpu_engines, "NUM_STEPS", 0)
    words = ["--out", str(tmp_path), "--cases", "glm4_moe", "--k", "3", "--prompts", "3"]
    assert gpu_engines.main([*words, "--max-new-tokens", "16"]) == 0
    (row,) = json.loads((tmp_path / "engines.json").read_text())
    assert row["num_equal_texts"] == 3
    assert row["num_equal_rounds"] == row["num_rounds"] > 3


def prepared(case: str, folder: Path, *, num_drafts: int) -> dict[str, Any]:
    """The row of our side alone, for a small target."""
    words = ["--out", str(folder), "--cases", case, "--k", str(num_drafts), "--prepare-only"]
    assert gpu_engines.main([*words, "--prompts", "6", "--max-new-tokens", "32"]) == 0
    (row,) = json.loads((folder / "engines.json").read_text())
    assert row["num_equal_rounds"] == row["num_rounds"]  # ours against itself
    assert row["rounding"]["lengths"][0] == row["lengths"][0]
    return row


@pytest.fixture
def small_case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    sizes = {"vocab_size": 16, "eos_token_id": None, "num_experts_per_tok": 8}
    monkeypatch.setitem(gpu_engines.CASES, request.param, sizes)
    return request.param


@pytest.mark.parametrize("small_case", ["deepseek_v3"], indirect=True)
def test_engine_tool_says_what_rounding_alone_does(
    small_case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_engines, "NUM_STEPS", 0)  # close calls of random weights
    rounding = prepared(small_case, tmp_path, num_drafts=1)["rounding"]
    assert rounding["lengths"][0] != rounding["lengths"][1] or rounding["num_equal_texts"] < 6


@pytest.mark.every_case
@pytest.mark.parametrize("small_case", ["qwen3_next"], indirect=True)
def test_trained_case_outlasts_rounding_and_tells_conventions_apart(
    small_case: str, tmp_path: Path
) -> None:
    row = prepared(small_case, tmp_path, num_drafts=3)
    rounding = row["rounding"]
    assert rounding["num_equal_texts"] == row["control"]["num_equal_texts"] == 6
    assert rounding["num_equal_rounds"] >= 0.995 * rounding["num_rounds"]
    for other in (row["control"], row["recycling"]):
        assert other["num_equal_rounds"] < 0.9 * other["num_rounds"]
    assert 2 < row["lengths"][0] < 3.6  # drafts are right and wrong


def test_engine_rounds_are_compared_where_they_begin() -> None:
    tokens = tuple(range(9))
    one = gpu_engines.Decoded(tokens, (0, 0, 2, 1, 0))
    other = gpu_engines.Decoded(tokens, (1, 2, 1, 0))  # one round less, then the same ones
    found = gpu_engines.agreement([one], [other])
    assert (found.num_rounds, found.num_equal_rounds, found.num_whole_texts) == (4, 2, 0)


def test_engine_tool_reports_a_case_that_fails_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(gpu_engines, "prepare", fails)
    assert gpu_engines.main(["--out", str(tmp_path), "--cases", "mimo,qwen3_next"]) == 1
    rows = json.loads((tmp_path / "engines.json").read_text())
    assert [row["case"] for row in rows] == ["mimo", "qwen3_next"]
    assert all("no kernel" in row["error"] for row in rows)


def test_guide_says_what_vllm_was_seen_to_do() -> None:
    stored = json.loads((ROOT / "docs" / "results" / "engines" / "vllm.json").read_text())
    guide = (ROOT / "docs" / "guide.md").read_text()
    names = {"lab_tiny": "lab_tiny", "glm4_moe": "GLM-4.5's form", "mimo": "MiMo's form"}
    names |= {"qwen3_next": "Qwen3-Next's form", "deepseek_v3": "DeepSeek-V3's form"}
    for row in stored["rows"]:
        ours, theirs = row["lengths"]
        texts = f"{row['num_equal_texts']} of {row['num_texts']}"
        rounds = f"{row['num_equal_rounds']:,} of {row['num_rounds']:,}"
        begin = f"| {names[row['case']]} | {row['dtype']} | {row['k']} | "
        assert f"{begin}{texts} | {rounds} | {ours:.3f}, {theirs:.3f} |\n" in guide
    assert {row["case"] for row in stored["rows"]} == {"lab_tiny", *gpu_engines.CASES}
    rounding = [row["rounding"] for row in stored["rows"] if "rounding" in row]
    assert len(rounding) == 4
    for one in rounding:
        assert f" {one['num_equal_rounds']:,} of {one['num_rounds']:,} " in guide
    (agreed,) = [one for one in stored["report"]["agreements"] if one["reference"] == "own as vllm"]
    lengths = {c["label"]: c["acceptance_length"]["value"] for c in stored["report"]["conditions"]}
    found = stored["report"]["difference"]
    for fact in (
        f"of {agreed['num_texts']} texts {agreed['num_equal_texts']} were equal",
        f"{agreed['num_equal_rounds']:,} of {agreed['num_rounds']:,} rounds, "
        f"length {lengths['vllm']:.3f} against {lengths['own as vllm']:.3f}",
        f"{found['value']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]",
    ):
        assert fact in guide


def test_rate_of_regenerate_stands_beside_that_of_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--cpu --shape tiny --batch 4 --documents 10 --prompt 8 --output 6 --steps 3 --passes 1"
    path = tmp_path / "line.json"
    assert gpu_regenerate.main([*words.split(), "--admit", "1", "3", "--json", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == path.read_text().strip()
    one, three = json.loads(path.read_text())["rows"]
    assert one["num_tokens"] == three["num_tokens"] > 10
    assert (one["admit_together"], three["admit_together"]) == (1, 3)
    assert one["num_steps"] < three["num_steps"]  # places stay empty for a while
    assert one["ratio"] == pytest.approx(one["tok_per_s"] / one["steps_alone"])

"""end_to_end over a played vLLM: what its engine is asked for, and what its rows say."""

import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtp_research.bench import end_to_end, vllm_loop
from mtp_research.bench.vllm_loop import VllmLoop
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.backends.vllm_backend import SWITCHES
from tests.evaluation.backends import played_vllm
from tests.evaluation.backends.played_vllm import PlayedVllm

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tries the commands on a CPU")


class Texts:
    """A loop without a model: rounds that keep as many drafts as it is told."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts, self.num_texts = num_drafts, 0

    def generate(
        self, prompts: Sequence[Sequence[int]], *, sampling: SamplingParams
    ) -> Iterator[RequestRecord]:
        """Three texts keep all drafts, later ones none."""
        kept = self.num_drafts if self.num_texts < 3 else 0
        self.num_texts += 1
        rounds = -(-(sampling.max_new_tokens - 1) // (kept + 1)) if self.num_drafts else 0
        yield RequestRecord(
            request_id="",
            num_prompt_tokens=len(prompts[0]),
            output_token_ids=tuple(range(sampling.max_new_tokens)),
            finish_reason="length",
            num_accepted_per_round=(kept,) * rounds,
            num_drafted_per_round=(self.num_drafts,) * rounds,
            num_target_forwards=rounds,
            ttft_s=0.0,
            decode_s=0.0,
        )


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM without models, and the configurations that its engines read."""
    module, configs = PlayedVllm(), []

    def texts(checkpoint: Path, _dtype: str, *, num_drafts: int, **_: object) -> Texts:
        configs.append(json.loads((checkpoint / "config.json").read_text()))
        return Texts(num_drafts)

    for name in (*SWITCHES, vllm_loop.ROUTING):  # so that they are taken back
        monkeypatch.setenv(name, "")
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(played_vllm, "loop_of", texts)
    return SimpleNamespace(module=module, configs=configs)


def test_vllm_gets_the_requests_of_the_command(played, capsys):
    words = ["--requests", "3", "--batch", "2", "--prompt", "8", "--output", "6", "--passes", "2"]
    more = ["--vllm", '{"enforce_eager": true}', "--policy", "eagle", "training"]
    found = end_to_end.main(["--engine", "vllm", "--cpu", "--k", "0", "2", *words, *more])
    assert found == 0
    *lines, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    assert [(row["num_drafts"], row["pass"]) for row in rows] == [(0, 1), (0, 2), (2, 1), (2, 2)]
    assert {(row["policy"], row["num_tokens"]) for row in rows} == {("vllm 0.24.0", 18)}
    # By vLLM's counters, each pass for itself: three texts keep two drafts a round, then none.
    assert [row["tau"] for row in rows] == [1.0, 1.0, 3.0, 1.0]
    assert rows[2]["num_steps"] < rows[3]["num_steps"]
    assert all(row["num_builds"] is None for row in rows)
    assert "mimo_7b K=2 vllm 0.24.0 B=2 8192 rows 8->6 pass 2" in lines[-1]
    assert played.module.num_open == 0


def test_the_engine_runs_as_its_users_run_it_with_acceptance_of_ours(played):
    for k, apart in (("0", "0"), ("2", "1")):
        words = ["--engine", "vllm", "--cpu", "--k", k, "--passes", "0", "--accept", ".5"]
        more = ["--vllm", '{"max_num_batched_tokens": 99}'] if k == "0" else ["--vllm-apart"]
        assert end_to_end.main([*words, *more]) == 0
        assert [os.environ[name] for name in SWITCHES] == [apart, "1"]
    plain, drafted = played.module.words
    assert "speculative_config" not in plain
    config = drafted["speculative_config"]
    assert config["rejection_sample_method"] == "synthetic"
    assert config["synthetic_acceptance_rates"] == [0.5, 0.25]
    assert (plain["max_num_batched_tokens"], drafted["max_num_batched_tokens"]) == (99, 8192)
    assert drafted["max_model_len"] >= 1024 + 256 + 2
    for one in played.module.words:
        assert one["async_scheduling"] is None  # vLLM's own choice: its steps may overlap
        assert (one["load_format"], one["max_num_seqs"]) == ("dummy", 32)
    for one in played.configs:  # the class that has MiMo's module
        assert one["architectures"] == ["MiMoForCausalLM"]
        assert (one["num_nextn_predict_layers"], one["num_hidden_layers"]) == (1, 36)


def test_targets_with_experts_get_the_class_that_has_their_module_and_even_routing(played):
    for shape in ("glm45_air_8", "glm47_flash"):
        words = ["--engine", "vllm", "--cpu", "--k", "1", "--passes", "0", "--shape", shape]
        assert end_to_end.main(words) == 0
    air, flash = played.configs
    assert air["architectures"] == ["Glm4MoeForCausalLM"]
    assert flash["architectures"] == ["Glm4MoeLiteForCausalLM"]
    assert air["num_nextn_predict_layers"] == flash["num_nextn_predict_layers"] == 1
    assert os.environ[vllm_loop.ROUTING] == "uniform_random"


def test_latencies_are_of_the_steps_that_gave_tokens(played, monkeypatch):
    now = [5.0]
    monkeypatch.setattr(vllm_loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    loop = VllmLoop(
        "mimo_7b", rates=(0.8,), max_num_requests=1, max_model_len=64, apart=False, words={}
    )
    step = loop._llm.llm_engine.step

    def slow() -> list[SimpleNamespace]:
        now[0] += 0.5
        return step()

    loop._llm.llm_engine.step = slow
    for name in "ab":
        loop.add_request([7, 7, 7], sampling=SamplingParams(max_new_tokens=5), request_id=name)
    while loop.has_work:
        loop.step()
    first, second = loop.stats.records
    assert [one.request_id for one in (first, second)] == ["a", "b"]
    assert first.output_token_ids == (0, 1, 2, 3, 4)
    # A chunk of the prompt, then 1 + 2 + 2 tokens; the second waits for its place.
    assert (first.ttft_s, first.decode_s) == (1.0, 1.0)
    assert (second.ttft_s, second.decode_s) == (3.0, 1.0)
    assert loop.stats.num_steps == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "tiny"], "must get --shape mimo_7b or glm45_air or"),
        (["--shape", "glm45_air_fp8"], "or glm47_flash or lab_base or lab_small or"),
        (["--target", "x", "--heads", "y"], "--engine vllm runs random weights"),
    ],
)
def test_what_vllm_cannot_run_is_refused(words, message, played, capsys):
    assert end_to_end.main(["--engine", "vllm", "--cpu", *words]) == 2
    assert message in capsys.readouterr().err
    assert not played.module.words


def test_tables_beside_vllm_are_what_is_stored() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    results = ROOT / "docs" / "results"
    stored = json.loads((results / "end_to_end.json").read_text())["same_arrivals"]
    apart = stored["apart"]
    for k in ("3", "0"):
        own, within = stored["own"][k], stored["vllm"][k]
        assert len(own) == len(within) == len(apart["vllm"][k]) == 8
        assert not any(row["num_builds"] for row in own), "the page says that nothing came later"
        beside = apart["own"].get(k, own)  # K = 0: the page says that it is of the first machine
        for at in range(0, 8, 2):
            rows = [part[at : at + 2] for part in (own, within, beside, apart["vllm"][k])]
            assert line_of(*rows) in page
    few = rates(stored["few_graphs"][2:4])
    assert f"128 to 128 tokens, K = 3, with graphs of eight sizes: {few} tokens/s" in page
    starts = json.loads((results / "cold_start.json").read_text())["beside_vllm"]
    own, theirs, plain = (
        " and ".join(f"{row['ready_s']:.1f}" for row in starts[name])
        for name in ("own", "vllm", "vllm_without_drafts")
    )
    assert f"ready after {own} s, vLLM after {theirs} (K = 0: {plain})" in page
    first = [f"{stored[name]['3'][0]['ready_s']:.1f}" for name in ("own", "vllm")]
    assert f"first processes {' and '.join(first)} s" in page


def rates(rows: list[dict]) -> str:
    return ", ".join(f"{row['tok_per_s']:,.0f}" for row in rows)


def line_of(own: list[dict], within: list[dict], beside: list[dict], apart: list[dict]) -> str:
    """Rates of two passes, and latencies of the second: ours, vLLM in our process and in its own.

    `beside` are ours of the machine of `apart`.
    """
    one, file = own[0], own[0]["arrivals"]
    come = "at once" if file is None else f"{Path(file).stem.removeprefix('arrivals_')} a second"
    cells = [f"{one['prompt']:,}, {one['output']}", come, str(one["num_drafts"]), rates(own)]
    for ours, theirs in ((own, within), (beside, apart)):
        cells += [rates(theirs), ratios(ours, theirs)]
    for name in ("ttft_ms", "token_ms"):
        spans = [f"{row[name]['p50']:,.1f} / {row[name]['p99']:,.1f}" for row in (own[1], apart[1])]
        cells.append("; ".join(spans))
    return f"| {' | '.join(cells)} |"


def test_table_beside_vllm_on_an_h200_is_what_is_stored() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    stored = json.loads((ROOT / "docs" / "results" / "end_to_end.json").read_text())["h200"]
    assert stored["command"].split(" (")[0] in page
    gains = {512: [], 1024: []}
    for prompt, max_rows in itertools.product((1024, 128), (512, 1024)):
        own, again, before, theirs = (
            [r for r in stored[name] if r["prompt"] == prompt and r["max_rows"] in (max_rows, 8192)]
            for name in ("own", "own_again", "before", "vllm")
        )
        assert not any(row["num_builds"] for row in (*own, *again, *before))
        cells = [f"{prompt:,}, {own[0]['output']}", f"{max_rows:,}", *map(rates, (own, before))]
        assert f"| {' | '.join(cells)} | {rates(theirs)} | {ratios(own, theirs)} |" in page
        for found in (own, again):
            pairs = zip(found, before, strict=False)
            gains[max_rows] += [100 * (a["tok_per_s"] / b["tok_per_s"] - 1) for a, b in pairs]
    few, many = ([f"{edge(found):.1f}" for edge in (min, max)] for found in gains.values())
    words = f"{' to '.join(few)} % with 512 rows, {' to '.join(many)} % with 1,024"
    assert words.replace("0.", ".") in page
    first = {name: stored[name][0]["ready_s"] for name in ("own", "own_again", "vllm")}
    own, warm, theirs = (f"{seconds:.1f}" for seconds in first.values())
    assert f"ready after {own} s with cold caches (the machine's first) and after {warm} s" in page
    assert f"vLLM after {theirs}." in page


def test_table_of_shared_code_is_what_is_stored() -> None:
    page = (ROOT / "docs" / "log.md").read_text()
    stored = json.loads((ROOT / "docs" / "results" / "end_to_end.json").read_text())["shared_code"]
    for machine, one in (("first", stored), ("second", stored["another_machine"])):
        for k, theirs in one["vllm"].items():
            own = [one[name].get(k, []) for name in ("own_512", "own_1024")]
            assert not any(row["num_builds"] for rows in own for row in rows)
            for at in (0, 2):
                passes = [rows[at : at + 2] for rows in own]
                first = theirs[at]
                cells = [machine, f"{first['prompt']:,}, {first['output']}", k, *map(rates, passes)]
                cells += [rates(theirs[at : at + 2]), *(ratios(p, theirs[at:]) for p in passes)]
                assert f"| {' | '.join(cells)} |" in page
    few, many = (stored[name]["3"][5] for name in ("own_512", "own_1024"))  # as they come
    first, gap = ([row[name]["p50"] for row in (few, many)] for name in ("ttft_ms", "token_ms"))
    assert (
        "p50 {:.1f} instead of {:.1f} ms, with {:.1f} instead of {:.1f} ms".format(*first, *gap)
        in page
    )


def test_table_of_experts_beside_vllm_is_what_is_stored() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    stored = json.loads((ROOT / "docs" / "results" / "end_to_end.json").read_text())
    names = {"glm45_air_8": "GLM-4.5-Air, 8 layers", "glm47_flash": "GLM-4.7-Flash"}
    for shape, name in names.items():
        runs = dict(stored["moe_beside_vllm"][shape])
        theirs = runs.pop("vllm")
        for run, rows in runs.items():
            assert not any(row["num_builds"] for row in rows)
            for at in range(0, len(rows), 2):
                own, first = rows[at : at + 2], rows[at]
                max_rows = f"{first['max_rows']:,}" + ", after" * run.endswith("after")
                cells = [name, f"{first['prompt']:,}, {first['output']}", max_rows, rates(own)]
                cells += [rates(theirs[at : at + 2]), ratios(own, theirs[at:])]
                assert f"| {' | '.join(cells)} |" in page


def ratios(own: list[dict], theirs: list[dict]) -> str:
    pairs = zip(own, theirs, strict=False)
    return ", ".join(f"{a['tok_per_s'] / b['tok_per_s']:.2f}" for a, b in pairs)

"""Each study of conf/experiment runs: a few prompts or two steps, on the shipped target."""

import dataclasses
import json
from pathlib import Path

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig, TrainConfig
from mtp_research.evaluation.report.stored import RESULTS_FILE, recompute
from mtp_research.evaluation.run.evaluate import evaluate
from mtp_research.runtime.errors import ConfigError
from mtp_research.studies import policy_matrix
from mtp_research.studies.policy_matrix import run_policy_matrix
from mtp_research.studies.tables import context_rows, main, speed_by_context
from tests.evaluation.generations import generation

FEW = ["model=lab_tiny", "prompts.max_prompts=2", "sampling.max_new_tokens=5"]
TWO_STEPS = [
    "trainer.max_steps=2",
    "trainer.batch_size=2",
    "data.max_documents=24",
    "data.eval_documents=6",
    "matrix.num_mtp_modules=[1]",
    "matrix.unrolls=[chain]",
    "matrix.seeds=[0]",
    "matrix.num_prompts=3",
    "matrix.max_new_tokens=12",
]


@pytest.mark.parametrize(
    ("name", "words", "num_conditions"),
    [
        # Greedy drafts at three temperatures, sampled ones at two; a baseline for each of three.
        ("draft_sampling", [], 8),
        ("batch_sweep", ["engine.max_num_requests=[1,2]", "spec.policy=training"], 4),
        # Rounds reach a bucket that the middle of no answer is in.
        (
            "context_sweep",
            ["spec.policy=training", "sampling.max_new_tokens=60", "sampling.ignore_eos=true"],
            2,
        ),
    ],
)
def test_eval_experiment_runs(
    name: str,
    words: list[str],
    num_conditions: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = compose_config(EvalConfig, [f"experiment={name}", *FEW, *words])
    evaluate(config, tmp_path)
    report = recompute(tmp_path / RESULTS_FILE)
    assert len(report.summaries) == num_conditions
    for summary in report.summaries:
        is_baseline = summary.result.num_speculative_tokens == 0
        assert (summary.acceptance.num_drafted == 0) == is_baseline, summary.result.label
    if name == "context_sweep":
        rows = context_rows(report)
        assert {row[1] for row in rows} == {"baseline", "training"}
        assert {row[-1] for row in rows if row[1] == "baseline"} == {"1.00"}
        capsys.readouterr()
        assert main(["context", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert "warning: only 2 prompts" in printed
        assert f"{len(rows)} of {len(rows)} rows have fewer than 80 prompts or requests" in printed
        (one,) = (s.result for s in report.summaries if s.result.num_speculative_tokens)
        num_rounds = sum(len(record.num_accepted_per_round) for record in one.records)
        assert (
            sum(int(row[2]) for row in rows if row[1] == one.label and row[2] != "-") == num_rounds
        )


@pytest.mark.parametrize("engine", ["default", "cpu"])
def test_engine_preset_runs_and_gives_the_text_of_the_plain_loop(
    engine: str, tmp_path: Path
) -> None:
    words = [f"engine={engine}", "model.dtype=float32", "spec.policy=training", *FEW]
    evaluate(compose_config(EvalConfig, words), tmp_path)
    summaries = recompute(tmp_path / RESULTS_FILE).summaries
    assert [summary.result.lossless for summary in summaries] == [
        "is the baseline",
        "identical 2/2",
    ]


@pytest.mark.parametrize(("name", "num_cells"), [("policy_matrix", 3), ("recycle_norm", 4)])
def test_train_experiment_runs_and_is_published_once(
    name: str, num_cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict] = []
    monkeypatch.setattr(policy_matrix, "publish", lambda sections, **rest: sent.append(rest))
    config = compose_config(TrainConfig, [f"experiment={name}", *TWO_STEPS])
    assert len(run_policy_matrix(config, tmp_path)["cells"]) == num_cells
    (published,) = sent
    assert len(published["scalars"]) == num_cells  # one name a cell


def test_experiments_have_three_seeds_and_choose_no_head_by_its_prompts() -> None:
    for name in ("policy_matrix", "recycle_norm"):
        config = compose_config(TrainConfig, [f"experiment={name}"])
        assert config.matrix.seeds == [0, 1, 2]
        assert config.trainer.eval_every > config.trainer.max_steps
        assert config.matrix.num_prompts >= 80


def test_speed_is_of_whole_requests_by_the_middle_of_their_output() -> None:
    short = generation("a", [1, 1])  # 5 prompt tokens and 5 more: the middle is at 7
    long = dataclasses.replace(short, num_prompt_tokens=100, decode_s=8.0)
    found = speed_by_context([short, long, short], seed=0)
    assert {low: count for low, (count, _) in found.items()} == {4: 2, 64: 1}
    assert found[4][1].value == pytest.approx(4 / 1.0)
    assert found[64][1].value == pytest.approx(4 / 8.0)


def test_context_table_of_a_batch_is_refused(tmp_path: Path) -> None:
    words = ["spec.head=null", "engine.max_num_requests=2", *FEW]
    evaluate(compose_config(EvalConfig, words), tmp_path)
    with pytest.raises(ConfigError, match="max_num_requests must be 1"):
        context_rows(recompute(tmp_path / RESULTS_FILE))
    assert main(["context", str(tmp_path)]) == 2
    (tmp_path / RESULTS_FILE).write_text(json.dumps({"schema_version": 2}))
    assert main(["context", str(tmp_path)]) == 3

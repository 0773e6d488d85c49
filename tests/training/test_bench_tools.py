"""The GPU training bench in tiny form, on a CPU: every mode runs and its figures fit together."""

import json

import pytest

from tests.training.tiny import save_lab
from tools import train_bench

DOCS = train_bench.ROOT / "docs"
ROUNDS = ["--seq-len", "64", "--batch-size", "2", "--steps", "1", "--compile", "no"]


def measured(folder, *words):
    """Rows of the JSON file that the bench writes."""
    train_bench.main(["--out", str(folder), *ROUNDS, *words])
    report = json.loads((folder / "train_bench.json").read_text())
    assert report["product_tflops"] > 0
    assert report["machine"].keys() >= {"device", "torch", "transformers", "commit", "dirty"}
    return report


def test_bench_of_a_trained_folder_counts_each_loss_and_source(tmp_path):
    config = save_lab(tmp_path)
    words = ["--models", config.model.path, "--documents", config.data.path]
    report = measured(tmp_path, *words, "--losses", "ce", "kl", "--hidden", "live", "kept")
    rows = {(row["loss"], row["hidden"] == "kept"): row for row in report["rows"]}
    assert rows.keys() == {("ce", False), ("ce", True), ("kl", False), ("kl", True)}
    for (loss, keeps_hidden), row in rows.items():
        flops = row["mflop_per_token"]
        assert (flops["teacher"] > 0) == (loss == "kl")
        assert (flops["target"] == 0) == keeps_hidden
        tflops = sum(flops.values()) * row["tokens_per_s"] / 1e6
        assert row["mfu"] == pytest.approx(tflops / report["product_tflops"])
        assert set(row["split_ms"]) == {
            "target_forward",
            "modules_forward",
            "loss",
            "backward",
            "optimizer",
        }
        assert row["loss_last"] < row["loss_first"]


def test_bench_of_a_name_builds_random_weights_of_its_shape(tmp_path):
    words = ["--models", "lab_tiny", "--losses", "ce", "--modules", "2", "--depths", "2"]
    (row,) = measured(tmp_path, *words)["rows"]
    assert row["num_depths"] == 2
    assert row["tokens_per_s"] == pytest.approx(1e3 * 2 * 64 / row["step_ms"])


def test_bench_measures_variants_of_the_loss_in_the_same_run(tmp_path):
    config = save_lab(tmp_path)
    words = ["--models", config.model.path, "--documents", config.data.path, "--losses", "ce"]
    words += ["--variants", "fused_rows=false", "--profile", "2"]
    row, other = measured(tmp_path, *words)["rows"]
    assert [row["variant"], other["variant"]] == ["", "fused_rows=false"]
    assert other["loss_last"] < row["loss_last"]  # the same run went on
    assert row["host_ms"] > 0
    assert {len(kernels) for kernels in row["kernels"].values()} == {2}


def test_bench_of_random_states_runs_no_target_and_each_unroll(tmp_path):
    words = ["--models", "tiny_experts", "--losses", "ce", "--hidden", "random", "--modules", "1"]
    report = measured(tmp_path, *words, "--unrolls", "ttt", "mixed")
    assert [(row["unroll"], row["num_mtp_modules"]) for row in report["rows"]] == [
        ("ttt", 1),
        ("mixed", 1),
    ]
    assert all(row["mflop_per_token"]["target"] == 0 for row in report["rows"])
    ttt, mixed = (row["loss_first"] for row in report["rows"])
    assert ttt != mixed  # the same weights, rows and states
    assert all(row["loss_last"] < row["loss_first"] for row in report["rows"])


def test_tables_of_one_gpu_are_what_is_stored():
    page = (DOCS / "benchmarks.md").read_text()
    stored = json.loads((DOCS / "results" / "head_training.json").read_text())["one_gpu"]
    names = {"smollm2_135m": "SmolLM2-135M"}
    states = {"random": "at random", "live": "of the target"}
    ways = {None: f"before ({stored['commit_before']})", False: "launched", True: "replayed"}
    for row in stored["before"] + stored["after"]:
        way = ways[row.get("cuda_graphs")]
        cells = [names.get(row["model"], row["model"]), states[row["hidden"]], way]
        cells += [f"{row['step_ms']:.1f}", f"{row['tokens_per_s']:,.0f}"]
        cells += [f"{100 * row['mfu']:.1f} %", f"{row['host_ms']:.1f}"]
        assert f"| {' | '.join(cells)} |" in page
    h200 = json.loads((DOCS / "results" / "head_training.json").read_text())["one_h200"]
    (row,) = h200["rows"]
    figures = (
        f"{row['step_ms']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s, {100 * row['mfu']:.1f} %"
    )
    assert f"its replayed steps take {figures} of a product" in page
    run = stored["whole_run"]
    seconds = [run["seconds"][way][0] for way in ("before", "after", "graphs")]
    rates = [f"{run['speed'][way][1]['tokens_per_s']:,.0f}" for way in run["seconds"]]
    before, after = (f"{s} s" for s in seconds[:2])
    assert f"{before} before ({run['commit_before']}) and {after} at {run['commit']}" in page
    assert f"`trainer=one_gpu` {seconds[2]} s" in page
    assert f"make {rates[0]}, {rates[1]} and {rates[2]} tokens/s" in page

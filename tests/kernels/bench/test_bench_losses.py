"""The distillation benchmark runs on a CPU with tiny sizes, and its contenders agree."""

import json

import pytest
import torch
from mtp_research.kernels.bench import __main__ as entry
from mtp_research.kernels.bench.bench_losses import (
    make_inputs,
    num_flops,
    reference,
    run_distill,
    run_eager,
)


@pytest.mark.parametrize("loss", ["ce", "kl", "lk"])
def test_bench_distill_contenders_agree_with_float64(loss):
    inputs = make_inputs(rows=9, hidden=16, vocab=300, num_depths=2, alpha=0.9, seed=1)
    expected = reference(inputs, loss=loss)
    for contender in (run_distill, run_eager):
        got = contender(inputs, loss=loss, chunk_rows=4)
        torch.testing.assert_close(got.losses.double(), expected.losses, atol=1e-5, rtol=1e-5)
        for grad, wanted in zip(got.grads, expected.grads, strict=True):
            torch.testing.assert_close(grad.double(), wanted, atol=1e-5, rtol=1e-3)


def test_bench_distill_inputs_reach_the_acceptance_asked_for():
    inputs = make_inputs(rows=64, hidden=32, vocab=500, num_depths=1, alpha=0.98, seed=0)
    assert inputs.alpha == pytest.approx(0.98, abs=0.005)


def test_bench_distill_counts_the_teacher_once():
    inputs = make_inputs(rows=4, hidden=8, vocab=10, num_depths=3, alpha=0.9, seed=0)
    assert num_flops(inputs, loss="kl") == 7 * 2 * 4 * 8 * 10
    assert num_flops(inputs, loss="ce") == 6 * 2 * 4 * 8 * 10


def test_bench_distill_writes_a_row_per_contender_and_depth(tmp_path, capsys):
    path = tmp_path / "rows.json"
    arguments = ["--rows", "8", "--hidden", "8", "--vocab", "64", "--depths", "1", "2"]
    code = entry.main(["distill", *arguments, "--repeats", "1", "--json", str(path)])
    assert code == 0
    *rows, last = json.loads(path.read_text())["rows"]
    assert [(row["contender"], row["k"]) for row in rows] == [
        (name, k) for k in (1, 2) for name in ("distill", "liger", "liger_kl", "eager")
    ]
    assert all(row["grad_error"] < 1e-3 for row in rows if "skipped" not in row)
    assert last["sizes"] == {"rows": 8, "hidden": 8, "vocab": 64}
    assert last["parts_ms"].keys() >= {"chunk_rows", "project", "divergence_kl"}
    printed = capsys.readouterr().out
    assert "grad error" in printed
    assert json.loads(printed.splitlines()[-1])["rows"][-1] == last

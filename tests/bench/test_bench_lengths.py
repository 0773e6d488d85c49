"""bench_lengths on the tiny shape without a GPU: its rates, its line and its JSON."""

import json
from pathlib import Path

import pytest

from mtp_research.bench import bench_lengths

ROOT = Path(__file__).resolve().parents[2]
FEW = ["--shape", "tiny", "--cpu", "--k", "2", "--prompt", "8", "--steps", "12", "--repeats", "1"]


def test_rates_of_every_number_and_of_the_rule(tmp_path, capsys) -> None:
    path = tmp_path / "rows.json"
    words = ["--batch", "2", "--accept", "1.0", "--json", str(path)]
    assert bench_lengths.main([*FEW, *words]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert set(row["tokens_per_s"]) == {"0", "1", "2", "chosen"}
    assert min(row["tokens_per_s"].values()) > 0 < row["plain"]
    fixed = {n: rate for n, rate in row["tokens_per_s"].items() if n != "chosen"}
    assert row["best"] == max(fixed, key=fixed.__getitem__)
    assert row["chosen_over_best"] == pytest.approx(
        row["tokens_per_s"]["chosen"] / fixed[row["best"]]
    )
    assert 0 <= row["mean_chosen"] <= 2
    assert f"of n = {row['best']}" in capsys.readouterr().out


def test_one_decoder_serves_all_batch_sizes_and_each_row_is_written_at_once(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, built, seen = tmp_path / "rows.json", [], []
    build, counts = bench_lengths._decoder, bench_lengths._counts

    def noted(*args, **how):
        built.append(build(*args, **how))
        return built[-1]

    def counted(decoder):  # before and after the timed steps
        num_rows = len(json.loads(path.read_text())["rows"]) if path.exists() else 0
        seen.append((decoder is built[-1], len(decoder.live_requests), num_rows))
        return counts(decoder)

    monkeypatch.setattr(bench_lengths, "_decoder", noted)
    monkeypatch.setattr(bench_lengths, "_counts", counted)
    words = ["--batch", "1", "3", "--accept", "1.0", "0.5", "--json", str(path)]
    assert bench_lengths.main([*FEW, *words]) == 0
    assert len(built) == 3  # without heads, then one for each acceptance
    per_row = 2 * 4  # n = 0, 1, 2 and the rule
    plain = [(True, batch, 0) for batch in (1, 3) for _ in range(2)]
    rows = [(True, (1, 3)[row % 2], row) for row in range(4) for _ in range(per_row)]
    assert seen == plain + rows
    found = json.loads(path.read_text())["rows"]
    assert [(row["batch"], row["accept"]) for row in found] == [
        (1, 1.0), (3, 1.0), (1, 0.5), (3, 0.5)
    ]  # fmt: skip
    assert found[0]["plain"] == found[2]["plain"] != found[1]["plain"]


def test_without_repeats_it_compiles_alone(capsys) -> None:
    assert bench_lengths.main([*FEW, "--repeats", "0", "--batch", "2", "--accept", "0.5"]) == 0
    assert capsys.readouterr().out == "accept 0.5: ready in 0 s\n"


def test_without_a_gpu_it_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench_lengths.main(["--shape", "tiny"]) == 4


def test_table_is_the_stored_one() -> None:
    stored = json.loads((ROOT / "docs" / "results" / "draft_length.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for row in stored["rows"]:
        rates, best = row["tokens_per_s"], row["best"]
        fixed = {n: rate for n, rate in rates.items() if n != "chosen"}
        assert best == max(fixed, key=fixed.__getitem__)
        cells = [f"{row['batch']}", f"{row['accept']:.1f}", f"{row['plain']:,.0f}"]
        cells += [f"{rates['0']:,.0f}", f"{rates[best]:,.0f} at n = {best}"]
        cells += [f"{rates['chosen']:,.0f} at n = {row['mean_chosen']:.2f}"]
        cells += [f"{rates['chosen'] / rates[best]:.3f}", f"{row['spread']:.3f}"]
        cells += [f"{rates['chosen'] / row['plain']:.2f}"]
        assert f"| {' | '.join(cells)} |\n" in page
    low, high = ((row["chosen_over_best"], row["spread"]) for row in stored["h100"]["rows"])
    words = "gave {:.3f} there with a spread of {:.3f}, and {:.3f} with {:.3f} at .8: both reach it"
    assert words.format(*low, *high) in page
    assert all(rate >= min(0.98, 1 - spread) for rate, spread in (low, high))

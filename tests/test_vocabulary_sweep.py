"""The sweep of draft vocabularies: lengths and texts of the loop, ratios by pass, proposals."""

import json
from pathlib import Path

import pytest

from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.stats import RequestRecord
from tests.test_lab_tiny import ASSETS
from tools import vocabulary_sweep
from tools.vocabulary_sweep import Decoded

FEW = ["--cpu", "--prompts", str(ASSETS / "prompts"), "--tokens", "24"]


def test_table_of_a_gpu_is_what_is_stored() -> None:
    docs = ASSETS.parents[1] / "docs"
    stored = json.loads((docs / "results" / "vocabulary_sweep.json").read_text())
    page = (docs / "benchmarks.md").read_text()
    rows = [row for row in stored["rows"] if row["domain"] == "all"]
    assert len(rows) == 12
    for row in rows:
        change, low, high = row["change"]
        least, most = min(row["ratios"]), max(row["ratios"])
        cells = [row["batch"], f"{row['size']:,}", f"{row['acceptance_length'][0]:.3f}"]
        cells += [f"{change:+.3f} [{low:+.3f}, {high:+.3f}]", f"{row['tokens_per_s']:,.0f}"]
        cells += [f"{row['of_first']:.3f} ({least:.3f} to {most:.3f})"]
        cells += [f"{row['num_equal']} of {row['num_prompts']}"]
        assert f"| {' | '.join(map(str, cells))} |" in page
    assert f"spec.draft_vocabulary_size={stored['proposed']['every batch size']}" in page


def test_sizes_lose_acceptance_and_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*FEW, "--sizes", "4096", "64", "--batch", "1", "2", "--passes", "2"]
    words += ["--max-prompts", "4"]
    assert vocabulary_sweep.main([*words, "--json", str(tmp_path / "rows.json")]) == 0
    record = json.loads((tmp_path / "rows.json").read_text())
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == record
    rows = {(row["batch"], row["domain"], row["size"]): row for row in record["rows"]}
    domains = {"arith", "dialog", "howto", "math"}
    assert {domain for _, domain, _ in rows} == domains | {"all"}
    assert len(rows) == 2 * 5 * 2
    assert all(row["num_equal"] == row["num_prompts"] for row in rows.values())
    for (batch, domain, size), row in rows.items():
        first = rows[batch, domain, 4096]
        lost = row["acceptance_length"][0] - first["acceptance_length"][0]
        assert row["change"][0] == pytest.approx(lost)
        assert row["acceptance_length"] == rows[1, domain, size]["acceptance_length"]
        assert len(row["ratios"]) == 2
    whole = rows[1, "all", 64]
    counts = [rows[1, domain, 64]["num_prompts"] for domain in domains]
    assert whole["num_prompts"] == sum(counts) == 4
    assert whole["change"][0] < -0.1
    assert whole["change"][1] <= whole["change"][0] <= whole["change"][2]
    assert set(record["proposed"].values()) <= {64, 4096}
    proposed = record["proposed"]["every batch size"]
    assert f"proposed for every batch size: spec.draft_vocabulary_size={proposed}" in printed


def test_batch_sizes_have_their_own_prompts_and_share_decoders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    decode, step, most, written = vocabulary_sweep._decode, SpecDecoder.step, {}, []

    def noted(decoder, token_ids, options, *, batch, domain):
        def stepped(self: SpecDecoder) -> None:
            most[batch] = max(most.get(batch, 0), len(self.live_requests))
            step(self)

        monkeypatch.setattr(SpecDecoder, "step", stepped)
        written.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)
        return decode(decoder, token_ids, options, batch=batch, domain=domain)

    monkeypatch.setattr(vocabulary_sweep, "_decode", noted)
    words = [*FEW, "--sizes", "4096", "--batch", "1", "3", "--passes", "1", "--tokens", "4"]
    assert vocabulary_sweep.main([*words, "--max-prompts", "4", "16", "--json", str(path)]) == 0
    assert capsys.readouterr().out.count("ready in") == 1
    assert most == {1: 1, 3: 3}
    assert written == [0, 0, 0, 1, 2, 3, 5, 6, 7, 8]  # a look at each batch size, then by domain
    rows = json.loads(path.read_text())["rows"]
    found = {(row["batch"], row["domain"]): row["num_prompts"] for row in rows}
    assert (found[1, "all"], found[3, "all"], found[3, "math"]) == (4, 16, 4)
    assert vocabulary_sweep.main([*words, "--max-prompts", "1", "2", "3"]) == 2
    assert "one for each of 2 batch sizes, got 3" in capsys.readouterr().err


def decoded(wall_s: float, *accepted: int, text: int = 0) -> Decoded:
    """Ten tokens of one request, whose rounds kept so many of two drafts."""
    counts = (accepted, (2,) * len(accepted), 9, 0.1, 1.0)
    return Decoded([RequestRecord("a", 3, (text,) * 10, "length", *counts)], wall_s)


def test_ratios_are_taken_pass_by_pass() -> None:
    whole = [decoded(1.0, 2, 2), decoded(4.0, 2, 2)]  # the machine became slower
    part = [decoded(0.5, 2, 0, text=1), decoded(4.0, 2, 0, text=1)]
    passes = {9: whole, 4: part}
    first, row = vocabulary_sweep.domain_rows(passes, batch=1, domain="d", num_drafts=2)
    assert (first["ratios"], first["num_equal"]) == ([1.0, 1.0], 1)
    assert (row["ratios"], row["of_first"], row["num_equal"]) == ([2.0, 1.0], 1.5, 0)
    assert row["tokens_per_s"] == pytest.approx((20 + 2.5) / 2)
    assert row["change"] == (-1.0, None, None)  # three tokens a round, then two; one prompt


def test_proposed_is_the_fastest_by_domain_and_over_batch_sizes() -> None:
    def rows(batch: int, domain: str, ratio: float, spread: float = 0.0) -> list[dict]:
        place = {"batch": batch, "domain": domain}
        sizes = ((9, 1.0, 0.0), (6, 1.01, 0.0), (4, ratio, spread))
        return [
            place | {"size": n, "of_first": r, "ratios": [r - s, r, r + s]} for n, r, s in sizes
        ]

    found = [*rows(1, "a", 0.9), *rows(1, "b", 1.5), *rows(1, "all", 1.2)]
    proposed = vocabulary_sweep.proposals([*found, *rows(8, "b", 0.9), *rows(8, "all", 0.9)])
    assert proposed == {
        "batch 1, a": 6,
        "batch 1, b": 4,
        "batch 1, all": 4,
        "batch 8, b": 6,
        "batch 8, all": 6,
        "every batch size": 4,
    }
    assert vocabulary_sweep.proposals(rows(1, "a", 1.1))["every batch size"] == 4
    # Faster in the middle and slower in one pass: it is not proposed.
    assert vocabulary_sweep.proposals(rows(1, "a", 1.1, 0.2))["every batch size"] == 6
    slow = [row for row in rows(1, "a", 0.9) if row["size"] != 6]
    assert vocabulary_sweep.proposals(slow)["every batch size"] == 9


def test_without_a_gpu_it_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert vocabulary_sweep.main([]) == 4

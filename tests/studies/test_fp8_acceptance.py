"""The FP8 copy that `studies/fp8_acceptance.py` makes, and the figures that it stores."""

import json
from pathlib import Path

import pytest
import torch

from mtp_research.models.target import load_target
from mtp_research.runtime.provenance import REPOSITORY_ROOT as ROOT
from mtp_research.studies import fp8_acceptance
from tests.models.test_loading import logits_of, save

STORED = json.loads((ROOT / "docs" / "results" / "fp8_acceptance.json").read_text())["studies"]


@pytest.mark.parametrize("layout", ["blocks", "rows"])
def test_copy_is_read_as_fp8_and_stands_for_nearly_the_same_numbers(
    layout: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "plain", "qwen3")
    folder = tmp_path / "fp8"
    error = fp8_acceptance.copy_as_fp8(source, folder, layout=layout)
    assert 0.01 < error < 0.04, "three bits behind the first leave 2 to 3 %"
    kept = load_target(folder, dtype="float32", device="cpu", weights="stored_fp8")
    plain = load_target(source, dtype="float32", device="cpu")
    assert kept.holds_fp8
    found, expected = logits_of(kept), logits_of(plain)
    assert 1e-4 < (found - expected).norm() / expected.norm() < 0.2


@pytest.mark.parametrize("layout", ["blocks", "rows"])
def test_largest_number_of_each_block_uses_the_whole_range(layout: str) -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    numbers, scale, meant = fp8_acceptance.quantise(weight, layout=layout)
    assert scale.shape == ((2, 3) if layout == "blocks" else (200, 1))
    assert numbers.float().abs().max() == 448
    assert (meant - weight).abs().max() <= scale.max() * 448 / 16


@pytest.mark.parametrize("stored", STORED, ids=lambda stored: stored["model"])
def test_page_says_what_is_stored(stored: dict) -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf8")
    section = page.partition("## A target and its FP8 copy")[2].partition("\n## ")[0]
    for row in stored["lengths"]:
        figures = f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        assert f"| {stored['model']} | {row['target']} | {row['head']} | {figures} |" in section
    for row in stored["differences"]:
        figures = f"{row['value']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"
        assert f"| {stored['model']} | {row['of']} | {row['minus']} | {figures} |" in section
    assert f"{stored['equal_texts']} of {stored['prompts']} texts" in section
    assert f"{100 * stored['relative_error_of_weights']:.1f} %" in section

"""Which code runs attention, and the line that says so."""

import json
from pathlib import Path

import pytest
import torch
from mtp_research.kernels import checks

from mtp_research.__main__ import run_evaluation
from mtp_research.app.cli import run_entry
from mtp_research.config.schema import EngineConfig, EvalConfig
from mtp_research.evaluation.run.decoders import check_backend, reference_note
from mtp_research.runtime.errors import EnvironmentFault


@pytest.mark.parametrize(
    ("backend", "device", "is_visible", "has_triton", "reason"),
    [
        ("auto", "auto", False, True, "no CUDA GPU is visible;"),
        ("auto", "cpu", True, True, "model.device=cpu;"),
        ("auto", "auto", True, False, "the triton package is not installed;"),
        ("reference", "auto", True, True, "engine.backend=reference;"),
        (
            *("reference", "cpu", False, False),
            "engine.backend=reference and no CUDA GPU is visible and the triton package",
        ),
        ("auto", "auto", True, True, None),
        ("triton", "auto", False, True, None),
    ],
)
def test_reference_path_is_said_with_its_reason(
    backend: str,
    device: str,
    is_visible: bool,
    has_triton: bool,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_visible)
    monkeypatch.setattr(checks, "triton", object() if has_triton else None)
    note = reference_note(EngineConfig(backend=backend), device)
    if reason is None:
        assert note is None
    else:
        assert note is not None
        assert f"(the reference path), because {reason}" in note
        assert "\n" not in note


def test_triton_on_a_cpu_is_refused_outside_its_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(EnvironmentFault, match=r"engine\.backend=triton needs a CUDA GPU"):
        check_backend("triton", torch.device("cpu"))
    check_backend("auto", torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_backend("triton", torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run here")
def test_entry_says_it_beside_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["model=lab_tiny", "prompts.max_prompts=1", "sampling.max_new_tokens=2", "spec.k=0"]
    assert run_entry(EvalConfig, run_evaluation, argv=[*few, f"output_dir={tmp_path}"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["num_prompts"] == 1
    assert "note: " not in printed.out
    assert [line[:50] for line in printed.err.splitlines()].count(
        "note: attention and KV writes run in plain PyTorch"
    ) == 1

"""Where compiled code is found again, and what the collector leaves alone meanwhile."""

import asyncio
import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtp_research.bench.end_to_end import serve
from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.graphs.decode_graphs import StepGraphs
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.streaming import AsyncDecoder
from mtp_research.evaluation.run.prompt_files import Prompt
from mtp_research.evaluation.run.prompts import EncodedPrompts
from mtp_research.evaluation.run.timed_decode import decode_prompts
from mtp_research.runtime import compiling
from mtp_research.runtime.compiling import old_objects_kept, share_assembler
from mtp_research.studies.answer_tasks import Task
from mtp_research.studies.regenerate import write_answers
from tests.decode.test_captured_loop import stand_in_for_graphs
from tests.tiny import tiny_target

_SHORT = SamplingParams(max_new_tokens=3)
_PROMPT = Prompt("a", "chat", ("hello",), "completion")
_CAPTURED = EngineConfig(
    cuda_graphs=True, deferred_output=True, audit=False, max_num_requests=1, max_model_len=64
)


@pytest.fixture
def assembler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an installed torch would have one."""
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "bin").mkdir()
    # Twice, so that the variable is put back also where it was not set.
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    return tmp_path / "bin" / "ptxas"


def test_kernels_of_compiled_steps_are_assembled_by_the_program_of_torch_from_the_first_one_on(
    assembler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembler.touch(mode=0o755)
    stand_in_for_graphs(monkeypatch)
    spec = SpecSettings(num_speculative_tokens=0)
    SpecDecoder(tiny_target(), spec=spec, engine=_CAPTURED)
    assert "TRITON_PTXAS_PATH" not in os.environ  # nothing that is compiled would name it
    SpecDecoder(tiny_target(), spec=spec, engine=replace(_CAPTURED, compile=True))
    assert os.environ["TRITON_PTXAS_PATH"] == str(assembler)


def test_a_torch_without_assembler_and_a_user_with_one_are_left_alone(
    assembler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_assembler()
    assert "TRITON_PTXAS_PATH" not in os.environ
    assembler.touch(mode=0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/own/ptxas")
    share_assembler()
    assert os.environ["TRITON_PTXAS_PATH"] == "/own/ptxas"


def test_collector_leaves_old_objects_alone_while_steps_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in_for_graphs(monkeypatch)
    counts = []
    monkeypatch.setattr(
        StepGraphs, "_captured", lambda *_, **__: counts.append(gc.get_freeze_count())
    )
    monkeypatch.setattr(compiling, "_are_others_frozen", False)
    gc.unfreeze()  # what the suite has set aside
    try:
        decoder = SpecDecoder(
            tiny_target(), spec=SpecSettings(num_speculative_tokens=0), engine=_CAPTURED
        )
        decoder.warm_up(SamplingParams())
        assert gc.get_freeze_count() == 0 < min(counts)
    finally:
        gc.freeze()


async def _stream(decoder: SpecDecoder, _: Path) -> None:
    async with AsyncDecoder(decoder) as service:
        async for _ in service.generate([5, 6], sampling=_SHORT):
            pass


_LOOPS = {
    "evaluation": lambda decoder, _: decode_prompts(
        decoder, EncodedPrompts((_PROMPT,), ((5, 6),), ()), [_SHORT], salt=""
    ),
    "bench": lambda decoder, _: serve(decoder, [[5, 6]], [0.0], sampling=_SHORT),
    "regenerate": lambda decoder, folder: write_answers(
        decoder, [Task("a", "chat", (5, 6))], output=folder / "x", params_of=lambda _: _SHORT
    ),
    "stream": lambda decoder, folder: asyncio.run(_stream(decoder, folder)),
}


@pytest.mark.parametrize("loop", _LOOPS)
def test_no_loop_waits_for_the_collector_to_look_through_libraries(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, step = [], SpecDecoder.step

    def counting(decoder: SpecDecoder):
        counts.append(gc.get_freeze_count())
        return step(decoder)

    monkeypatch.setattr(SpecDecoder, "step", counting)
    monkeypatch.setattr(compiling, "_are_others_frozen", False)
    decoder = SpecDecoder(tiny_target(), spec=SpecSettings(num_speculative_tokens=0))
    gc.unfreeze()  # what the suite has set aside
    try:
        _LOOPS[loop](decoder, tmp_path)
        assert gc.get_freeze_count() == 0 < min(counts)
    finally:
        gc.freeze()


def test_what_a_process_has_set_aside_stays_there_and_is_counted_once(monkeypatch) -> None:
    gc.freeze()
    monkeypatch.setattr(compiling, "_are_others_frozen", False)
    counted, count = [], gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or count())
    for _ in range(3):
        with old_objects_kept():
            pass
    assert count() > 1000
    assert len(counted) == 1


def test_objects_are_kept_once_more_after_calls_inside_each_other(monkeypatch) -> None:
    monkeypatch.setattr(compiling, "_are_others_frozen", False)
    gc.unfreeze()
    try:
        for _ in range(2):
            with old_objects_kept():
                with old_objects_kept():
                    pass
                assert gc.get_freeze_count() > 1000
            assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()

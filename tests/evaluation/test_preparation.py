"""What happens before the clock: refusals before capture, progress of capture, equal pools."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig
from mtp_research.decode import build
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.graphs.capture import Wish
from mtp_research.evaluation.backends import own_backend
from mtp_research.evaluation.run import passes as preparation
from mtp_research.evaluation.run.evaluate import evaluate
from mtp_research.runtime.errors import ConfigError

WORDS = [
    "model=lab_tiny",
    "model.dtype=float32",
    "model.device=cpu",
    "prompts.max_prompts=2",
    "sampling.max_new_tokens=4",
    "engine.max_num_requests=2",
    "engine.max_model_len=512",
    "engine.deferred_output=true",
    "engine.audit=false",
    "spec.k=3",
    "spec.policy=eagle",
]


def run(folder: Path, *words: str) -> None:
    evaluate(compose_config(EvalConfig, [*WORDS, *words]), folder)


class BothAreBuilt(Exception):
    """Ends an evaluation whose texts nobody asks for."""


class FakeGraphs:
    """Takes no step; says that it captured two buckets, and one more in each step it was shown."""

    capture_s = 0.0
    num_builds = 0
    step_seconds: ClassVar[dict[int, dict[int, float]]] = {}
    mixed_step_seconds: ClassVar[dict[int, dict[int, float]]] = {}

    def wish(self, *_: object, **__: object) -> Wish:
        self.num_builds += 1
        return Wish(0, False, 0, 0, is_unknown=True, cannot_mix=False)

    def prepare(
        self,
        _: object,
        *,
        draft_limits: Sequence[int],
        num_requests: int,
        is_timed: bool,
        log: Callable[[str], None],
    ) -> None:
        assert len(draft_limits) == 1
        assert not is_timed
        assert num_requests == 2
        assert torch.is_inference_mode_enabled()
        for number in (1, 2):
            self.capture_s += 30.25
            log(f"captured {number} of 2")


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> list[SpecDecoder]:
    """Every decoder that is built, with graphs that capture nothing."""
    made: list[SpecDecoder] = []
    init = SpecDecoder.__init__

    def init_with_graphs(self: SpecDecoder, *args: object, **settings: object) -> None:
        init(self, *args, **settings)  # type: ignore[arg-type]
        for number, device in self._devices.items():
            self._devices[number] = device._replace(graphs=FakeGraphs())  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(SpecDecoder, "__init__", init_with_graphs)
    return made


def test_prompt_that_cannot_fit_is_refused_before_capture(
    tmp_path: Path, decoders: list[SpecDecoder]
) -> None:
    with pytest.raises(ConfigError, match=r"can never fit: .* raise engine\.num_blocks"):
        run(tmp_path, "engine.num_blocks=3")
    assert [decoder.graphs.capture_s for decoder in decoders if decoder.graphs] == [0.0]
    assert not decoders[0].scheduler.has_work


@pytest.mark.usefixtures("warm_ups")
def test_capture_is_reported_as_it_goes_and_in_the_results(
    tmp_path: Path, decoders: list[SpecDecoder], capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    for label, decoder in zip(("baseline", "eagle"), decoders, strict=True):
        first = lines.index(f"{label}: captured 1 of 2")
        assert lines[first + 1] == f"{label}: captured 2 of 2"
        num_blocks = decoder.scheduler.blocks.num_blocks
        assert lines[first - 1].startswith(f"{label}: KV pool: {num_blocks} blocks, 0.0")
    stored = json.loads((tmp_path / "results.json").read_text())
    for condition, decoder in zip(stored["conditions"], decoders, strict=True):
        num_tokens = sum(len(record["output_token_ids"]) for record in condition["records"])
        found = decoder.recent.output_tokens
        assert 0.9 * num_tokens < found <= num_tokens, "those of warm-ups tell nothing"
    assert [condition["capture_s"] for condition in stored["conditions"]] == [60.5, 60.5]
    late = [condition["num_late_builds"] for condition in stored["conditions"]]
    assert late == [condition["num_steps"] for condition in stored["conditions"]]
    told = " ".join((tmp_path / "table.txt").read_text().split())
    assert "started: 121 s in all, at most 60 s a condition (baseline);" in told
    assert f"; {sum(late)} compilations and captures later" in told
    assert f"warning: eagle compiled or captured {late[1]} times while its clock ran" in told


@pytest.mark.parametrize("memory", ["scarce", "ample", "explicit"])
def test_decoders_that_live_side_by_side_get_equal_pools(
    tmp_path: Path, decoders: list[SpecDecoder], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    total = (1 << 20) * (6 if memory == "scarce" else 600)

    def free(_: torch.device) -> int:
        return total - sum(decoder.cache.num_bytes for decoder in decoders)

    def warm_up(*_: object, **__: object) -> int:
        if len(decoders) == 2:
            raise BothAreBuilt
        return 1

    monkeypatch.setattr(build, "free_for_pool", free)
    monkeypatch.setattr(preparation, "free_for_pool", free)
    monkeypatch.setattr(own_backend, "warm_up", warm_up)
    explicit = ["engine.num_blocks=50"] if memory == "explicit" else []
    with pytest.raises(BothAreBuilt):
        run(tmp_path, "timing.passes=2", *explicit)
    baseline, eagle = (decoder.scheduler.blocks.num_blocks for decoder in decoders)
    assert baseline == eagle
    if memory == "scarce":
        num_bytes = sum(decoder.cache.num_bytes for decoder in decoders)
        assert 0.85 * total < num_bytes <= 0.9 * total
    else:
        assert baseline == (50 if memory == "explicit" else 2 * 33)


def test_pools_that_do_not_fit_side_by_side_are_refused_before_any_is_built(
    tmp_path: Path, decoders: list[SpecDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "free_for_pool", lambda _: 1 << 18)
    with pytest.raises(ConfigError, match=r"pools of 2 conditions .* With timing\.passes=1 there"):
        run(tmp_path, "timing.passes=2")
    assert decoders == []


def test_pool_is_sized_by_what_the_prompts_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[tuple[int, int]] = []
    init = SpecDecoder.__init__

    def noting(self: SpecDecoder, *args: object, **settings: object) -> None:
        init(self, *args, **settings)  # type: ignore[arg-type]
        pools.append((self.max_model_len, self.num_blocks))

    monkeypatch.setattr(SpecDecoder, "__init__", noting)
    run(tmp_path, "engine.max_model_len=null")
    stored = json.loads((tmp_path / "results.json").read_text())
    longest = max(record["num_prompt_tokens"] for record in stored["conditions"][0]["records"])
    assert [length for length, _ in pools] == [longest + 4 + 1] * 2
    assert all(blocks <= 2 * (1 + (longest + 16) // 16) for _, blocks in pools)
    assert stored["config"]["engine"]["max_model_len"] is None  # what was asked for

"""The jobs of tools/gpu_study.py: one that is late is stopped, a finished one kept.

And the parts of its batch sweep, each of which is a whole evaluation.
"""

import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from mtp_research.cli import compose_config
from mtp_research.config import EvalConfig, TrainConfig
from mtp_research.evaluation.run.conditions import conditions_of
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import load_target
from tools import gpu_batch_sweep as sweep
from tools import gpu_study as tool
from tools import untrained
from tools.gpu_study_jobs import HEADS, Job, jobs_of

ROOT = Path(__file__).parent.parent
SLEEPS = ["-c", "import time; time.sleep(60)"]


def study(
    folder: Path,
    *jobs: Job,
    limit_s: float = 60,
    prepare_s: float | None = None,
    num_gpus: int = 0,
) -> dict[str, dict[str, object]]:
    """Run jobs to their end."""
    prepare_s = prepare_s or limit_s
    found = tool.Study(jobs, folder, prepare_s=prepare_s, limit_s=limit_s, num_gpus=num_gpus)
    while not found.is_over:
        found.step()
        time.sleep(0.05)
    return found.facts


def test_late_job_is_stopped_and_runs_again_and_a_finished_one_does_not(tmp_path: Path) -> None:
    assert study(tmp_path, Job("prices", SLEEPS), limit_s=1)["prices"]["code"] == -15
    again = Job("prices", ["-c", "print('priced')"])
    assert study(tmp_path, again)["prices"]["code"] == 0
    assert "priced" in (tmp_path / "prices.log").read_text()
    assert study(tmp_path, Job("prices", SLEEPS))["prices"]["note"] == "done before"


def test_job_that_ignores_the_request_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "GRACE_S", 0.2)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    assert study(tmp_path, Job("deaf", ["-c", code]), limit_s=1)["deaf"]["code"] == -9


def test_jobs_wait_for_what_they_need_and_timed_ones_for_everything(tmp_path: Path) -> None:
    def marks(name: str, seconds: float) -> list[str]:
        code = f"import time; a = time.monotonic(); time.sleep({seconds}); "
        path = str(tmp_path / name)
        return ["-S", "-c", f"{code} open({path!r}, 'w').write(f'{{a}} {{time.monotonic()}}')"]

    facts = study(
        tmp_path,
        Job("first", marks("first", 0.3)),
        Job("beside", marks("beside", 0.6)),
        Job("after", marks("after", 0.1), ("first", "of another study")),
        Job("fails", ["-S", "-c", "raise SystemExit(3)"], ("first",)),
        Job("timed", marks("timed", 0.1), ("beside", "after", "fails"), is_timed=True),
    )
    assert {name: fact["code"] for name, fact in facts.items()} == {
        "first": 0, "beside": 0, "after": 0, "fails": 3, "timed": 0
    }  # fmt: skip
    names = ("first", "beside", "after", "timed")
    spans = {name: tuple(map(float, (tmp_path / name).read_text().split())) for name in names}
    assert spans["beside"][0] < spans["first"][1] <= spans["after"][0]
    assert spans["timed"][0] >= max(spans["beside"][1], spans["after"][1])


def test_timed_jobs_begin_when_the_others_have_had_their_time(tmp_path: Path) -> None:
    timed = Job("speed", ["-S", "-c", ""], ("compile",), is_timed=True)
    late = Job("price", SLEEPS, ("compile",))
    facts = study(tmp_path, Job("compile", SLEEPS), late, timed, prepare_s=1)
    assert facts["compile"]["code"] == -15
    assert facts["price"]["note"] == "no time was left"
    assert facts["speed"]["code"] == 0


def test_models_share_the_gpus_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "others").mkdir()
    words = ["-S", "-c", "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"]
    jobs = [Job(f"target_{number}", words, model=number) for number in range(3)]
    study(tmp_path, *jobs, num_gpus=2)
    found = [(tmp_path / f"{job.name}.log").read_text().strip() for job in jobs]
    assert found == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    study(tmp_path / "others", jobs[1], num_gpus=2)
    assert (tmp_path / "others" / "target_1.log").read_text().strip() == "7"


def test_results_that_there_are_are_collected(tmp_path: Path) -> None:
    for name, file in (("batch_64_k1", "results.json"), ("batch_1_k1", "finished.jsonl")):
        (tmp_path / "lab_tiny" / "speed" / name).mkdir(parents=True)
        (tmp_path / "lab_tiny" / "speed" / name / file).write_text("{}")
    args = tool.arguments(["--out", str(tmp_path), "--work", str(tmp_path), "--models", "lab_tiny"])
    done = tool.Study([Job("speed", [])], tmp_path, prepare_s=1, limit_s=1)
    done.facts["speed"] = {"code": 0}
    tool.collect(done, args)
    with tarfile.open(tmp_path / "lab_tiny.tar.xz") as archive:
        assert archive.getnames() == ["lab_tiny/speed/batch_64_k1/results.json"]
    assert json.loads((tmp_path / "study.json").read_text())["jobs"] == done.facts


def test_every_job_is_asked_for_something_that_its_entry_takes(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--work", str(tmp_path), "--corpus", "/corpus"]
    words += ["--models", "lab_base:195", "lab_small:130", "--engine", "h200"]
    for path in ("target/target", *(f"matrix/{head}_s0/head" for head in HEADS)):
        (tmp_path / "lab_base" / path).mkdir(parents=True)
    args = tool.arguments(words)
    jobs = {job.name: job for job in jobs_of(args)}
    kinds = ["untrained", "compile", "target", "answers", "matrix", "price", "prices", "speed"]
    assert {name.split("_")[0] for name in jobs} == set(kinds)
    assert all(need in jobs for job in jobs.values() for need in job.needs)
    assert len(jobs) == 2 * (len(kinds) + 2)
    models = {job.name.rpartition("lab_")[2][:5]: job.model for job in jobs.values()}
    assert {name.split("_")[0]: model for name, model in models.items()} == {"base": 0, "small": 1}
    unpriced = jobs_of(tool.arguments([*words, "--no-prices"]))
    assert {*jobs} - {job.name for job in unpriced} == {name for name in jobs if "price" in name}
    target = compose_config(TrainConfig, jobs["target_lab_base"].words[1:])
    assert (target.task, target.model.pretrain.max_seconds) == ("target", 195)
    matrix = compose_config(TrainConfig, jobs["matrix_lab_base"].words[1:])
    assert (matrix.model.dtype, matrix.matrix.dtype) == ("bfloat16", "float32")
    price = compose_config(EvalConfig, jobs["price_lab_base_ttt_n1"].words[1:])
    assert (price.task, price.grid.head) == (
        "fault_price",
        [f"{tmp_path}/lab_base/matrix/ttt_n1_s0/head"],
    )
    fills, times = (
        sweep.parse(jobs[f"{kind}_lab_base"].words[1:]) for kind in ("compile", "speed")
    )
    assert fills.compile_only
    assert times.turns == sweep.parse(jobs["speed_lab_small"].words[1:]).turns
    options = [*sweep.words_of(sweep.PARTS[0], times), "model.device=cpu"]
    part = compose_config(EvalConfig, options)
    assert part.spec.head == f"{tmp_path}/lab_base/matrix/chain_n3_s0/head"
    with pytest.raises(SystemExit):
        tool.arguments([*words, "--target", "/one/for/two"])


def test_sweep_covers_every_k_at_every_size_with_a_baseline() -> None:
    found = set()
    for part in sweep.PARTS:
        words = ["experiment=batch_sweep", "engine=h200", "model.device=cpu", *part.words]
        config = compose_config(EvalConfig, words)
        conditions = conditions_of(config)
        assert config.engine.compile
        assert [c.num_speculative_tokens for c in conditions].count(0) == 1
        found |= {
            (c.group.max_num_requests, c.num_speculative_tokens, c.policy) for c in conditions
        }
    policies = ("eagle", "training")
    drafting = {(r, k, p) for r in (1, 8, 32, 64) for k in range(1, 6) for p in policies}
    assert found == drafting | {(r, 0, None) for r in (1, 8, 32, 64)}
    assert len({part.name for part in sweep.PARTS}) == len(sweep.PARTS)


def test_filling_the_cache_compiles_the_steps_of_the_sweep_once(tmp_path: Path) -> None:
    steps: dict[bool, list[tuple[object, ...]]] = {}
    for fills in (True, False):
        flag = ["--compile-only"] if fills else []
        words = ["--out", str(tmp_path), *flag, "engine=h200", "model.device=cpu"]
        options = sweep.parse(words)
        configs = [compose_config(EvalConfig, sweep.words_of(p, options)) for p in sweep.PARTS]
        steps[fills] = [
            (c.config.engine, c.policy, c.num_speculative_tokens)
            for config in configs
            for c in conditions_of(config)
        ]
        assert {config.timing.turns is None for config in configs} == {fills}
    assert len(steps[True]) == len(set(map(repr, steps[True]))) == 44
    assert set(map(repr, steps[True])) == set(map(repr, steps[False]))


def test_untrained_models_have_the_sizes_of_trained_ones(tmp_path: Path) -> None:
    assert untrained.main(["--model", "lab_tiny", "--out", str(tmp_path)]) == 0
    trained = load_target(ROOT / "assets/lab_tiny/target", device="cpu")
    made = load_target(tmp_path / "target", device="cpu")
    heads = [load_heads(ROOT / "assets/lab_tiny/heads/chain_n3", trained)]
    heads.append(load_heads(tmp_path / "head", made))
    for one, other in ((trained.model, made.model), heads):
        assert shapes_of(one) == shapes_of(other)


def shapes_of(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}


def test_sweep_goes_on_after_a_part_that_failed_and_skips_finished_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, *others = sweep.PARTS[:4]
    (tmp_path / done.name).mkdir()
    (tmp_path / done.name / "results.json").touch()
    (tmp_path / done.name / "exit_code").write_text("0\n")
    ran: list[str] = []

    def start(words: list[str], log: Path, *, num_workers: int) -> object:
        (tmp_path / log.stem).mkdir(exist_ok=True)
        ran.append(log.stem)
        ends = {others[0].name: "sys.exit(3)", others[1].name: "os.kill(os.getpid(), 9)"}
        if log.stem != others[1].name:  # killed before its results were there
            (tmp_path / log.stem / "results.json").touch()
        code = f"import os, sys; {ends.get(log.stem, 'sys.exit(0)')}"
        return subprocess.Popen([sys.executable, "-S", "-c", code])

    monkeypatch.setattr(sweep, "start", start)
    for _ in range(2):  # the second time all parts are done, and their codes are known
        codes = sweep.run_parts({part: [] for part in (done, *others)}, tmp_path, num_workers=2)
        assert sorted(codes) == [0, 0, 3, 137]
    assert sorted(ran) == sorted(part.name for part in (*others, others[1]))


def test_parts_of_a_sweep_that_is_stopped_are_stopped_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[subprocess.Popen[bytes]] = []

    def start(*_: object, num_workers: int) -> subprocess.Popen[bytes]:
        if len(processes) == 2:
            raise SystemExit(143)  # as the handler of SIGTERM does
        processes.append(subprocess.Popen([sys.executable, *SLEEPS]))
        return processes[-1]

    monkeypatch.setattr(sweep, "start", start)
    with pytest.raises(SystemExit):
        sweep.run_parts({part: [] for part in sweep.PARTS}, tmp_path, num_workers=3)
    assert [process.wait(timeout=20) for process in processes] == [-15, -15]

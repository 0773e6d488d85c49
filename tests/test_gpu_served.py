"""The tool that trains from a server beside a training of its own: three runs, faults, and ends."""

import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtp_research.__main__ import run_training
from mtp_research.app.cli import run_entry
from mtp_research.config.schema import TrainConfig
from mtp_research.models.target import Target
from tests.test_lab_tiny import ASSETS
from tests.training.test_imported_states import target
from tests.training.test_served_states import Engine
from tools import gpu_served

__all__ = ["target"]  # a fixture
SMALL = ["--model", "lab_tiny", "--steps", "2", "--batch", "2", "--seq-len", "24"]


@pytest.fixture
def engine(target: Target, tmp_path: Path) -> Iterator[Engine]:
    (tmp_path / "states").mkdir()
    engine = Engine(target, tmp_path / "states")
    yield engine
    engine.server.shutdown()
    engine.server.server_close()


def run(out: Path, *words: str) -> tuple[int, dict]:
    code = gpu_served.main(["--out", str(out), *SMALL, *words])
    return code, json.loads((out / "served.json").read_text())


def test_training_from_a_server_is_compared_with_one_beside_the_target(
    engine: Engine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train_here(words: list[str], folder: Path, **_: object) -> dict:
        assert run_entry(TrainConfig, run_training, argv=words[1:]) == 0
        return gpu_served.figures(folder, [1.0, 2.0 + (folder.name == "served")])

    monkeypatch.setattr(gpu_served, "train", train_here)
    lab = ["--target", str(ASSETS / "target"), "--endpoint", engine.url]
    code, record = run(tmp_path / "out", *lab)
    assert "fault" not in record, record["fault"]
    # lab_tiny computes in float32 on a CPU: what is left is the order of sums.
    assert max(record[f"gap_{name}"]["max"] for name in ("again", "served")) < 1e-4
    losses = {name: one["losses"] for name, one in record["runs"].items()}
    assert {len(curve) for curve in losses.values()} == {2}
    split = record["split_ms"]
    assert set(split["live"]) == {"step"}
    documents = {f"document_{name}" for name in ("server", "writer", "reading")}
    assert set(split["served"]) == {"step", "waiting", "training"} | documents
    assert split["served"]["step"] == pytest.approx(2000)  # by the times above
    assert losses["live"] != losses["again"]
    assert losses["live"][0] != losses["live"][1]
    assert record["served_ratio"] == pytest.approx(1 / 2)  # by the times above
    assert code == 1
    assert len(engine.prompts) >= 2 * 2 + 8
    assert {len(prompt) for prompt in engine.prompts} == {24}
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == {name: value for name, value in record.items() if name != "runs"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["served.json"]


def test_split_is_of_the_steps_behind_the_first_third(tmp_path: Path) -> None:
    names = ("num_served", "server_s", "writer_s", "reading_s", "waited_s")
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 10):  # the first steps are slow; the last two lines come at once
            done = min(step + 1, 9)
            at = done - 5 if done >= 5 else 100 * (done - 5)
            times = dict(zip(names, (8 * at, 0.8 * at, 0.4 * at, 0.2 * at, 0.03 * at), strict=True))
            line = {"kind": "train", "step": step, "loss": 1.0, "num_tokens": 1} | times
            file.write(json.dumps(line) + "\n")
        file.write('{"kind": "result", "acceptance_length_last": 1.5}\n')
    split = gpu_served.figures(tmp_path, [0.1 * step for step in range(9)])["split_ms"]
    expected = {"step": 100, "waiting": 30, "training": 70}
    expected |= {"document_server": 100, "document_writer": 50, "document_reading": 25}
    assert split == pytest.approx(expected)


def curves(served: list[float], rate: float) -> dict:
    one = {"losses": [4.0, 2.0], "tokens_per_s": 100.0, "acceptance_length": 1.5, "split_ms": {}}
    return {
        "again": one,
        "ready_s": 1.0,
        "live": one,
        "served": {**one, "losses": served, "tokens_per_s": rate},
    }


@pytest.mark.parametrize(
    ("served", "rate", "is_fine"),
    [([4.04, 2.0], 81.0, True), ([4.4, 2.0], 81.0, False), ([4.04, 2.0], 79.0, False)],
    ids=["fine", "curves-part", "slow"],
)
def test_verdict_is_of_the_mean_gap_and_the_rate(
    served: list[float], rate: float, is_fine: bool
) -> None:
    found = gpu_served.compare(curves(served, rate))
    assert found["is_fine"] == is_fine
    assert found["gap_served"]["max"] == pytest.approx(served[0] / 4 - 1)
    assert found["gap_served"]["mean"] == pytest.approx((served[0] / 4 - 1) / 2)


def test_server_is_asked_for_the_last_layer_of_a_random_target(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_served, "SHAPE", gpu_served.SHAPE | {"num_hidden_layers": 3})
        gpu_served.random_target(folder)
    words = gpu_served.server_words(folder, tmp_path / "states", seq_len=512)
    options = dict(itertools.pairwise(words))
    speculative = json.loads(options["--speculative-config"])
    layers = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert (speculative["method"], layers) == ("extract_hidden_states", [3])
    connector = json.loads(options["--kv-transfer-config"])
    assert connector["kv_connector_extra_config"]["shared_storage_path"] == f"{tmp_path}/states"
    assert int(options["--max-model-len"]) > 512 + 1
    assert int(options["--max-num-batched-tokens"]) >= int(options["--max-model-len"])


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('no CUDA'); raise SystemExit(3)", "the server ended with status 3"),
        ("import time; print('loading', flush=True); time.sleep(600)", "not ready after"),
    ],
    ids=["ends", "hangs"],
)
def test_server_that_does_not_come_up_ends_the_tool_and_leaves_its_log(
    program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_served, "server_words", lambda *_, **__: ["-c", program])
    monkeypatch.setattr(gpu_served, "train", lambda *_, **__: {})
    monkeypatch.setattr(gpu_served, "READY_S", 2.0)
    started: list[subprocess.Popen] = []
    start = gpu_served._start
    monkeypatch.setattr(gpu_served, "_start", lambda *a: started.append(start(*a)) or started[-1])
    code, record = run(tmp_path, "--target", str(ASSETS / "target"))
    assert code == 1
    assert message in record["fault"]
    assert (tmp_path / "server_tail.txt").read_text().strip() in program
    (server,) = started
    assert server.poll() is not None


def test_training_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    program = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); "
    program += "print(p.pid, flush=True); p.wait()"
    with pytest.raises(RuntimeError, match=r"run was not done after 2 s"):
        gpu_served.train(["-c", program], tmp_path / "run", num_steps=2, limit_s=2.0)
    status = Path(f"/proc/{int((tmp_path / 'run.log').read_text())}/stat")
    give_up = time.monotonic() + 10.0
    while time.monotonic() < give_up and status.exists():
        if status.read_text().rpartition(")")[2].split()[0] == "Z":  # ended; nobody asked for it
            return
        time.sleep(0.05)
    assert not status.exists()


def test_rate_is_of_the_steps_behind_the_first_third(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    line = {"kind": "train", "loss": 1.0}
    program = f"""if True:
        import json, time
        file = open({str(folder / "metrics.jsonl")!r}, "w")
        for step, wait_s in enumerate((0, 0.3, 0.3, 0)):
            print(json.dumps({line!r} | {{"num_tokens": 100 * step}}), file=file, flush=True)
            time.sleep(wait_s)
        print('{{"kind": "result", "acceptance_length_last": 1.5}}', file=file, flush=True)
        time.sleep(0.2)"""
    found = gpu_served.train(["-c", program], folder, num_steps=4, limit_s=30.0)
    assert (found["losses"], found["acceptance_length"]) == ([1.0] * 4, 1.5)
    assert 50 < found["tokens_per_s"] < 500 / 0.25
    assert set(found["split_ms"]) == {"step"}
    exact = gpu_served.figures(folder, [0.0, 1.0, 2.0, 3.0])
    assert exact["tokens_per_s"] == pytest.approx((200 + 300) / 2)
    words = ["-c", "raise SystemExit(5)"]
    with pytest.raises(RuntimeError, match=r"other ended with 5 at step 0"):
        gpu_served.train(words, tmp_path / "other", num_steps=2, limit_s=20.0)

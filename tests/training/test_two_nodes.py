"""Two groups of processes, as of two machines, train as one process does, and end together.

Machine 0 is started by torchrun and machine 1 by `accelerate launch`, which both join the same
meeting. The rank of machine 1 is killed before its seventh step: no launcher of machine 0 knows it.
"""

import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import TrainConfig
from mtp_research.runtime.errors import EnvironmentFault
from mtp_research.training import loop
from tests.training.test_parallel import LOSS_TOLERANCE, loss_curve
from tests.training.tiny import save_lab

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "train.py")
NUM_STEPS, LAST_STEP = 8, 6
# Steps before the last ones may not have been written when a rank is killed.
MIN_WRITTEN = LAST_STEP - 2


def main() -> None:
    """train.py, as machine 1 runs it: killed without notice behind `LAST_STEP` steps."""
    step = loop.TrainingRun._train_step

    def step_or_die(run: loop.TrainingRun) -> None:
        if run.step == LAST_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        step(run)

    loop.TrainingRun._train_step = step_or_die
    runpy.run_path(TRAIN, run_name="__main__")


@pytest.mark.slow
def test_two_machines_train_as_one_and_end_when_a_rank_is_killed(tmp_path: Path) -> None:
    lab = save_lab(tmp_path, num_documents=24)
    words = [
        *(f"model.path={lab.model.path}", "model.family=qwen3", "model.device=cpu"),
        *(f"data.path={lab.data.path}", "data.seq_len=64", "data.eval_documents=6"),
        *(f"trainer.max_steps={NUM_STEPS}", "trainer.save_every=3"),
    ]
    alone = compose_config(TrainConfig, [*words, "trainer.batch_size=4"])
    loop.train_heads(alone, tmp_path / "one")
    words += ["trainer.batch_size=2", f"output_dir={tmp_path / 'two'}"]
    first, second = start_machines(tmp_path, words)
    message = first.communicate(timeout=100)[1]
    ended = time.time()
    assert second.wait(timeout=30) != 0
    assert first.returncode != 0
    found = [line for line in message.splitlines() if line.startswith("error: ")]
    assert found == [
        "error: every rank must run to the end, got rank 1 gone, as rank 0 noticed; see what it "
        "printed last, and run the same command again, which goes on from the last checkpoint."
    ], message[-3000:]
    assert f"exitcode  : {EnvironmentFault.exit_code} " in message, "torchrun says how it ended"
    assert ended - (tmp_path / "two" / "metrics.jsonl").stat().st_mtime < 30
    losses = loss_curve(tmp_path / "two")
    assert MIN_WRITTEN <= len(losses) <= LAST_STEP
    expected = loss_curve(tmp_path / "one")
    assert losses == pytest.approx({n: expected[n] for n in losses}, rel=LOSS_TOLERANCE)
    names = {path.name for path in (tmp_path / "two").iterdir()}
    assert {"step_000003", "step_000006"} & names
    assert not [name for name in names if name.startswith(".writing")]


def start_machines(folder: Path, words: list[str]) -> tuple[subprocess.Popen, subprocess.Popen]:
    """The launcher of each machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "0"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port), TRAIN]
    settings = {
        **{"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU"},
        **{"num_machines": 2, "machine_rank": 1, "num_processes": 2, "same_network": True},
        **{"main_process_ip": "127.0.0.1", "main_process_port": port, "mixed_precision": "no"},
    }
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    join = ["-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml")]
    join += ["-m", __name__]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    first, second = (
        subprocess.Popen(
            [sys.executable, *launcher, *words],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for launcher in (launch, join)
    )
    return first, second


if __name__ == "__main__":
    main()

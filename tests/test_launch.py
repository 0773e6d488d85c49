"""`launcher=slurm` without a cluster: the script, what it runs, and what is said without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_research.app.cli import compose_config, run_entry
from mtp_research.config.schema import TrainConfig
from mtp_research.runtime.errors import ConfigError

WORDS = ["launcher=slurm", "launcher.num_nodes=2", "launcher.gpus_per_node=4"]
WORDS += ["launcher.cpus_per_node=32", "launcher.partition=gpu", "launcher.grace_s=300"]


def never(config: TrainConfig, output_dir: Path) -> None:
    pytest.fail("the work must not start on this machine")


def program(folder: Path, name: str, text: str) -> None:
    """A program of the cluster that is told by `PATH`."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, first in `PATH`; srun prints its words and some variables."""
    folder = tmp_path / "bin"
    program(folder, "sbatch", f'printf "%s\\n" "$@" > {tmp_path}/sbatch.args; echo "77;cluster"')
    program(folder, "scontrol", 'echo "$3" | tr "," "\\n"')
    shown = "$OMP_NUM_THREADS $TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    program(folder, "srun", f'printf "%s\\n" "{shown}" "$@"')
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def test_slurm_without_sbatch_exits_4_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = ["launcher=slurm", f"output_dir={tmp_path / 'run'}"]
    assert run_entry(TrainConfig, never, argv=argv) == 4
    message = capsys.readouterr().err
    assert "needs sbatch, none is in PATH" in message
    assert message.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_slurm_submits_a_script_of_one_torchrun_a_node_with_the_same_words(
    tmp_path: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["trainer=zero2", "logger.tags=[a b]", *WORDS, f"output_dir={run}"]
    assert run_entry(TrainConfig, never, argv=words) == 0
    script = run / "slurm" / "job.sh"
    said = json.loads(capsys.readouterr().out)
    assert said == {"script": str(script), "output_dir": str(run), "job_id": "77"}
    assert (tmp_path / "sbatch.args").read_text().split() == ["--parsable", str(script)]
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    asked = dict(
        line.removeprefix("#SBATCH --").split("=", 1)
        for line in script.read_text().splitlines()
        if line.startswith("#SBATCH --")
    )
    assert asked == {
        **{"job-name": "run", "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "4"},
        **{"cpus-per-task": "32", "time": "240", "signal": "TERM@300", "partition": "gpu"},
        **{"output": f"{run}/slurm/%j.out", "open-mode": "append"},
    }
    environment = os.environ | {"SLURM_JOB_NODELIST": "node7,node8", "SLURM_JOB_ID": "77"}
    done = subprocess.run(
        ["bash", script], env=environment, capture_output=True, text=True, check=True, cwd="/"
    )
    variables, *started = done.stdout.splitlines()
    assert variables == "8 290", "threads of a rank, and seconds to save before torchrun kills"
    assert started == [
        *("--kill-on-bad-exit=1", sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--nproc-per-node", "4", "--rdzv-id", "77"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node7:29511"),
        str(Path(__file__).resolve().parents[1] / "train.py"),
        *("trainer=zero2", "logger.tags=[a b]", f"output_dir={run}"),
    ]


def test_script_alone_needs_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = ["launcher=slurm", "launcher.submit=false", f"output_dir={tmp_path / 'a run'}"]
    assert run_entry(TrainConfig, never, argv=argv) == 0
    script = Path(json.loads(capsys.readouterr().out)["script"])
    assert [path for path in (tmp_path / "a run").rglob("*") if path.is_file()] == [script]
    assert "--partition" not in script.read_text()
    assert f"'output_dir={tmp_path / 'a run'}'" in script.read_text()


def test_job_that_slurm_refuses_exits_4_with_its_reason(
    tmp_path: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(cluster, "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    assert run_entry(TrainConfig, never, argv=[*WORDS, f"output_dir={tmp_path / 'run'}"]) == 4
    message = capsys.readouterr().err
    assert "(sbatch: error: invalid partition); check that sbatch works." in message
    assert message.count("\n") == 1


def test_sizes_of_a_job_that_is_not_submitted_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"launcher\.num_nodes must be 1 for .*; set launcher=sl"):
        compose_config(TrainConfig, ["launcher.num_nodes=2"])

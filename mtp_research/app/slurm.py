"""`launcher=slurm`: a batch script of the same command, one torchrun a node, and its submission.

    output_dir/slurm/job.sh     what sbatch takes; it can be read, changed and submitted by hand
    output_dir/slurm/JOB.out    what the job prints

Slurm sends SIGTERM `launcher.grace_s` before the time limit. The training then saves and exits with
75, and the same script goes on where it stopped.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mtp_research.config.training_schema import LauncherConfig
from mtp_research.runtime.errors import EnvironmentFault
from mtp_research.runtime.files import write_atomically
from mtp_research.runtime.provenance import REPOSITORY_ROOT

_PORT = 29511
_SPARE_S = 10  # of the grace, for torchrun and Slurm themselves
_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={launcher.num_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={launcher.gpus_per_node}
#SBATCH --cpus-per-task={launcher.cpus_per_node}
#SBATCH --time={launcher.max_minutes}
#SBATCH --signal=TERM@{launcher.grace_s}
#SBATCH --open-mode=append
#SBATCH --output={output}
{partition}set -euo pipefail
cd {folder}
export OMP_NUM_THREADS={num_threads}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={patience_s}
# The first host of the job is where the ranks meet.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun --kill-on-bad-exit=1 {python} -m torch.distributed.run \\
    --nnodes {launcher.num_nodes} --nproc-per-node {launcher.gpus_per_node} \\
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:{port}" \\
    {words}
"""


def launch(launcher: LauncherConfig, *, words: Sequence[str], output_dir: Path) -> dict[str, str]:
    """Write the script of a training, and submit it unless `launcher.submit` is false.

    Args:
        launcher: sizes of the job.
        words: the user's own; those of the launcher are left out.
        output_dir: run folder of the job.

    Returns:
        What to print: script, output_dir, and job_id where it was submitted.

    Raises:
        EnvironmentFault: there is no sbatch, or it refuses the job.
    """
    if launcher.submit and shutil.which("sbatch") is None:
        raise EnvironmentFault(
            "launcher.kind=slurm needs sbatch, none is in PATH; start it on a machine of the "
            "cluster, set launcher.submit=false to write the script alone, or launcher=local."
        )
    script = output_dir.resolve() / "slurm" / "job.sh"
    script.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(script, job_script(launcher, words, output_dir=output_dir))
    found = {"script": str(script), "output_dir": str(output_dir)}
    return found | {"job_id": _submit(script)} if launcher.submit else found


def job_script(launcher: LauncherConfig, words: Sequence[str], *, output_dir: Path) -> str:
    """The batch script, for this Python and this folder, which all nodes must see."""
    kept = [word for word in words if not word.startswith(("launcher", "output_dir="))]
    entry = REPOSITORY_ROOT / "train.py"  # a wheel has none
    program = [str(entry)] if entry.is_file() else ["-m", "mtp_research", "train"]
    folder = output_dir.resolve()
    partition = launcher.partition
    return _SCRIPT.format(
        launcher=launcher,
        name=shlex.quote(output_dir.name),
        output=shlex.quote(str(folder / "slurm" / "%j.out")),
        partition="" if partition is None else f"#SBATCH --partition={shlex.quote(partition)}\n",
        folder=shlex.quote(str(Path.cwd())),
        num_threads=max(launcher.cpus_per_node // launcher.gpus_per_node, 1),
        patience_s=max(launcher.grace_s - _SPARE_S, 1),
        python=shlex.quote(sys.executable),
        port=_PORT,
        words=shlex.join([*program, *kept, f"output_dir={folder}"]),
    )


def _submit(script: Path) -> str:
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise EnvironmentFault(
            f"launcher.kind=slurm could not submit {script} ({reason}); check that sbatch works."
        )
    return done.stdout.strip().partition(";")[0]

"""`launcher=slurm`: hand the same command to a Slurm cluster, one torchrun a node.

submitit writes the batch script and submits it; it is not a dependency of the project. The job gets
SIGTERM some time before its limit, so it saves, exits with 75 and can be submitted again.
Hydra's launcher for submitit does not serve here: it works with `-m` only, runs a pickled function
in each Slurm task where we need torchrun, and had its last release (1.2.0) in 2022.
"""

from collections.abc import Sequence
from pathlib import Path

from mtp_research.config.training_schema import LauncherConfig
from mtp_research.runtime.errors import EnvironmentFault
from mtp_research.runtime.provenance import REPOSITORY_ROOT

PORT = 29511
# The first host of the job is where the ranks meet; Slurm knows it, this machine does not yet.
_SCRIPT = """
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec torchrun --nnodes "$1" --nproc-per-node "$2" --rdzv-backend c10d --rdzv-endpoint "$head:$3" \\
    "${@:4}"
"""


def submit(launcher: LauncherConfig, *, words: Sequence[str], output_dir: Path) -> str:
    """Submit `train.py` with these words as a job.

    Args:
        launcher: size and limits of the job.
        words: overrides and flags.
        output_dir: run folder, which a job that is submitted again goes on from.

    Returns:
        The job's id.

    Raises:
        EnvironmentFault: submitit is not installed, or Slurm does not take the job.
    """
    try:
        import submitit
    except ImportError as fault:
        raise EnvironmentFault(
            f"launcher.kind=slurm needs submitit ({fault}); pip install submitit, or set "
            "launcher=local."
        ) from fault
    executor = submitit.AutoExecutor(folder=str(output_dir / "slurm"), cluster="slurm")
    executor.update_parameters(
        name=output_dir.name,
        nodes=launcher.num_nodes,
        tasks_per_node=1,
        gpus_per_node=launcher.gpus_per_node,
        cpus_per_task=launcher.cpus_per_node,
        timeout_min=launcher.max_minutes,
        slurm_additional_parameters={"signal": f"TERM@{launcher.grace_s}"},
        **({} if launcher.partition is None else {"slurm_partition": launcher.partition}),
    )
    command = submitit.helpers.CommandFunction(job_command(launcher, words, output_dir=output_dir))
    try:
        return str(executor.submit(command).job_id)
    except (OSError, RuntimeError) as fault:
        raise EnvironmentFault(
            f"launcher.kind=slurm could not submit the job ({fault}); check that sbatch works."
        ) from fault


def job_command(launcher: LauncherConfig, words: Sequence[str], *, output_dir: Path) -> list[str]:
    """What each node runs: bash, the meeting point, then torchrun with the user's own words."""
    kept = [word for word in words if not word.startswith(("launcher", "output_dir="))]
    sizes = [str(number) for number in (launcher.num_nodes, launcher.gpus_per_node, PORT)]
    program = [str(REPOSITORY_ROOT / "train.py"), *kept, f"output_dir={output_dir.resolve()}"]
    return ["bash", "-c", _SCRIPT, "torchrun", *sizes, *program]

"""The study of lab targets on a GPU: what may run side by side does, what is timed runs alone.

    python tools/gpu_study.py --out OUT --corpus CORPUS --engine h200 --workers 20 \
        --models lab_base:195 lab_small:130        H200s, 3 GB of the host's memory a worker
    python tools/gpu_study.py --out /tmp/out --models lab_tiny --tiny \
        --target assets/lab_tiny/target --answers assets/lab_tiny/regenerated.jsonl.xz   on a CPU

For each model, with the seconds that its target trains: target, its answers, heads and policy
matrix, fault prices (a process for each head, then joined), and speed by batch size and K. Steps
compile with random weights while targets train (`compile`). Speed begins when all else has ended,
one decoding at a time; what has not ended after --prepare-s is told to stop and left as it is.
Several GPUs are shared out by model, of which each still has one, and clocks still run alone.

Every job is a command of its own with its output in WORK/JOB.log. The same command with the same
--work goes on: a job that ended well is not run again, others continue with their files. After
every job the small results go to --out: `MODEL.tar.xz` with what `mtp_research.report` reads, and
`study.json` with command, seconds and exit code of every job.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tools.gpu_study_jobs import Job, jobs_of

POLL_S = 0.2
GRACE_S = 20  # between asking a job to stop and killing it; trainers save in between


class Study:
    """Runs jobs as soon as what they need has ended.

    Args:
        jobs: all of them.
        work: folder of their logs, and of marks of those that ended well.
        prepare_s: seconds after which jobs that are not timed are told to stop.
        limit_s: the same for all jobs.
        num_gpus: model i has GPU i modulo this one; with 0 or 1 nothing is said of GPUs.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        work: Path,
        *,
        prepare_s: float,
        limit_s: float,
        num_gpus: int = 0,
    ) -> None:
        self.facts: dict[str, dict[str, object]] = {}
        self._jobs, self._work, self._num_gpus = list(jobs), work, num_gpus
        self._commands = {job.name: " ".join(job.words) for job in jobs}
        self._limits = {job.name: limit_s if job.is_timed else prepare_s for job in jobs}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._begun: dict[str, float] = {}
        self._told: set[str] = set()  # to stop
        self._started = time.perf_counter()

    def step(self) -> bool:
        """Begin, stop and note what is due; whether a job has ended."""
        before = len(self.facts)
        now = time.perf_counter() - self._started
        for name, process in list(self._running.items()):
            if process.poll() is not None:
                self._end(name, self._running.pop(name).returncode, now)
            elif now > self._limits[name] + GRACE_S:
                _send(process, signal.SIGKILL)
            elif now > self._limits[name] and name not in self._told:
                self._told.add(name)
                _send(process, signal.SIGTERM)
        names = {job.name for job in self._jobs}
        for job in self._jobs:
            if job.name in self.facts or job.name in self._running:
                continue
            if (self._work / f"{job.name}.done").is_file():
                self.facts[job.name] = {"code": 0, "seconds": 0.0, "note": "done before"}
            elif all(need in self.facts or need not in names for need in job.needs):
                if now > self._limits[job.name]:
                    self.facts[job.name] = {"code": -1, "note": "no time was left"}
                else:
                    self._begin(job, now)
        return len(self.facts) > before

    @property
    def is_over(self) -> bool:
        """Whether every job has ended."""
        return len(self.facts) == len(self._jobs)

    def _begin(self, job: Job, now: float) -> None:
        command = ["nice", "-n", str(job.nice), sys.executable, *job.words]
        env = dict(os.environ)
        if self._num_gpus > 1:
            named = env.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self._num_gpus)))
            env["CUDA_VISIBLE_DEVICES"] = named.split(",")[job.model % self._num_gpus]
        with (self._work / f"{job.name}.log").open("ab") as log:
            self._running[job.name] = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
            )
        self._begun[job.name] = now

    def _end(self, name: str, code: int, now: float) -> None:
        if code == 0:
            (self._work / f"{name}.done").touch()
        seconds = round(now - self._begun[name], 1)
        self.facts[name] = {"code": code, "seconds": seconds, "command": self._commands[name]}
        print(f"{name}: exit {code}, {seconds} s, ended at {now:.0f} s", flush=True)

    def stop(self) -> None:
        """Tell running jobs to stop, then make them."""
        for process in self._running.values():
            _send(process, signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                _send(process, signal.SIGKILL)


def _send(process: subprocess.Popen[bytes], what: signal.Signals) -> None:
    """Signal a job and what it has started."""
    if process.poll() is None:
        os.killpg(process.pid, what)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs; the exit code is 1 if any of them did not end well."""
    args = arguments(argv)
    for folder in (args.out, *(args.work / name for name, _ in args.models)):
        folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    study = Study(
        jobs_of(args),
        args.work,
        prepare_s=args.prepare_s,
        limit_s=args.limit_s,
        num_gpus=torch.cuda.device_count(),
    )
    try:
        while not study.is_over:
            if study.step():
                collect(study, args)
            time.sleep(POLL_S)
    finally:
        study.stop()
        collect(study, args)
    codes = {name: facts["code"] for name, facts in study.facts.items()}
    print(json.dumps({"jobs": codes, "out": str(args.out)}))
    return int(any(codes.values()))


def collect(study: Study, args: argparse.Namespace) -> None:
    """Copy the results that there are, and write what each job took."""
    for name, _ in args.models:
        work = args.work / name
        files = [*work.glob("prices/fault_price.json"), *work.glob("matrix/matrix.json")]
        files += [*work.glob("speed/*/results.json"), *work.glob("target/target/PROVENANCE.json")]
        if files:
            with tarfile.open(args.out / f"{name}.tar.xz", "w:xz") as archive:
                for path in sorted(files):
                    archive.add(path, path.relative_to(args.work))
    facts = {"models": dict(args.models), "argv": sys.argv[1:], "jobs": study.facts}
    (args.out / "study.json").write_text(json.dumps(facts, indent=1) + "\n")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--out", type=Path, required=True, help="small results")
    add("--work", type=Path, default=Path("/tmp/gpu_study"), help="everything else")
    add("--models", nargs="+", type=_model, required=True, help="of conf/model, MODEL:SECONDS")
    add("--corpus", help="text for the targets, and questions for their answers")
    add("--target", type=Path, help="a trained target of the one model, in place of training")
    add("--answers", type=Path, help="its own text, in place of making some")
    add("--engine", default="auto", help="of conf/engine, for speed: h200 on such a GPU")
    add("--matrix-words", nargs="*", default=[], help="overrides, such as matrix.seeds=[0,1,2]")
    add("--workers", type=int, default=1, help="parts of each sweep at a time; 20 are all")
    add("--no-prices", action="store_true", help="leave the fault prices out")
    add("--prepare-s", type=float, default=1800, help="when speed must begin")
    add("--limit-s", type=float, default=3600)
    add("--tiny", action="store_true", help="few steps and prompts, for a trial on a CPU")
    args = parser.parse_args(argv)
    if len(args.models) > 1 and (args.target or args.answers):
        parser.error("--target and --answers belong to one model; give one to --models")
    return args


def _model(text: str) -> tuple[str, int | None]:
    name, _, seconds = text.partition(":")
    return name, int(seconds) if seconds else None


if __name__ == "__main__":
    sys.exit(main())

"""`mtp doctor`: is this machine fit? One line a check, one JSON line, exit code.

A check is `ok`, `note` (works, with a limit to know) or `fail` (what the project needs is broken).
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from mtp_research.runtime.errors import EnvironmentFault
from mtp_research.runtime.options import OptionParser
from mtp_research.runtime.progress import WorkProgress
from mtp_research.runtime.provenance import num_cores, package_ranges, package_version, redact

SELF_TEST = "mtp_research.app.self_test"
_SHOWN = ("accelerate", "datasets", "deepspeed", "hydra-core", "wandb")


def main(argv: Sequence[str] | None = None) -> int:
    """Run every check; returns 0, or 4 where one failed."""
    about = "Can this machine run the project? A line a check, one JSON line, exit code 0 or 4."
    OptionParser(prog="mtp doctor", description=about).parse_args(argv)
    findings = []
    with WorkProgress("looking at this machine", total=len(CHECKS), unit="checks") as progress:
        for name in CHECKS:
            findings.append(one := run_check(name))
            sys.stdout.write(f"{one['status']:5} {one['name']:12} {one['detail']}\n")
            sys.stdout.flush()
            progress.advance()
    failed = [one["name"] for one in findings if one["status"] == "fail"]
    sys.stdout.write(json.dumps({"failed": failed, "checks": findings}) + "\n")
    return EnvironmentFault.exit_code if failed else 0


def run_check(name: str) -> dict[str, object]:
    """One check; a fault of its own is a finding, and secrets are redacted."""
    started = time.perf_counter()
    try:
        status, detail = CHECKS[name]()
    except (OSError, subprocess.SubprocessError, RuntimeError, ValueError) as fault:
        status, detail = "fail", f"{type(fault).__name__}: {fault}"
    seconds = round(time.perf_counter() - started, 3)
    last = (redact(detail).splitlines() or [""])[-1]
    return {"name": name, "status": status, "detail": last, "seconds": seconds}


def _versions() -> tuple[str, str]:
    wanted = package_ranges()
    found = [f"{name} {package_version(name)}" for name in [*wanted, *_SHOWN]]
    faults = [
        f"{name} must be {wanted[name]}, got {version}"
        for name in wanted
        if not wanted[name].contains((version := package_version(name)) or "0", prereleases=True)
    ]
    return ("fail", "; ".join(faults)) if faults else ("ok", ", ".join(found))


def _gpu() -> tuple[str, str]:
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = f"; busy: load {load:.1f} on {num_cores()} cores" if load > num_cores() else ""
    if not gpus:
        return "note", f"none that torch can use: everything runs on the CPU, slowly{busy}"
    names = ", ".join(f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus)
    return ("note" if busy else "ok"), names + busy


def _triton() -> tuple[str, str]:
    interpreted = {} if shutil.which("nvidia-smi") else {"TRITON_INTERPRET": "1"}
    return "ok", _output(["-m", SELF_TEST, "kernel"], interpreted)


def _processes() -> tuple[str, str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return "ok", _output([*launch, "-m", SELF_TEST, "processes"], {})


def _hub() -> tuple[str, str]:
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return "note", "HF_HUB_OFFLINE is set: only local models and the cache are used"
    try:
        with urllib.request.urlopen("https://huggingface.co", timeout=5) as answer:
            return "ok", f"the hub answers {answer.status}"
    except OSError as fault:
        return "note", f"the hub cannot be reached ({fault}): only local models load"


def _disk() -> tuple[str, str]:
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    return ("ok" if free_gib >= 5 else "note"), f"{free_gib:.0f} GiB free"


def _wandb() -> tuple[str, str]:
    mode, netrc = os.environ.get("WANDB_MODE", "online"), Path.home() / ".netrc"
    has_netrc = netrc.is_file() and "api.wandb.ai" in netrc.read_text(errors="replace")
    if has_netrc or mode != "online" or "WANDB_API_KEY" in os.environ:
        return "ok", f"mode {mode}" + ", key set" * ("WANDB_API_KEY" in os.environ or has_netrc)
    return "note", "no key: logger=wandb keeps runs offline, and says how to send them"


CHECKS: dict[str, Callable[[], tuple[str, str]]] = {
    check.__name__[1:]: check
    for check in (_versions, _gpu, _triton, _processes, _hub, _disk, _wandb)
}


def _output(words: Sequence[str], environment: dict[str, str]) -> str:
    """Last line that a Python process prints; its last error line as a fault where it fails."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=120, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no error text"])[-1])
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    raise SystemExit(main())

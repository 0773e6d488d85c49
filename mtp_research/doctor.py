"""Is this machine fit for the project? One line per check, one JSON line, an exit code.

    python -m mtp_research.doctor

Each check is `ok`, `note` (works, with a limit that one should know) or `fail` (something the
project needs is broken). The exit code is 0 without a failure, else 4 as for any fault of the
environment. What could hang or crash runs in a process of its own with a time limit.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from mtp_research.runtime.errors import EnvironmentFault
from mtp_research.runtime.provenance import REPOSITORY_ROOT, redact

Status = Literal["ok", "note", "fail"]
_HUB_URL = "https://huggingface.co"
_HUB_TIMEOUT_S = 5.0
_PROCESS_TIMEOUT_S = 120.0
_DISK_BYTES = 64 << 20
_MIN_DISK_MB_PER_S, _MIN_FREE_GIB = 50.0, 5.0
# A copy into pages by the kernel and by plain PyTorch; bfloat16 must be refused by the interpreter,
# whose arithmetic on it is silently wrong.
_TRITON_PROBE = """
import torch
from mtp_research.kernels.attention.store_kv import store_kv
device = "cuda" if torch.cuda.is_available() else "cpu"
def store(dtype, backend):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 5, 2, 16, generator=generator).to(device, dtype)
    pool = torch.zeros(2, 3, 16, 2, 16, device=device, dtype=dtype)
    slots = torch.tensor([3, -1, 40, 17, 0], device=device)
    store_kv(*rows, key_cache=pool[0], value_cache=pool[1], slot_mapping=slots, backend=backend)
    return pool
dtypes = [torch.float32, torch.float16] + [torch.bfloat16] * (device == "cuda")
for dtype in dtypes:
    assert torch.equal(store(dtype, "triton"), store(dtype, "reference")), dtype
if device == "cpu":
    try:
        store(torch.bfloat16, "triton")
    except ValueError:
        print("in Triton's interpreter; bfloat16 is refused there, as it must be")
    else:
        raise AssertionError("the interpreter took bfloat16, which it computes wrongly")
else:
    print("compiled for", torch.cuda.get_device_name())
"""
_PROCESS_PROBE = """
import os, torch, torch.distributed as dist
from datetime import timedelta
num_gpus = torch.cuda.device_count()
backend = "nccl" if num_gpus >= 2 else "gloo"
device = f"cuda:{os.environ['RANK']}" if backend == "nccl" else "cpu"
dist.init_process_group(backend, timeout=timedelta(seconds=60))
value = torch.full((3,), float(dist.get_rank() + 1), device=device)
dist.all_reduce(value)
assert value.tolist() == [3.0] * 3, value
dist.destroy_process_group()
print(backend)
"""


@dataclass(frozen=True)
class Finding:
    """Outcome of one check."""

    name: str
    status: Status
    detail: str
    seconds: float = 0.0


def main() -> int:
    """Run every check, print the findings and return the exit code."""
    findings = [run_check(name, check) for name, check in CHECKS.items()]
    for finding in findings:
        sys.stdout.write(f"{finding.status:5} {finding.name:12} {finding.detail}\n")
    failed = [finding.name for finding in findings if finding.status == "fail"]
    line = {"failed": failed, "checks": [asdict(finding) for finding in findings]}
    sys.stdout.write(json.dumps(line) + "\n")
    return EnvironmentFault.exit_code if failed else 0


def run_check(name: str, check: Callable[[], tuple[Status, str]]) -> Finding:
    """One check; a fault of its own is a finding, and secrets are redacted."""
    started = time.perf_counter()
    try:
        status, detail = check()
    except (OSError, subprocess.SubprocessError, RuntimeError, ValueError) as fault:
        status, detail = "fail", f"{type(fault).__name__}: {fault}"
    lines = redact(detail).splitlines() or [""]
    return Finding(name, status, lines[-1], round(time.perf_counter() - started, 3))


def check_versions() -> tuple[Status, str]:
    """The packages that decoding needs, against the ranges of pyproject.toml."""
    from packaging.requirements import Requirement

    project = tomllib.loads((REPOSITORY_ROOT / "pyproject.toml").read_text(encoding="utf8"))
    wanted = [Requirement(text) for text in project["project"]["dependencies"]]
    found, faults = [f"python {sys.version.split()[0]}"], []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            faults.append(f"{requirement.name} is not installed")
            continue
        found.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            faults.append(f"{requirement.name} must be {requirement.specifier}, got {version}")
    return ("fail", "; ".join(faults)) if faults else ("ok", ", ".join(found))


def check_gpu() -> tuple[Status, str]:
    """Names and memory of the GPUs that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return "note", "none that torch can use: everything runs on the CPU, slowly"
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        names.append(f"{properties.name} {properties.total_memory / 2**30:.0f} GiB")
    return "ok", ", ".join(names)


def check_triton() -> tuple[Status, str]:
    """A kernel against its reference; on a CPU in Triton's interpreter."""
    environment = {} if shutil.which("nvidia-smi") else {"TRITON_INTERPRET": "1"}
    return "ok", _run_python(_TRITON_PROBE, environment)


def check_processes() -> tuple[Status, str]:
    """A sum over two processes, as data-parallel training needs it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    second = _start_python(_PROCESS_PROBE, shared | {"RANK": "1"})
    try:
        backend = _run_python(_PROCESS_PROBE, shared | {"RANK": "0"})
        second.communicate(timeout=_PROCESS_TIMEOUT_S)
    finally:
        second.kill()  # nothing if it has ended
    if second.returncode != 0:
        return "fail", f"the second process ended with {second.returncode}"
    return "ok", f"two processes sum over {backend}"


def check_hub() -> tuple[Status, str]:
    """Whether models could be downloaded; nothing that is shipped needs it."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return "note", "HF_HUB_OFFLINE is set: only local models and the cache are used"
    request = urllib.request.Request(_HUB_URL, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S) as answer:
            return "ok", f"{_HUB_URL} answers {answer.status}"
    except (urllib.error.URLError, TimeoutError) as fault:
        return "note", f"{_HUB_URL} cannot be reached ({fault}): only local models load"


def check_disk() -> tuple[Status, str]:
    """Speed of a synced write where runs are stored, and the room left."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".doctor-") as folder:
        started = time.perf_counter()
        with (Path(folder) / "block").open("wb") as file:
            for _ in range(_DISK_BYTES >> 20):
                file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        rate = _DISK_BYTES / 1e6 / (time.perf_counter() - started)
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    is_fine = rate >= _MIN_DISK_MB_PER_S and free_gib >= _MIN_FREE_GIB
    return ("ok" if is_fine else "note"), f"{rate:.0f} MB/s synced, {free_gib:.0f} GiB free"


def check_wandb() -> tuple[Status, str]:
    """Whether a run could be logged; the key itself is not read."""
    if util.find_spec("wandb") is None:
        return "note", "not installed: logger.wandb must stay disabled"
    mode = os.environ.get("WANDB_MODE", "online")
    has_key = "WANDB_API_KEY" in os.environ or _netrc_names("api.wandb.ai")
    if mode in ("disabled", "offline") or has_key:
        return (
            "ok",
            f"wandb {metadata.version('wandb')}, mode {mode}, key {'set' * has_key or 'no'}",
        )
    return "note", "no key: logger.wandb=online would warn and go on without it; offline works"


CHECKS: dict[str, Callable[[], tuple[Status, str]]] = {
    "versions": check_versions,
    "gpu": check_gpu,
    "triton": check_triton,
    "processes": check_processes,
    "hub": check_hub,
    "disk": check_disk,
    "wandb": check_wandb,
}


def _netrc_names(host: str) -> bool:
    path = Path.home() / ".netrc"
    return path.is_file() and host in path.read_text(encoding="utf8", errors="replace")


def _start_python(code: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY_ROOT,
        env=os.environ | environment,
    )


def _run_python(code: str, environment: dict[str, str]) -> str:
    """Last line that the code prints.

    Raises:
        RuntimeError: it failed or took too long; the last line of its error.
    """
    process = _start_python(code, environment)
    try:
        output, error = process.communicate(timeout=_PROCESS_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise RuntimeError(f"no answer within {_PROCESS_TIMEOUT_S:.0f} s") from None
    if process.returncode != 0:
        lines = error.strip().splitlines() or [f"exit code {process.returncode}"]
        raise RuntimeError(lines[-1])
    return output.strip().splitlines()[-1]


if __name__ == "__main__":
    raise SystemExit(main())

"""Which code runs attention and KV writes: Triton's kernels or the reference, and why.

Letters: none.
"""

import os

import torch

from mtp_research.config import EngineConfig
from mtp_research.errors import EnvironmentFault
from mtp_research.kernels import checks
from mtp_research.models.placement import resolve_device


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse Triton kernels on a CPU, unless Triton's own interpreter is on.

    Args:
        backend: `engine.backend`.
        device: of the target.

    Raises:
        EnvironmentFault: `backend` is `triton` and cannot run.
    """
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and device.type != "cuda" and not is_interpreted:
        raise EnvironmentFault(
            f"engine.backend=triton needs a CUDA GPU, the target is on {device}; "
            "set engine.backend=auto, or TRITON_INTERPRET=1 to run Triton's interpreter."
        )


def reference_note(engine: EngineConfig, device: str) -> str | None:
    """One line for people who may think that kernels run; None where they do.

    Args:
        engine: its backend decides.
        device: `model.device`.

    Raises:
        EnvironmentFault: `device` is `cuda` and no GPU can be used.
    """
    if engine.backend == "triton":
        return None  # runs, or is refused by `check_backend`
    reasons = []
    if engine.backend == "reference":
        reasons.append("engine.backend=reference")
    if resolve_device(device).type != "cuda":
        is_visible = torch.cuda.is_available()
        reasons.append("model.device=cpu" if is_visible else "no CUDA GPU is visible")
    if checks.triton is None:
        reasons.append("the triton package is not installed")
    if not reasons:
        return None
    return (
        "note: attention and KV writes run in plain PyTorch (the reference path), because "
        f"{' and '.join(reasons)}; times are not those of the kernels."
    )

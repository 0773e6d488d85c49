"""mtp-research: train Multi-Token-Prediction heads on a frozen target and decode with them.

    from mtp_research import SpecDecoder, SpecSettings, load_heads, load_target

    target = load_target("path/or/hub-id", dtype="bfloat16", device="cuda")
    heads = load_heads("path", target)
    spec = SpecSettings(policy="training", num_speculative_tokens=3)
    decoder = SpecDecoder(target, heads, spec=spec)
    for output in decoder.generate(["Once upon a time"], max_new_tokens=256):
        print(output.text, output.token_ids)
    print(decoder.stats.acceptance_length)

A prompt is text, a list of messages or token ids. `train_heads` and `evaluate` are the runs of
`train.py` and `eval.py`. The names below are imported when they are first used, so that `import
mtp_research` costs nothing. The Triton kernels lie in the top-level folder `kernels/`, which is
imported as `mtp_research.kernels`.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_research.runtime.threads import wait_passively_as_command

if TYPE_CHECKING:
    from mtp_research.app.api import evaluate, train_heads
    from mtp_research.config.schema import EngineConfig
    from mtp_research.decode.decoder import SpecDecoder
    from mtp_research.decode.sampling.sampling_params import SamplingParams
    from mtp_research.decode.settings import SpecSettings
    from mtp_research.decode.streaming import AsyncDecoder
    from mtp_research.heads.weights import load_heads
    from mtp_research.models.target import load_target
    from mtp_research.policy.fields import POLICIES

__all__ = [
    "POLICIES",
    "AsyncDecoder",
    "EngineConfig",
    "SamplingParams",
    "SpecDecoder",
    "SpecSettings",
    "evaluate",
    "load_heads",
    "load_target",
    "train_heads",
]

_HOMES = {
    "POLICIES": "mtp_research.policy.fields",
    "AsyncDecoder": "mtp_research.decode.streaming",
    "EngineConfig": "mtp_research.config.schema",
    "SamplingParams": "mtp_research.decode.sampling.sampling_params",
    "SpecDecoder": "mtp_research.decode.decoder",
    "SpecSettings": "mtp_research.decode.settings",
    "load_heads": "mtp_research.heads.weights",
    "evaluate": "mtp_research.app.api",
    "load_target": "mtp_research.models.target",
    "train_heads": "mtp_research.app.api",
}

# In a source tree or an editable install `kernels/` lies beside this package, not inside it. A
# top-level package called `kernels` would shadow Hugging Face's package of that name, so the folder
# is mounted here as a namespace sub-package.
_PACKAGE_DIR = Path(__file__).resolve().parent
if not (_PACKAGE_DIR / "kernels").is_dir():
    __path__.append(str(_PACKAGE_DIR.parent))


wait_passively_as_command(sys.argv, sys.orig_argv)


def __getattr__(name: str) -> object:
    """Import a public name from where it lives."""
    if name == "__version__":
        from mtp_research.runtime.provenance import project_version

        return project_version()
    if name not in _HOMES:
        raise AttributeError(f"mtp_research has no {name!r}; public names: {', '.join(__all__)}.")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, and those of an ordinary module."""
    return sorted({*globals(), *__all__, "__version__"})

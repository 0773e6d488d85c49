"""What the installed transformers needs before `generate(use_mtp=True)` drafts with our modules.

Sources: transformers 5.17.0, `MTPCandidateGenerator` in `generation/candidate_generator.py` and
`MtpModel` in `modeling_layers.py`.
"""

import re

import transformers
from transformers.generation import candidate_generator

from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError


def library_steps(target: Target, *, num_modules: int) -> list[str]:
    """What to do before `generate(use_mtp=True)` on the exported checkpoint; [] for nothing.

    The library knows modules by the layer numbers of the releases; those of other targets have to
    be named to it, or it fails for lack of a pattern.

    Raises:
        ConfigError: as `layer_pattern`.
    """
    pattern = layer_pattern(target, num_modules=num_modules)
    if pattern is None:
        return []
    return [
        f'before generate(use_mtp=True): model._keys_to_ignore_on_load_unexpected = [r"{pattern}"]'
    ]


def layer_pattern(target: Target, *, num_modules: int) -> str | None:
    """The pattern of tensor names that `generate(use_mtp=True)` has to be told; None for none.

    Raises:
        ConfigError: the installed version, or its class for this target, has no such generation.
    """
    if not hasattr(candidate_generator, "MTPCandidateGenerator"):
        raise ConfigError(
            "backend=transformers must find generate(use_mtp=True), which transformers "
            f"{transformers.__version__} lacks; install transformers 5.17 or export for an engine."
        )
    if not hasattr(target.config, "num_mtp_layers"):
        raise ConfigError(
            "model.path must be of a family with num_mtp_layers in its configuration for "
            f"backend=transformers, got {target.family_name} (transformers "
            f"{transformers.__version__}); export for an engine."
        )
    first = target.config.num_hidden_layers
    patterns = [str(pattern) for pattern in target.model._keys_to_ignore_on_load_unexpected or []]
    names = [f"model.layers.{first + module}.eh_proj.weight" for module in range(num_modules)]
    if all(any(re.search(pattern, name) for pattern in patterns) for name in names):
        return None
    numbers = "|".join(str(first + module) for module in range(num_modules))
    return rf"model\.layers\.({numbers})\."

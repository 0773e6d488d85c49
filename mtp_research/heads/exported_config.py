"""`config.json` of an exported checkpoint: how many modules it has, and that they are no FP8.

A quantised source says in `quantization_config` which modules are not; every other one is taken for
quantised. Exported modules are bfloat16, so they join that list, or an engine would look for scales
that are not there and fail, or cast the weights as if they were FP8.

Sources: transformers' `FineGrainedFP8Config.modules_to_not_convert`; `ignore` of compressed-tensors
and of NVIDIA's modelopt; `llm_int8_skip_modules` of bitsandbytes.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from mtp_research.errors import ConfigError, IntegrityError
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.source import CONFIG_FILE

_QUANTISATION = "quantization_config"
_LISTS = {  # method -> key of its list of modules that are left as they are
    "fp8": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "mxfp4": "modules_to_not_convert",
    "compressed-tensors": "ignore",
    "modelopt": "ignore",
    "bitsandbytes": "llm_int8_skip_modules",
}
_SEPARATE_FILE = "hf_quant_config.json"  # of modelopt; read where config.json says nothing
_OTHER_NAME = "ignored_layers"  # of vLLM, which then reads no other list


def exported_config(heads: MTPHeads, source: Path, names: Iterable[str]) -> dict[str, object]:
    """The source's configuration, changed where the exported modules need it.

    Args:
        heads: what is exported.
        source: checkpoint folder of the target.
        names: published names of the exported tensors.

    Raises:
        ConfigError: the source is quantised by a method whose list of exceptions is not known here,
            or says so elsewhere than in its `config.json`.
        IntegrityError: the configuration cannot be read.
    """
    path = source / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf8"))
        text = config.get("text_config", config)
        quantised = [part for part in (config, text) if part.get(_QUANTISATION)]
    except (OSError, ValueError, AttributeError) as fault:
        raise IntegrityError(
            f"{path} must be a model's configuration in JSON, got {fault}."
        ) from fault
    count_field = heads.target.family.native.count_field
    if count_field is not None:
        text[count_field] = heads.spec.num_mtp_modules
    if (source / _SEPARATE_FILE).exists() and not quantised:
        raise ConfigError(
            f"{path} must hold the quantization_config of its model, which is in {_SEPARATE_FILE} "
            "alone, where the bfloat16 modules cannot be marked; export with --model set to the "
            "unquantised checkpoint."
        )
    if quantised:  # in both places at most one and the same
        _leave_out(quantised[0][_QUANTISATION], _modules(names), path=path)
    return config


def _leave_out(quantisation: dict[str, object], modules: list[str], *, path: Path) -> None:
    """Add modules to the list of those that are not quantised."""
    method = str(quantisation.get("quant_method"))
    if method not in _LISTS:
        raise ConfigError(
            f"a target of {path} must be quantised by one of {sorted(_LISTS)} or not at all, got "
            f"quant_method {method!r}, where the bfloat16 modules cannot be marked; export with "
            "--model set to the unquantised checkpoint."
        )
    keys = {_LISTS[method]} | ({_OTHER_NAME} & quantisation.keys())
    for key in keys:
        listed = quantisation.get(key) or []
        if not isinstance(listed, list):
            raise IntegrityError(f"{path}: {key} must be a list of module names, got {listed!r}.")
        quantisation[key] = listed + [name for name in modules if name not in listed]


def _modules(names: Iterable[str]) -> list[str]:
    """Modules of tensors; experts also as the one module that transformers makes of them."""
    modules = {name.rpartition(".")[0] for name in names}
    stacks = {
        name.partition(".experts.")[0] + ".experts" for name in modules if ".experts." in name
    }
    return sorted(modules | stacks)

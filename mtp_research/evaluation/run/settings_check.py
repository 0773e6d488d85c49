"""From the configuration to the decoder's own setting types; nothing here imports torch.

The types check ranges and each other, so building them is the check that `preflight` makes before a
model is loaded.
"""

import importlib
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from mtp_research.config.rules import LENGTH_SETTINGS, expand
from mtp_research.config.schema import VERSIONS, EvalConfig, SamplingConfig, SpecConfig
from mtp_research.decode.draft.draft_length import (
    BatchTableLength,
    ConfidenceLength,
    DraftLength,
    ExpectedGainLength,
    FixedLength,
)
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.verify.verify_options import check_options
from mtp_research.evaluation.run.conditions import conditions_of
from mtp_research.runtime.errors import ConfigError, EnvironmentFault

_NAMES = {"sglang": "SGLang", "vllm": "vLLM"}  # engines that are no dependencies, as written


def check_settings(config: EvalConfig) -> None:
    """Build every setting of every cell of the grid and throw it away."""
    check_installed(config.backend)
    conditions_of(config)
    for cell in expand(config).cells:
        _check_cell(cell)


def check_installed(engines: Iterable[str]) -> None:
    """Refuse an engine that is no dependency of ours and not there; imports nothing."""
    for engine in sorted(_NAMES.keys() & engines):
        if find_spec(engine) is None:
            raise EnvironmentFault(
                f"backend={engine} must find {_NAMES[engine]} {VERSIONS[engine]}, got none; pip "
                f"install {engine}=={VERSIONS[engine]} on a machine with a GPU, or set "
                "backend=[own,transformers]."
            )


def load_engine(engine: str) -> Any:
    """The module of an engine that is no dependency of ours, of the version that we know.

    Raises:
        EnvironmentFault: it is not installed, cannot be loaded here, or is of another version.
    """
    check_installed([engine])
    known = f"{_NAMES[engine]} {VERSIONS[engine]}"
    try:
        module = importlib.import_module(engine)
    except (ImportError, OSError) as fault:  # built for another torch or CUDA
        raise EnvironmentFault(
            f"backend={engine} must load {known}, got {type(fault).__name__}: {fault}; install the "
            "build for this torch, or set backend=own."
        ) from fault
    if not str(module.__version__).startswith(VERSIONS[engine]):
        raise EnvironmentFault(
            f"backend={engine} must find {known}, whose conventions and step outputs are known, "
            f"got {module.__version__}; pip install {engine}=={VERSIONS[engine]}."
        )
    return module


def _check_cell(config: EvalConfig) -> None:
    spec, num_drafts = config.spec, config.spec.num_speculative_tokens
    draft_length(spec)
    sampling_params(config.sampling, seed=0, stop_token_ids=(0,))
    if num_drafts > 0:
        check_options(spec.verify, spec, num_speculative_tokens=num_drafts)
    is_headless, name = spec.head in (None, "oracle"), spec.head or "null"
    if spec.draft_vocabulary_size is not None and is_headless and num_drafts > 0:
        raise ConfigError(
            f"spec.draft_vocabulary_size must be null for spec.head={name}, got "
            f"{spec.draft_vocabulary_size}; set spec.draft_vocabulary_size=null."
        )
    if spec.draft_length != "fixed" and is_headless:
        raise ConfigError(
            f"spec.draft_length must be fixed for spec.head={name}, got {spec.draft_length}; "
            "set spec.draft_length=fixed."
        )


def draft_length(spec: SpecConfig) -> DraftLength:
    """The rule for the number of drafts.

    Raises:
        ConfigError: a value is out of range, or the rule does not read it.
    """
    usual = SpecConfig()
    for name, rule in LENGTH_SETTINGS.items():
        if spec.draft_length != rule and getattr(spec, name) != getattr(usual, name):
            raise ConfigError(
                f"spec.{name} must be left alone for spec.draft_length={spec.draft_length}; "
                f"set spec.draft_length={rule}."
            )
    if spec.draft_length == "confidence":
        return ConfidenceLength(spec.draft_p_min)
    if spec.draft_length == "batch_table":
        return BatchTableLength(tuple(sorted(spec.draft_table.items())))
    if spec.draft_length == "expected_gain":
        return ExpectedGainLength(spec.draft_cost_ratio)
    assert spec.draft_length == "fixed", f"validation let through {spec.draft_length}"
    return FixedLength()


def sampling_params(
    sampling: SamplingConfig, *, seed: int, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """Parameters of one request; `stop_token_ids` are the target's, used unless `ignore_eos`."""
    ends = () if sampling.ignore_eos else stop_token_ids
    return SamplingParams.of(sampling, seed=seed, stop_token_ids=ends)

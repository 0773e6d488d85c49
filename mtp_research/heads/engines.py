"""How serving engines run the heads of each family, as one literal table.

Published names do not say how modules are run, and engines disagree. An entry says what one engine
does with one family, from reading the files in `source`; nothing here was measured by running it.
None stands for what was not found out, and a family without an entry for what was not read.

vLLM: 0.24.0, the loop of `v1/spec_decode/llm_base_proposer.py` (not that of model runner v2), which
never says to a module which draft step it is at, so that module 0 makes all drafts. SGLang: 0.5.23,
the loop of `speculative/eagle_worker_v2.py`, which takes one module. transformers: 5.17.0, compared
draft by draft with our loop in `tests/heads/test_library_drafts.py`. `config.schema.VERSIONS` has
the versions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import cast

from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.family import ConcatOrder, NormPoint
from mtp_research.policy.fields import MATCHING_POLICY, ModuleSchedule
from mtp_research.runtime.errors import ConfigError


@dataclass(frozen=True)
class HeadRun:
    """How heads are run: the policy of the loop, and what `HeadSpec` calls conventions.

    None: unknown.
    """

    policy: str | None  # key of `POLICIES`
    hidden_source: NormPoint | None
    recycle_norm: NormPoint | None
    concat_order: ConcatOrder | None
    zero_position_0: bool | None
    module_schedule: ModuleSchedule | None


@dataclass(frozen=True)
class Engine:
    """What one engine does with the heads of one family."""

    run: HeadRun
    norms: tuple[str, str, str]  # checkpoint names of enorm, hnorm and the last norm that it reads
    # Whether a target with `tie_word_embeddings` works without lm_head.weight.
    knows_ties: bool | None
    source: str
    most_modules: int | None = None  # it refuses more of them, or loads one over the other
    # K above the number of modules N must be a multiple of N.
    drafts_in_multiples: bool = False
    drafts_per_module: bool = False  # K is the number of modules, and cannot be chosen
    # Keys of config.json that releases have and transformers does not write, with their values.
    config: Mapping[str, str] = field(default_factory=dict)


_DEEPSEEK_NORMS = ("enorm", "hnorm", "shared_head.norm")
# Without them vLLM scores experts by a softmax and has no room for the routers' biases, and SGLang
# does not load the target.
_DEEPSEEK_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_MIMO_NORMS = ("token_layernorm", "hidden_layernorm", "final_layernorm")
_QWEN_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
# The loop of vLLM and SGLang: rows up to the frontier from the target's states, then one row a
# draft from the module's own output.
_POST = HeadRun("eagle", "post_norm", "post_norm", "embedding_first", False, "first")
_LIBRARY = Engine(
    HeadRun("training", "post_norm", "post_norm", "embedding_first", False, "cycle"),
    _DEEPSEEK_NORMS,
    True,
    "generation/candidate_generator.py, modeling_layers.py",
    drafts_per_module=True,
)

ENGINES: Mapping[str, Mapping[str, Engine]] = {
    "vllm": {
        "deepseek_v3": Engine(
            replace(_POST, zero_position_0=True),
            _DEEPSEEK_NORMS,
            False,
            "deepseek_mtp.py, deepseek_v2.py",
            drafts_in_multiples=True,
            config=_DEEPSEEK_ROUTER,
        ),
        "glm4_moe": Engine(
            replace(_POST, recycle_norm="pre_norm", zero_position_0=True),
            _DEEPSEEK_NORMS,
            False,
            "glm4_moe_mtp.py, glm4_moe.py",
            drafts_in_multiples=True,
        ),
        "glm4_moe_lite": Engine(
            replace(_POST, hidden_source=None, recycle_norm="pre_norm", zero_position_0=True),
            _DEEPSEEK_NORMS,
            None,
            "glm4_moe_lite_mtp.py",
            drafts_in_multiples=True,
        ),
        "mimo": Engine(
            HeadRun("eagle", "pre_norm", "post_norm", "hidden_first", True, "first"),
            _MIMO_NORMS,
            True,
            "mimo_mtp.py, mimo.py",
            drafts_in_multiples=True,
        ),
        "qwen3_next": Engine(_POST, _QWEN_NORMS, False, "qwen3_next_mtp.py, qwen3_next.py"),
    },
    "sglang": {
        "deepseek_v3": Engine(
            _POST,
            _DEEPSEEK_NORMS,
            True,
            "deepseek_nextn.py, deepseek_v2.py",
            most_modules=1,
            config=_DEEPSEEK_ROUTER,
        ),
        "glm4_moe": Engine(
            _POST,
            _DEEPSEEK_NORMS,
            False,
            "glm4_moe_nextn.py, glm4_moe.py",
            most_modules=1,
        ),
        "mimo": Engine(
            HeadRun("eagle", "post_norm", "post_norm", "hidden_first", True, "first"),
            _MIMO_NORMS,
            True,
            "mimo_mtp.py, mimo.py",
            most_modules=1,
        ),
        "qwen3_next": Engine(
            _POST,
            _QWEN_NORMS,
            False,
            "qwen3_next_mtp.py, qwen3_next.py",
            most_modules=1,
        ),
    },
    "transformers": {"deepseek_v3": _LIBRARY, "glm4_moe": _LIBRARY},
}


def engine_for(name: str, heads: MTPHeads, *, num_drafts: int | None = None) -> Engine | None:
    """The entry of engine `name` for the family of `heads`; None where there is none.

    Args:
        name: key of `ENGINES`.
        heads: what the engine is to load.
        num_drafts: K that it is to run with, None where that is not decided yet.

    Raises:
        ConfigError: the engine refuses so many modules, or so many drafts with them.
    """
    family, num_modules = heads.target.family_name, heads.spec.num_mtp_modules
    engine = ENGINES[name].get(family)
    if engine is None:
        return None
    if engine.most_modules is not None and num_modules > engine.most_modules:
        raise ConfigError(
            f"spec.head must have at most {engine.most_modules} module for backend={name} with "
            f"family {family}, got {num_modules} ({engine.source}); train one module "
            "(head=shared_n1)."
        )
    if num_drafts is None:
        return engine
    if engine.drafts_per_module and num_drafts != num_modules:
        raise ConfigError(
            f"spec.k must be {num_modules} for backend={name}, which drafts once a module, got "
            f"{num_drafts}; set spec.k={num_modules}."
        )
    if engine.drafts_in_multiples and num_drafts > num_modules and num_drafts % num_modules:
        raise ConfigError(
            f"spec.k must be at most {num_modules}, the number of modules, or a multiple of it for "
            f"backend={name}, got {num_drafts}; set spec.k={num_modules}."
        )
    return engine


def trained_run(heads: MTPHeads) -> HeadRun:
    """How heads were trained to be run; the policy is None for weights of unknown origin."""
    spec = heads.spec
    return HeadRun(
        policy=MATCHING_POLICY.get(spec.unroll or ""),
        hidden_source=spec.hidden_source,
        recycle_norm=spec.recycle_norm,
        concat_order=spec.concat_order,
        zero_position_0=spec.zero_position_0,
        module_schedule=spec.module_schedule,
    )


def differences(trained: HeadRun, engine: HeadRun, *, num_modules: int) -> list[str]:
    """Names of the conventions that both sides know and in which they differ.

    With one module every order of modules is the same one.
    """
    return [
        item.name
        for item in fields(HeadRun)
        if None not in (ours := getattr(trained, item.name), theirs := getattr(engine, item.name))
        and ours != theirs
        and not (item.name == "module_schedule" and num_modules == 1)
    ]


def run_as(heads: MTPHeads, run: HeadRun) -> MTPHeads:
    """The same weights with the conventions of `run`; what it does not know stays as it is."""
    known = {
        item.name: value
        for item in fields(HeadSpec)
        if item.name in vars(run) and (value := getattr(run, item.name)) is not None
    }
    twin = MTPHeads(heads.target, spec=replace(heads.spec, **cast(dict, known)))
    twin.load_state_dict(heads.state_dict())
    return twin.eval().requires_grad_(False)

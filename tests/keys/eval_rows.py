"""What each key of `eval.py` promises: the rows of `EvalConfig`, section by section.

The baseline is in `lab`: the shipped target and its chain heads, three prompts, eight tokens each,
greedy, K = 3 under `training`, without K = 0. A lossless key keeps the texts.
"""

from collections.abc import Mapping

from tests.keys.row import Row, fault
from tests.keys.train_rows import GPU, RANKS

_HEADS = "assets/lab_tiny/heads"
_TTT = f"{_HEADS}/ttt_n1"
# Sampled text, and drafts that rejection sampling judges.
_SAMPLED: Mapping[str, object] = {"sampling.temperature": 1.0, "spec.verify": "standard"}
_SAMPLED_DRAFTS = {**_SAMPLED, "spec.draft_sampling": "sample"}
_MEASURED = {"synthetic_profile": "one profile", "synthetic_condition": "always"}
_LONG: Mapping[str, object] = {"sampling.max_new_tokens": 20}


def _row(key: str, value: object, changes: str, keeps: str = "", **more: object) -> Row:
    return Row(key, value, "evaluate", changes, keeps, **more)  # type: ignore[arg-type]


def _price(key: str, value: object, changes: str, keeps: str = "", **more: object) -> Row:
    return Row(key, value, "price", changes, keeps, **more)  # type: ignore[arg-type]


def _rule(key: str, value: object, rule: str, **base: object) -> Row:
    wanted = {"spec.verify": rule} | {f"spec.{name}": one for name, one in base.items()}
    return _row(f"spec.{key}", value, "rounds", "said", base=wanted)


def _graphs(key: str, value: object, changes: str, keeps: str = "") -> Row:
    return Row(f"engine.{key}", value, "graphs", changes, keeps, reason=GPU)


def _is_greedy(before: object, after: object) -> bool:
    """The change leaves one token to choose from: the text is the greedy one."""
    return after["texts"]["training"]["sum"][:2] == [23, 29]  # type: ignore[index]


MODEL = [
    _row("model.name", "mine", "config", "texts", reason="a name in records and folders"),
    _row("model.family", "llama", "warnings", "texts"),
    _row("model.path", "copied target", "fault", shows=fault("head")),
    _row("model.path", "copied target", "hashes texts", base={"spec.num_speculative_tokens": 0}),
    _row("model.dtype", "float64", "dtype loaded", "texts"),
    _row("model.device", "cuda", "fault", shows=fault("model.device=cuda"), reason=GPU),
    _row("model.tp_plan", "tensor", "fault", shows=fault("2 or more processes"), reason=RANKS),
    _row("model.device_map", "auto", "loaded", "texts", reason="one device: the same texts"),
    _row("model.weights", "random", "fault", shows=fault("head")),
    _row("model.weights", "random", "hashes texts", base={"spec.num_speculative_tokens": 0}),
    _row("model.keep_fp8", True, "loaded warnings", "texts", base={"model.path": "fp8 target"}),
    _row("model.experts", "grouped_mm", "loaded", "texts", reason=GPU),
    _price("model.dtype", "float64", "dtype loaded", "texts conditions"),
    _price("model.device_map", "auto", "loaded", "texts conditions"),
    _price("model.weights", "random", "fault", shows=fault("head")),
    _price(
        "model.keep_fp8",
        True,
        "loaded warnings",
        "texts conditions",
        base={"model.path": "fp8 target"},
    ),
    _price("model.experts", "grouped_mm", "loaded", "texts conditions", reason=GPU),
]
SPEC = [
    _row("spec.num_speculative_tokens", 2, "drafted", "texts labels"),
    _row("spec.policy", ["eagle"], "labels rounds"),
    _row("spec.policy", ["training", "eagle"], "labels rounds paired"),
    _row("spec.head", _TTT, "rounds said", "texts labels"),
    _row("spec.head", "oracle", "labels rounds"),
    _row("spec.head", None, "labels rounds"),
    _row("spec.module_schedule", "first", "fault", shows=fault("spec.module_schedule must be")),
    _row("spec.head", "head of module 0", "rounds said", "texts labels"),
    _row("spec.verify", "relaxed", "texts said lossless"),
    _row("spec.verify", "block", "said rounds", "prompts", base=_SAMPLED_DRAFTS),
    _rule("relaxed_top_n", 1, "relaxed"),
    _rule("relaxed_delta", 0.0, "relaxed"),
    _rule("relaxed_thinking_token_ids", [3000, 3001], "relaxed"),
    _rule("typical_epsilon", 1.0, "typical", typical_delta=1.0),
    _row(
        "spec.typical_delta",
        1e-6,
        "rounds",
        "said",
        base={"sampling.temperature": 1.0, "spec.verify": "typical"},
    ),
    _rule("synthetic_rates", [0.0, 0.0, 0.0], "synthetic", synthetic_rates=[1.0, 1.0, 1.0]),
    _rule("synthetic_length", 3.9, "synthetic", synthetic_length=1.1),
    _rule("synthetic_schedule", "geometric", "synthetic", synthetic_length=2.5),
    _rule("synthetic_profile", "other profile", "synthetic", **_MEASURED),
    _rule("synthetic_condition", "never", "synthetic", **_MEASURED),
    _row("spec.draft_sampling", "sample", "rounds said", base=_SAMPLED),
    _row(
        "spec.draft_sampling",
        "processed",
        "rounds said",
        "texts",
        base={"sampling.repetition_penalty": 3.0, **_LONG},
    ),
    _row("spec.draft_length", "confidence", "drafted", "texts labels"),
    _row("spec.draft_p_min", 0.9, "drafted", "texts", base={"spec.draft_length": "confidence"}),
    _row(
        "spec.draft_table",
        {1: 1},
        "drafted",
        "texts",
        base={"spec.draft_length": "batch_table", "spec.draft_table": {1: 3}},
    ),
    _row(
        "spec.draft_cost_ratio",
        100.0,
        "drafted",
        "texts",
        base={"spec.draft_length": "expected_gain", "spec.draft_cost_ratio": 0.0},
    ),
    _row("spec.draft_vocabulary_size", 16, "rounds", "texts"),
    _price("spec.num_speculative_tokens", 1, "conditions rounds", "texts"),
    _price("spec.policy", ["target_roll"], "conditions rounds", "prompts"),
    _price("spec.head", _TTT, "conditions rounds", "texts"),
    _price(
        "spec.module_schedule", "last", "fault", shows=fault("spec.module_schedule must be null")
    ),
    _price("spec.verify", "standard", "fault", shows=fault("spec.verify must be greedy")),
]
SAMPLING = [
    _row("sampling.temperature", 1.0, "texts", base={"spec.verify": "standard"}),
    _row("sampling.temperature", 0.2, "texts", base=_SAMPLED),
    _row("sampling.top_k", 1, "texts", base=_SAMPLED, shows=_is_greedy),
    _row("sampling.top_p", 1e-6, "texts", base=_SAMPLED, shows=_is_greedy),
    _row("sampling.min_p", 1.0, "texts", base=_SAMPLED, shows=_is_greedy),
    _row("sampling.repetition_penalty", 5.0, "texts"),
    _row("sampling.frequency_penalty", 2.0, "texts", base=_LONG),
    _row("sampling.presence_penalty", 2.0, "texts", base=_LONG),
    _row("sampling.dry_multiplier", 50.0, "texts", base=_LONG),
    _row("sampling.dry_base", 100.0, "texts", base={"sampling.dry_multiplier": 0.1, **_LONG}),
    _row(
        "sampling.dry_allowed_length", 1, "texts", base={"sampling.dry_multiplier": 50.0, **_LONG}
    ),
    _row("sampling.min_tokens", 8, "texts finished", base={"model.path": "stopping target"}),
    _row("sampling.max_new_tokens", 5, "texts", "labels"),
    _row("sampling.ignore_eos", True, "texts finished", base={"model.path": "stopping target"}),
    _price("sampling.max_new_tokens", 5, "texts", "conditions"),
    _price("sampling.temperature", 1.0, "fault", shows=fault("sampling.temperature must be 0")),
    _price("sampling.ignore_eos", True, "fault", shows=fault("sampling.ignore_eos must be false")),
]
ENGINE = [
    _row("engine.block_size", 32, "pools", "texts rounds"),
    _row("engine.num_blocks", 40, "pools", "texts rounds"),
    Row("engine.memory_fraction", 0.5, "small_gpu", "pools", reason=GPU),
    _row("engine.max_num_requests", 1, "pools steps said", "texts rounds"),
    _row(
        "engine.max_num_batched_tokens",
        16,
        "steps",
        "texts",
        base={"engine.max_num_batched_tokens": 512},
    ),
    _row("engine.max_prefill_chunk", 4, "steps", "texts rounds"),
    _row("engine.max_model_len", 16, "pools skipped prompts"),
    _row("engine.backend", "triton", "fault", shows=fault("needs a CUDA GPU"), reason=GPU),
    _row(
        "engine.prefix_caching",
        True,
        "steps",
        "texts rounds",
        base={"prompts.path": "same prompts", "engine.max_num_requests": 1},
    ),
    Row(
        "engine.steps_per_priority",
        1,
        "priorities",
        "order",
        reason="requests of eval.py have no priority",
    ),
    _row("engine.deferred_output", True, "", "texts rounds"),
    Row("engine.deferred_output", True, "priorities", "known", "order"),
    Row(
        "engine.cuda_graphs", False, "graphs", "graphs", base={"engine.compile": False}, reason=GPU
    ),
    _graphs("compile", False, "graphs merged rotated"),
    _graphs("few_rows_kernel", False, "merged", "graphs rotated"),
    _graphs("rotary_in_attention", False, "rotated", "graphs merged"),
    _graphs("overlap_launches", False, "graphs", "merged rotated"),
    _graphs("layer_regions", False, "regions", "merged rotated graphs"),
    _graphs("graph_batch_sizes", [3], "graphs", "merged rotated"),
    _graphs("capture_mixed", True, "graphs", "merged rotated"),
    _row(
        "engine.cuda_graphs",
        True,
        "fault",
        shows=fault("engine.cuda_graphs=true needs"),
        reason=GPU,
    ),
    _row(
        "engine.mixed_batches",
        False,
        "steps",
        "texts",
        base={"engine.max_num_requests": 2, "prompts.path": "many prompts"},
    ),
    _row(
        "engine.admit_together",
        2,
        "steps",
        "texts",
        base={"engine.max_num_requests": 2, "prompts.path": "many prompts"},
    ),
    _row("engine.deterministic", True, "num_products", "texts rounds"),
    _row("engine.audit", False, "audit", "texts rounds"),
    _row("engine.audit_every", 2, "audit", "texts rounds"),
    _price("engine.max_num_requests", 1, "pools", "texts rounds"),
    _price("engine.audit", False, "fault", shows=fault("engine.audit must be true")),
]
PROMPTS = [
    _row("prompts.path", "other prompts", "prompts texts"),
    _row("prompts.domains", ["code"], "prompts texts"),
    _row("prompts.max_prompts", 2, "prompts texts"),
    _row("prompts.turns", "first", "texts", base={"prompts.path": "scored prompts"}),
    _row("prompts.thinking", True, "fault", shows=fault("does not know enable_thinking")),
    _row("prompts.thinking_markers", ["<|user|>", "<|end|>"], "thinking", "texts rounds"),
    _row("prompts.score", "exact", "scores", "texts", base={"prompts.path": "scored prompts"}),
    _row(
        "prompts.run_code",
        True,
        "scores",
        "texts",
        base={"prompts.path": "scored prompts", "prompts.score": "auto"},
    ),
    _price("prompts.score", "exact", "fault", shows=fault("prompts.score must be null")),
    _price("prompts.path", "other prompts", "prompts texts"),
    _price("prompts.domains", ["code"], "prompts texts"),
    _price("prompts.max_prompts", 2, "prompts texts"),
]
GRID = [
    _row("grid.num_speculative_tokens", [1, 2], "labels drafted"),
    _row("grid.head", [_TTT, f"{_HEADS}/chain_n1"], "labels said rounds"),
    _row("grid.draft_sampling", ["greedy", "sample"], "labels said", base=_SAMPLED),
    _row("grid.draft_length", ["fixed", "confidence"], "labels said"),
    _row("grid.temperature", [0.0, 1.0], "labels texts", base={"spec.verify": "auto"}),
    _row("grid.max_num_requests", [1, 2], "labels said pools"),
    _price("grid.num_speculative_tokens", [1, 2], "conditions"),
    _price("grid.head", [_TTT, f"{_HEADS}/chain_n1"], "conditions"),
]
REST = [
    _row("logger.wandb", "offline", "wandb", "texts"),
    _row("logger.project", "mine", "wandb", "texts", base={"logger.wandb": "offline"}),
    _row("logger.tags", ["mine"], "wandb", "texts", base={"logger.wandb": "offline"}),
    _price("logger.tags", ["mine"], "wandb", "texts", base={"logger.wandb": "offline"}),
    _row("seed", 3, "seeds texts draws", base=_SAMPLED),
    _row("seed", 3, "prompts", base={"prompts.max_prompts": 1, "prompts.path": "many prompts"}),
    _price(
        "seed", 3, "prompts draws", base={"prompts.max_prompts": 1, "prompts.path": "many prompts"}
    ),
    Row("output_dir", "mine", "eval_entry", "started_in", "code"),
    Row(
        "overwrite",
        True,
        "evaluate_again",
        "fault drafted",
        shows=lambda a, b: "finished evaluation" in a["fault"] and b["fault"] is None,
    ),
    _row("verbose", True, "printed", "texts rounds"),
    _price("verbose", True, "fault", shows=fault("verbose must be false")),
    _row("baseline", True, "labels lossless"),
    _price("baseline", False, "fault", shows=fault("baseline must be true")),
    _row(
        "backend",
        ["own", "transformers"],
        "labels",
        base={"engine.max_num_requests": 1, "sampling.max_new_tokens": 2, "baseline": True},
        shows=lambda a, b: [*a["labels"], "own as transformers"] == b["labels"][:3],
    ),
    _row("task", "fault_price", "conditions", base={"spec.policy": ["window"], "baseline": True}),
    _row("timing.passes", 2, "num_passes", "texts rounds"),
    _row("reference", "eagle", "paired", "texts", base={"spec.policy": ["training", "eagle"]}),
]
# `task=target` of train.py alone reads them; the files of conf/model serve both entries.
UNREAD = ("model.architecture", "model.pretrain.")
EVAL_ROWS = [*MODEL, *SPEC, *SAMPLING, *ENGINE, *PROMPTS, *GRID, *REST]

"""The configuration schema: each key of `train.py` and `eval.py`, its type, default and values.

A dataclass field is a key. The comment gives meaning and unit, the metadata the legal values, which
`mtp_research.validation` enforces together with the rules between keys before a model is loaded.
YAML files under `conf/` only choose values. A key has one name here, in YAML and in the docs; the
one alias is `spec.k`. Letters: K drafts per step, N MTP modules, R requests, T rows of a step.
"""

from dataclasses import dataclass, field
from typing import Any, TypeVar

MAX_SPECULATIVE_TOKENS = 64
POLICIES = (
    "eagle",
    "eagle_norefresh",
    "target_roll",
    "training",
    "training_norefresh",
    "window",
)
COMPARED_POLICIES = ("eagle", "training")
VERIFY_RULES = ("block", "greedy", "relaxed", "standard", "typical")
ARGMAX_RULES = ("greedy", "relaxed")  # they take the target's argmax: temperature must be 0
MODULE_SCHEDULES = ("cycle", "first", "last")
NORMS = ("post_norm", "pre_norm")
PRECISIONS = ("auto", "bfloat16", "float16", "float32", "float64")

Number = TypeVar("Number", int, float, int | None)


def _within(default: Number, low: float, high: float) -> Number:
    """A key in [low, high]; None is legal where the annotation allows it."""
    return field(default=default, metadata={"low": low, "high": high})


def _above(default: float, low: float, high: float) -> float:
    """A key in (low, high]."""
    return field(default=default, metadata={"low": low, "high": high, "open_low": True})


def _one_of(default: str, *choices: str) -> str:
    return field(default=default, metadata={"choices": tuple(sorted(choices))})


@dataclass
class PretrainConfig:
    """How `task=target` trains a small target from scratch."""

    # Byte-level BPE: 256 bytes and 6 special tokens at least.
    vocab_size: int = _within(4096, 262, 1 << 18)
    seq_len: int = _within(512, 8, 1 << 20)  # tokens per packed row
    batch_size: int = _within(64, 1, 1 << 16)  # packed rows per step
    max_steps: int = _within(2000, 1, 10**9)
    max_seconds: float = _above(420.0, 0.0, 1e9)  # the first of max_steps and max_seconds ends it
    learning_rate: float = _above(3e-3, 0.0, 10.0)
    warmup_steps: int = _within(100, 0, 10**9)
    min_learning_rate_ratio: float = _within(0.05, 0.0, 1.0)  # last / peak learning rate
    weight_decay: float = _within(0.1, 0.0, 10.0)
    grad_clip: float = _above(1.0, 0.0, 1e6)  # global gradient norm
    corpus_dir: str = "../shared/data/corpus"
    # Sampling weight per corpus domain; `python` is the installed Python source.
    domain_weights: dict[str, float] = field(default_factory=dict)
    compile: bool = True
    log_every: int = _within(50, 1, 10**9)  # steps
    router_bias_rate: float = _within(1e-3, 0.0, 1.0)  # step of the expert-balancing bias


@dataclass
class ModelConfig:
    """The frozen target."""

    name: str
    family: str  # such as glm4_moe or qwen3
    path: str  # folder in Hugging Face format, or a hub id
    dtype: str = _one_of("auto", *PRECISIONS)  # auto: float32 on cpu, bfloat16 on cuda
    device: str = _one_of("auto", "auto", "cpu", "cuda")
    # Arguments of the family's Hugging Face config; read by task=target only.
    architecture: dict[str, Any] = field(default_factory=dict)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)


@dataclass
class HeadConfig:
    """The MTP modules that are trained."""

    num_mtp_modules: int = _within(3, 1, MAX_SPECULATIVE_TOKENS)  # N
    init: str = _one_of("target_last_layer", "native", "random", "target_last_layer")
    path: str | None = None  # heads to start from
    hidden_source: str = _one_of("post_norm", *NORMS)  # target hidden, seen from its final norm
    recycle_norm: str = _one_of("post_norm", *NORMS)  # module output fed on, seen from its own norm
    concat_order: str = _one_of("embedding_first", "embedding_first", "hidden_first")
    zero_position_0: bool = False  # zero the embedding at position 0, as some families do
    # The module of draft step i: cycle is i mod N, first is 0, last is min(i, N - 1).
    module_schedule: str = _one_of("cycle", *MODULE_SCHEDULES)


@dataclass
class DataConfig:
    """Documents that heads are trained on."""

    name: str
    path: str  # .jsonl or .jsonl.xz, one document a line
    # regenerated: the target's own answers, which heads should be trained on.
    kind: str = _one_of("regenerated", "original", "regenerated")
    seq_len: int = _within(256, 8, 1 << 20)  # tokens per packed row
    eval_documents: int = _within(96, 1, 10**7)  # held out for the replay walk
    max_documents: int | None = _within(None, 2, 10**9)


@dataclass
class ObjectiveConfig:
    """What is minimised."""

    # chain matches the decode policy `training`, ttt matches `eagle`.
    unroll: str = _one_of("chain", "chain", "ttt")
    num_depths: int | None = _within(None, 1, MAX_SPECULATIVE_TOKENS)  # None: max(N, 3)
    loss: str = _one_of("ce", "ce")
    depth_decay: float = _above(0.8, 0.0, 1.0)  # weight of depth d: depth_decay ** (d - 1)


@dataclass
class TrainerConfig:
    """Optimiser, schedule and checkpoints of `task=heads`."""

    precision: str = _one_of("auto", "auto", "bfloat16", "float32")
    max_steps: int = _within(300, 1, 10**9)
    batch_size: int = _within(8, 1, 1 << 16)  # packed rows per micro-batch
    gradient_accumulation_steps: int = _within(1, 1, 1 << 16)  # micro-batches per step
    learning_rate: float = _above(2e-3, 0.0, 10.0)  # peak
    warmup_fraction: float = _within(0.05, 0.0, 1.0)  # of max_steps
    betas: tuple[float, ...] = (0.9, 0.95)  # AdamW
    weight_decay: float = _within(0.0, 0.0, 10.0)
    grad_clip: float = _above(1.0, 0.0, 1e6)  # global gradient norm
    eval_every: int = _within(100, 1, 10**9)  # steps
    save_every: int = _within(100, 1, 10**9)  # steps
    keep_last: int = _within(2, 1, 10**6)  # checkpoints
    resume: str = "auto"  # auto, never, or the step folder to continue from

    def __post_init__(self) -> None:
        """OmegaConf hands a list over where the schema says tuple."""
        self.betas = tuple(self.betas)


@dataclass
class LoggerConfig:
    """Where curves go beside the run folder."""

    wandb: str = _one_of("disabled", "disabled", "offline", "online")
    project: str = "mtp-research"
    tags: list[str] = field(default_factory=list)


@dataclass
class SpecConfig:
    """Speculative decoding."""

    # K, alias spec.k; 0 is plain decoding through the same loop.
    num_speculative_tokens: int = _within(3, 0, MAX_SPECULATIVE_TOKENS)
    # Each policy of the list is measured.
    policy: list[str] = field(
        default_factory=lambda: list(COMPARED_POLICIES), metadata={"choices": POLICIES}
    )
    # Folder of trained heads. null: every draft is wrong; oracle: every draft is right.
    head: str | None = "assets/lab_tiny/heads/chain_n3"
    module_schedule: str = _one_of("cycle", *MODULE_SCHEDULES)
    # standard: rejection sampling; block: the same, drafts judged together; the others are lossy.
    verify: str = _one_of("greedy", *VERIFY_RULES)
    draft_sampling: str = _one_of("greedy", "greedy", "sample")


@dataclass
class SamplingConfig:
    """How the target's tokens are chosen, and when a request ends."""

    temperature: float = _within(0.0, 0.0, 100.0)  # 0 is greedy
    top_k: int = _within(0, 0, 1 << 20)  # 0 is off
    top_p: float = _above(1.0, 0.0, 1.0)  # 1 is off
    max_new_tokens: int = _within(64, 1, 1 << 20)  # per request
    ignore_eos: bool = False


@dataclass
class EngineConfig:
    """Memory and batching of the decode loop."""

    block_size: int = _within(16, 16, 1 << 12)  # KV slots per block, a power of two
    num_blocks: int | None = _within(None, 1, 1 << 31)  # None: enough for max_num_requests
    max_num_requests: int = _within(16, 1, 1 << 16)  # R
    max_num_batched_tokens: int = _within(512, 1, 1 << 20)  # T
    max_prefill_chunk: int = _within(256, 1, 1 << 20)  # prompt rows of one request in a step
    max_model_len: int | None = _within(None, 2, 1 << 24)  # tokens; None: the target's limit
    backend: str = _one_of("auto", "auto", "reference", "triton")
    audit: bool = True  # count WRONG, MIXED and HOLE slots of the draft KV


@dataclass
class PromptsConfig:
    """What is decoded."""

    name: str = "lab"
    # question.jsonl or a folder of them; None: shipped prompts and standard-library code.
    path: str | None = None
    max_prompts: int | None = _within(None, 1, 10**9)


@dataclass
class TrainConfig:
    """Everything `train.py` takes."""

    model: ModelConfig
    data: DataConfig
    task: str = _one_of("heads", "heads", "target")  # target: train a small target instead
    head: HeadConfig = field(default_factory=HeadConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    seed: int = _within(0, 0, (1 << 32) - 1)
    output_dir: str | None = None  # None: runs/<task>-<model>-<timestamp>


@dataclass
class EvalConfig:
    """Everything `eval.py` takes."""

    model: ModelConfig
    spec: SpecConfig = field(default_factory=SpecConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    seed: int = _within(0, 0, (1 << 32) - 1)
    output_dir: str | None = None  # None: results/eval-<model>-<timestamp>
    baseline: bool = True  # measure K = 0 on the same prompts

"""The configuration schema: each key of `train.py` and `eval.py`, its type, default and values.

A dataclass field is a key. The comment gives meaning and unit, the metadata the legal values, which
`mtp_research.validation` enforces together with the rules between keys before a model is loaded.
YAML files under `conf/` only choose values. A key has one name here, in YAML and in the docs; the
one alias is `spec.k`. Letters: K drafts per step, N MTP modules, R requests, T rows of a step.
"""

from dataclasses import dataclass, field
from typing import Any, TypeVar

from mtp_research.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 64
POLICIES = (
    "eagle",
    "eagle_norefresh",
    "target_roll",
    "training",
    "training_norefresh",
    "window",
)
CLEAN_POLICIES = ("eagle", "training")  # their draft KV depends on the text alone
COMPARED_POLICIES = CLEAN_POLICIES
VERIFY_RULES = ("block", "greedy", "relaxed", "standard", "synthetic", "typical")
DRAFT_LENGTHS = ("batch_table", "confidence", "expected_gain", "fixed")
ARGMAX_RULES = ("greedy", "relaxed")  # they take the target's argmax: temperature must be 0
MODULE_SCHEDULES = ("cycle", "first", "last")
NORMS = ("post_norm", "pre_norm")
UNROLLS = ("chain", "independent", "mixed", "shared_context", "ttt")
LOSS_TERMS = ("ce", "e2e_tv", "hidden", "kl", "lk", "tv")
DEPTH_WEIGHTS = ("decay", "dpace", "expected_length", "uniform")
PARALLEL = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
PRECISIONS = ("auto", "bfloat16", "float16", "float32", "float64")

Number = TypeVar("Number", int, float, int | None, float | None)


def _within(default: Number, low: float, high: float) -> Number:
    """A key in [low, high]; None is legal where the annotation allows it."""
    return field(default=default, metadata={"low": low, "high": high})


def _above(default: float, low: float, high: float) -> float:
    """A key in (low, high]."""
    return field(default=default, metadata={"low": low, "high": high, "open_low": True})


def _one_of(default: str, *choices: str) -> str:
    return field(default=default, metadata={"choices": tuple(sorted(choices))})


def parse_loss(text: str) -> dict[str, float]:
    """Terms and weights of `objective.loss`: `kl+0.1*hidden` is {"kl": 1.0, "hidden": 0.1}.

    Raises:
        ConfigError: an unknown term, a term named twice, or a weight that is not above 0.
    """
    weights: dict[str, float] = {}
    for part in text.replace(" ", "").split("+"):
        factor, _, name = part.rpartition("*")
        try:
            weight = float(factor) if factor else 1.0
        except ValueError:
            weight = 0.0
        if name not in LOSS_TERMS or name in weights or not 0 < weight < float("inf"):
            raise ConfigError(
                f"objective.loss must be a sum of {' | '.join(LOSS_TERMS)}, each once and with an "
                f"optional weight above 0, got {text}; set objective.loss=kl+0.1*hidden."
            )
        weights[name] = weight
    return weights


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
    # eval.py under torchrun: split over its processes by the model's own plan, projections and
    # heads (tensor) or whole experts.
    tp_plan: str = _one_of("none", "experts", "none", "tensor")
    # auto: spread over the GPUs of one process, then memory and disk; eval.py wants one GPU.
    device_map: str = _one_of("none", "auto", "none")
    # Expert layers of a bfloat16 target on a GPU. fused: our kernel, for layers that are not being
    # trained; grouped_mm: transformers'; auto: fused on Hopper for the layouts that it knows.
    experts: str = _one_of("auto", "auto", "fused", "grouped_mm")
    # Arguments of the family's Hugging Face config; read by task=target only.
    architecture: dict[str, Any] = field(default_factory=dict)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)


@dataclass
class HeadConfig:
    """The MTP modules that are trained."""

    num_mtp_modules: int = _within(3, 1, MAX_SPECULATIVE_TOKENS)  # N
    # native: the target's own MTP layers, N and the conventions below from its files where they are
    # not typed; replicate: the one module of head.path, N times.
    init: str = _one_of("target_last_layer", "native", "random", "replicate", "target_last_layer")
    path: str | None = None  # heads to start from, or the one module of init=replicate
    # Parts that stay as they start: a dotted part of a parameter's name (experts) or a pattern.
    freeze: list[str] = field(default_factory=list)
    lora_rank: int = _within(0, 0, 4096)  # train low-rank updates through peft; 0: the weights
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
    # Folder of the target's hidden states, written by task=cache; None: computed while training.
    hidden_cache: str | None = None


@dataclass
class ObjectiveConfig:
    """What is minimised."""

    # Decode policy that shows a head what it was trained on: chain and mixed `training`, ttt (one
    # module) and shared_context `eagle`, independent `target_roll`.
    unroll: str = _one_of("chain", *UNROLLS)
    num_depths: int | None = _within(None, 1, MAX_SPECULATIVE_TOKENS)  # None: max(N, 3)
    # A term of LOSS_TERMS, or a weighted sum of them such as kl+0.1*hidden.
    loss: str = "ce"
    # decay: depth_decay ** (d - 1); dpace: by the draft's own confidence, anchor by anchor;
    # expected_length: by how much the depth adds to the greedy acceptance length.
    depth_weights: str = _one_of("decay", *DEPTH_WEIGHTS)
    depth_decay: float = _above(0.8, 0.0, 1.0)
    lk_eta: float = _within(3.0, 0.0, 1000.0)  # lk leaves kl for tv as exp(-lk_eta * acceptance)
    lk_acceptance: str = _one_of("row", "batch", "row")  # what lk_eta multiplies: row's or mean
    # ce alone, half precision on a GPU: logits in float16, half of float32's bytes. The error of a
    # gradient stays near that of a bfloat16 gradient; logits beyond 65,504 skip the step.
    half_logits: bool = True


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
    # Settings that may differ from the checkpoint's when a run is resumed, such as `world size`.
    allow_drift: list[str] = field(default_factory=list)
    # Evaluations without a longer held-out walk after which a run ends; null: never.
    early_stopping_patience: int | None = _within(None, 1, 10**6)
    decode_eval_prompts: int = _within(0, 0, 10**6)  # prompts of the real loop at each evaluation
    # How weights, gradients and moments are spread over ranks; zero1..zero3 are DeepSpeed's.
    parallel: str = _one_of("ddp", *PARALLEL)
    shard_target: bool = False  # spread the frozen target's layers over ranks
    activation_checkpointing: bool = False  # recompute a module's inside in the backward pass
    compile: bool = False  # torch.compile for the modules and the target's layers

    def __post_init__(self) -> None:
        """OmegaConf hands a list over where the schema says tuple."""
        self.betas = tuple(self.betas)


@dataclass
class LoggerConfig:
    """Where curves go beside the run folder."""

    wandb: str = _one_of("disabled", "disabled", "offline", "online")
    project: str = "mtp-research"
    tags: list[str] = field(default_factory=list)
    tensorboard: bool = False  # event files in the run folder


@dataclass
class LauncherConfig:
    """Where `train.py` runs."""

    kind: str = _one_of("local", "local", "slurm")
    partition: str | None = None  # None: the cluster's default
    num_nodes: int = _within(1, 1, 10**5)
    gpus_per_node: int = _within(8, 1, 64)  # as many processes
    cpus_per_node: int = _within(64, 1, 10**4)
    max_minutes: int = _within(240, 1, 10**6)
    grace_s: int = _within(120, 1, 10**5)  # SIGTERM, which saves, comes this long before the end


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
    # auto: greedy at temperature 0, standard above.
    verify: str = _one_of("greedy", "auto", *VERIFY_RULES)
    # processed: the argmax after the request's own logit processors (penalties, masks).
    draft_sampling: str = _one_of("greedy", "greedy", "processed", "sample")
    # fixed: always K drafts. The others make fewer where more do not pay, see decode/draft_length.
    draft_length: str = _one_of("fixed", *DRAFT_LENGTHS)
    # confidence: stop before the first draft whose probability is below this.
    draft_p_min: float = _within(0.3, 0.0, 1.0)
    # batch_table: drafts by least batch size, such as {1:3,8:2,32:0}.
    draft_table: dict[int, int] = field(default_factory=dict)
    # expected_gain: price of one more draft in steps that make none; None: measured by the clock.
    draft_cost_ratio: float | None = _within(None, 0.0, 1e3)
    # Draft from so many tokens only, the most frequent ones by token_ranking.json of spec.head;
    # None: all.
    draft_vocabulary_size: int | None = _within(None, 1, 1 << 24)
    # Settings of the lossy rules, each read by the rule that its name begins with; their ranges
    # stand in decode.verify_options.VerifyOptions.
    relaxed_top_n: int = 10
    relaxed_delta: float = 0.6
    relaxed_thinking_token_ids: list[int] | None = None  # begin and end token
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    synthetic_rates: list[float] = field(default_factory=list)  # falling, one per draft
    synthetic_length: float | None = None  # instead of rates: mean acceptance length
    synthetic_schedule: str = _one_of("minimum_variance", "geometric", "minimum_variance")


@dataclass
class SamplingConfig:
    """How the target's tokens are chosen, and when a request ends."""

    temperature: float = _within(0.0, 0.0, 100.0)  # 0 is greedy
    top_k: int = _within(0, 0, 1 << 20)  # 0 is off
    top_p: float = _above(1.0, 0.0, 1.0)  # 1 is off
    min_p: float = _within(0.0, 0.0, 1.0)  # relative to the best token's probability; 0 is off
    repetition_penalty: float = _above(1.0, 0.0, 100.0)  # 1 is off
    frequency_penalty: float = _within(0.0, -2.0, 2.0)  # per occurrence in the output
    presence_penalty: float = _within(0.0, -2.0, 2.0)  # once for a token in the output
    dry_multiplier: float = _within(0.0, 0.0, 1e6)  # against repeated sequences; 0 is off
    dry_base: float = _within(1.75, 1.0, 1e6)
    dry_allowed_length: int = _within(2, 1, 32)  # tokens; shorter repetitions are free
    min_tokens: int = _within(0, 0, 1 << 20)  # no stop token before so many
    max_new_tokens: int = _within(64, 1, 1 << 20)  # per request
    ignore_eos: bool = False


@dataclass
class EngineConfig:
    """Memory and batching of the decode loop."""

    # KV slots per block; the Triton kernels and eval.py want a power of two from 16 on.
    block_size: int = _within(16, 1, 1 << 12)
    # None: enough for max_num_requests, as far as memory_fraction goes.
    num_blocks: int | None = _within(None, 1, 1 << 31)
    memory_fraction: float = _above(0.9, 0.0, 1.0)  # of a GPU's free memory, for the pool
    max_num_requests: int = _within(16, 1, 1 << 16)  # R
    max_num_batched_tokens: int = _within(512, 1, 1 << 20)  # T
    max_prefill_chunk: int = _within(256, 1, 1 << 20)  # prompt rows of one request in a step
    max_model_len: int | None = _within(None, 2, 1 << 24)  # tokens; None: the target's limit
    backend: str = _one_of("auto", "auto", "reference", "triton")
    # Keep the KV of finished texts and share it with texts that start alike; changes no output.
    prefix_caching: bool = False
    steps_per_priority: int = _within(1000, 1, 1 << 30)  # head start of one level of priority
    # The host learns a step's tokens while the next one runs; changes no output.
    deferred_output: bool = False
    # Replay decode steps as CUDA graphs; wants deferred_output and no audit.
    cuda_graphs: bool = False
    compile: bool = False  # run captured steps through torch.compile
    # Products of compiled steps by our kernel, where it was measured to be faster; Hopper only.
    few_rows_kernel: bool = True
    # Compiled steps rotate queries and keys in the attention launch, not in launches of their own.
    rotary_in_attention: bool = True
    # Kernels of compiled steps start while the one in front ends (programmatic dependent launch),
    # and wait for its end before they touch memory; from Hopper on, else without effect.
    overlap_launches: bool = True
    # Batch sizes that are captured, as far as max_num_requests asks for them: smaller batches are
    # padded to the next one, larger ones split. None: powers of two up to max_num_requests.
    graph_batch_sizes: list[int] | None = field(default=None, metadata={"low": 1, "high": 1 << 16})
    # Steps with up to 1,024 rows, prompt rows among them, are captured too, uncompiled: a request
    # that arrives then stops the others for the time of its rows and not for that of its launches.
    # Wants cuda_graphs; engine=h200 turns it on.
    capture_mixed: bool = False
    # Batch-invariant products and attention: greedy text is the same to the bit for any K, batch
    # and order; wants compile=false.
    deterministic: bool = False
    audit: bool = True  # count WRONG, MIXED and HOLE slots of the draft KV
    audit_every: int = _within(1, 1, 1 << 20)  # watch about one request in so many, by id


@dataclass
class PromptsConfig:
    """What is decoded."""

    name: str = "lab"
    # question.jsonl or a folder of them; None: shipped prompts and standard-library code.
    path: str | None = None
    domains: list[str] = field(default_factory=list)  # categories that are kept; empty: all
    max_prompts: int | None = _within(None, 1, 10**9)


@dataclass
class MatrixConfig:
    """The train-unroll x decode-policy matrix of `task=matrix`."""

    num_mtp_modules: list[int] = field(default_factory=lambda: [1, 3])  # N of the heads
    # ttt is left out for N > 1, and shared_context for N = 1, where ttt is the same.
    unrolls: list[str] = field(
        default_factory=lambda: ["chain", "ttt", "shared_context", "independent"],
        metadata={"choices": UNROLLS},
    )
    policies: list[str] = field(
        default_factory=lambda: ["training", "eagle", "target_roll"],
        metadata={"choices": ("eagle", "target_roll", "training")},
    )
    seeds: list[int] | None = None  # each trains every head once; None: the run's own seed
    # Each is trained, and decoded with each, to price a wrong record; empty: head.recycle_norm.
    recycle_norms: list[str] = field(default_factory=list, metadata={"choices": NORMS})
    # Share of the prompts of a cell whose text or rounds may differ from plain decoding and from
    # the walk, for rounding; in float32 on a CPU none does.
    max_differing_share: float = _within(0.0, 0.0, 1.0)
    num_prompts: int = _within(12, 1, 10**6)  # held-out prompts that are decoded
    max_new_tokens: int = _within(48, 1, 1 << 20)  # per prompt; stop tokens do not end it
    num_workers: int = _within(1, 1, 64)  # heads trained and decoded at a time on this machine
    # Dtype in which cells are decoded; auto: that of the training. In float32 the loop equals the
    # walk, and training takes a fraction of its time in bfloat16.
    dtype: str = _one_of("auto", "auto", "bfloat16", "float32")


@dataclass
class TrainConfig:
    """Everything `train.py` takes."""

    model: ModelConfig
    data: DataConfig
    # cache: write data.hidden_cache; matrix: heads of every unroll under every policy; target:
    # train a small target instead.
    task: str = _one_of("heads", "cache", "heads", "matrix", "target")
    head: HeadConfig = field(default_factory=HeadConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    matrix: MatrixConfig = field(default_factory=MatrixConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    seed: int = _within(0, 0, (1 << 32) - 1)
    output_dir: str | None = None  # None: runs/<task>-<model>-<timestamp>


@dataclass
class GridConfig:
    """Lists of values: every combination is measured, in one process on the same prompts.

    An empty list means the one value of the key in `GRID_AXES`. On the command line a list for that
    key goes here: `spec.k=[1,3]`.
    """

    num_speculative_tokens: list[int] = field(
        default_factory=list, metadata={"low": 0, "high": MAX_SPECULATIVE_TOKENS}
    )
    head: list[str | None] = field(default_factory=list)
    draft_sampling: list[str] = field(
        default_factory=list, metadata={"choices": ("greedy", "processed", "sample")}
    )
    temperature: list[float] = field(default_factory=list, metadata={"low": 0.0, "high": 100.0})
    max_num_requests: list[int] = field(default_factory=list, metadata={"low": 1, "high": 1 << 16})


GRID_AXES = {
    "grid.num_speculative_tokens": "spec.num_speculative_tokens",
    "grid.head": "spec.head",
    "grid.draft_sampling": "spec.draft_sampling",
    "grid.temperature": "sampling.temperature",
    "grid.max_num_requests": "engine.max_num_requests",
}


@dataclass
class TimingConfig:
    """How the conditions of an evaluation take turns."""

    # Decodings of the prompt set by each condition, one or an even number: with two, conditions
    # A and B run in the order A B B A, which takes a slow drift of the machine out of the ratios.
    passes: int = _within(1, 1, 100)
    # File, on a disk of the machine, on which evaluations take turns: those that name the same one
    # compile and capture side by side, and each decodes alone. Their pools lie beside each other,
    # so set engine.max_model_len or engine.num_blocks.
    turns: str | None = None


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
    # fault_price: what the slots that unclean policies leave behind cost.
    task: str = _one_of("evaluate", "evaluate", "fault_price")
    grid: GridConfig = field(default_factory=GridConfig)
    timing: TimingConfig = field(default_factory=TimingConfig)
    # Label or policy of the condition that paired differences are taken to; None: the first one
    # that drafts.
    reference: str | None = None

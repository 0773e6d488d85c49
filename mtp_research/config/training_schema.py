"""The sections that `train.py` alone takes, in the order of `TrainConfig`; small target first.

Letter: N MTP modules.
"""

from dataclasses import dataclass, field

from mtp_research.config.ranges import above, one_of, within
from mtp_research.policy.fields import MATCHING_POLICY, MODULE_SCHEDULES
from mtp_research.runtime.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 64
NORMS = ("post_norm", "pre_norm")
UNROLLS = tuple(sorted(MATCHING_POLICY))
LOSS_TERMS = ("ce", "e2e_tv", "hidden", "kl", "lk", "tv")
DEPTH_WEIGHTS = ("decay", "dpace", "expected_length", "uniform")
PARALLEL = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


@dataclass
class PretrainConfig:
    """How `task=target` trains a small target from scratch."""

    # Byte-level BPE: 256 bytes and 6 special tokens at least.
    vocab_size: int = within(4096, 262, 1 << 18)
    seq_len: int = within(512, 8, 1 << 20)  # tokens per packed row
    batch_size: int = within(64, 1, 1 << 16)  # packed rows per step
    max_steps: int = within(2000, 1, 10**9)  # optimiser steps
    max_seconds: float = above(420.0, 0.0, 1e9)  # the first of max_steps and max_seconds ends it
    learning_rate: float = above(3e-3, 0.0, 10.0)  # peak
    warmup_steps: int = within(100, 0, 10**9)  # steps up to the peak
    min_learning_rate_ratio: float = within(0.05, 0.0, 1.0)  # last / peak learning rate
    weight_decay: float = within(0.1, 0.0, 10.0)  # of matrices
    grad_clip: float = above(1.0, 0.0, 1e6)  # global gradient norm
    corpus_dir: str = "corpus"  # folder of DOMAIN.SPLIT.jsonl files (docs/data.md)
    # Sampling weight per corpus domain; `python` is the installed Python source.
    domain_weights: dict[str, float] = field(default_factory=dict)
    compile: bool = True  # torch.compile on a GPU
    log_every: int = within(50, 1, 10**9)  # steps
    router_bias_rate: float = within(1e-3, 0.0, 1.0)  # step of the expert-balancing bias
    # MTP modules that are trained with the target and saved in it, one a depth; 0: none.
    num_mtp_modules: int = within(0, 0, MAX_SPECULATIVE_TOKENS)
    mtp_loss_weight: float = above(0.3, 0.0, 100.0)  # of the modules' mean loss in the sum


@dataclass
class DataConfig:
    """Documents that heads are trained on."""

    path: str  # file, folder, or data set NAME[:CONFIG][@SPLIT] on the hub; see docs/data.md
    # regenerated: the target's own answers, which heads should be trained on.
    kind: str = one_of("regenerated", "original", "regenerated")
    seq_len: int = within(256, 8, 1 << 20)  # tokens per packed row
    eval_documents: int = within(96, 1, 10**7)  # held out for the replay walk
    max_documents: int | None = within(None, 2, 10**9)  # documents that are read; None: all
    # Folder of the target's hidden states, written by task=cache; None: computed while training.
    hidden_cache: str | None = None
    # Folder of hidden states that vLLM or speculators wrote, which task=cache takes; None: the
    # target computes them.
    import_hidden: str | None = None
    # Server that runs the target and writes hidden states to a local folder while heads train, such
    # as http://localhost:8000/v1; None: the target computes them.
    states_endpoint: str | None = None
    states_model: str | None = None  # what the server calls the target; None: a name alike
    # Rows that the server is asked for before they are needed; more of them never wait on disk.
    states_ahead: int = within(32, 1, 10**5)
    # Load the target's layers beside the cache, and compare a row of each shard with them.
    check_hidden_cache: bool = False


@dataclass
class HeadConfig:
    """The MTP modules that are trained."""

    num_mtp_modules: int = within(3, 1, MAX_SPECULATIVE_TOKENS)  # N, modules that are trained
    # native: the target's own MTP layers, N and the conventions below from its files where they are
    # not typed, more modules than it has as copies; auto: native where its checkpoint holds modules
    # that can be trained so, else target_last_layer; replicate: the one module of head.path, N
    # times.
    init: str = one_of("auto", "auto", "native", "random", "replicate", "target_last_layer")
    # init=target_last_layer: noise on the copied matrices, as a share of their root mean square. It
    # is drawn by `seed`, so that seeds and modules 1..N start apart; 0: exact copies.
    init_noise: float = within(0.02, 0.0, 1.0)
    path: str | None = None  # heads to start from, or the one module of init=replicate
    # Parts that stay as they start: a dotted part of a parameter's name (experts) or a pattern.
    freeze: list[str] = field(default_factory=list)
    lora_rank: int = within(0, 0, 4096)  # train low-rank updates through peft; 0: the weights
    hidden_source: str = one_of("post_norm", *NORMS)  # target hidden, seen from its final norm
    recycle_norm: str = one_of("post_norm", *NORMS)  # module output fed on, seen from its own norm
    # What eh_proj reads first.
    concat_order: str = one_of("embedding_first", "embedding_first", "hidden_first")
    zero_position_0: bool = False  # zero the embedding at position 0, as some families do
    # The module of draft step i: cycle is i mod N, first is 0, last is min(i, N - 1). Recorded in
    # head.json, and decoded with.
    module_schedule: str = one_of("cycle", *MODULE_SCHEDULES)


@dataclass
class ObjectiveConfig:
    """What is minimised."""

    # Decode policy that shows a head what it was trained on: chain and mixed `training`, ttt (one
    # module) and shared_context `eagle`, independent `target_roll`.
    unroll: str = one_of("chain", *UNROLLS)
    num_depths: int | None = within(None, 1, MAX_SPECULATIVE_TOKENS)  # None: max(N, 3)
    # A term of LOSS_TERMS, or a weighted sum of them such as kl+0.1*hidden.
    loss: str = "ce"
    # decay: depth_decay ** (d - 1); dpace: by the draft's own confidence, anchor by anchor;
    # expected_length: by how much the depth adds to the greedy acceptance length.
    depth_weights: str = one_of("decay", *DEPTH_WEIGHTS)
    depth_decay: float = above(0.8, 0.0, 1.0)  # weight of a depth relative to the one before
    lk_eta: float = within(3.0, 0.0, 1000.0)  # lk leaves kl for tv as exp(-lk_eta * acceptance)
    lk_acceptance: str = one_of("row", "batch", "row")  # what lk_eta multiplies: row's or mean
    # ce alone, half precision on a GPU: logits in float16, half of float32's bytes. The error of a
    # gradient stays near that of a bfloat16 gradient; logits beyond 65,504 skip the step.
    half_logits: bool = True


@dataclass
class TrainerConfig:
    """Optimiser, schedule and checkpoints of `task=heads`."""

    # Dtype of target and heads; auto: model.dtype.
    precision: str = one_of("auto", "auto", "bfloat16", "float32")
    max_steps: int = within(300, 1, 10**9)  # optimiser steps
    batch_size: int = within(8, 1, 1 << 16)  # packed rows per micro-batch
    gradient_accumulation_steps: int = within(1, 1, 1 << 16)  # micro-batches per step
    learning_rate: float = above(2e-3, 0.0, 10.0)  # peak
    warmup_fraction: float = within(0.05, 0.0, 1.0)  # of max_steps
    betas: tuple[float, ...] = (0.9, 0.95)  # AdamW, two numbers in [0, 1)
    weight_decay: float = within(0.0, 0.0, 10.0)  # AdamW
    grad_clip: float = above(1.0, 0.0, 1e6)  # global gradient norm
    eval_every: int = within(100, 1, 10**9)  # steps
    save_every: int = within(100, 1, 10**9)  # steps
    keep_last: int = within(2, 1, 10**6)  # checkpoints
    resume: str = "auto"  # auto, never, or the step folder to continue from
    # Settings that may differ from the checkpoint's when a run is resumed, such as `world size`.
    allow_drift: list[str] = field(default_factory=list)
    # Evaluations without a longer held-out walk after which a run ends; null: never.
    early_stopping_patience: int | None = within(None, 1, 10**6)
    decode_eval_prompts: int = within(0, 0, 10**6)  # prompts of the real loop at each evaluation
    # How weights, gradients and moments are spread over ranks; zero1..zero3 are DeepSpeed's.
    parallel: str = one_of("ddp", *PARALLEL)
    # DeepSpeed JSON for zero1..zero3: buffers, communication, logs. Entries that other keys decide
    # must agree with those or be auto; None: DeepSpeed's defaults.
    deepspeed_config: str | None = None
    shard_target: bool = False  # spread the frozen target's layers over ranks
    activation_checkpointing: bool = False  # recompute a module's inside in the backward pass
    compile: bool = False  # torch.compile for the modules and the target's layers
    # Replay unroll, backward pass and target pass as CUDA graphs, which pays where Python launches
    # for longer than the GPU runs; one process on one GPU.
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        """OmegaConf hands a list over where the schema says tuple."""
        self.betas = tuple(self.betas)


@dataclass
class MatrixConfig:
    """The train-unroll x decode-policy matrix of `task=matrix`."""

    num_mtp_modules: list[int] = field(default_factory=lambda: [1, 3])  # N of the heads
    # ttt is left out for N > 1, and shared_context for N = 1, where ttt is the same.
    unrolls: list[str] = field(
        default_factory=lambda: ["chain", "ttt", "shared_context", "independent"],
        metadata={"choices": UNROLLS},
    )
    # Every head is decoded under each of these.
    policies: list[str] = field(
        default_factory=lambda: ["training", "eagle", "target_roll"],
        metadata={"choices": ("eagle", "target_roll", "training")},
    )
    seeds: list[int] | None = None  # each trains every head once; None: the run's own seed
    # Each is trained, and decoded with each, to price a wrong record; empty: head.recycle_norm.
    recycle_norms: list[str] = field(default_factory=list, metadata={"choices": NORMS})
    # Share of the prompts of a cell whose text or rounds may differ from plain decoding and from
    # the walk, for rounding; in float32 on a CPU none does.
    max_differing_share: float = within(0.0, 0.0, 1.0)
    num_prompts: int = within(12, 1, 10**6)  # prompts that are decoded
    # Files like data.path whose prompts are decoded, such as texts that the target was not trained
    # on; empty: the held-out documents of data.path.
    prompts: list[str] = field(default_factory=list)
    # Per prompt; rounds behind the stop token are decoded and not counted.
    max_new_tokens: int = within(48, 1, 1 << 20)
    num_workers: int = within(1, 1, 64)  # heads trained and decoded at a time on this machine
    # Dtype in which cells are decoded; auto: that of the training. In float32 the loop equals the
    # walk, and training takes a fraction of its time in bfloat16.
    dtype: str = one_of("auto", "auto", "bfloat16", "float32")


@dataclass
class LauncherConfig:
    """Where `train.py` runs."""

    kind: str = one_of("local", "local", "slurm")  # slurm: a job, one torchrun a node
    submit: bool = True  # slurm: call sbatch; false: write the batch script alone
    partition: str | None = None  # None: the cluster's default
    num_nodes: int = within(1, 1, 10**5)  # machines of the job
    gpus_per_node: int = within(8, 1, 64)  # as many processes
    cpus_per_node: int = within(64, 1, 10**4)  # cores asked for
    max_minutes: int = within(240, 1, 10**6)  # time limit of the job
    grace_s: int = within(120, 1, 10**5)  # SIGTERM, which saves, comes this long before the end


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


def has_teacher(loss: str) -> bool:
    """Whether a term of `objective.loss` reads the target's own logits."""
    return not parse_loss(loss).keys() <= {"ce", "hidden"}

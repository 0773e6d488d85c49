"""The configuration schema: each key of `train.py` and `eval.py`, its type, default and values.

A dataclass field is a key. The comment above or beside it is its meaning, which `--help` prints;
its metadata holds the legal values, which `ranges` enforces; rules between keys stand in `rules`.
YAML under `conf/` only chooses values. A key has one name here, in YAML and in the docs; the one
alias is `spec.k`. The sections of `train.py` alone stand in `training_schema`.

Letters: K drafts per step, R requests, T rows of a step.
"""

from collections import ChainMap
from dataclasses import dataclass, field, fields
from typing import Any

from mtp_research.config.ranges import above, axis, one_of, within
from mtp_research.config.training_schema import (
    MAX_SPECULATIVE_TOKENS,
    DataConfig,
    HeadConfig,
    LauncherConfig,
    MatrixConfig,
    ObjectiveConfig,
    PretrainConfig,
    TrainerConfig,
)
from mtp_research.policy.fields import MODULE_SCHEDULES, POLICIES

VERIFY_RULES = ("block", "greedy", "relaxed", "standard", "synthetic", "typical")
# By name; `verify_rules` fills it, since they need torch. A process may add its own.
RULES: dict[str, Any] = dict.fromkeys(VERIFY_RULES)
ARGMAX_RULES = ("greedy", "relaxed")  # they take the target's argmax: temperature must be 0
DRAFT_LENGTHS = ("batch_table", "confidence", "expected_gain", "fixed")
WEIGHTS = ("random", "stored")
FP8_SUFFIX = "_fp8"  # of these, in Python, with `model.keep_fp8`
OWN = "own"  # the engine that this project is
# Of engines whose conventions and outputs were read in their sources.
VERSIONS = {"sglang": "0.5.23", "transformers": "5.17.0", "vllm": "0.24.0"}
BACKENDS = (OWN, *VERSIONS)
PRECISIONS = ("auto", "bfloat16", "float16", "float32", "float64")


@dataclass
class ModelConfig:
    """The frozen target."""

    name: str  # in the names of folders and tables
    family: str  # such as glm4_moe or qwen3
    path: str  # folder in Hugging Face format, or a hub id, ORGANISATION/NAME[@REVISION]
    dtype: str = one_of("auto", *PRECISIONS)  # auto: float32 on cpu, bfloat16 on cuda
    device: str = one_of("auto", "auto", "cpu", "cuda")  # auto: a GPU where one is visible
    # eval.py under torchrun: split over its processes by the model's own plan, projections and
    # heads (tensor) or whole experts; data: experts, and prompts dealt to processes, each of which
    # decodes its own with all else of the model (engine.max_num_requests of them at a time).
    tp_plan: str = one_of("none", "data", "experts", "none", "tensor")
    # auto: spread over the GPUs of one process, then memory and disk; eval.py wants one GPU.
    device_map: str = one_of("none", "auto", "none")
    # random: of the sizes in the config.json of model.path, where no other file is needed; the same
    # for any number of processes. To rehearse a run: texts mean nothing.
    weights: str = one_of("stored", *WEIGHTS)
    # Matrices that the checkpoint stores as FP8 stay FP8, with their scales, on one device; false:
    # de-quantised as they are read. With weights=random: those that an FP8 release stores so.
    keep_fp8: bool = False
    # Expert layers of a bfloat16 target on a GPU. fused: our kernel, for layers that are not being
    # trained; grouped_mm: transformers'; auto: fused on Hopper for the layouts that it knows.
    experts: str = one_of("auto", "auto", "fused", "grouped_mm")
    # Arguments of the family's Hugging Face config; read by task=target only.
    architecture: dict[str, Any] = field(default_factory=dict)
    # Read by task=target only; eval.py takes it because both entries share the files of conf/model.
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)

    @property
    def weights_form(self) -> str:
        """`weights` and `keep_fp8` as `load_target` takes them."""
        return f"{self.weights}{FP8_SUFFIX}" if self.keep_fp8 else self.weights


@dataclass
class LoggerConfig:
    """Where curves go beside the run folder."""

    wandb: str = one_of("disabled", "disabled", "offline", "online")  # Weights & Biases
    project: str = "mtp-research"  # of Weights & Biases
    tags: list[str] = field(default_factory=list)  # of the Weights & Biases run


@dataclass
class VerifyOptions:
    """Settings of the lossy rules, each read by the rule that its name begins with."""

    relaxed_top_n: int = within(10, 1, 1 << 20)  # a draft among the target's so many best tokens
    relaxed_delta: float = within(0.6, 0.0, 1.0)  # and at most so far below the best probability
    # Begin and end token between which that holds; elsewhere drafts are verified greedily. None:
    # it holds everywhere.
    relaxed_thinking_token_ids: list[int] | None = None
    typical_epsilon: float = above(0.09, 0.0, 1.0)  # a draft above min(this, delta * exp(-entropy))
    typical_delta: float = above(0.3, 0.0, 1e6)  # see typical_epsilon
    # Chance that drafts 1..j are all accepted, for j = 1..K; falling.
    synthetic_rates: list[float] = field(default_factory=list, metadata={"low": 0.0, "high": 1.0})
    # Instead of rates: mean acceptance length, in [1, K + 1].
    synthetic_length: float | None = within(None, 1.0, MAX_SPECULATIVE_TOKENS + 1.0)
    # How rates are spread over the drafts to give synthetic_length.
    synthetic_schedule: str = one_of("minimum_variance", "geometric", "minimum_variance")
    # Instead of both: rates of a speculation_profile.json, which every evaluation writes.
    synthetic_profile: str | None = None
    # Label of its condition; None where only one has spec.k drafts or more.
    synthetic_condition: str | None = None


@dataclass
class SpecConfig(VerifyOptions):
    """Speculative decoding."""

    # K, alias spec.k; 0 is plain decoding through the same loop.
    num_speculative_tokens: int = within(3, 0, MAX_SPECULATIVE_TOKENS)
    # Each policy of the list is measured.
    policy: list[str] = field(
        default_factory=lambda: ["eagle", "training"],
        metadata={"choices": POLICIES},  # the table itself: a process may add its own
    )
    # Folder of trained heads (RUN/head; lab_deep and lab_tiny ship some), or a checkpoint or hub id
    # that holds the target's own modules. null: every draft is wrong; oracle: every draft is right.
    head: str | None = "assets/${model.name}/heads/chain_n3"
    # The module of draft step i, as head.module_schedule; None: what head.json records, and trained
    # heads take no other.
    module_schedule: str | None = one_of(None, *MODULE_SCHEDULES)
    # standard: rejection sampling; block: the same, drafts judged together; the others are lossy.
    # auto: greedy at temperature 0, standard above.
    verify: str = field(default="auto", metadata={"choices": ChainMap(RULES, {"auto": None})})
    # processed: the argmax after the request's own logit processors (penalties, masks).
    draft_sampling: str = one_of("greedy", "greedy", "processed", "sample")
    # fixed: always K drafts. The others make fewer where more do not pay, see decode/draft_length.
    draft_length: str = one_of("fixed", *DRAFT_LENGTHS)
    # confidence: stop before the first draft whose probability is below this.
    draft_p_min: float = within(0.3, 0.0, 1.0)
    # batch_table: drafts by least batch size, such as {1:3,8:2,32:0}.
    draft_table: dict[int, int] = field(default_factory=dict)
    # expected_gain: price of one more draft in steps that make none; None: captured steps are timed
    # at the start, others by the clock as they go.
    draft_cost_ratio: float | None = within(None, 0.0, 1e3)
    # Draft from so many tokens only, the most frequent ones by token_ranking.json of spec.head;
    # None: all.
    draft_vocabulary_size: int | None = within(None, 1, 1 << 24)


@dataclass
class SamplingOptions:
    """How tokens are chosen: the settings that the command line and a request share."""

    temperature: float = within(0.0, 0.0, 1e300)  # 0 is greedy
    top_k: int = within(0, 0, 1 << 20)  # 0 is off
    top_p: float = above(1.0, 0.0, 1.0)  # 1 is off
    min_p: float = within(0.0, 0.0, 1.0)  # relative to the best token's probability; 0 is off
    repetition_penalty: float = above(1.0, 0.0, 1e300)  # 1 is off
    frequency_penalty: float = within(0.0, -2.0, 2.0)  # per occurrence in the output
    presence_penalty: float = within(0.0, -2.0, 2.0)  # once for a token in the output
    dry_multiplier: float = within(0.0, 0.0, 1e300)  # against repeated sequences; 0 is off
    dry_base: float = within(1.75, 1.0, 1e300)  # growth of that penalty with each repeated token
    dry_allowed_length: int = within(2, 1, 32)  # tokens; shorter repetitions are free
    min_tokens: int = within(0, 0, 1 << 20)  # no stop token before so many
    max_new_tokens: int = within(64, 0, 1 << 20)  # per request


@dataclass
class SamplingConfig(SamplingOptions):
    """How the target's tokens are chosen, and when a request ends."""

    max_new_tokens: int = within(64, 1, 1 << 20)  # per request
    ignore_eos: bool = False  # decode max_new_tokens whatever the target says


@dataclass
class EngineConfig:
    """Memory and batching of the decode loop."""

    # KV slots per block; the Triton kernels and eval.py want a power of two from 16 on.
    block_size: int = within(16, 1, 1 << 12)
    # None: enough for max_num_requests, as far as memory_fraction goes.
    num_blocks: int | None = within(None, 1, 1 << 31)
    # Of a GPU's free memory, or of half a CPU's, for the pool.
    memory_fraction: float = above(0.9, 0.0, 1.0)
    # R, requests that decode side by side; eval.py takes 1 (engine=auto).
    max_num_requests: int = within(2, 1, 1 << 16)
    max_num_batched_tokens: int = within(512, 1, 1 << 20)  # T, rows of a step
    max_prefill_chunk: int = within(256, 1, 1 << 20)  # prompt rows of one request in a step
    # Tokens; None: the target's limit, in eval.py what the prompts can grow to.
    max_model_len: int | None = within(None, 2, 1 << 24)
    # Attention kernels; auto: triton on a GPU, reference elsewhere.
    backend: str = one_of("auto", "auto", "reference", "triton")
    # Keep the KV of finished texts and share it with texts that start alike; changes no output.
    prefix_caching: bool = False
    # Prompt rows and decoding rows share steps; false: a step has one kind, by turns where both
    # wait. Changes no output.
    mixed_batches: bool = True
    # Head start of one level of priority; for the library, as requests of eval.py have none.
    steps_per_priority: int = within(1000, 1, 1 << 30)
    # Free places from which on waiting requests are admitted, then to all of them (at most
    # max_num_requests count; fewer are enough for all who wait): fewer steps have prompt rows, and
    # requests wait longer for their first token. Changes no output.
    admit_together: int = within(1, 1, 1 << 16)
    # The host learns a step's tokens while the next one runs; changes no output.
    deferred_output: bool = False
    # Replay decode steps as CUDA graphs; wants deferred_output and no audit.
    cuda_graphs: bool = False
    compile: bool = False  # run captured steps through torch.compile
    # Products of a few rows where another way was measured to be faster: in compiled steps by our
    # kernel, on Hopper; on a CPU with MKL with the weight as the left operand. On a CPU also norms
    # of fewer calls, and small experts as two products.
    few_rows_kernel: bool = True
    # Compiled steps rotate queries and keys in the attention launch, not in launches of their own.
    rotary_in_attention: bool = True
    # Kernels of compiled steps start while the one in front ends (programmatic dependent launch),
    # and wait for its end before they touch memory; from Hopper on, else without effect.
    overlap_launches: bool = True
    # Decoder layers are compiled once, for all layers and numbers of rows, not with every step.
    layer_regions: bool = True
    # Batch sizes that are captured, as far as max_num_requests asks for them: smaller batches are
    # padded to the next one, larger ones split. None: powers of two from 2 to max_num_requests, and
    # from 16 on the middle between two of them.
    graph_batch_sizes: list[int] | None = field(default=None, metadata={"low": 1, "high": 1 << 16})
    # Steps with up to 1,024 rows, prompt rows among them, are captured too: a request that arrives
    # then stops the others for the time of its rows and not for that of its launches. Wants
    # cuda_graphs; engine=h200 turns it on.
    capture_mixed: bool = False
    # Batch-invariant products and attention: greedy text is the same to the bit for any K, batch
    # and order.
    deterministic: bool = False
    audit: bool = True  # count WRONG, MIXED and HOLE slots of the draft KV
    audit_every: int = within(1, 1, 1 << 20)  # watch about one request in so many, by id


@dataclass
class PromptsConfig:
    """What is decoded."""

    # question.jsonl or a folder of them; None: shipped prompts and standard-library code.
    path: str | None = None
    domains: list[str] = field(default_factory=list)  # categories that are kept; empty: all
    max_prompts: int | None = within(None, 1, 10**9)  # spread over the domains; None: all
    # all: of several turns each is asked, with the answers before it. first: one turn a prompt, as
    # task=fault_price always does.
    turns: str = one_of("all", "all", "first")
    # Given to the chat template as enable_thinking; None: what the template does by itself.
    thinking: bool | None = None
    # Begin and end of the thinking part of an answer, one token each; None: <think> and </think>
    # where the tokenizer has them.
    thinking_markers: list[str] | None = None
    # Right answers. exact: the answer's last number; tests: the tests that come with the prompt,
    # which run code that the model wrote; auto: what each prompt has. None: none.
    score: str | None = one_of(None, "auto", "exact", "tests")
    # Whether score may run that code, on this machine and with this user's rights.
    run_code: bool = False


@dataclass
class GridConfig:
    """Lists of values: every combination is measured, in one process on the same prompts.

    An empty list means the one value of the key. On the command line a list for that key goes here:
    `spec.k=[1,3]`.
    """

    # its values
    num_speculative_tokens: list[int] = axis(SpecConfig, "spec.num_speculative_tokens")
    head: list[str | None] = axis(SpecConfig, "spec.head")  # its values
    draft_sampling: list[str] = axis(SpecConfig, "spec.draft_sampling")  # its values
    # Its values; rules beside fixed take the greatest K alone, of which they choose.
    draft_length: list[str] = axis(SpecConfig, "spec.draft_length")
    temperature: list[float] = axis(SamplingConfig, "sampling.temperature")  # its values
    max_num_requests: list[int] = axis(EngineConfig, "engine.max_num_requests")  # its values


# The list's key -> the key that takes one value.
GRID_AXES = {f"grid.{item.name}": str(item.metadata["axis_of"]) for item in fields(GridConfig)}


@dataclass
class TimingConfig:
    """How often each condition is decoded, and in which order."""

    # Decodings of the prompt set by each condition, one or an even number: with two, conditions
    # A and B run in the order A B B A, which takes a slow drift of the machine out of the ratios.
    passes: int = within(1, 1, 100)


@dataclass
class TrainConfig:
    """Everything `train.py` takes."""

    model: ModelConfig
    data: DataConfig
    # cache: write data.hidden_cache; matrix: heads of every unroll under every policy; target:
    # train a small target instead.
    task: str = one_of("heads", "cache", "heads", "matrix", "target")
    head: HeadConfig = field(default_factory=HeadConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    matrix: MatrixConfig = field(default_factory=MatrixConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    seed: int = within(0, 0, (1 << 32) - 1)  # of weights, data order and sampling
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
    seed: int = within(0, 0, (1 << 32) - 1)  # of weights, data order and sampling
    output_dir: str | None = None  # None: results/eval-<model>-<timestamp>
    overwrite: bool = False  # replace a finished evaluation, or one of other settings, there
    # Print every table and definition, and the JSON line on a terminal too; of a finished
    # evaluation it is enough to run the same command again with this.
    verbose: bool = False
    baseline: bool = True  # measure K = 0 on the same prompts
    # Engines that decode the same prompts. own: this project's loop, which the others are compared
    # with; transformers: its generate(); sglang, vllm: the versions in VERSIONS, which have to be
    # installed.
    backend: list[str] = field(default_factory=lambda: [OWN], metadata={"choices": BACKENDS})
    # fault_price: what the slots that unclean policies leave behind cost.
    task: str = one_of("evaluate", "evaluate", "fault_price")
    grid: GridConfig = field(default_factory=GridConfig)
    timing: TimingConfig = field(default_factory=TimingConfig)
    # Label or policy of the condition that paired differences are taken to; None: the first one
    # that drafts.
    reference: str | None = None

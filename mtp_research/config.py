"""The configuration schema: each key of `train.py` and `eval.py`, its type, default and values.

A dataclass field is a key. The comment gives meaning and unit, the metadata the legal values, which
`mtp_research.validation` enforces together with the rules between keys before a model is loaded.
YAML files under `conf/` only choose values. A key has one name here, in YAML and in the docs; the
one alias is `spec.k`. Here stand the two roots and the sections that both take; the others stand in
`config_training`, `config_decode` and `config_evaluation`, and are imported from here as well.
Letter: K drafts per step.
"""

from dataclasses import dataclass, field
from typing import Any

from mtp_research.config_choices import PRECISIONS, one_of, within
from mtp_research.config_decode import EngineConfig, SamplingConfig, SpecConfig
from mtp_research.config_evaluation import GridConfig, PromptsConfig, TimingConfig
from mtp_research.config_training import (
    DataConfig,
    HeadConfig,
    LauncherConfig,
    MatrixConfig,
    ObjectiveConfig,
    PretrainConfig,
    TrainerConfig,
)


@dataclass
class ModelConfig:
    """The frozen target."""

    name: str
    family: str  # such as glm4_moe or qwen3
    path: str  # folder in Hugging Face format, or a hub id
    dtype: str = one_of("auto", *PRECISIONS)  # auto: float32 on cpu, bfloat16 on cuda
    device: str = one_of("auto", "auto", "cpu", "cuda")
    # eval.py under torchrun: split over its processes by the model's own plan, projections and
    # heads (tensor) or whole experts.
    tp_plan: str = one_of("none", "experts", "none", "tensor")
    # auto: spread over the GPUs of one process, then memory and disk; eval.py wants one GPU.
    device_map: str = one_of("none", "auto", "none")
    # Expert layers of a bfloat16 target on a GPU. fused: our kernel, for layers that are not being
    # trained; grouped_mm: transformers'; auto: fused on Hopper for the layouts that it knows.
    experts: str = one_of("auto", "auto", "fused", "grouped_mm")
    # Arguments of the family's Hugging Face config; read by task=target only.
    architecture: dict[str, Any] = field(default_factory=dict)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)


@dataclass
class LoggerConfig:
    """Where curves go beside the run folder."""

    wandb: str = one_of("disabled", "disabled", "offline", "online")
    project: str = "mtp-research"
    tags: list[str] = field(default_factory=list)
    tensorboard: bool = False  # event files in the run folder


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
    seed: int = within(0, 0, (1 << 32) - 1)
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
    seed: int = within(0, 0, (1 << 32) - 1)
    output_dir: str | None = None  # None: results/eval-<model>-<timestamp>
    baseline: bool = True  # measure K = 0 on the same prompts
    # fault_price: what the slots that unclean policies leave behind cost.
    task: str = one_of("evaluate", "evaluate", "fault_price")
    grid: GridConfig = field(default_factory=GridConfig)
    timing: TimingConfig = field(default_factory=TimingConfig)
    # Label or policy of the condition that paired differences are taken to; None: the first one
    # that drafts.
    reference: str | None = None

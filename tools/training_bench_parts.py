"""Parts of the GPU training benches: a target of a given shape, rows of text, an engine, FLOPs.

Weights are random unless a folder is given; the text is a noisy permutation of a few tokens, which
heads learn within tens of steps, so that loss curves have something to show. A trained target with
experts should read its own text, since the text decides how evenly its experts are used.

Letters: B rows, S row length, D hidden, V vocabulary, N modules, k depths.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtp_research.config.schema import ModelConfig, TrainConfig
from mtp_research.config.training_schema import DataConfig, HeadConfig, TrainerConfig
from mtp_research.data.packing import EncodedDocument, pack_first_fit
from mtp_research.models.fresh import new_target
from mtp_research.models.target import Target, load_target, wrap_target
from mtp_research.training.documents import HeadDocuments, load_head_documents
from mtp_research.training.losses.loss_terms import loss_spec
from mtp_research.training.losses.losses import HeadObjective, UnrollSpec
from mtp_research.training.packed_rows import TrainingRows
from mtp_research.training.parallel.parallel import make_engine, prepare_target
from mtp_research.training.setup import RunParts, build_heads

USED_TOKENS = 256  # of the vocabulary
# lab_base with the widths of a model that people use: 2.6 G parameters.
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "n_routed_experts": 32,
    "vocab_size": 65536,
}


@dataclass(frozen=True)
class Shape:
    """What is trained: a model of `conf/model` or a folder, and the size of a step.

    Attributes:
        documents: file that `data.path` takes; None for made-up text.
        keeps_hidden: the target's hidden states are computed once and then read, as from a cache.
        experts: what `model.experts` takes.
    """

    model: str
    seq_len: int
    batch_size: int
    num_mtp_modules: int = 3
    num_depths: int = 3
    loss: str = "ce"
    documents: str | None = None
    keeps_hidden: bool = False
    experts: str = "auto"


def run_config(shape: Shape, trainer: TrainerConfig, *, device: str) -> TrainConfig:
    """The configuration that a run of this shape would have."""
    return TrainConfig(
        model=ModelConfig(shape.model, "", "", device=device),
        data=DataConfig("bench", shape.documents or "", seq_len=shape.seq_len, eval_documents=1),
        head=HeadConfig(num_mtp_modules=shape.num_mtp_modules),
        trainer=trainer,
    )


def make_target(name: str, *, device: torch.device, experts: str = "auto") -> Target:
    """A folder with weights, or random ones in the shape of `conf/model/NAME.yaml` or `large`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if Path(name).is_dir():
        dtype_name = str(dtype).removeprefix("torch.")
        return load_target(name, dtype=dtype_name, device=device.type, experts=experts)
    file = "lab_base" if name == "large" else name
    fields = yaml.safe_load((ROOT / "conf" / "model" / f"{file}.yaml").read_text())
    architecture = {"vocab_size": fields["pretrain"]["vocab_size"], **fields["architecture"]}
    architecture |= LARGE if name == "large" else {}
    model = new_target(fields["family"], architecture, dtype=dtype, device=device, seed=0)
    return wrap_target(model, experts=experts)


def make_parts(shape: Shape, config: TrainConfig, ranks: Accelerator) -> RunParts:
    """A run without a held-out part: heads, engine and training rows."""
    target = make_target(shape.model, device=ranks.device, experts=shape.experts)
    config.objective.loss = shape.loss
    heads = build_heads(config, target=target)
    prepare_target(target, trainer=config.trainer, ranks=ranks)
    spec = UnrollSpec(shape.num_depths, config.objective.unroll, "cycle")
    objective = HeadObjective(heads, unroll_spec=spec, loss_spec=loss_spec(config.objective))
    engine = make_engine(objective, trainer=config.trainer, ranks=ranks)
    documents = _documents(shape, config, vocab_size=target.config.vocab_size)
    training_rows = TrainingRows(
        pack_first_fit(documents.train, seq_len=shape.seq_len, pad_id=0),
        target=target,
        hidden_source="post_norm",
        keep_hidden=shape.keeps_hidden,
    )
    assert training_rows.keeps_hidden == shape.keeps_hidden, "the rows do not fit in CACHE_BYTES"
    return RunParts(
        heads=heads,
        engine=engine,
        documents=documents,
        rows=training_rows,
        held_out_rows=training_rows,
        unroll_spec=spec,
        settings={},
    )


def _documents(shape: Shape, config: TrainConfig, *, vocab_size: int) -> HeadDocuments:
    if shape.documents is None:
        return HeadDocuments(made_up_documents(shape), [], num_short=0, data_sha256="none")
    return load_head_documents(
        config.data,
        model_path=shape.model,
        vocab_size=vocab_size,
        num_depths=shape.num_depths,
    )


def made_up_documents(shape: Shape, *, num_rows: int = 512) -> list[EncodedDocument]:
    """Documents of half to three quarters of a row; nine tokens in ten follow a permutation."""
    generator = np.random.default_rng(0)
    follow = generator.permutation(USED_TOKENS)
    found = []
    for index in range(num_rows):
        length = int(generator.integers(shape.seq_len // 2, 3 * shape.seq_len // 4 + 1))
        for part, size in enumerate((length, shape.seq_len - length)):
            tokens = [int(generator.integers(USED_TOKENS))]
            while len(tokens) < size:
                noise = generator.random() < 0.1
                tokens.append(int(generator.integers(USED_TOKENS) if noise else follow[tokens[-1]]))
            mask = (False, *[True] * (size - 1))
            found.append(EncodedDocument(f"{index}-{part}", "synthetic", tuple(tokens), mask))
    return found


def flops_per_token(parts: RunParts, shape: Shape) -> dict[str, float]:
    """Useful floating-point operations per token of a step; recomputation does not count.

    2 N_act for the target, 6 P_act a depth for the modules, 4 D V a depth for lm_head (logits and
    their way back; it is frozen), 2 D V for the teacher's logits; attention over S / 2 keys.
    """
    target = parts.heads.target
    config = target.config
    hidden, vocab = config.hidden_size, config.vocab_size
    width = config.num_attention_heads * config.head_dim
    attention = 4 * width * shape.seq_len / 2  # forward, one layer
    decoder = cast(nn.ModuleList, target.model.base_model.layers)
    layers = active_parameters(decoder, config)
    modules = active_parameters(parts.heads.mtp_modules, config) / len(parts.heads.mtp_modules)
    depths = shape.num_depths
    forward = 2 * layers + attention * len(decoder)
    return {
        "target": 0.0 if shape.keeps_hidden else forward,
        "modules": depths * (6 * modules + 3 * attention),
        "lm_head": depths * 4 * hidden * vocab,
        "teacher": 0.0 if shape.loss == "ce" else 2 * hidden * vocab,
    }


def active_parameters(module: torch.nn.Module, config: PreTrainedConfig) -> float:
    """Parameters that one token meets: of the routed experts only those it is sent to."""
    total = 0.0
    for name, parameter in module.named_parameters():
        share = 1.0
        if ".experts." in name and parameter.ndim == 3:
            share = config.num_experts_per_tok / parameter.shape[0]
        total += parameter.numel() * share
    return total


def matmul_tflops(device: torch.device, *, size: int = 8192, repeats: int = 10) -> float:
    """Median rate of a bf16 `size`^3 product, random data: what MFU is measured against."""
    if device.type != "cuda":
        size = 256
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    times = [time_of(lambda: left @ right, device) for _ in range(repeats + 3)][3:]
    return 2 * size**3 / float(np.median(times)) / 1e12


def time_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the device drained before and after."""
    if device.type == "cuda":
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3
    started = time.perf_counter()
    call()
    return time.perf_counter() - started

"""What a model takes before it is loaded: bytes by part, limits of a step, operations, training.

Everything is read from modules, which may lie on the meta device (`shapes.sizes_only`). A time is a
limit over the share of it that was measured of the nearest shape; the rows below are the owners of
these shares, and the tests hold them against `docs/results` and `docs/log.md`.

Letters: K drafts per step, N MTP modules, D hidden, V vocabulary, S row length.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import nn

from mtp_research.bench.bench_row import evenly_used, expert_weights, step_bytes
from mtp_research.bench.shapes import SHAPES, sizes_only
from mtp_research.config.schema import EngineConfig, ModelConfig
from mtp_research.config.training_schema import TrainerConfig
from mtp_research.decode.build import build_drafter
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.pool_size import NUM_SPARE_BLOCKS, PoolNeeds, pool_needs
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.kernels.products.scaled_weights import FP8
from mtp_research.models.block import layers_like_block
from mtp_research.models.experts import expert_stacks
from mtp_research.models.family import ATTENTION_BLOCK
from mtp_research.models.loading.split_layers import num_sums
from mtp_research.models.rank_parts import BEST_BYTES
from mtp_research.models.recurrent import RecurrentStates
from mtp_research.models.target import Target
from mtp_research.training.optim import trained_bytes, trained_parameters
from mtp_research.training.step_costs import experts_per_token

_OTHER_ATTENTION = 4.0  # a choice, not a measurement; see the table in docs/recipes.md
# Layers of a spread target that are whole: the one that runs, and two on their way.
_NUM_GATHERED = 3


class Gpu(NamedTuple):
    """One kind of GPU; figures that were measured are of `docs/benchmarks.md`."""

    memory_gib: int  # that torch can use
    copy_tb_per_s: float | None  # measured; None: not
    product_tflops: float | None  # measured, bfloat16; None: not
    peak_tb_per_s: float  # the vendor's
    link_gb_per_s: float  # the vendor's, to the other GPUs of a host, one way


GPUS = {"h100": Gpu(79, None, None, 3.35, 450), "h200": Gpu(139, 4.25, 787, 4.8, 450)}


class MeasuredStep(NamedTuple):
    """A decode step that was timed on one H200, in bfloat16."""

    shape: str  # key of `SHAPES`
    batch: int
    num_drafts: int  # K
    limit_ms: float  # its bytes over the copy bandwidth of the run
    step_ms: float

    @property
    def share(self) -> float:
        """Of the limit, as `docs/benchmarks.md` has it."""
        return self.limit_ms / self.step_ms


# docs/results/bench_decode.json; GLM shapes from docs/log.md, in FP8 from docs/results/fp8.json,
# where routing was random.
MEASURED_STEPS = (
    MeasuredStep("dense_1b", 1, 0, 0.49556, 1.06108),
    MeasuredStep("dense_1b", 1, 3, 0.6747, 1.57777),
    MeasuredStep("dense_1b", 32, 0, 1.17631, 1.95316),
    MeasuredStep("dense_1b", 32, 3, 1.61262, 2.79272),
    MeasuredStep("mimo_7b", 1, 0, 3.32335, 3.99444),
    MeasuredStep("mimo_7b", 1, 3, 4.50652, 5.60535),
    MeasuredStep("mimo_7b", 32, 0, 4.54813, 5.60586),
    MeasuredStep("mimo_7b", 32, 3, 6.09617, 8.59862),
    MeasuredStep("lab_base", 1, 0, 0.03138, 0.50413),
    MeasuredStep("lab_base", 1, 3, 0.07028, 0.73896),
    MeasuredStep("lab_base", 32, 0, 0.11192, 0.59326),
    MeasuredStep("lab_base", 32, 3, 0.17512, 1.0394),
    MeasuredStep("lab_small", 1, 0, 0.00868, 0.29473),
    MeasuredStep("lab_small", 1, 3, 0.01998, 0.50604),
    MeasuredStep("lab_small", 32, 0, 0.0271, 0.47136),
    MeasuredStep("lab_small", 32, 3, 0.05047, 0.61592),
    MeasuredStep("glm45_air_8", 1, 3, 3.484, 4.448),
    MeasuredStep("glm45_air_8", 32, 3, 12.431, 13.755),
    MeasuredStep("glm47_flash", 1, 3, 3.971, 7.599),
    MeasuredStep("glm47_flash", 32, 3, 15.908, 20.803),
    MeasuredStep("glm45_air_fp8", 1, 0, 3.21665, 4.96586),
    MeasuredStep("glm45_air_fp8", 1, 3, 6.13797, 9.27686),
    MeasuredStep("glm45_air_fp8", 32, 0, 23.63561, 29.55703),
    MeasuredStep("glm45_air_fp8", 32, 3, 30.21028, 43.24966),
    MeasuredStep("glm45_air_fp8_rows", 1, 3, 6.15109, 9.23594),
    MeasuredStep("glm45_air_fp8_rows", 32, 3, 30.38839, 42.88197),
)


# Two H200, docs/results/two_cards.json: limit and link together over the step of the slower GPU.
MEASURED_ON_TWO = (
    MeasuredStep("glm45_air", 1, 0, 3.03707, 5.51206),
    MeasuredStep("glm45_air", 1, 3, 5.30609, 8.54841),
    MeasuredStep("glm45_air", 32, 0, 22.81704, 26.03895),
    MeasuredStep("glm45_air", 32, 3, 27.50603, 34.37652),
)
SUM_MS = 0.0076  # of a sum of a few rows over two H200, as NCCL makes it (docs/log.md)
_ALIKE = 2.0  # a choice: how far from a measured limit shares on two GPUs are taken over


class MeasuredTraining(NamedTuple):
    """A head training step that was timed on one H200: chain, N = 3, 256 rows of 256 tokens."""

    shape: str
    is_compiled: bool
    step_ms: float
    tflops: float  # useful operations a second
    product_tflops: float  # of the same run
    peak_gb: float  # of the allocator

    @property
    def mfu(self) -> float:
        """Share of the rate of a large product."""
        return self.tflops / self.product_tflops


# docs/log.md, "Head training step"
MEASURED_TRAINING = (
    MeasuredTraining("lab_base", True, 73.73, 322.4, 787, 10.2),
    MeasuredTraining("lab_small", True, 40.43, 194.3, 787, 6.1),
    MeasuredTraining("lab_base", False, 211.0, 112.7, 763, 14.5),
)
TRAINING_ROWS, TRAINING_LENGTH, TRAINING_DEPTHS = 256, 256, 3  # of these steps
# Two GPUs over one, docs/benchmarks.md, "Head training".
TWO_GPUS = {"ddp": 1.96, "fsdp2": 1.94, "zero2": 1.82, "zero3": 1.33}
# What a GPU receives a second beside a target that two H200 share. Of the step n1_zero2 of
# docs/results/two_cards.json the time is taken off that its operations need at lab_base's share;
# in the rest it received the bytes that `received_bytes` counts.
RECEIVED_GB_PER_S = 195.0


def num_parameters(module: nn.Module) -> int:
    """Numbers in the parameters of a module, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def num_bytes(*modules: nn.Module) -> int:
    """Bytes of parameters, shared ones once."""
    found = {id(p): p.nbytes for module in modules for p in module.parameters()}
    return sum(found.values())


def weight_parts(target: Target) -> dict[str, int]:
    """Bytes of the target's parameters by part; every parameter is in one."""
    model, kinds = target.model, dict[int, str]()
    for layer in cast(nn.ModuleList, model.base_model.layers):
        attention = dict(layer.named_children()).get(target.family.attention)
        is_own = getattr(layer, "block_type", ATTENTION_BLOCK) == ATTENTION_BLOCK
        if attention is not None and is_own:
            kinds |= dict.fromkeys(map(id, attention.parameters()), "attention")
    for mixer in target.mixers.values():
        kinds |= dict.fromkeys(map(id, mixer.parameters()), "recurrent layers")
    for module in model.modules():
        kinds |= dict.fromkeys(map(id, expert_weights(module)), "routed experts")
    kinds[id(target.lm_head.weight)] = "lm_head"
    kinds[id(target.embed_tokens.weight)] = "embedding"
    parts: dict[str, int] = {}
    for parameter in model.parameters():
        part = kinds.get(id(parameter), "MLP, shared experts, norms")
        parts[part] = parts.get(part, 0) + parameter.nbytes
    return parts


class DecodeMemory(NamedTuple):
    """Bytes on one GPU of a decoder."""

    weights: int  # of the target, or the rank's part of it
    modules: int  # or the rank's part of them
    states: int  # of recurrent layers
    needs: PoolNeeds  # of all requests at their longest
    num_blocks: int  # of the pool that is asked for
    fraction: float  # of the free memory that the pool may take

    @property
    def fixed(self) -> int:
        """Bytes beside the pool."""
        return self.weights + self.modules + self.states

    @property
    def pool(self) -> int:
        """Bytes of the pool that is asked for."""
        return self.num_blocks * self.needs.block_bytes

    @property
    def needed(self) -> float:
        """Bytes with which `engine.memory_fraction` leaves enough to the pool."""
        return self.fixed + self.pool / self.fraction

    def num_requests(self, memory: int) -> int:
        """Requests of the longest length whose pages fit a GPU of `memory` bytes."""
        blocks = int((memory - self.fixed) * self.fraction) // self.needs.block_bytes
        own = self.needs.num_least - NUM_SPARE_BLOCKS
        return max(blocks - NUM_SPARE_BLOCKS, 0) // own


def decode_memory(
    heads: MTPHeads, *, spec: SpecSettings, engine: EngineConfig, max_model_len: int
) -> DecodeMemory:
    """What a decoder with these settings holds, its pool counted as the engine counts it."""
    target, plan, has_drafts = heads.target, spec.plan(heads), spec.num_speculative_tokens > 0
    drafter, _ = build_drafter(target, heads if has_drafts else None, spec=spec, engine=engine)
    needs = pool_needs(target, drafter, plan=plan, engine=engine, max_model_len=max_model_len)
    states = 0
    if target.has_recurrent_state:
        slots = RecurrentStates(
            target.mixers,
            num_slots=engine.max_num_requests,
            num_speculative_tokens=plan.num_speculative_tokens,
        )
        states = sum(part.nbytes for layer in slots.layers.values() for part in layer)
    return DecodeMemory(
        num_bytes(target.model),
        num_bytes(heads) if has_drafts else 0,
        states,
        needs,
        engine.num_blocks + NUM_SPARE_BLOCKS if engine.num_blocks else needs.num_enough,
        engine.memory_fraction,
    )


class StepLimit(NamedTuple):
    """The least time of a decoding step of one GPU, by the bytes that it reads."""

    limit_ms: float
    num_rows: int  # of the target
    num_module_rows: float  # of all module passes
    num_logits: int  # rows of logits, drafts included
    unique_experts: float | None  # mean of the target's expert layers; None without
    gigabytes: float


def step_limit(
    heads: MTPHeads,
    *,
    gpu: Gpu,
    spec: SpecSettings,
    engine: EngineConfig,
    batch: int,
    context: int,
) -> StepLimit:
    """Limit of a step of `batch` texts of `context` tokens, experts drawn evenly."""
    drafts, target = spec.num_speculative_tokens, heads.target
    top_k, num_rows = experts_per_token(target), batch * (drafts + 1)
    used = evenly_used(target.model, num_rows=num_rows, top_k=top_k)
    counts = [stack.count for stack in used.values()]
    decoder = SpecDecoder(target, heads if drafts else None, spec=spec, engine=engine)
    module_rows = 0.0
    if drafts:
        module_rows = batch * spec.plan(heads).num_rows_per_step
        used |= evenly_used(heads, num_rows=module_rows / drafts, top_k=top_k)  # of a mean pass
    needed = step_bytes(decoder, heads if drafts else None, num_tokens=batch * context, used=used)
    total = needed.target_weights + needed.draft_weights + needed.keys_values
    tb_per_s = gpu.copy_tb_per_s or gpu.peak_tb_per_s
    unique = sum(counts) / len(counts) if counts else None
    logits = num_rows + batch * drafts
    return StepLimit(total / tb_per_s / 1e9, num_rows, module_rows, logits, unique, total / 1e9)


def link_time_ms(heads: MTPHeads, limit: StepLimit, *, gpu: Gpu, num_gpus: int) -> float:
    """Time that sums over ranks and best tokens spend on the link, without their latency.

    A ring of n GPUs sends 2 (n - 1) / n of what is added up: outputs of layers of the target and of
    a module, and embeddings. Best tokens, 16 bytes a row of logits, go to n - 1 others. Where ranks
    share experts alone, the rows of a rank in `limit` go to n - 1 others in expert layers, with
    their experts and weights, and as many come back; padding is not counted.
    """
    target = heads.target
    if target.exchange is not None:
        stacks = len(expert_stacks(target.model)) * limit.num_rows
        stacks += len(expert_stacks(heads)) / len(heads.mtp_modules) * limit.num_module_rows
        choices = 2 * torch.float32.itemsize * experts_per_token(target)  # number and weight
        row = 2 * target.config.hidden_size * target.dtype.itemsize + choices
        return stacks * row * (num_gpus - 1) / gpu.link_gb_per_s / 1e6
    sums = (num_sums(target.model) + 1) * limit.num_rows
    sums += (num_sums(heads) / len(heads.mtp_modules) + 1) * limit.num_module_rows
    added = sums * target.config.hidden_size * target.dtype.itemsize * 2 / num_gpus
    sent = (added + limit.num_logits * BEST_BYTES) * (num_gpus - 1)
    return sent / gpu.link_gb_per_s / 1e6


def nearest_step(
    target: Target,
    *,
    batch: int,
    num_drafts: int,
    limit_ms: float,
    rows: Sequence[MeasuredStep] = MEASURED_STEPS,
    but: str | None = None,
) -> MeasuredStep:
    """The step of `rows` that is most alike: batch, experts, FP8, then the nearest limit, then K.

    Another kind of attention (heads, latent) counts as a limit that is `_OTHER_ATTENTION` times as
    far. `but` leaves one shape out, for a look at how far such a choice can be trusted.
    """
    has_experts = any(map(expert_weights, target.model.modules()))
    is_fp8 = any(parameter.dtype == FP8 for parameter in target.model.parameters())

    def away(row: MeasuredStep) -> tuple[float, ...]:
        fields = SHAPES[row.shape].arguments
        is_other = ("n_routed_experts" in fields) != has_experts
        is_wider = ("quantization_config" in fields) != is_fp8
        factor = abs(math.log(row.limit_ms / limit_ms))
        if ("kv_lora_rank" in fields) != target.family.latent_attention:
            factor += math.log(_OTHER_ATTENTION)
        return row.batch != batch, is_other, is_wider, factor

    rows = [row for row in rows if row.shape != but]
    best = min(rows, key=away)
    same = (row for row in rows if (row.shape, row.batch) == (best.shape, best.batch))
    return min(same, key=lambda row: abs(row.num_drafts - num_drafts))


def step_on_two(
    target: Target, *, batch: int, num_drafts: int, limit_ms: float
) -> MeasuredStep | None:
    """The step measured on two GPUs with such experts and attention, and about such a limit."""
    if target.family.latent_attention or not any(map(expert_weights, target.model.modules())):
        return None
    sizes = {"batch": batch, "num_drafts": num_drafts, "limit_ms": limit_ms}
    row = nearest_step(target, **sizes, rows=MEASURED_ON_TWO)
    is_alike = abs(math.log(row.limit_ms / limit_ms)) <= math.log(_ALIKE)
    return row if row.batch == batch and is_alike else None


def latency_ms(heads: MTPHeads, *, num_drafts: int) -> float:
    """What the sums of a step over ranks take at least, embeddings among them."""
    of_module = num_sums(heads) / len(heads.mtp_modules) + 1
    return (num_sums(heads.target.model) + 1 + num_drafts * of_module) * SUM_MS


class TrainMemory(NamedTuple):
    """Bytes on one GPU of a training of heads."""

    target: float
    weights: float
    gradients: float
    optimizer: float
    gathered: float  # whole for a while, of what ranks share
    activations: float

    @property
    def at_rest(self) -> float:
        """What an update holds at once, whatever the micro-batch is."""
        return self.target + self.weights + self.gradients + self.optimizer

    @property
    def needed(self) -> float:
        """All of them."""
        return sum(self)


class Spread(NamedTuple):
    """What of the modules ranks share, each holding 1 / n of it."""

    weights: bool
    gradients: bool
    optimizer: bool


_SPREAD = {
    "ddp": Spread(False, False, False),
    "zero1": Spread(False, False, True),
    "zero2": Spread(False, True, True),
    "zero3": Spread(True, True, True),
    "fsdp2": Spread(True, True, True),
}
# Bytes a parameter of one module that is whole on a rank, by the steps of these libraries: weights
# and gradients in half precision, and FSDP2's float32 buffer of the reduction.
_WHOLE_BYTES = {"ddp": 0, "zero1": 0, "zero2": 2, "zero3": 4, "fsdp2": 8}


def training_memory(
    heads: MTPHeads,
    trainer: TrainerConfig,
    *,
    num_gpus: int,
    num_rows: int,
    is_cached: bool,
    starts_from_layer: bool,
) -> TrainMemory:
    """What a GPU holds; DeepSpeed's buckets of communication are not counted.

    Args:
        heads: modules as they are trained, on the whole target.
        trainer: spread and micro-batch.
        num_gpus: ranks.
        num_rows: tokens of a micro-batch times trained depths.
        is_cached: hidden states come from disk, and the target's layers stay there.
        starts_from_layer: all the same the layers that modules start from are loaded.
    """
    target = heads.target
    layers = list(cast(nn.ModuleList, target.model.base_model.layers))
    own, gathered = num_bytes(target.model) - num_bytes(*layers), 0.0
    if is_cached:
        alike = layers_like_block(target.model, target.family) if starts_from_layer else []
        held = num_bytes(*(layers[number] for number in alike))
    elif trainer.shard_target and num_gpus > 1:
        held = num_bytes(*layers) / num_gpus
        gathered = _NUM_GATHERED * max(map(num_bytes, layers))
    else:
        held = num_bytes(*layers)
    per = trained_bytes(target.dtype)
    count = sum(p.numel() for p in trained_parameters(heads).values())
    sizes = [num_bytes(heads), count * per.gradients, count * per.optimizer]
    if trainer.parallel == "fsdp2":  # its masters are the weights, and gradients are float32 alone
        sizes[:2] = [0, count * (per.gradients - per.weights)]
    spread = _SPREAD[trainer.parallel]
    kept = [
        size / num_gpus if is_spread else size
        for size, is_spread in zip(sizes, spread, strict=True)
    ]
    if num_gpus > 1:  # modules are whole at other times than layers, which meet no gradients
        largest = max(map(num_parameters, heads.mtp_modules))
        gathered = max(gathered - kept[1], _WHOLE_BYTES[trainer.parallel] * largest)
    values = num_rows * values_per_row(trainer.compile) if num_rows else 0.0
    activations = values * target.config.hidden_size * target.dtype.itemsize
    return TrainMemory(own + held, *kept, gathered=gathered, activations=activations)


@functools.cache  # it builds a model
def values_per_row(is_compiled: bool) -> float:
    """Numbers that a micro-batch keeps for a token and depth, as a multiple of D.

    Of the peak of a measured step weights and their state are taken off; the rest, what the target
    needs for a while included, is held to grow with tokens, depths and D. That is an assumption:
    the peaks of the other measured steps say how good it is.
    """
    row = measured_training(is_compiled)
    heads, no_state = measured_heads(row), {"is_cached": False, "starts_from_layer": False}
    states = training_memory(heads, TrainerConfig(), num_gpus=1, num_rows=0, **no_state).needed
    num_rows = TRAINING_ROWS * TRAINING_LENGTH * TRAINING_DEPTHS
    left = (row.peak_gb * 1e9 - states) / heads.target.dtype.itemsize
    return left / num_rows / heads.target.config.hidden_size


def measured_heads(row: MeasuredTraining) -> MTPHeads:
    """The modules of a measured training step, without weights."""
    shape = SHAPES[row.shape]
    model = ModelConfig(
        row.shape, shape.model_type, f"random:{row.shape}", architecture=dict(shape.arguments)
    )
    sizes = sizes_only(model, dtype=torch.bfloat16)
    with torch.device("meta"):
        return MTPHeads(sizes.target, spec=HeadSpec(num_mtp_modules=TRAINING_DEPTHS))


def measured_training(is_compiled: bool) -> MeasuredTraining:
    """The first measured step of a kind, that of the largest shape."""
    return next(row for row in MEASURED_TRAINING if row.is_compiled == is_compiled)


def speedup(parallel: str, num_gpus: int) -> tuple[float, str]:
    """Of n GPUs over one, and a note that says where that was not measured."""
    if num_gpus == 1:
        return 1.0, ""
    if num_gpus == 2 and parallel in TWO_GPUS:
        return TWO_GPUS[parallel], f", {TWO_GPUS[parallel]} times one GPU as lab_base ({parallel})"
    return float(num_gpus), f", {num_gpus} times one GPU: not measured"


def received_bytes(heads: MTPHeads, trainer: TrainerConfig, *, num_gpus: int) -> float:
    """Bytes that each GPU receives in a step beside a target that ranks share.

    In each micro-batch: layers of the target, gathered once; weights of modules, where ranks share
    them, before the forward and the backward pass; gradients, where ranks share those (FSDP2 sends
    them in float32). Once a step: gradients that are whole on each rank, and weights where ranks
    share the optimizer alone.
    """
    layers = cast(nn.ModuleList, heads.target.model.base_model.layers)
    count = sum(p.numel() for p in trained_parameters(heads).values())
    weights = count * heads.target.dtype.itemsize
    gradients = count * 4 if trainer.parallel == "fsdp2" else weights
    has_part = _SPREAD[trainer.parallel]
    often = num_bytes(*layers) + 2 * weights * has_part.weights + gradients * has_part.gradients
    once = gradients * (1 if has_part.optimizer else 2) * (not has_part.gradients)
    once += weights * (has_part.optimizer and not has_part.weights)
    return (often * trainer.gradient_accumulation_steps + once) * (num_gpus - 1) / num_gpus


def nearest_training(*, is_compiled: bool, tflop: float) -> MeasuredTraining:
    """The measured step of the same kind whose operations are nearest to `tflop`."""

    def distance(row: MeasuredTraining) -> float:
        return abs(math.log(row.tflops * row.step_ms / 1e3 / tflop))

    return min((row for row in MEASURED_TRAINING if row.is_compiled == is_compiled), key=distance)

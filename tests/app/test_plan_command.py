"""`mtp plan`: what it reads, what it refuses, and what it says of models that do not fit."""

import copy
import functools
import json
from pathlib import Path

import pytest
import torch

from mtp_research.app import plan_command
from mtp_research.app.cli import compose_config
from mtp_research.app.plan_command import GIB, Line, Plan, make_plan, read_words
from mtp_research.app.training_fit import planned_heads
from mtp_research.bench.planned import GPUS
from mtp_research.bench.shapes import SHAPES, Sizes, sizes_only
from mtp_research.config.schema import ModelConfig
from mtp_research.config.training_schema import HeadConfig
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TWO_CARDS = json.loads((ROOT / "docs" / "results" / "two_cards.json").read_text())
RECIPES_PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf8")
LAB_TINY = Path(__file__).resolve().parents[2] / "assets" / "lab_tiny" / "target"
_SIZES: dict[tuple[object, ...], Sizes] = {}
_HEADS: dict[tuple[object, ...], MTPHeads] = {}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True)
def models_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan asks for one model up to seven times, and the plans of this file for the same few."""
    monkeypatch.setattr(plan_command, "sizes_only", kept_sizes)
    monkeypatch.setattr(plan_command, "planned_heads", kept_heads)
    # A plan composes both entries; `_adopt_release` writes into what it is given.
    composed = lambda schema, words: copy.deepcopy(kept_config(schema, tuple(words)))  # noqa: E731
    monkeypatch.setattr(plan_command, "compose_config", composed)


kept_config = functools.cache(compose_config)


def kept_sizes(model: ModelConfig, *, dtype: torch.dtype, num_ranks: int = 1) -> Sizes:
    key = (repr(model), dtype, num_ranks)
    if key not in _SIZES:
        _SIZES[key] = sizes_only(model, dtype=dtype, num_ranks=num_ranks)
    return _SIZES[key]


def kept_heads(target: Target, *, head: HeadConfig) -> MTPHeads:
    key = (id(target), repr(head))  # kept targets keep their ids
    if key not in _HEADS:
        _HEADS[key] = planned_heads(target, head=head)
    return _HEADS[key]


@functools.cache
def planned(words: str) -> Plan:
    return make_plan(read_words(words.split()))


def section(words: str, start: str) -> dict[str, Line]:
    """Lines by name of the section whose title begins so; of equal names the last."""
    return {line.name: line for line in lines_of(words, start)}


def lines_of(words: str, start: str) -> list[Line]:
    (title,) = (name for name in planned(words) if name.startswith(start))
    return planned(words)[title]


def refusal(words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make_plan(read_words(words.split()))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpus=1xcpu", "gpus must be 1 to 8 of h100 or h200, such as 2xh200, got 1xcpu; CPUs are"),
        ("gpus=9xh200", "got 9xh200"),
        ("gpus=h200", "got h200"),
        ("tokens=many", "tokens must be a number of tokens, got many; set tokens=1e8"),
        ("context=0", "context must be a number of tokens, got 0; set context=1024"),
        ("engine.prefix_caching=true", "plan does not read engine.prefix_caching; nearest: "),
        ("engine.max_num_request=3", "nearest: engine.max_num_requests"),
        ("model=lab_tini", "model must be one of"),
        ("spec.k=[1,3]", "plan takes one value a key, got a list for num_speculative_tokens"),
        ("spec.policy=[eagle,training]", "got a list for spec.policy; run it once for each"),
        ("engine.block_size=24", "block_size"),
        ("model=qwen3", "is not in the hub cache, and the hub is offline"),
    ],
)
def test_word_that_cannot_be_planned_is_refused(words: str, message: str) -> None:
    assert message in refusal(words)


def test_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.main(["model=lab_tiny", "spec.k=1"]) == 0
    table = capsys.readouterr().out
    assert "\ndecoding on 1xh200, each GPU\n" in table
    assert plan_command.main(["model=lab_tiny", "spec.k=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for title, lines in found.items():
        assert title in table
        for line in lines:
            assert line.keys() == {"name", "figure", "unit", "rests_on"}
            assert line["rests_on"] in table
    assert plan_command.main(["gpus=1xcpu"]) == 2
    assert capsys.readouterr().err.startswith("error: gpus must be ")


def test_target_of_a_path_is_planned_or_refused_and_never_the_default_one() -> None:
    assert "'/nowhere' does not exist" in refusal("model.path=/nowhere")
    assert "is not in the hub cache" in refusal("model.path=org/absent")


def test_folder_with_a_config_alone_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((LAB_TINY / "config.json").read_text())
    by_path, by_name = (
        section(f"{words} head.num_mtp_modules=2", "weights")
        for words in (f"model.path={tmp_path}", "model=lab_tiny")
    )
    assert by_path == by_name
    sizes = [line.figure for name, line in by_name.items() if name != "MTP modules"]
    assert sum(size or 0 for size in sizes) == 3_863_040 * 2 / GIB


def test_release_gives_number_and_source_of_its_modules() -> None:
    own = section("model=mimo", "model")["MTP modules"]
    assert own.rests_on == "N = 1, the release's own"
    typed = section("model=mimo head.num_mtp_modules=3", "model")["MTP modules"]
    assert typed.rests_on == "N = 3, head.num_mtp_modules"
    assert typed.figure == pytest.approx(3 * (own.figure or 0))
    # Modules of MiMo read states before the final norm, so both sides are kept.
    assert section("model=mimo", "hidden")["a token"].figure == 4096 * 2 * 2
    assert section("model=mimo head=shared_n1", "hidden")["a token"].figure == 4096 * 2


def test_model_that_does_not_fit_says_by_how_much_and_what_would_do() -> None:
    decoding = section("model=glm45_air gpus=1xh200", "decoding")
    needed = decoding["needed on each of 1"]
    assert needed.rests_on == f"does not fit: {(needed.figure or 0) - 139:.1f} GiB missing"
    assert decoding["needed on each of 2"].rests_on.startswith("fits: ")
    assert decoding["would fit: GPUs"].rests_on == "gpus=2xh200"
    eight_bits = decoding["would fit: FP8 weights"]
    assert eight_bits.figure == pytest.approx((needed.figure or 0) - decoding["target"].figure / 2)
    assert decoding["requests that fit"].figure == 0
    assert "would fit: requests at a time" not in decoding
    several = section("model=deepseek_v3 gpus=8xh200", "decoding")  # whose FP8 fits no one of them
    assert several["needed on each of 8"].rests_on.startswith("does not fit: ")
    assert "would fit: FP8 weights" not in several


def test_ranks_that_share_experts_hold_all_else_whole() -> None:
    words = "model=glm45_air gpus=2xh200"
    whole = section("model=glm45_air gpus=1xh200", "decoding")
    dealt = section(f"{words} model.tp_plan=data", "decoding")
    experts = section(words, "weights")["routed experts"].figure or 0
    target, pool = dealt["target"], dealt["KV pool"]
    assert target.rests_on == "experts split by model.tp_plan=data"
    assert target.figure == pytest.approx((whole["target"].figure or 0) - experts / 2)
    assert pool.figure == whole["KV pool"].figure
    assert pool.figure == pytest.approx(2 * (section(words, "decoding")["KV pool"].figure or 0))
    step = section(f"{words} model.tp_plan=data", "a decode step")["step"]
    assert (step.figure, step.rests_on) == (None, "not planned for model.tp_plan=data")


def test_weights_kept_in_fp8_are_planned_with_their_bytes() -> None:
    """One H200 holds GLM-4.5-Air so; a step reads a byte a number, and bfloat16 of the rest."""
    words = "model=glm45_air gpus=1xh200 model.keep_fp8={}"
    kept, plain = (section(words.format(value), "decoding") for value in ("true", "false"))
    assert kept["needed on each of 1"].rests_on.startswith("fits: ")
    assert kept["needed on each of 2"].rests_on.endswith("set gpus=1xh200.")
    assert "would fit: FP8 weights" not in kept
    assert 0.50 < (kept["target"].figure or 0) / (plain["target"].figure or 1) < 0.51
    steps = [section(words.format(value), "a decode step") for value in ("true", "false")]
    name = "batch 32, K = 0: limit"
    assert 0.5 < (steps[0][name].figure or 0) / (steps[1][name].figure or 1) < 0.53


def test_pool_that_does_not_fit_says_how_many_requests_do() -> None:
    words = "model=mimo engine.max_model_len=32768 engine.max_num_requests={}"
    decoding = section(words.format(64), "decoding")
    count = decoding["would fit: requests at a time"]
    assert count.rests_on == f"engine.max_num_requests={count.figure}: the others wait"
    assert decoding["requests that fit"].figure == count.figure
    for more, verdict in ((0, "fits: "), (1, "does not fit: ")):
        again = section(words.format(count.figure + more), "decoding")
        assert again["needed on each of 1"].rests_on.startswith(verdict)
    assert "would fit: requests at a time" not in section(words.format(count.figure), "decoding")


def test_training_that_does_not_fit_says_what_would() -> None:
    words = "model=glm45_air gpus=2xh200"
    lines = [line for line in lines_of(words, "head training") if line.name == "would fit"]
    ways = [line.rests_on for line in lines]
    assert ways == [
        "gpus=2xh200 data.hidden_cache=FOLDER, written by task=cache model.device_map=auto",
        "gpus=2xh200 trainer.parallel=fsdp2 data.hidden_cache=FOLDER, written by task=cache "
        "model.device_map=auto",
        "gpus=2xh200 trainer.shard_target=true trainer.parallel=fsdp2",
    ]
    more = f"{words} trainer.shard_target=true trainer.parallel=fsdp2"
    spread = section(more, "head training")["needed on each of 2"]
    assert spread.figure == lines[2].figure
    assert spread.rests_on.startswith("fits: ")
    cached = section(f"{words} data.hidden_cache=FOLDER", "head training")
    assert cached["needed on each of 2"].figure == lines[0].figure
    assert "target 0%" in cached["operations of a step"].rests_on


def test_micro_batch_that_does_not_fit_says_that_one_row_would() -> None:
    lines = lines_of("model=lab_base trainer.batch_size=4096 data.seq_len=2048", "head training")
    assert {line.name: line for line in lines}["needed on each of 1"].rests_on.startswith("does")
    assert "gpus=1xh200 trainer.batch_size=1" in [line.rests_on for line in lines]


def test_target_that_cannot_be_split_is_planned_for_one_gpu() -> None:
    decoding = section("model=smollm2 gpus=2xh200", "decoding")
    assert decoding["needed on each of 2"].figure is None
    assert "divides {'num_attention_heads': 9" in decoding["needed on each of 2"].rests_on
    assert decoding["needed on each of 1"].rests_on.startswith("fits")
    assert section("model=smollm2 gpus=2xh200", "a decode step")["step"].figure is None


def test_times_rest_on_what_was_measured_alone() -> None:
    steps = section("model=mimo context=1140", "a decode step")
    limit, step = steps["batch 1, K = 0: limit"], steps["batch 1, K = 0: step"]
    assert step.rests_on == "share 0.832 of mimo_7b, batch 1, K = 0"
    assert (limit.figure or 0) / (step.figure or 1) == pytest.approx(3.32335 / 3.99444)
    assert step.figure == pytest.approx(3.99444, rel=0.005)
    two = section("model=mimo gpus=2xh200", "a decode step")
    note = ", and 7.6 us a sum as two GPUs take; not measured"
    assert two["batch 1, K = 3: step"].rests_on.endswith(note)
    link = two["batch 1, K = 3: link"]
    assert "the vendor's 450 GB/s, without latency" in link.rests_on
    share = 4.50652 / 5.60535
    expected = (two["batch 1, K = 3: limit"].figure or 0) / share + (link.figure or 0)
    # Two sums a layer and one of embeddings: 36 layers, and the module once for each draft.
    expected += 0.0076 * (2 * 36 + 1 + 3 * (2 * 1 + 1))
    assert two["batch 1, K = 3: step"].figure == pytest.approx(expected)
    for words in ("model=mimo gpus=1xh100", "model=mimo model.dtype=float32"):
        other, training = section(words, "a decode step"), section(words, "head training")
        assert other["batch 32, K = 0: limit"].figure is not None
        assert other["batch 32, K = 0: step"].figure is None
        assert training["step"].figure is None
    assert other["batch 32, K = 0: step"].rests_on.endswith("on an H200 in bfloat16 only")


@pytest.mark.parametrize("name", ["lab_base", "glm4_moe_lite", "mimo", "glm45_air"])
def test_two_gpus_are_planned_at_no_more_than_twice_the_speed_of_one(name: str) -> None:
    one, two = (section(f"model={name} gpus={count}xh200", "a decode step") for count in (1, 2))
    for line in two:
        if line.endswith("step"):
            assert (two[line].figure or 0) >= 0.5 * (one[line].figure or 0) > 0, line


DECODED, TRAINED = TWO_CARDS["decode"]["rows"], TWO_CARDS["training"]["rows"]


@pytest.mark.parametrize("row", DECODED, ids=lambda row: f"{row['batch']}-{row['num_drafts']}")
def test_steps_on_two_gpus_are_planned_as_they_were_measured(row: dict) -> None:
    """But for batch 1 with drafts, where random routers chose 17 experts a layer and not 29."""
    step = section("model=glm45_air gpus=2xh200 context=1066", "a decode step")[
        f"batch {row['batch']}, K = {row['num_drafts']}: step"
    ]
    assert step.rests_on.endswith(" on two GPUs")
    is_uneven = (row["batch"], row["num_drafts"]) == (1, 3)
    assert (step.figure == pytest.approx(row["step_ms"], rel=0.1)) != is_uneven
    name = f"decode step, batch {row['batch']}, K = {row['num_drafts']}: ms"
    assert f"| {name} | {step.figure:.2f} | {row['step_ms']:.2f} |" in RECIPES_PAGE


@pytest.mark.parametrize("row", TRAINED, ids=lambda row: row["case"])
def test_training_beside_a_split_target_is_planned_as_it_was_measured(row: dict) -> None:
    """Memory and time within a tenth; the rate of the link is fitted to the first of them."""
    words = f"model=glm45_air gpus=2xh200 trainer.batch_size={row['batch_size']} data.seq_len=256"
    words += f" trainer.shard_target=true trainer.parallel={row['parallel']}"
    words += f" head.num_mtp_modules={row['num_mtp_modules']} trainer.compile=false"
    if row["model"].endswith("fp8_rows"):
        words += " model.keep_fp8=true"
    found = section(words, "head training")
    measured = {"step": row["step_ms"], "needed on each of 2": sum(row["memory_gib"].values())}
    for (name, value), unit in zip(measured.items(), ("step: ms", "a GPU: GiB"), strict=True):
        figure = found[name].figure or 0
        assert figure == pytest.approx(value, rel=0.1)
        form = ".0f" if name == "step" else ".1f"
        line = f"| training {row['case']}, {unit} | {figure:{form}} | {value:{form}} |"
        assert line in RECIPES_PAGE


def test_hours_follow_from_tokens_and_gpus() -> None:
    words = "model=lab_base trainer.compile=true trainer.batch_size=256 tokens=65536e3"
    one = section(words, "head training")
    assert one["step"].figure == pytest.approx(73.73, rel=0.03)  # the measured step itself
    hours = 1000 * (one["step"].figure or 0) / 3600e3
    assert one["65,536,000 tokens"].figure == pytest.approx(hours)
    two = section(f"{words} gpus=2xh200", "head training")
    assert two["65,536,000 tokens"].figure == pytest.approx(hours / 1.96)
    eight = section(f"{words} gpus=8xh200", "head training")["step"]
    assert eight.figure == pytest.approx(one["step"].figure)
    assert eight.rests_on.endswith("8 times one GPU: not measured")
    slow = section(words.replace("true", "false"), "head training")["step"]
    assert "14.8% of 787 TFLOP/s, as lab_base, not compiled" in slow.rests_on


def test_precision_of_the_training_is_its_own() -> None:
    half, full = (
        section(f"model=lab_tiny trainer.precision={name}", "head training")["weights"].figure
        for name in ("auto", "float32")
    )
    assert full == 2 * (half or 0)


def test_frozen_and_low_rank_parts_have_no_optimizer() -> None:
    words = "model=lab_tiny head.num_mtp_modules=1"
    whole = section(words, "head training")["optimizer"].figure or 0
    part = section(f"{words} head.freeze=[experts]", "head training")["optimizer"].figure or 0
    assert 0 < part < whole


def test_kinds_and_shapes_are_the_named_ones() -> None:
    assert {name: gpu.memory_gib for name, gpu in GPUS.items()} == {"h100": 79, "h200": 139}
    assert len({shape.path for shape in SHAPES.values() if shape.path}) == 6

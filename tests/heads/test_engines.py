"""Heads for an engine: its conventions, the exported checkpoint, and the measured effect."""

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.generation import candidate_generator

from mtp_research.app import export_command
from mtp_research.app.cli import compose_config
from mtp_research.app.export_command import comparison_table
from mtp_research.app.overrides import CONF_DIR
from mtp_research.config.schema import VERSIONS, TrainConfig
from mtp_research.config.training_schema import HeadConfig
from mtp_research.decode.settings import SpecSettings
from mtp_research.evaluation.backends.transformers_backend import library_steps
from mtp_research.evaluation.run.engine_effect import (
    DecodeTask,
    Effects,
    decode_as,
    measure_effects,
)
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.heads.engines import (
    ENGINES,
    HeadRun,
    differences,
    engine_for,
    run_as,
    trained_run,
)
from mtp_research.heads.export import stitch_heads
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.heads.weights import load_heads, save_heads
from mtp_research.models.families import FAMILIES
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.errors import ConfigError
from tests import tiny
from tests.heads.engine_loop import SGLANG_GLM4_MOE, VLLM_GLM4_MOE, EngineLoop, Habits
from tests.heads.release import change_config

LAB_TINY = Path(__file__).resolve().parents[2] / "assets" / "lab_tiny"
PROMPTS = [[3, 1, 4, 1, 5, 2], [2, 2, 1, 5], [5, 4, 3, 2, 1, 0, 1], [1, 3], [4, 4], [0, 5, 0, 2, 3]]
NUM_DRAFTS, NUM_ROUNDS = 3, 7
SPEC = SpecSettings(num_speculative_tokens=NUM_DRAFTS)
ENTRIES = [(name, family) for name, families in ENGINES.items() for family in families]
ASSIGNED = ("vllm_deepseek_v3", "vllm_glm4_moe", "vllm_mimo", "vllm_qwen3_next")


class Pair(NamedTuple):
    folder: Path  # the target's checkpoint
    heads: MTPHeads


def _tiny_pair(folder: Path, *, tied: bool, num_modules: int = 1, **spec: object) -> Pair:
    """A target of six tokens, whose drafts are often right, and heads of bfloat16 numbers."""
    target = tiny.tiny_target(
        "glm4_moe",
        dtype=torch.float32,
        seed=1,  # texts in which each habit changes some round
        vocab_size=6,
        tie_word_embeddings=tied,
        eos_token_id=None,
        num_nextn_predict_layers=0,
    )
    target.model.save_pretrained(folder)
    target = load_target(folder, dtype="float32", device="cpu")
    heads = tiny.tiny_heads(target, num_mtp_modules=num_modules, **{"unroll": "ttt", **spec})
    for module in heads.mtp_modules:  # norms near 1 would hide what is recycled
        weight = module.shared_head.norm.weight
        weight.data = torch.linspace(-2, 2, len(weight)).exp().roll(17)
    for parameter in heads.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return Pair(folder, heads)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _tiny_pair(tmp_path_factory.mktemp("tied"), tied=True)


def _config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


# The exported checkpoint.


def test_tied_target_gets_a_head_equal_to_its_embedding(tied: Pair, tmp_path: Path) -> None:
    assert "lm_head.weight" not in load_file(tied.folder / "model.safetensors")
    assert _config(tied.folder)["tie_word_embeddings"] is True
    stitch_heads(tied.heads, tmp_path / "new", source=tied.folder, engine="vllm")
    shards = sorted((tmp_path / "new").glob("*.safetensors"))
    tensors = {name: t for shard in shards for name, t in load_file(shard).items()}
    assert torch.equal(tensors["lm_head.weight"].float(), tensors["model.embed_tokens.weight"])
    assert tensors["lm_head.weight"].dtype == tensors["model.embed_tokens.weight"].dtype
    assert _config(tmp_path / "new")["tie_word_embeddings"] is False
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["lm_head.weight"] == shards[1].name
    assert shards[0].samefile(tied.folder / "model.safetensors")  # the target's shard is a link


def test_library_reads_the_exported_target_with_equal_logits(tied: Pair, tmp_path: Path) -> None:
    stitch_heads(tied.heads, tmp_path / "new", source=tied.folder, engine="vllm")
    tokens = torch.tensor([PROMPTS[0]])
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        for folder in (tied.folder, tmp_path / "new")
    )
    assert torch.equal(before, after)


def test_quantised_tied_target_keeps_the_written_head_out(tied: Pair, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tied.heads.target.model.save_pretrained(source)
    quantisation = {"quant_method": "fp8", "modules_to_not_convert": []}
    change_config(source, {"quantization_config": quantisation})
    stitch_heads(tied.heads, tmp_path / "new", source=source, engine="vllm")
    listed = _config(tmp_path / "new")["quantization_config"]["modules_to_not_convert"]
    assert "lm_head" in listed


@pytest.mark.parametrize("engine", [None, "transformers"])
def test_readers_that_know_ties_get_the_tied_target_as_it_is(
    engine: str | None, tied: Pair, tmp_path: Path
) -> None:
    written = stitch_heads(tied.heads, tmp_path / "new", source=tied.folder, engine=engine)
    assert "lm_head.weight" not in written.names
    assert _config(tmp_path / "new")["tie_word_embeddings"] is True


def test_untied_target_is_the_same_for_every_engine(tmp_path: Path) -> None:
    pair = _tiny_pair(tmp_path / "source", tied=False)
    for engine in (None, *ENGINES):
        stitch_heads(pair.heads, tmp_path / str(engine), source=pair.folder, engine=engine)
    plain = {p.name: p.read_bytes() for p in (tmp_path / "None").iterdir()}
    assert b'"tie_word_embeddings": false' in plain["config.json"]
    for engine in ENGINES:
        assert {p.name: p.read_bytes() for p in (tmp_path / engine).iterdir()} == plain, engine


def test_family_that_was_not_read_gets_the_head_all_the_same(tmp_path: Path) -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.float32, tie_word_embeddings=True)
    target.model.save_pretrained(tmp_path / "source")
    heads = tiny.tiny_heads(target, num_mtp_modules=1)
    assert engine_for("vllm", heads) is None
    written = stitch_heads(heads, tmp_path / "new", source=tmp_path / "source", engine="vllm")
    assert "lm_head.weight" in written.names


def test_warning_of_conventions_is_left_to_the_table_of_an_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = _tiny_pair(tmp_path / "source", tied=False, recycle_norm="pre_norm")
    with caplog.at_level(logging.WARNING):
        stitch_heads(pair.heads, tmp_path / "vllm", source=pair.folder, engine="vllm")
        assert "published names cannot say" not in caplog.text
        stitch_heads(pair.heads, tmp_path / "plain", source=pair.folder)
        assert "published names cannot say" in caplog.text


# The measured effect.


def _predicted(loop: EngineLoop, habits: Habits) -> list[list[int]]:
    return [
        loop.accepted_per_round(p, num_drafts=NUM_DRAFTS, num_rounds=NUM_ROUNDS, habits=habits)
        for p in PROMPTS
    ]


def _measured(heads: MTPHeads, run: HeadRun) -> list[list[int]]:
    room = NUM_ROUNDS * (NUM_DRAFTS + 1) + NUM_DRAFTS + 1
    records = decode_as(heads, run, DecodeTask(PROMPTS, SPEC, room))
    return [list(record.num_accepted_per_round[:NUM_ROUNDS]) for record in records]


def test_measured_columns_are_what_an_engine_does_with_the_exported_files(
    tied: Pair, tmp_path: Path
) -> None:
    stitch_heads(tied.heads, tmp_path / "new", source=tied.folder, engine="vllm")
    loop = EngineLoop(tmp_path / "new")
    vllm, sglang = (ENGINES[name]["glm4_moe"].run for name in ("vllm", "sglang"))
    expected = {
        "vllm": _predicted(loop, VLLM_GLM4_MOE),
        "sglang": _predicted(loop, SGLANG_GLM4_MOE),
    }
    found = {"vllm": _measured(tied.heads, vllm), "sglang": _measured(tied.heads, sglang)}
    assert found == expected
    assert expected["vllm"] != expected["sglang"]  # or neither convention would be tested
    for habits in (Habits(True, False), Habits(False, True)):
        assert _predicted(loop, habits) != expected["vllm"], habits
    assert {0, 1} <= {count for counts in expected["vllm"] for count in counts}


def test_effects_are_lengths_of_these_rounds_and_their_difference(tied: Pair) -> None:
    run = ENGINES["vllm"]["glm4_moe"].run
    work = DecodeTask(PROMPTS, SPEC, 16)
    effects = measure_effects(tied.heads, trained=trained_run(tied.heads), engine=run, task=work)
    lengths = []
    for one in (dataclasses.replace(run, recycle_norm="post_norm", zero_position_0=False), run):
        records = decode_as(tied.heads, one, work)
        rounds = [count for record in records for count in record.num_accepted_per_round]
        lengths.append(1 + sum(rounds) / len(rounds))
    assert [effects.trained.value, effects.engine.value] == pytest.approx(lengths)
    assert effects.total.value == pytest.approx(lengths[1] - lengths[0])
    assert effects.total.value != 0
    assert list(effects.single) == ["recycle_norm", "zero_position_0"]
    assert effects.total.low <= effects.total.value <= effects.total.high


def test_head_of_the_engine_s_convention_costs_nothing(tmp_path: Path) -> None:
    pair = _tiny_pair(tmp_path, tied=True, recycle_norm="pre_norm", zero_position_0=True)
    run = ENGINES["vllm"]["glm4_moe"].run
    work = DecodeTask(PROMPTS, SPEC, 12)
    effects = measure_effects(pair.heads, trained=trained_run(pair.heads), engine=run, task=work)
    assert effects.single == {}
    assert effects.total == (0, 0, 0)
    assert effects.engine == effects.trained


def test_run_as_changes_conventions_and_keeps_weights_and_the_original(tied: Pair) -> None:
    run = ENGINES["vllm"]["mimo"].run
    twin, before = run_as(tied.heads, run), tied.heads.spec
    assert (twin.spec.concat_order, twin.spec.hidden_source) == ("hidden_first", "pre_norm")
    assert twin.mtp_modules[0].concat_order == "hidden_first"
    assert twin.spec.zero_position_0
    assert twin.spec.unroll == "ttt"
    assert tied.heads.spec == before
    for name, tensor in tied.heads.state_dict().items():
        assert torch.equal(twin.state_dict()[name], tensor), name
    unknown = dataclasses.replace(run, hidden_source=None)
    assert run_as(tied.heads, unknown).spec.hidden_source == tied.heads.spec.hidden_source


# The table.

_OWN = HeadRun("training", "post_norm", "post_norm", "embedding_first", False, "cycle")
_THEIRS = HeadRun("eagle", None, "pre_norm", "embedding_first", True, "first")


def test_table_has_a_row_a_convention_and_the_lengths() -> None:
    single = {
        "policy": Estimate(-0.25, -0.5, -0.125),
        "recycle_norm": Estimate(0.0, 0.0, 0.0),
        "zero_position_0": Estimate(None),
    }
    effects = Effects(Estimate(2.5), Estimate(2.25), Estimate(-0.25, -0.3, -0.2), single)
    text = comparison_table(_OWN, _THEIRS, effects, num_modules=1)
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    assert rows[0] == ["convention", "trained with", "engine does", "effect on acceptance length"]
    assert rows[2:] == [
        ["policy", "training", "eagle", "-0.250 [-0.500, -0.125]"],
        ["hidden_source", "post_norm", "not known", "not known"],
        ["recycle_norm", "post_norm", "pre_norm", "+0.000 [+0.000, +0.000]"],
        ["concat_order", "embedding_first", "embedding_first", "none: the same"],
        ["zero_position_0", "no", "yes", "-"],
        ["module_schedule", "cycle", "first", "none: one module"],
        ["acceptance length", "2.500", "2.250", "-0.250 [-0.300, -0.200]"],
    ]
    assert len({line.find("|") for line in text.splitlines() if " | " in line}) == 1


def test_table_without_a_measurement_says_so() -> None:
    text = comparison_table(_OWN, _THEIRS, None, num_modules=2)
    assert text.count("not measured") == 4  # the order of modules counts with two
    assert "acceptance length" not in text.splitlines()[-1]
    assert differences(_OWN, _OWN, num_modules=2) == []


# The command.


def _words(pair: Pair, folder: Path) -> list[str]:
    save_heads(pair.heads, folder / "head")
    return ["--model", str(pair.folder), "--head", str(folder / "head"), "--out", str(folder / "o")]


def test_heads_of_an_unroll_that_nobody_knows_have_no_policy_of_their_own() -> None:
    def policy_of(unroll: str | None) -> str | None:
        spec = HeadSpec(num_mtp_modules=1, unroll=unroll)
        return trained_run(cast(MTPHeads, SimpleNamespace(spec=spec))).policy

    assert [policy_of(name) for name in ("chain", "of_a_fork", None)] == ["training", None, None]


def test_command_measures_on_given_prompts_and_prints_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("2 + 2 =", "Say hello", "A B C"))
    )
    words = ["--model", LAB_TINY / "target", "--head", LAB_TINY / "heads" / "ttt_n1"]
    words += ["--out", tmp_path / "o", "--for", "vllm", "--prompts", tmp_path / "prompts.jsonl"]
    words += ["--max-prompts", 2, "--max-new-tokens", 8, "--k", 2]
    assert export_command.main([str(word) for word in words]) == 0
    out = capsys.readouterr().out
    assert "lm_head.weight: a copy of the embedding, tie_word_embeddings false" in out
    assert "K = 2, 2 prompts, up to 8 new tokens" in out
    assert "vllm 0.24.0, read in its source (glm4_moe_mtp.py, glm4_moe.py), not run here" in out
    assert out.count("convention ") == 1
    (row,) = [line for line in out.splitlines() if line.startswith("recycle_norm")]
    assert "pre_norm" in row
    assert "[" in row
    assert "lm_head.weight" in load_file(tmp_path / "o" / "model-00002-of-00002.safetensors")


def test_command_without_measuring_needs_no_tokenizer(
    tied: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export_command.main([*_words(tied, tmp_path), "--for", "vllm", "--no-measure"]) == 0
    assert "not measured (--no-measure)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_modules", "words", "message"),
    [
        (3, ["--for", "sglang", "--no-measure"], "at most 1 module for --for sglang"),
        (2, ["--for", "vllm", "--k", "3"], "--k must be at most 2"),
        (2, ["--for", "transformers", "--k", "3"], "--k must be 2 for --for transformers"),
        (1, ["--for", "vllm", "--alone"], "--for must go with a whole checkpoint"),
    ],
)
def test_command_refuses_what_the_engine_would_refuse(
    num_modules: int,
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = _tiny_pair(tmp_path / "target", tied=True, num_modules=num_modules, unroll="chain")
    words = [*_words(pair, tmp_path), *words]
    capsys.readouterr()  # the library's bar
    assert export_command.main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "o").exists()


# transformers' own generation.


def test_library_drafts_with_the_modules_after_the_printed_step(
    tied: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*_words(tied, tmp_path), "--for", "transformers", "--no-measure"]
    assert export_command.main(words) == 0
    (step,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("before")]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "o", dtype=torch.float32).eval()
    prompt = torch.tensor([PROMPTS[0]])
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": prompt * 0 + 1}
    plain = model.generate(prompt, **settings)
    with pytest.raises((ValueError, RuntimeError)):
        model.generate(prompt, use_mtp=True, **settings)
    exec(step.partition(": ")[2], {"model": model})
    assert torch.equal(model.generate(prompt, use_mtp=True, **settings), plain)


def test_library_without_such_generation_is_a_fault_of_one_line(
    tied: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(candidate_generator, "MTPCandidateGenerator")
    assert export_command.main([*_words(tied, tmp_path), "--for", "transformers"]) == 2
    error = capsys.readouterr().err
    assert "which transformers" in error
    assert "lacks" in error
    assert error.count("\n") == 1


def test_library_refuses_families_whose_configuration_counts_no_modules() -> None:
    with pytest.raises(ConfigError, match=r"got qwen3 \(transformers"):
        library_steps(tiny.tiny_target("qwen3"), num_modules=1)


# The literal table.


def test_entries_are_of_known_families_and_versions() -> None:
    assert ENGINES.keys() == VERSIONS.keys()
    assert {family for _, family in ENTRIES} <= FAMILIES.keys()
    for name, family in ENTRIES:
        entry = ENGINES[name][family]
        assert entry.source.endswith(".py")


@pytest.mark.parametrize(("name", "family"), ENTRIES)
def test_norms_that_an_engine_reads_are_those_that_we_write(name: str, family: str) -> None:
    layout = FAMILIES[family].native
    prefixes = ("enorm.", "hnorm.", "shared_head.norm.")
    written = tuple(dict(layout.names)[prefix].rstrip(".") for prefix in prefixes)
    assert ENGINES[name][family].norms == written


PRESETS = sorted(path.stem for path in (CONF_DIR / "head").glob("vllm_*.yaml"))


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_trains_what_the_engine_runs(preset: str) -> None:
    head = compose_config(TrainConfig, [f"head={preset}", "objective=ttt"]).head
    run = ENGINES["vllm"][preset.removeprefix("vllm_")].run
    spec = {item.name for item in dataclasses.fields(HeadSpec)}
    for item in dataclasses.fields(HeadRun):
        if item.name in spec:
            assert getattr(head, item.name) == getattr(run, item.name), item.name
    assert run.policy == "eagle"  # the loop that objective=ttt trains for
    assert head.num_mtp_modules == 1
    text = (CONF_DIR / "head" / f"{preset}.yaml").read_text()
    assert f"python train.py head={preset} objective=ttt" in text


def test_families_without_a_preset_are_run_as_heads_are_trained_by_default() -> None:
    plain = HeadConfig()
    for name in set(ASSIGNED) - set(PRESETS):
        run = ENGINES["vllm"][name.removeprefix("vllm_")].run
        names = ("hidden_source", "recycle_norm", "concat_order", "zero_position_0")
        assert all(getattr(run, item) == getattr(plain, item) for item in names), name
    assert set(PRESETS) == set(ASSIGNED) - {"vllm_qwen3_next"}


def test_target_of_the_fixture_is_tied(tied: Pair) -> None:
    target: Target = tied.heads.target
    assert torch.equal(target.lm_head_weight, target.embed_tokens.weight)
    assert (
        load_heads(
            LAB_TINY / "heads" / "ttt_n1",
            load_target(LAB_TINY / "target", dtype="float32", device="cpu"),
        ).spec.unroll
        == "ttt"
    )

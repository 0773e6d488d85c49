"""Training and evaluation as functions: the runs of the commands, with results to look at."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest

import mtp_research
from mtp_research.app import api
from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig, TrainConfig
from mtp_research.decode.verify.verify import VerifyInputs, VerifyOutput, count_leading, emit
from mtp_research.decode.verify.verify_rules import RULES, Rule
from mtp_research.runtime.errors import ArgumentTypeError, ConfigError

LAB_TINY = Path(__file__).resolve().parents[2] / "assets" / "lab_tiny"
SHORT_TRAINING = {
    "data.path": str(LAB_TINY / "regenerated.jsonl.xz"),
    "trainer.max_steps": 2,
    "trainer.batch_size": 2,
    "trainer.eval_every": 2,
    "trainer.save_every": 2,
    "trainer.warmup_fraction": 0.0,
    "data.max_documents": 24,
    "data.eval_documents": 4,
    "head": "shared_n1",
    "objective": "ttt",
}
SHORT_EVALUATION = {
    "prompts.max_prompts": 2,
    "sampling.max_new_tokens": 4,
    "spec.k": 1,
    "spec.policy": ["training", "eagle"],
}


@pytest.mark.slow
def test_heads_are_trained_evaluated_and_saved_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = mtp_research.train_heads(
        target=LAB_TINY / "target", output_dir="first", settings=SHORT_TRAINING
    )
    assert repr(trained).startswith("TrainedHeads('first/head', 1 modules, ttt unroll, 2 steps, ")
    assert len(repr(trained)) < 200
    assert 1 <= trained.acceptance_length == trained.figures["acceptance_length"] < 4
    assert trained.heads.spec.unroll == "ttt"
    record = json.loads((tmp_path / "first" / "config.json").read_text())
    assert (record["model"]["name"], record["model"]["family"]) == ("target", "glm4_moe")
    assert {"run.json", "git.diff", "metrics.jsonl"} <= {p.name for p in Path("first").iterdir()}

    found = mtp_research.evaluate(trained, output_dir="second", settings=SHORT_EVALUATION)
    assert set(found.acceptance_length) == {"baseline", "training", "eagle"}
    assert found.acceptance_length["baseline"] == 1.0
    assert found.figures["num_prompts"] == 2
    assert repr(found).startswith("Evaluation('second', 2 prompts, acceptance length: baseline 1.0")
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert config["spec"]["head"] == "first/head"
    assert "acceptance" in capsys.readouterr().out

    card = (trained.heads.save_pretrained("third") / "README.md").read_text()
    assert f"| acceptance length on held-out text | {trained.acceptance_length:.3f}" in card


def evaluate_lab_tiny(**arguments: Any) -> api.Evaluation:
    """An evaluation of the shipped chain heads."""
    heads = LAB_TINY / "heads" / "chain_n3"
    return mtp_research.evaluate(heads, target=LAB_TINY / "target", **arguments)


def test_policy_of_ones_own_is_evaluated_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = mtp_research.POLICIES["target_roll"]
    mine = dataclasses.replace(known, name="mine", rows="anchored", clean=True)
    settings = {"spec.policy": ["mine", "target_roll"], "spec.k": 3, "prompts.max_prompts": 1}
    settings |= {"sampling.max_new_tokens": 16}
    evaluate = functools.partial(evaluate_lab_tiny, settings=settings)
    with pytest.raises(ConfigError, match=r"spec\.policy must be .*, got mine"):
        evaluate()
    monkeypatch.setitem(mtp_research.POLICIES, "mine", mine)
    found = evaluate(output_dir="own")
    assert set(found.acceptance_length) == {"baseline", "mine", "target_roll"}
    conditions = json.loads((tmp_path / "own" / "results.json").read_text())["conditions"]
    wrong = {one["label"]: one["audit"]["WRONG"] for one in conditions if one["audit"]}
    assert wrong["mine"] == 0 < wrong["target_roll"]
    monkeypatch.setitem(mtp_research.POLICIES, "mine", known)
    with pytest.raises(ConfigError, match="what the policy is called, got mine for target_roll"):
        evaluate()
    monkeypatch.setitem(mtp_research.POLICIES, "mine", "target_roll")
    with pytest.raises(ConfigError, match=r"spec\.policy must name a HiddenPolicy, got str; set"):
        evaluate()
    settings["spec.policy"] = [["mine"]]  # which no table can look up
    with pytest.raises(ConfigError, match=r"each .* \| mine \| .*, got \['mine'\]"):
        evaluate()


def test_rule_of_ones_own_is_evaluated_and_said_to_be_lossy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"spec.policy": ["training"], "spec.k": 3, "spec.verify": "mine"}
    settings |= {"prompts.max_prompts": 2, "sampling.max_new_tokens": 16}
    settings["spec.typical_delta"] = 0.5  # a rule of one's own may read it
    evaluate = functools.partial(evaluate_lab_tiny, settings=settings)
    with pytest.raises(ConfigError, match=r"spec\.verify must be .*auto \| .*, got mine"):
        evaluate()
    monkeypatch.setitem(RULES, "mine", accept_all)
    with pytest.raises(
        ConfigError, match=r"spec\.verify must name a Rule, got function; set RULES"
    ):
        evaluate()
    monkeypatch.setitem(RULES, "mine", Rule(accept_all, lossless=False, samples=False))
    found = evaluate(output_dir="own")
    assert found.acceptance_length == {"baseline": 1.0, "training": 4.0}
    summary = json.loads((tmp_path / "own" / "results.json").read_text())["summary"]
    verdicts = [(one["verify"], one["lossless"]) for one in summary["conditions"]]
    assert verdicts[1] == ("mine", "lossy rule: mine")
    settings["sampling.temperature"] = 0.8
    with pytest.raises(ConfigError, match=r"temperature must be 0 for spec\.verify=mine"):
        evaluate(output_dir="warm")
    assert not Path("warm").exists()
    settings["sampling.temperature"] = 0.0
    monkeypatch.setitem(RULES, "mine", Rule(accept_all, lossless=True, samples=False))
    with pytest.raises(ConfigError, match=r"other inputs: rules "):
        evaluate(output_dir="own")
    assert evaluate(output_dir="lossless").figures["num_prompts"] == 2
    summary = json.loads(Path("lossless/results.json").read_text())["summary"]
    assert summary["conditions"][1]["lossless"] == "DIFFERS, same 0/2"


def accept_all(inputs: VerifyInputs) -> VerifyOutput:
    """Keep every draft."""
    decided = inputs.target_logits.argmax(dim=-1)
    return emit(inputs, num_accepted=count_leading(inputs.is_valid), decided=decided)


def composed(schema, **arguments):
    settings = arguments.pop("settings", None)
    given = {"model.path": None, **arguments}
    return api._compose(schema, given, settings)


def test_settings_mean_what_the_words_of_the_command_line_mean() -> None:
    settings = {
        "spec.k": [1, 3],
        "spec.policy": ("eagle", "training"),
        "sampling": "warm",
        "engine.audit": False,
        "engine.num_blocks": None,
        "spec.draft_table": {1: 3, 8: 2},
        "spec.draft_length": "batch_table",
        "prompts.domains": ["a b", "c,d"],
        "spec.head": Path("a, b/heads"),
    }
    words = [
        "spec.k=[1,3]",
        "spec.policy=[eagle,training]",
        "sampling=warm",
        "engine.audit=false",
        "engine.num_blocks=null",
        "spec.draft_table={1:3,8:2}",
        "spec.draft_length=batch_table",
        "prompts.domains=['a b','c,d']",
        "spec.head='a, b/heads'",
    ]
    config = composed(EvalConfig, settings=settings)
    assert config == compose_config(EvalConfig, words)
    assert config.prompts.domains == ["a b", "c,d"]
    assert config.engine.audit is False


def test_target_of_ones_own_brings_its_name_and_family(tmp_path: Path) -> None:
    from tests.tiny import tiny_target

    folder = tmp_path / "my model!"
    tiny_target("qwen3").model.config.save_pretrained(folder)
    model = composed(TrainConfig, **{"model.path": folder}).model
    assert (model.name, model.family, model.path) == ("my-model", "qwen3", str(folder))
    named = composed(TrainConfig, **{"model.path": folder}, settings={"model": "qwen3"}).model
    assert (named.name, named.path) == ("qwen3", str(folder))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], ("my-model", "qwen3")),
        (["model.name=mine"], ("mine", "qwen3")),
        (["model=llama"], ("llama", "llama")),  # said, and warned of when it is loaded
        (["model.family=llama"], ("my-model", "llama")),
    ],
)
def test_command_takes_name_and_family_of_a_target_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], expected: tuple[str, str]
) -> None:
    from mtp_research.app.cli import run_entry
    from tests.tiny import tiny_target

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my model!"
    tiny_target("qwen3").model.config.save_pretrained(folder)
    seen: list[tuple[str, str, str]] = []

    def run(config: EvalConfig, output_dir: Path) -> None:
        seen.append((config.model.name, config.model.family, output_dir.name))

    words = [f"model.path={folder}", "spec.head=null", *more]
    assert run_entry(EvalConfig, run, argv=words) == 0
    ((name, family, output_dir),) = seen
    assert (name, family) == expected
    assert output_dir.startswith(f"eval-{expected[0]}-")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: api.train_heads(settings={"trainer.max_step": 1}),
            r"key.*trainer\.max_steps",
        ),
        (lambda: api.train_heads(settings={"trainer.max_steps": "x"}), "trainer.max_steps must be"),
        (lambda: api.train_heads(settings={"task": "target"}), "train_heads takes task=heads"),
        (lambda: api.train_heads(data=3), r"data\.path must be a path as text, got .* int"),
        (lambda: api.train_heads(target=object()), r"such as target\.path"),
        (
            lambda: api.train_heads(data="a", settings={"data.path": "b"}),
            r"data\.path is given twice",
        ),
        (
            lambda: api.train_heads(data="absent.jsonl"),
            r"data\.path must be an existing file or folder",
        ),
        (lambda: api.train_heads(settings={"launcher": "slurm"}), "launcher=local"),
        (lambda: api.evaluate(3), r"write it with heads\.save_pretrained"),
        (lambda: api.evaluate(None, settings={"task": "fault_price"}), "task=evaluate"),
        (lambda: api.evaluate("absent"), r"spec\.head must be an existing path"),
    ],
)
def test_wrong_argument_is_one_error_before_anything_is_written(
    call, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        call()
    assert list(tmp_path.iterdir()) == []


def test_object_in_place_of_a_path_or_word_is_a_type_error() -> None:
    with pytest.raises(ArgumentTypeError):
        api.evaluate(object())
    with pytest.raises(ArgumentTypeError, match="got one of type object; write it as on the"):
        api.evaluate(None, settings={"spec.draft_length": [object()]})


def test_faults_of_settings_name_keys_alone() -> None:
    """Other calls than this one take them as arguments."""
    for settings in ({"sampling.temperature": -1}, {"spec.k": 99}, {"engine.block_size": 0}):
        with pytest.raises(ConfigError, match=next(iter(settings))) as refused:
            api.evaluate(None, settings=settings)
        assert refused.value.__notes__ == []

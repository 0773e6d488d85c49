"""The price of faulty draft slots: clean forms are clean, and losses are counted as they say."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtp_research.__main__ import run_evaluation
from mtp_research.app.cli import compose_config, run_entry
from mtp_research.config.schema import EvalConfig
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.stats.fault_study import (
    FAULTS,
    STUDY_FILE,
    UNFINISHED,
    FaultCondition,
    FaultStudy,
    read_study,
)
from mtp_research.evaluation.stats.outcome import PromptEntry
from mtp_research.policy.fields import POLICIES
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.studies import fault_price
from mtp_research.studies.fault_price import CLEAN_FORM, policies_of, price_faults
from mtp_research.studies.study_tables import price_markdown, price_rows, split_prices
from mtp_research.studies.tables import main

WORDS = ["experiment=fault_price", "spec.head=assets/lab_tiny/heads/chain_n3", "spec.k=3"]


@pytest.fixture(scope="module")
def config() -> EvalConfig:
    words = [*WORDS, "prompts.max_prompts=4", "sampling.max_new_tokens=16"]
    return compose_config(EvalConfig, words)


@pytest.fixture(scope="module")
def folder(config: EvalConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prices")
    price_faults(config, folder)
    return folder


def made_up(accepted: dict[str, int], audits: dict[str, tuple[int, int, int]]) -> FaultStudy:
    """A study of 20 prompts with 10 rounds each, of which a number accepts one draft."""
    conditions = tuple(
        FaultCondition(
            head="head",
            num_mtp_modules=3,
            num_speculative_tokens=3,
            policy=policy,
            reference=CLEAN_FORM[policy].name if policy in CLEAN_FORM else None,
            audit=dict(zip(FAULTS, audits.get(policy, (0, 0, 0)), strict=True)) | {"slots": 1000},
            accepted_per_round=((1,) * count + (0,) * (10 - count),) * 20,
            text_sha256=("same",) * 20,
        )
        for policy, count in accepted.items()
    )
    prompts = tuple(PromptEntry(f"q{i}", "math", "chat", "0") for i in range(20))
    return FaultStudy((), prompts, conditions, "float32", 16, 0, {})


def test_heads_are_named_with_their_conventions_under_the_tables() -> None:
    heads = ({"name": "mine", "conventions": "1 module, reads pre_norm"}, {"name": "older"})
    text = price_markdown(FaultStudy(heads, (), (), "float32", 16, 0, {}))
    assert "heads mine: 1 module, reads pre_norm" in text
    assert "older" not in text


def test_unclean_policy_without_a_clean_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataclasses.replace(POLICIES["target_roll"], name="own")
    monkeypatch.setitem(POLICIES, "own", own)
    with pytest.raises(ConfigError, match="must have a clean form to be priced against, got own;"):
        policies_of(["own"])
    monkeypatch.setitem(POLICIES, "own", dataclasses.replace(own, clean=True))
    assert [policy.name for policy in policies_of(["own"])] == ["own"]


def test_every_unclean_policy_has_a_clean_form_and_no_other() -> None:
    assert set(CLEAN_FORM) == {name for name, policy in POLICIES.items() if not policy.clean}
    assert all(form.clean for form in CLEAN_FORM.values())
    names = [policy.name for policy in policies_of(["window", "target_roll", "training"])]
    assert names == ["training", "eagle", "target_roll_rerun", "window", "target_roll"]


def test_study_of_real_heads_finds_clean_forms_clean_and_unclean_ones_not(folder: Path) -> None:
    study = read_study(folder)
    assert len(study.conditions) == 7
    for condition in study.conditions:
        assert (condition.shares.sum() == 0) == (condition.reference is None), condition.key
    assert len({condition.text_sha256 for condition in study.conditions}) == 1


def test_heads_in_folders_of_one_name_are_two_heads(tmp_path: Path) -> None:
    for name in ("chain_n1", "ttt_n1"):  # the trainer calls every head's folder `head`
        (tmp_path / name).mkdir()
        (tmp_path / name / "head").symlink_to(Path("assets/lab_tiny/heads", name).resolve())
    heads = f"spec.head=[{tmp_path}/chain_n1/head,{tmp_path}/ttt_n1/head]"
    words = [heads, "spec.policy=training_norefresh", "spec.k=2", "sampling.max_new_tokens=4"]
    words = ["experiment=fault_price", *words, "prompts.max_prompts=1"]
    price_faults(compose_config(EvalConfig, words), tmp_path / "out")
    study = read_study(tmp_path / "out")
    assert [condition.head for condition in study.conditions] == [
        *("chain_n1/head",) * 2,
        *("ttt_n1/head",) * 2,
    ]
    assert [head["name"] for head in study.heads] == ["chain_n1/head", "ttt_n1/head"]


def test_loss_is_the_clean_forms_length_minus_the_policys_per_percent_of_slots() -> None:
    study = made_up({"training": 8, "training_norefresh": 5}, {"training_norefresh": (60, 0, 0)})
    clean, stale = price_rows(study)
    assert clean.lost is None
    assert stale.lost.value == pytest.approx(0.3)
    assert stale.lost_pct.value == pytest.approx(100 * 0.3 / 1.8)
    assert stale.lost_per_pct.value == pytest.approx(0.3 / 6)


def test_split_prices_gives_back_prices_that_add_up() -> None:
    accepted = {"training": 9, "eagle": 8, "target_roll_rerun": 9}
    audits = {
        "training_norefresh": (100, 0, 0),
        "target_roll": (200, 0, 0),
        "window": (0, 100, 0),
        "eagle_norefresh": (0, 100, 100),
    }
    # WRONG costs 0.01 per percent, MIXED 0.02, HOLE 0.03.
    accepted |= {"training_norefresh": 8, "target_roll": 7, "window": 6, "eagle_norefresh": 3}
    (split,) = split_prices(made_up(accepted, audits))
    assert [price.value for price in split.prices] == pytest.approx([0.01, 0.02, 0.03])
    only_wrong = made_up({"training": 9, "training_norefresh": 8}, audits)
    assert split_prices(only_wrong) == []


def test_stopped_study_keeps_its_conditions(
    config: EvalConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = json.loads((folder / STUDY_FILE).read_text())
    whole = list(stored["conditions"])
    stored["conditions"] = whole[:-1]
    (tmp_path / STUDY_FILE).write_text(json.dumps(stored))
    decoders, made = [], fault_price.SpecDecoder
    monkeypatch.setattr(
        fault_price,
        "SpecDecoder",
        lambda *a, **k: decoders.append(k["spec"].policy) or made(*a, **k),
    )
    price_faults(config, tmp_path)
    assert [policy.name for policy in decoders] == [whole[-1]["policy"]]
    assert json.loads((tmp_path / STUDY_FILE).read_text())["conditions"] == whole
    other = dataclasses.replace(config, seed=4)
    with pytest.raises(IntegrityError, match="other heads, prompts or settings"):
        price_faults(other, tmp_path)


def test_domains_choose_the_prompts(tmp_path: Path) -> None:
    words = [*WORDS, "spec.policy=window", "spec.k=1", "sampling.max_new_tokens=2"]
    words += ["prompts.domains=[arith]", "prompts.max_prompts=2"]
    price_faults(compose_config(EvalConfig, words), tmp_path)
    assert {prompt.category for prompt in read_study(tmp_path).prompts} == {"arith"}


@pytest.mark.parametrize("left", [0, 1])
def test_unfinished_prompts_are_in_no_figure_and_a_study_of_none_exits_3(
    left: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    generate = fault_price.SpecDecoder.generate

    def damaged(*args: object, **kwargs: object) -> Iterator[RequestRecord]:
        for i, record in enumerate(generate(*args, **kwargs)):
            reason = record.finish_reason if i < left else "non_finite"
            yield dataclasses.replace(record, finish_reason=reason)

    monkeypatch.setattr(fault_price.SpecDecoder, "generate", damaged)
    words = [*WORDS, "spec.policy=window", "sampling.max_new_tokens=6", "prompts.max_prompts=2"]
    words += [f"output_dir={tmp_path}"]
    assert run_entry(EvalConfig, run_evaluation, argv=words) == (0 if left else 3)
    for condition in read_study(tmp_path).conditions:
        assert condition.text_sha256.count(UNFINISHED) == 2 - left
        assert sum(map(bool, condition.accepted_per_round)) == left
    expected = (
        "1 of 2 prompts did not finish" if left else "expected finished generations, got none"
    )
    assert expected in capsys.readouterr().err


def test_prompt_unfinished_in_one_condition_counts_in_none(folder: Path) -> None:
    study = read_study(folder)
    *others, last = study.conditions
    texts, rounds = (UNFINISHED, *last.text_sha256[1:]), ((), *last.accepted_per_round[1:])
    cut = dataclasses.replace(last, text_sha256=texts, accepted_per_round=rounds)
    found = price_rows(dataclasses.replace(study, conditions=(*others, cut)))
    assert len(study.prompts) > 1

    def rest(one: FaultCondition) -> FaultCondition:
        kept = one.accepted_per_round[1:]
        return dataclasses.replace(one, accepted_per_round=kept, text_sha256=one.text_sha256[1:])

    without = dataclasses.replace(
        study,
        prompts=study.prompts[1:],
        conditions=tuple(rest(one) for one in study.conditions),
    )
    assert [row.length.value for row in found] == [row.length.value for row in price_rows(without)]


def test_table_from_the_file_is_the_one_printed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fault", str(folder)]) == 0
    assert capsys.readouterr().out == price_markdown(read_study(folder)) + "\n"
    text = (folder / STUDY_FILE).read_text().replace('"slots"', '"rows"')
    (tmp_path / STUDY_FILE).write_text(text)
    assert main(["fault", str(tmp_path)]) == 3


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("timing.passes=2", "timing.passes must be 1 for task=fault_price, got 2"),
        ("reference=window", "reference must be null for task=fault_price, got window"),
        ("model.tp_plan=tensor", "model.tp_plan must be none"),
        ("sampling.repetition_penalty=2", "sampling.repetition_penalty must be 1.0"),
        ("spec.draft_length=confidence", "spec.draft_length must be fixed"),
        ("engine.max_num_requests=[1,2]", r"grid.max_num_requests must be \[\]"),
        ("engine.audit=false", "engine.audit must be true"),
        ("spec.verify=typical", "spec.verify must be greedy"),
    ],
)
def test_key_that_a_study_does_not_read_is_refused(
    word: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=expected):
        price_faults(compose_config(EvalConfig, [*WORDS, word]), tmp_path)


def test_kernels_without_a_gpu_are_refused_as_by_an_evaluation(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"engine\.backend=triton needs a CUDA GPU"):
        price_faults(compose_config(EvalConfig, [*WORDS, "engine.backend=triton"]), tmp_path)


@pytest.mark.parametrize(
    "word", ["spec.policy=[eagle]", "spec.head=oracle", "spec.k=[0,3]", "sampling.temperature=1"]
)
def test_study_without_a_fault_to_price_is_refused(word: str, tmp_path: Path) -> None:
    verify = ["spec.verify=standard"] if "temperature" in word else []
    with pytest.raises(ConfigError, match="must"):
        price_faults(compose_config(EvalConfig, [*WORDS, word, *verify]), tmp_path)

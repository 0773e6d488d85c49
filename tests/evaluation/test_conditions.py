"""From lists on the command line to cells, conditions and their labels."""

from pathlib import Path

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.rules import expand
from mtp_research.config.schema import EvalConfig
from mtp_research.evaluation.run.conditions import Condition, conditions_of, head_names
from mtp_research.evaluation.run.settings_check import check_settings
from mtp_research.runtime.errors import ConfigError

HEADS = "assets/lab_tiny/heads"


def conditions(*words: str) -> list[Condition]:
    return conditions_of(compose_config(EvalConfig, list(words)))


def labels(*words: str) -> list[str]:
    return [condition.label for condition in conditions(*words)]


def test_scalars_give_the_conditions_and_labels_of_one_evaluation() -> None:
    assert labels("spec.k=3") == ["baseline", "eagle", "training"]
    assert labels("spec.k=0") == ["baseline"]
    assert labels("spec.head=null") == ["baseline", "null"]
    assert labels("spec.head=oracle", "baseline=false") == ["oracle"]
    assert labels("spec.k=[3]") == labels("spec.k=3")


def test_label_names_only_what_differs() -> None:
    assert labels("spec.k=[1,3]", "spec.policy=eagle") == ["baseline", "eagle K=1", "eagle K=3"]
    assert labels("engine.max_num_requests=[1,8]", "spec.policy=eagle") == [
        "baseline R=1", "eagle R=1", "baseline R=8", "eagle R=8",
    ]  # fmt: skip


def test_every_batch_size_and_temperature_has_its_own_baseline() -> None:
    words = ["spec.verify=auto", "sampling.temperature=[0,0.6]", "engine.max_num_requests=[1,8]"]
    found = conditions(*words, "spec.k=[1,2]", "spec.policy=[eagle,training]")
    baselines = [c for c in found if c.num_speculative_tokens == 0]
    assert [c.group for c in baselines] == [(1, 0.0), (1, 0.6), (8, 0.0), (8, 0.6)]
    assert len(found) == 4 * (1 + 4)
    assert len({c.label for c in found}) == len(found)
    assert [c.config.spec.verify for c in baselines] == ["greedy", "standard"] * 2


def test_other_engine_has_its_baseline_and_our_loop_by_its_conventions() -> None:
    found = conditions("backend=[own,vllm]", "spec.k=[1,3]", "spec.policy=eagle")
    assert [(c.label, c.backend, c.conventions) for c in found] == [
        ("baseline", "own", None),
        ("eagle K=1", "own", None),
        ("own as vllm K=1", "own", "vllm"),
        ("eagle K=3", "own", None),
        ("own as vllm K=3", "own", "vllm"),
        ("vllm baseline", "vllm", None),
        ("vllm K=1", "vllm", None),
        ("vllm K=3", "vllm", None),
    ]
    assert [c.num_speculative_tokens for c in found if c.backend == "vllm"] == [0, 1, 3]
    assert {c.policy for c in found if c.label.startswith(("vllm", "own as"))} == {None}
    words = ["backend=[own,vllm]", "engine.max_num_requests=[1,8]", "baseline=false"]
    assert labels(*words, "spec.policy=eagle") == [
        *("eagle R=1", "own as vllm R=1", "vllm R=1"),
        *("eagle R=8", "own as vllm R=8", "vllm R=8"),
    ]


def test_k_of_zero_in_a_list_is_the_baseline() -> None:
    assert labels("spec.k=[0,2]", "spec.policy=eagle") == ["baseline", "eagle"]
    assert labels("spec.k=[0,2]", "spec.policy=eagle", "baseline=false") == ["baseline", "eagle"]


def test_heads_are_named_by_what_tells_them_apart() -> None:
    words = [f"spec.head=[{HEADS}/chain_n3,{HEADS}/ttt_n1,oracle]", "spec.policy=training"]
    found = conditions(*words)
    assert [c.label for c in found] == [
        "baseline", "training chain_n3", "training ttt_n1", "oracle",
    ]  # fmt: skip
    assert [c.head for c in found] == [None, "chain_n3", "ttt_n1", "oracle"]
    assert {c.config.spec.head for c in found[1:]} >= {"oracle"}


def test_heads_of_one_name_are_told_apart_by_their_folders() -> None:
    cells = [
        compose_config(EvalConfig, [f"spec.head={head}"]) for head in ("runs/a/head", "runs/b/head")
    ]
    names = head_names(cells)
    assert list(names.values()) == [None, "a/head", "b/head"]


def test_sampled_drafts_at_temperature_zero_are_skipped_and_named() -> None:
    words = ["spec.verify=auto", "sampling.temperature=[0,0.6]", "spec.policy=eagle"]
    config = compose_config(EvalConfig, [*words, "spec.draft_sampling=[greedy,sample]"])
    cells, skipped = expand(config)
    pairs = [(c.sampling.temperature, c.spec.draft_sampling) for c in cells]
    assert pairs == [(0.0, "greedy"), (0.6, "greedy"), (0.6, "sample")]
    assert "temperature 0" in skipped[0]
    assert expand(compose_config(EvalConfig, words)).skipped == ()


def test_rules_for_the_number_of_drafts_take_the_most_of_a_list() -> None:
    words = ["spec.k=[1,3]", "spec.policy=training", "spec.draft_length=[fixed,confidence]"]
    config = compose_config(EvalConfig, [*words, "spec.draft_p_min=0.5"])
    assert [c.label for c in conditions_of(config)] == [
        "baseline", "training K=1 fixed", "training K=3 fixed", "training K=3 confidence",
    ]  # fmt: skip
    cells, skipped = expand(config)
    assert [c.spec.draft_p_min for c in cells] == [0.3, 0.3, 0.5]
    (line,) = skipped
    assert "spec.draft_length=confidence with spec.k below 3: it makes fewer" in line
    for rule in ("confidence", "[confidence]"):
        alone = compose_config(EvalConfig, ["spec.k=[1,3]", f"spec.draft_length={rule}"])
        assert len(expand(alone).cells) == 2
    beside = ["spec.head=[oracle,null]", "spec.draft_length=[fixed,confidence]"]
    cells, skipped = expand(compose_config(EvalConfig, beside))
    assert [(c.spec.head, c.spec.draft_length) for c in cells] == [
        ("oracle", "fixed"), (None, "fixed"),
    ]  # fmt: skip
    assert [line.split(",")[0] for line in skipped] == [
        f"spec.draft_length=confidence with spec.head={head}" for head in ("oracle", "null")
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["spec.k=[1,65]"], "spec.num_speculative_tokens must be an integer in 0..64, got 65"),
        (["spec.k=[1,x]"], "spec.num_speculative_tokens must be an integer in 0..64"),
        (["spec.k=[3,3]"], "must name each value once"),
        (["spec.draft_sampling=[greedy,smple]"], "nearest: sample"),
        (["spec.draft_length=[fixed,batch_table]", "spec.draft_table={1:5}"], "set spec.k=5"),
        (["backend=[own,vllm]", "spec.draft_length=[confidence]"], "draft_length must be fixed"),
        (
            ["model.tp_plan=tensor", "spec.draft_length=[fixed,expected_gain]"],
            "spec.draft_cost_ratio=0.1",
        ),
        (["spec.verify=greedy", "sampling.temperature=[0,0.6]"], "set spec.verify=auto"),
        (["spec=greedy", "sampling.temperature=0.5"], "must be 0 for spec.verify=greedy, got 0.5"),
        (["engine.max_num_requests=[1,200]"], "set engine.max_num_batched_tokens=800"),
        (["spec.k=[31,40]", "engine.max_num_requests=16"], "set engine.max_num_batched_tokens=656"),
        (["timing.passes=3"], "set timing.passes=4"),
    ],
)
def test_impossible_list_is_refused_with_one_line(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as fault:
        compose_config(EvalConfig, words)
    (line,) = str(fault.value).splitlines()
    assert expected in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["reference=window"], "reference must be the label or policy of a condition that drafts"),
        (["spec.head=[null,oracle]", "spec.draft_length=confidence"], "set spec.draft_length="),
        (["spec.draft_length=[fixed,batch_table]", "spec.draft_p_min=.5"], "spec.draft_p_min must"),
        (["spec.head=oracle", "spec.draft_vocabulary_size=9"], "draft_vocabulary_size=null"),
        (["spec.verify=synthetic", "spec.k=[1,2]", "spec.synthetic_rates=[0.5]"], "spec.k=2 rates"),
    ],
)
def test_impossible_cell_is_refused_before_a_model_is_loaded(
    words: list[str], expected: str
) -> None:
    config = compose_config(EvalConfig, words)
    with pytest.raises(ConfigError) as fault:
        check_settings(config)
    assert expected in str(fault.value)


def test_scalar_on_the_command_line_clears_the_list_of_an_experiment() -> None:
    words = ["grid.num_speculative_tokens=[1,2]", "grid.temperature=[0,1]", "spec.k=5"]
    config = compose_config(EvalConfig, [*words, "spec.verify=auto"])
    assert [cell.spec.num_speculative_tokens for cell in expand(config).cells] == [5, 5]


def test_heads_of_a_list_may_hold_spaces_and_are_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose_config(EvalConfig, [f"spec.head=[{HEADS}/ttt_n1, {tmp_path}/a b,null]"])
    first, second, third = config.grid.head
    assert first is not None
    assert Path(first).is_absolute()
    assert (second, third) == (f"{tmp_path}/a b", None)

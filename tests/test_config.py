"""The schema, the YAML files, the override grammar and the fault lines. No model is loaded here."""

import json
import re
import shlex
from pathlib import Path

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.app.overrides import CONF_DIR, ENTRIES, check_overrides, group_choices, help_text
from mtp_research.app.preflight import check_inputs
from mtp_research.config.ranges import legal_values, meanings, schema_keys
from mtp_research.config.schema import EvalConfig, TrainConfig
from mtp_research.runtime.errors import ConfigError

SCHEMAS = {name: schema for schema, name in ENTRIES.items()}
# Sweeps are read by W&B's agent, not composed: tests/test_sweeps.py.
YAML_FILES = sorted(path for path in CONF_DIR.glob("*/*.yaml") if path.parent.name != "sweep")
COMMAND = re.compile(r"python (train|eval)\.py(.*)$", re.MULTILINE)


def fault_lines(schema: type, *words: str) -> list[str]:
    with pytest.raises(ConfigError) as fault:
        compose_config(schema, words)
    assert fault.value.exit_code == 2
    return str(fault.value).splitlines()


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_yaml_file_names_a_command_that_selects_it_and_composes(path: Path) -> None:
    command = COMMAND.search(path.read_text(encoding="utf8"))
    assert command, f"{path} must name a command such as `python train.py group=name`"
    words = shlex.split(command[2])
    assert f"{path.parent.name}={path.stem}" in words
    assert compose_config(SCHEMAS[command[1]], words).model.name


@pytest.mark.parametrize("schema", [TrainConfig, EvalConfig])
def test_defaults_compose_from_another_folder(
    schema: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert compose_config(schema, []) == compose_config(schema, ["seed=0"])


@pytest.mark.parametrize(("words", "name"), [([], "lab_deep"), (["model=lab_tiny"], "lab_tiny")])
def test_shipped_target_selects_its_own_heads_and_answers(words: list[str], name: str) -> None:
    config, training = compose_config(EvalConfig, words), compose_config(TrainConfig, words)
    check_inputs(config)
    check_inputs(training)
    assert config.model.path == training.model.path
    assert {config.model.name, training.model.name} == {name}
    assert config.spec.head is not None
    head = json.loads((Path(config.spec.head) / "head.json").read_text())
    answers = Path(training.data.path.removesuffix(".xz") + ".settings.json")
    written_by = json.loads(answers.read_text())
    for digest in ("config_sha256", "weights_sha256", "tokenizer_sha256"):
        assert head["target"][digest] == written_by[digest]


@pytest.mark.parametrize(("words", "name"), [([], "lab_deep"), (["model=lab_tiny"], "lab_tiny")])
def test_demo_trains_the_shipped_heads_on_for_the_other_policy(words: list[str], name: str) -> None:
    config = compose_config(TrainConfig, ["experiment=finetune_eagle", *words])
    check_inputs(config)
    assert config.head.path == f"assets/{name}/heads/chain_n3"
    head = json.loads((Path(config.head.path) / "head.json").read_text())
    assert (head["spec"]["unroll"], config.objective.unroll) == ("chain", "shared_context")


def test_every_yaml_file_is_reachable_from_one_entry() -> None:
    reachable = {
        (group, name)
        for schema in (TrainConfig, EvalConfig)
        for group, names in group_choices(schema).items()
        for name in names
    }
    assert {(path.parent.name, path.stem) for path in YAML_FILES} == reachable


def test_prefix_caching_with_an_unclean_policy_is_a_fault() -> None:
    words = ["spec.policy=[eagle,window]", "engine.prefix_caching=true"]
    (line,) = fault_lines(EvalConfig, *words)
    assert "engine.prefix_caching must be false for spec.policy=window" in line
    assert compose_config(EvalConfig, words[1:]).engine.prefix_caching


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["engine=h200", "engine.graph_batch_sizes=[8,4]"], "set engine.graph_batch_sizes=[4,8]"),
        (["engine=h200", "engine.graph_batch_sizes=[]"], "set engine.graph_batch_sizes=null"),
        (
            ["spec.draft_length=batch_table", "spec.draft_table={1:5,8:2}"],
            "spec.draft_table must give at most spec.k=3 drafts",
        ),
    ],
)
def test_keys_that_do_not_fit_others_name_the_fix(words: list[str], expected: str) -> None:
    (line,) = fault_lines(EvalConfig, *words)
    assert expected in line


def test_deterministic_steps_are_compiled_by_layers_alone() -> None:
    words = ["engine=h200_deterministic", "engine.layer_regions=false"]
    (line,) = fault_lines(EvalConfig, *words)
    assert line == (
        "engine.layer_regions must be true for compiled deterministic steps, got false; "
        "set engine.layer_regions=true."
    )
    engine = compose_config(EvalConfig, words[:1]).engine
    assert engine.deterministic
    assert engine.compile


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("sampling.temperature=[0,1]", "sampling.temperature must be 0 for backend=[own,vllm]"),
        ("sampling.repetition_penalty=1.5", "sampling.repetition_penalty must be 1.0 for backend"),
        ("sampling.min_tokens=3", "sampling.min_tokens must be 0 for backend=[own,vllm]"),
        ("spec.verify=relaxed", "spec.verify must be greedy for backend=[own,vllm], got relaxed"),
        ("spec.draft_length=confidence", "spec.draft_length must be fixed for backend=[own,vllm]"),
        ("spec.draft_vocabulary_size=9", "got 9; set spec.draft_vocabulary_size=null"),
        ("engine.prefix_caching=true", "set engine.prefix_caching=false"),
        ("model.tp_plan=tensor", "model.tp_plan must be none for backend=[own,vllm], got tensor"),
        ("spec.head=oracle", "spec.head must be a folder for backend=[own,vllm], got oracle"),
        ("spec.head=[null,assets]", "spec.head must be a folder for backend=[own,vllm], got null"),
    ],
)
def test_keys_that_another_engine_does_not_read_are_refused(word: str, expected: str) -> None:
    words = [word, "spec.policy=eagle"]
    (line,) = fault_lines(EvalConfig, "backend=[own,vllm]", *words)
    assert expected in line
    assert compose_config(EvalConfig, words).backend == ["own"]


def test_generate_of_transformers_is_compared_one_request_at_a_time() -> None:
    words = ["backend=[own,transformers]", "engine.max_num_requests=2"]
    (line,) = fault_lines(EvalConfig, *words)
    assert "set engine.max_num_requests=1" in line
    alone = compose_config(EvalConfig, words[:1])  # which eval.py does unasked
    assert alone.engine.max_num_requests == 1
    assert compose_config(EvalConfig, ["engine=cpu"]).engine.max_num_requests == 1


def test_plain_decoding_by_several_engines_needs_no_head() -> None:
    words = ["backend=[own,vllm]", "spec.head=null", "spec.k=0"]
    assert compose_config(EvalConfig, words).backend == ["own", "vllm"]


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_eval_takes_wandb(mode: str) -> None:
    words = ["logger=wandb", f"logger.wandb={mode}"]
    assert compose_config(EvalConfig, words).logger.wandb == mode


@pytest.mark.parametrize("task", [["task=target", "model=lab_tiny"], ["task=cache", "data=cached"]])
def test_task_without_curves_refuses_a_service(task: list[str]) -> None:
    (line,) = fault_lines(TrainConfig, *task, "logger=wandb")
    assert line.startswith("logger.wandb must be disabled for task=")


def test_engine_presets_that_stand_for_others() -> None:
    plain = compose_config(EvalConfig, [])
    assert compose_config(EvalConfig, ["engine=default"]) == plain
    cpu = compose_config(EvalConfig, ["engine=cpu", "model=lab_small"])
    assert (cpu.model.device, cpu.engine.backend, cpu.engine.cuda_graphs) == (
        *("cpu", "reference"),
        False,
    )


def test_spec_k_is_short_for_num_speculative_tokens() -> None:
    assert compose_config(EvalConfig, ["spec.k=5"]).spec.num_speculative_tokens == 5


@pytest.mark.parametrize("num_tokens", [0, 64])
def test_spec_k_at_a_bound_is_taken(num_tokens: int) -> None:
    words = [f"spec.k={num_tokens}", "engine.max_num_batched_tokens=1040"]
    config = compose_config(EvalConfig, words)
    assert config.spec.num_speculative_tokens == num_tokens


@pytest.mark.parametrize("value", ["-1", "65", "1000000", "three", "2.5", "true", "null", "", "[]"])
def test_spec_k_outside_its_range_names_the_range(value: str) -> None:
    (line,) = fault_lines(EvalConfig, f"spec.k={value}")
    assert "spec.num_speculative_tokens must be an integer in 0..64" in line
    assert f"got {value}" in line
    assert "set spec.k=" in line


@pytest.mark.parametrize(
    ("typed", "policies"),
    [("training", ["training"]), ("[eagle,training]", ["eagle", "training"])],
)
def test_spec_policy_takes_a_name_or_a_list(typed: str, policies: list[str]) -> None:
    assert compose_config(EvalConfig, [f"spec.policy={typed}"]).spec.policy == policies


@pytest.mark.parametrize(
    ("schema", "word", "expected"),
    [
        (EvalConfig, "spec.polcy=eagle", "nearest: spec.policy"),
        (EvalConfig, "modl=lab_tiny", "nearest: model"),
        (TrainConfig, "max_steps=5", "trainer.max_steps"),
        (TrainConfig, "trainer.max_step=5", "nearest: "),
        (TrainConfig, "spec.k=3", "belongs to eval.py"),
        (EvalConfig, "head=chain_n3", "belongs to train.py"),
        (TrainConfig, "head=chian_n3", "vllm_mimo, got chian_n3; nearest: chain_n3"),
        (
            TrainConfig,
            "experiment=eval_oracle",
            "must be one of finetune_eagle, glm_native, policy_matrix, policy_matrix_tiny, ",
        ),
        (TrainConfig, "-m", "must read NAME=VALUE"),
        (EvalConfig, "=", "must read NAME=VALUE without spaces"),
        (TrainConfig, "lr=1e-4", "nearest: model.pretrain.learning_rate, trainer.learning_rate"),
        (TrainConfig, "trainer.epochs=2", "nearest: trainer.max_steps, model.pretrain.max_steps"),
        (EvalConfig, "max_tokens=9", "nearest: sampling.max_new_tokens"),
        (EvalConfig, "engine.max_num_seqs=4", "nearest: engine.max_num_requests"),
        (TrainConfig, "~haed", "haed is not a key of train.py; nearest: head"),
        (EvalConfig, "spec.k=1,2", "write spec.k=[1,2] for one paired run, or add -m for many"),
        (EvalConfig, "model=lab_tiny,lab_small", "add -m for many runs"),
        (TrainConfig, "seed=0,1", "seed takes one value a run, got 0,1; add -m for many runs"),
        (
            EvalConfig,
            "hydra.run.dir=x",
            "follows output_dir, got x; set output_dir=x.",
        ),
        (TrainConfig, "+nonsense=1", "nonsense is not a key of train.py"),
        (EvalConfig, "spec.policy=trainin", ", got trainin; nearest: training"),
        (EvalConfig, "spec.verify=greeedy", "synthetic | typical, got greeedy; nearest: greedy"),
        (TrainConfig, "trainer.learning_rate=fast", "a number above 0 up to 10, got fast"),
        (TrainConfig, "trainer.learning_rate=0", "a number above 0 up to 10, got 0.0"),
        (TrainConfig, "trainer.learning_rate=nan", "set trainer.learning_rate=0.002"),
        (TrainConfig, "trainer.betas=[0.9]", "two numbers in [0, 1)"),
        (TrainConfig, "trainer.betas=[0.9,1.0]", "two numbers in [0, 1)"),
        (TrainConfig, "objective.num_depths=2", "at least head.num_mtp_modules=3"),
        (TrainConfig, "objective.unroll=ttt", "set head=shared_n1"),
        (TrainConfig, "objective.loss=mse", "must be a sum of ce | e2e_tv | hidden | kl | lk | tv"),
        (TrainConfig, "objective.lk_eta=2", "must be 3.0 for objective.loss=ce, which has no lk"),
        (TrainConfig, "objective.depth_weights=none", "decay | dpace | expected_length | uniform"),
        (TrainConfig, "task=cache", "must be set for task=cache, got nothing; set data=cached"),
        (TrainConfig, "data.import_hidden=x", "set task=cache data=cached"),
        (TrainConfig, "data.states_ahead=2", "must be 32 for data.states_endpoint=null"),
        (TrainConfig, "head.module_schedule=first", "set head=shared_n1"),
        (EvalConfig, "spec.policy=[]", "at least one policy"),
        (EvalConfig, "spec.policy=[eagle,eagle]", "each once"),
        (
            EvalConfig,
            "engine.block_size=24",
            "power of two >= 16, got 24; set engine.block_size=32",
        ),
        (EvalConfig, "engine.block_size=8", "power of two >= 16, got 8; set engine.block_size=16"),
        (EvalConfig, "engine.max_num_batched_tokens=3", "* (spec.k + 1) = 4 rows, got 3"),
        (EvalConfig, "engine.max_num_requests=200", "set engine.max_num_batched_tokens=800"),
        (EvalConfig, "engine.max_model_len=64", "must exceed max_new_tokens=64"),
        (EvalConfig, "engine.num_blocks=0", "or null, got 0; set engine.num_blocks=null"),
        (EvalConfig, "engine.memory_fraction=0", "above 0 up to 1, got 0"),
        (EvalConfig, "engine.graph_batch_sizes=[4]", "must be null for engine.cuda_graphs=false"),
        (EvalConfig, "engine.capture_mixed=true", "must be false for engine.cuda_graphs=false"),
        (EvalConfig, "engine.compile=true", "must be false for engine.cuda_graphs=false"),
        (EvalConfig, "sampling.top_k=5", "must be 0 at temperature 0"),
        (EvalConfig, "sampling.min_p=0.5", "must be 0 at temperature 0"),
        (EvalConfig, "spec.draft_length=adaptive", "| fixed, got adaptive"),
        (EvalConfig, "spec.draft_p_min=1.5", "in 0.0..1.0, got 1.5; set spec.draft_p_min=1.0"),
        (EvalConfig, "engine.audit_every=0", "set engine.audit_every=1"),
        (EvalConfig, "sampling.top_p=0.5", "must be 1 at temperature 0"),
        (EvalConfig, "spec.draft_sampling=sample", "must be greedy at temperature 0"),
        (EvalConfig, "backend=[own,vlm]", "transformers | vllm, got vlm; nearest: vllm"),
        (EvalConfig, "backend=vllm", "must name own, which others are compared with"),
        (EvalConfig, "backend=[own,vllm,vllm]", "and each engine once"),
    ],
)
def test_wrong_override_gives_one_line_with_the_fix(schema: type, word: str, expected: str) -> None:
    (line,) = fault_lines(schema, word)
    assert expected in line
    assert len(line) < 200


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("model.pretrain.warmup_steps=900000", "must be below max_steps"),
        ("model.pretrain.domain_weights.prose=-1", "a finite number >= 0, got -1"),
    ],
)
def test_wrong_pretrain_key_is_named_for_task_target(word: str, expected: str) -> None:
    (line,) = fault_lines(TrainConfig, "task=target", "model=lab_tiny", word)
    assert expected in line


def test_target_without_an_architecture_is_refused() -> None:
    (line,) = fault_lines(TrainConfig, "task=target", "model=qwen3")
    assert line.startswith("model.architecture must be set for task=target")


def test_several_faults_give_one_line_each() -> None:
    lines = fault_lines(EvalConfig, "spec.k=-1", "seed=-1", "sampling.top_p=2")
    assert [line.split()[0] for line in lines] == [
        "spec.num_speculative_tokens",
        "sampling.top_p",
        "seed",
    ]


@pytest.mark.parametrize("path", ["a b", "x,y", "(z)", "it's", "k=v", "C:\\data"])
def test_path_with_special_characters_arrives_unchanged(path: str) -> None:
    assert compose_config(TrainConfig, [f"model.path={path}"]).model.path == path


@pytest.mark.parametrize(
    ("path", "name"),
    [("/x/My-7B", "My-7B"), ("org/Tiny@main", "Tiny"), ("'a b'", "a-b"), ("runs/target", "target")],
)
def test_target_given_by_its_path_names_itself_wherever_the_name_stands(
    path: str, name: str
) -> None:
    model = compose_config(EvalConfig, [f"model.path={path}"]).model
    assert (model.name, model.architecture) == (name, {})
    training = compose_config(TrainConfig, [f"model.path={path}", "data=cached"])
    assert training.data.hidden_cache == f"runs/hidden_cache/{name}"
    assert training.data.path == f"assets/{name}/regenerated.jsonl.xz"
    named = compose_config(EvalConfig, [f"model.path={path}", "model=lab_tiny"])
    assert named.model.name == "lab_tiny"
    assert named.model.architecture
    assert compose_config(TrainConfig, ["task=target", f"model.path={path}"]).model.architecture
    again = compose_config(EvalConfig, ["model.path=other", f"model.path={path}", "model.family=x"])
    assert (again.model.name, again.model.architecture, again.model.family) == (name, {}, "x")
    some = compose_config(EvalConfig, [f"model.path={path}", "model.architecture.head_dim=8"])
    assert (some.model.name, some.model.architecture["head_dim"]) == (name, 8)


def test_mapping_takes_new_entries_with_their_types() -> None:
    words = ["model.architecture.num_hidden_layers=2", "model.architecture.tie=true"]
    architecture = compose_config(TrainConfig, words).model.architecture
    assert architecture["num_hidden_layers"] == 2
    assert architecture["tie"] is True


def test_null_clears_an_optional_key() -> None:
    assert compose_config(EvalConfig, ["spec.head=null"]).spec.head is None


def test_config_holds_plain_types_only() -> None:
    config = compose_config(TrainConfig, ["logger.tags=[a,b]"])
    assert type(config.logger.tags) is list
    assert type(config.trainer.betas) is tuple
    assert type(config.model.architecture) is dict


@pytest.mark.parametrize("schema", [TrainConfig, EvalConfig])
def test_help_lists_every_group_choice_key_and_meaning(schema: type) -> None:
    text = help_text(schema)
    for group, choices in group_choices(schema).items():
        assert f"{group}={' | '.join(choices)}" in text
    said = meanings(schema)
    for key, item in schema_keys(schema).items():
        assert f"{key}: {legal_values(item)}" in text
        assert said[key], f"{key} needs a comment that says what it means"
        assert f"\n      {said[key]}\n" in text


def test_check_overrides_reports_all_unknown_names_at_once() -> None:
    with pytest.raises(ConfigError) as fault:
        check_overrides(TrainConfig, ["modl=a", "sed=1", "seed=1"])
    assert len(str(fault.value).splitlines()) == 2


def test_meaning_is_the_comment_above_and_beside_a_field() -> None:
    said = meanings(EvalConfig)
    assert said["sampling.temperature"] == "0 is greedy"
    assert said["spec.num_speculative_tokens"].startswith("K, alias spec.k; 0 is plain decoding")
    assert "Settings of the lossy rules" not in said["spec.relaxed_top_n"]


@pytest.mark.parametrize(
    ("word", "swept", "fixed"),
    [
        ("spec.k=1,3", ["spec.num_speculative_tokens=1,3"], ["grid.num_speculative_tokens=[]"]),
        ("spec.k=[1,3]", [], ["grid.num_speculative_tokens=[1,3]"]),
        ("spec.k=[1,3],[5]", ["grid.num_speculative_tokens=[1,3],[5]"], []),
        ("spec.policy=eagle,training", ["spec.policy=[eagle],[training]"], []),
        ("model.path=a,b", ["model.path='a','b'"], []),
        ("seed=range(0,3)", ["seed=0,1,2"], []),
        ("model=glob(lab*)", ["model=glob(lab*)"], []),
        ("hydra.verbose=true", [], ["hydra.verbose=true"]),
    ],
)
def test_many_runs_split_values_as_hydra_does(
    word: str, swept: list[str], fixed: list[str]
) -> None:
    assert check_overrides(EvalConfig, [word], is_many=True) == (fixed, swept)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("model=lab_tiny,lab_tinny", "got lab_tinny; nearest: lab_tiny"),
        ("spec.kk=1,3", "nearest: spec.k"),
        ("spec.k=1,[2,3]", "single values or lists, got both"),
        ("seed=(1", "(1"),
    ],
)
def test_many_runs_of_a_wrong_word_give_one_line(word: str, expected: str) -> None:
    with pytest.raises(ConfigError) as fault:
        check_overrides(EvalConfig, [word], is_many=True)
    assert expected in str(fault.value)
    assert len(str(fault.value).splitlines()) == 1


def test_tilde_takes_an_entry_or_a_group_away() -> None:
    plain = compose_config(EvalConfig, [])
    assert "head_dim" in plain.model.architecture
    fewer = compose_config(EvalConfig, ["~model.architecture.head_dim", "~experiment"])
    assert "head_dim" not in fewer.model.architecture
    assert fewer.spec == plain.spec

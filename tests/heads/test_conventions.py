"""`head.init=native` takes from a checkpoint how its modules are run, and how many there are."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import TrainConfig
from mtp_research.config.training_schema import HeadConfig
from mtp_research.heads.init import choose_start, init_heads
from mtp_research.heads.native import load_native_heads
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.loading.source import may_hold_modules
from mtp_research.models.target import load_target
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.training.setup import build_heads
from tests.heads.release import change_config, write_release
from tests.tiny import tiny_target

# Conventions that are not the defaults, and the number of modules that a release has.
RELEASED = {
    "mimo": ("pre_norm", "post_norm", "hidden_first", 1),
    "mimo_v2": ("pre_norm", "post_norm", "embedding_first", 3),
    "glm4_moe": ("post_norm", "post_norm", "embedding_first", 1),
    "ernie4_5_moe": ("pre_norm", "pre_norm", "embedding_first", 1),
}


@pytest.fixture(scope="module", params=RELEASED)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / request.param
    write_release(tiny_target(request.param), folder)
    return folder


def composed(folder: Path, *words: str) -> HeadConfig:
    named = ["head.init=native", f"model.path={folder}", f"model.family={folder.name}"]
    return compose_config(TrainConfig, [*named, *words]).head


def test_conventions_and_number_of_modules_need_not_be_typed(release: Path) -> None:
    head = composed(release)
    found = (head.hidden_source, head.recycle_norm, head.concat_order, head.num_mtp_modules)
    assert found == RELEASED[release.name]
    target = load_target(release, dtype="float32", device="cpu")
    heads = MTPHeads(target, spec=HeadSpec(head.num_mtp_modules, *found[:3]))  # type: ignore[arg-type]
    init_heads(heads, init="native")
    wanted = load_native_heads(release, target)
    assert heads.spec == wanted.spec


@pytest.mark.parametrize(
    ("family", "words", "kept"),
    [
        ("mimo", ["head.hidden_source=post_norm"], ("hidden_source", "post_norm")),
        ("mimo_v2", ["head.num_mtp_modules=2"], ("num_mtp_modules", 2)),
        ("mimo_v2", ["head=shared_n1"], ("num_mtp_modules", 1)),
    ],
)
def test_what_was_typed_stays_and_is_refused_by_name(
    family: str, words: list[str], kept: tuple[str, object], tmp_path: Path
) -> None:
    folder = tmp_path / family
    write_release(tiny_target(family), folder)
    head = composed(folder, *words)
    assert getattr(head, kept[0]) == kept[1]
    target = load_target(folder, dtype="float32", device="cpu")
    spec = HeadSpec(head.num_mtp_modules, head.hidden_source, concat_order=head.concat_order)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"got head\.{kept[0]}={kept[1]}; set head\.{kept[0]}="):
        init_heads(MTPHeads(target, spec=spec), init="native")


@pytest.mark.parametrize("words", [["head.num_mtp_modules=3"], ["head=chain_n3"]])
def test_more_modules_than_the_release_has_are_its_module_copied(
    words: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "mimo"
    write_release(tiny_target("mimo"), folder)
    head = composed(folder, *words)
    assert (head.num_mtp_modules, head.hidden_source, head.concat_order) == (
        3,
        *RELEASED["mimo"][:3:2],
    )
    target = load_target(folder, dtype="float32", device="cpu")
    spec = HeadSpec(3, head.hidden_source, concat_order=head.concat_order)  # type: ignore[arg-type]
    heads = MTPHeads(target, spec=spec)
    init_heads(heads, init="native")
    (released,) = load_native_heads(folder, target).mtp_modules
    for module in heads.mtp_modules:
        state = module.state_dict()
        assert all(torch.equal(state[k], tensor) for k, tensor in released.state_dict().items())
    pointers = {module.eh_proj.weight.data_ptr() for module in heads.mtp_modules}
    assert len(pointers) == 3, "copies are tuned apart, so they must not share memory"


def test_copies_of_several_released_modules_follow_the_engines_order(tmp_path: Path) -> None:
    folder = tmp_path / "mimo_v2"
    write_release(tiny_target("mimo_v2"), folder)
    target = load_target(folder, dtype="float32", device="cpu")
    released = load_native_heads(folder, target)
    heads = MTPHeads(target, spec=replace(released.spec, num_mtp_modules=5))
    init_heads(heads, init="native")
    for index, module in enumerate(heads.mtp_modules):
        weight = released.mtp_modules[index % 3].eh_proj.weight
        assert torch.equal(module.eh_proj.weight, weight), index


def test_auto_starts_from_a_release_and_adopts_its_conventions(release: Path) -> None:
    words = [f"model.path={release}", f"model.family={release.name}"]
    head = compose_config(TrainConfig, words).head
    found = (head.hidden_source, head.recycle_norm, head.concat_order, head.num_mtp_modules)
    assert (head.init, found) == ("auto", RELEASED[release.name])
    target = load_target(release, dtype="float32", device="cpu")
    heads = MTPHeads(target, spec=HeadSpec(head.num_mtp_modules, *found[:3]))  # type: ignore[arg-type]
    start = choose_start(heads.target, heads.spec, init="auto")
    assert start.init == "native"
    assert "the target's checkpoint holds MTP modules" in start.phrase
    init_heads(heads, init="auto")
    wanted = load_native_heads(release, target).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in heads.state_dict().items())


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["head.hidden_source=post_norm"], "modules are head.hidden_source=pre_norm head.concat"),
        (["head.num_mtp_modules=2"], "modules are head.hidden_source=pre_norm head.num_mtp_mod"),
    ],
)
def test_auto_leaves_a_release_alone_that_does_not_fit_what_was_typed(
    words: list[str], phrase: str, tmp_path: Path
) -> None:
    family = "mimo" if "hidden" in words[0] else "mimo_v2"
    folder = tmp_path / family
    write_release(tiny_target(family), folder)
    head = compose_config(
        TrainConfig, [f"model.path={folder}", f"model.family={family}", *words]
    ).head
    plain = HeadConfig()
    assert (head.hidden_source, head.concat_order) == (plain.hidden_source, plain.concat_order)
    target = load_target(folder, dtype="float32", device="cpu")
    heads = MTPHeads(target, spec=HeadSpec(head.num_mtp_modules, head.hidden_source))  # type: ignore[arg-type]
    start = choose_start(heads.target, heads.spec, init="auto")
    assert start.init == "target_last_layer"
    assert phrase in start.phrase


def test_auto_of_modules_with_own_heads_is_the_last_layer(tmp_path: Path) -> None:
    folder = tmp_path / "step3p5"
    write_release(tiny_target("step3p5"), folder)
    head = compose_config(TrainConfig, [f"model.path={folder}", "model.family=step3p5"]).head
    assert (head.num_mtp_modules, head.hidden_source) == (3, "post_norm")
    target = load_target(folder, dtype="float32", device="cpu")
    start = choose_start(target, HeadSpec(3), init="auto")
    assert start.init == "target_last_layer"
    assert "output heads of their own" in start.phrase


def test_experiment_trains_the_released_module_at_a_low_rate(tmp_path: Path) -> None:
    write_release(tiny_target("glm4_moe"), tmp_path)
    named = ["experiment=glm_native", f"model.path={tmp_path}"]
    config = compose_config(TrainConfig, named)
    assert (config.head.init, config.head.num_mtp_modules) == ("native", 1)
    assert config.trainer.learning_rate == 5e-5
    assert compose_config(TrainConfig, [*named, "head.num_mtp_modules=3"]).head.num_mtp_modules == 3
    plain = compose_config(TrainConfig, ["experiment=glm_native"])  # the lab target has no modules
    target = load_target(plain.model.path, dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match=r"head\.init=native needs a target with MTP layers"):
        build_heads(plain, target=target)


def test_promise_without_modules_is_no_native_start(tmp_path: Path) -> None:
    target = tiny_target("glm4_moe", dtype=torch.float32)
    target.model.save_pretrained(tmp_path)
    change_config(tmp_path, {"num_nextn_predict_layers": 1})
    head = compose_config(TrainConfig, [f"model.path={tmp_path}"]).head
    assert head.num_mtp_modules == HeadConfig.num_mtp_modules
    loaded = load_target(tmp_path, dtype="float32", device="cpu")
    start = choose_start(loaded, HeadSpec(1), init="auto")
    assert start == (
        "target_last_layer",
        "target_last_layer (1 module): the target's checkpoint holds no MTP modules",
    )


@pytest.mark.parametrize("family", RELEASED)
def test_look_at_names_finds_the_modules_of_each_release(family: str, tmp_path: Path) -> None:
    target = tiny_target(family)
    write_release(target, tmp_path / "released")
    target.model.save_pretrained(tmp_path / "plain")
    assert may_hold_modules(tmp_path / "released")
    assert not may_hold_modules(tmp_path / "plain")
    assert not may_hold_modules(tmp_path)


def test_other_starts_and_absent_models_keep_the_defaults(tmp_path: Path) -> None:
    folder = tmp_path / "mimo"
    write_release(tiny_target("mimo"), folder)
    plain = compose_config(TrainConfig, [f"model.path={folder}", "head.init=random"]).head
    assert (plain.hidden_source, plain.num_mtp_modules) == ("post_norm", 3)
    assert composed(tmp_path / "nowhere", "model.family=mimo").hidden_source == "post_norm"


def test_damaged_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(IntegrityError, match=r"config\.json must be a model's configuration"):
        composed(tmp_path, "model.family=mimo")

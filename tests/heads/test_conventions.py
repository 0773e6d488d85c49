"""`head.init=native` takes from a checkpoint how its modules are run, and how many there are."""

from pathlib import Path

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import TrainConfig
from mtp_research.config.training_schema import HeadConfig
from mtp_research.heads.init import init_heads
from mtp_research.heads.native import load_native_heads
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.target import load_target
from mtp_research.runtime.errors import ConfigError, IntegrityError
from tests.heads.release import write_release
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
    ("words", "kept"),
    [
        (["head.hidden_source=post_norm"], ("hidden_source", "post_norm")),
        (["head.num_mtp_modules=3"], ("num_mtp_modules", 3)),
        (["head=chain_n3"], ("num_mtp_modules", 3)),
        (["head.num_mtp_modules=2"], ("num_mtp_modules", 2)),
    ],
)
def test_what_was_typed_stays_and_is_refused_by_name(
    words: list[str], kept: tuple[str, object], tmp_path: Path
) -> None:
    folder = tmp_path / "mimo"
    write_release(tiny_target("mimo"), folder)
    head = composed(folder, *words)
    assert getattr(head, kept[0]) == kept[1]
    target = load_target(folder, dtype="float32", device="cpu")
    spec = HeadSpec(head.num_mtp_modules, head.hidden_source, concat_order=head.concat_order)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"got head\.{kept[0]}={kept[1]}; set head\.{kept[0]}="):
        init_heads(MTPHeads(target, spec=spec), init="native")


def test_other_starts_and_absent_models_keep_the_defaults(tmp_path: Path) -> None:
    folder = tmp_path / "mimo"
    write_release(tiny_target("mimo"), folder)
    plain = compose_config(TrainConfig, [f"model.path={folder}"]).head
    assert (plain.hidden_source, plain.num_mtp_modules) == ("post_norm", 3)
    assert composed(tmp_path / "nowhere", "model.family=mimo").hidden_source == "post_norm"


def test_damaged_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(IntegrityError, match=r"config\.json must be a model's configuration"):
        composed(tmp_path, "model.family=mimo")

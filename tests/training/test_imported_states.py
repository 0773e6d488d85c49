"""Hidden states of vLLM's connector and of speculators as a cache, and files that are refused."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtp_research.__main__ import run_training
from mtp_research.app.cli import run_entry
from mtp_research.app.preflight import check_inputs
from mtp_research.config.schema import ModelConfig, TrainConfig
from mtp_research.config.training_schema import DataConfig, TrainerConfig
from mtp_research.data.rows import read_rows
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from mtp_research.training.loop import train_heads
from mtp_research.training.setup import cache_hidden

LAB_TINY = REPOSITORY_ROOT / "assets" / "lab_tiny"
SEQ_LEN = 96


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(LAB_TINY / "target", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A training on a few of lab_tiny's own answers, some of which are longer than a row."""
    path = tmp_path_factory.mktemp("lab") / "answers.jsonl"
    rows = read_rows(LAB_TINY / "regenerated.jsonl.xz", key="data.path")
    texts = sorted((dict(row.record) for row, _ in zip(rows, range(400), strict=False)), key=_size)
    texts = texts[::25]
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    assert _size(texts[-1]) > SEQ_LEN > 2 * _size(texts[0]), "some are cut, some share a row"
    return TrainConfig(
        model=ModelConfig("lab_tiny", "glm4_moe", str(LAB_TINY / "target"), device="cpu"),
        data=DataConfig(str(path), seq_len=SEQ_LEN, eval_documents=4),
        trainer=TrainerConfig(max_steps=2, batch_size=4, eval_every=100, save_every=100),
    )


def _size(text: dict) -> int:
    return len(text["token_ids"])


@torch.no_grad()
def engine_file(target: Target, token_ids: list[int], *, layer: int = -1) -> dict[str, Tensor]:
    """What vLLM writes of a prompt for two layer ids, the last one `num_hidden_layers`."""
    taken: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: taken.append(output))
        for module in target.model.base_model.layers
    ]
    try:
        ids = torch.tensor([token_ids])
        positions = torch.arange(len(token_ids))[None]
        target.forward(ids, position_ids=positions, context=DenseContext())
    finally:
        for hook in hooks:
            hook.remove()
    states = [one[0] if isinstance(one, tuple) else one for one in taken]
    pair = torch.stack([states[0][0], states[layer][0]], dim=1)
    return {"hidden_states": pair.contiguous(), "token_ids": torch.tensor(token_ids)}


@pytest.fixture(scope="module")
def written(lab: TrainConfig, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as speculators names them; vLLM's have the request's id as name."""
    folder = tmp_path_factory.mktemp("states")
    for number, row in enumerate(read_rows(lab.data.path, key="data.path")):
        save_file(engine_file(target, row.record["token_ids"]), folder / f"hs_{number}.safetensors")
    return folder


def importing(lab: TrainConfig, folder: Path, cache: Path, **head: str) -> TrainConfig:
    config = copy.deepcopy(lab)
    config.data.import_hidden, config.data.hidden_cache = str(folder), str(cache)
    for key, value in head.items():
        setattr(config.head, key, value)
    return config


def figures(folder: Path) -> list[float]:
    """Losses of the steps, and held-out acceptance lengths."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    values = [record.get("loss", record.get("acceptance_length")) for record in records]
    return [value for value in values if value is not None]  # a speed has neither


@pytest.mark.parametrize("hidden_source", ["post_norm", "pre_norm"])
def test_heads_learn_the_same_from_imported_states(lab, written, tmp_path, hidden_source):
    config = importing(lab, written, tmp_path / "imported", hidden_source=hidden_source)
    result = cache_hidden(config)
    assert result["num_shards_written"] == 2
    assert cache_hidden(config)["num_shards_written"] == 0
    own = copy.deepcopy(config)
    own.data.import_hidden, own.data.hidden_cache = None, str(tmp_path / "own")
    cache_hidden(own)
    for run in (own, config):
        run.data.import_hidden, run.data.check_hidden_cache = None, True
        train_heads(run, Path(str(run.data.hidden_cache)) / "run")
    found, expected = figures(tmp_path / "imported" / "run"), figures(tmp_path / "own" / "run")
    assert len(expected) == 5  # two steps, an evaluation before and behind them, and the best one
    assert found == pytest.approx(expected, rel=1e-5)


def changed(written: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of the files, of which one is another."""
    folder.mkdir()
    for path in sorted(written.iterdir()):
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "hs_3.safetensors")
    change(tensors)
    save_file(tensors, folder / "hs_3.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update(token_ids=t["token_ids"][:-1].clone()),
            r"expected hidden_states \[T",
        ),
        (lambda t: t.update(hidden_states=t["hidden_states"][:, 0].clone()), r"\[T, L, D\]"),
        (lambda t: t.update(token_ids=t["token_ids"].float()), "torch.float32"),
        (lambda t: t.pop("token_ids"), "expected tensors hidden_states and token_ids"),
        (lambda t: t.update(hidden_states=t["hidden_states"][..., :-1].clone()), "hidden size"),
        (lambda t: t["hidden_states"][2].fill_(float("nan")), "must be finite"),
    ],
    ids=["fewer-tokens", "no-layers", "float-tokens", "no-tokens", "hidden-size", "nan"],
)
def test_file_that_is_not_what_it_claims_to_be_is_refused(lab, written, tmp_path, change, message):
    folder = changed(written, tmp_path / "states", change)
    with pytest.raises(IntegrityError, match=message) as fault:
        cache_hidden(importing(lab, folder, tmp_path / "cache"))
    assert "hs_3.safetensors" in str(fault.value)
    assert not [path for path in tmp_path.glob("cache/**/*") if path.is_file()]


def test_states_of_another_dtype_name_the_key(lab, written, tmp_path):
    def to_bfloat16(tensors: dict[str, Tensor]) -> None:
        tensors["hidden_states"] = tensors["hidden_states"].bfloat16()

    folder = changed(written, tmp_path / "states", to_bfloat16)
    with pytest.raises(ConfigError, match=r"set model\.dtype=bfloat16"):
        cache_hidden(importing(lab, folder, tmp_path / "cache"))


def test_document_without_states_is_named(lab, written, tmp_path):
    def other_token(tensors: dict[str, Tensor]) -> None:
        tensors["token_ids"][5] += 1

    folder = changed(written, tmp_path / "states", other_token)
    rows = list(read_rows(lab.data.path, key="data.path"))
    with pytest.raises(ConfigError, match=f"lacks 1 of .* such as '{rows[3].name}'"):
        cache_hidden(importing(lab, folder, tmp_path / "cache"))


def test_truncated_file_is_one_line_with_code_3_and_leaves_nothing(lab, written, tmp_path, capsys):
    folder = changed(written, tmp_path / "states", lambda tensors: None)
    path = folder / "hs_3.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    words = ["task=cache", "data=cached", "model=lab_tiny", "model.device=cpu"]
    words += [f"data.path={lab.data.path}", f"data.seq_len={SEQ_LEN}", "data.eval_documents=4"]
    words += [f"data.import_hidden={folder}", f"data.hidden_cache={tmp_path / 'cache'}"]
    code = run_entry(TrainConfig, run_training, argv=[*words, f"output_dir={tmp_path / 'run'}"])
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error:")]
    assert code == 3
    assert "hs_3.safetensors: cut off or damaged" in line
    assert not (tmp_path / "cache").exists()


def test_states_of_another_layer_show_in_the_nll_and_fail_the_check(lab, written, tmp_path, target):
    right = cache_hidden(importing(lab, written, tmp_path / "right"))["nll_per_token"]
    wrong = tmp_path / "states"
    wrong.mkdir()
    for path in written.iterdir():  # as if the last layer had not been asked for
        token_ids = load_file(path)["token_ids"].tolist()
        save_file(engine_file(target, token_ids, layer=-2), wrong / path.name)
    config = importing(lab, wrong, tmp_path / "cache")
    found = cache_hidden(config)["nll_per_token"]
    assert isinstance(right, float)
    assert right < 0.01, "greedy text of the target itself"
    assert found > 1
    config.data.import_hidden, config.data.check_hidden_cache = None, True
    with pytest.raises(IntegrityError, match="differs from this target"):
        train_heads(config, tmp_path / "run")


def test_cache_of_another_origin_is_not_gone_on_with(lab, written, tmp_path):
    config = importing(lab, written, tmp_path / "cache")
    cache_hidden(config)
    config.data.import_hidden = None
    with pytest.raises(IntegrityError, match=r"imported from .*, this run imports from None"):
        cache_hidden(config)


def test_folder_without_files_names_the_key(lab, tmp_path):
    with pytest.raises(ConfigError, match=r"must be a folder of \.safetensors"):
        cache_hidden(importing(lab, tmp_path, tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"data\.import_hidden must be an existing"):
        check_inputs(importing(lab, tmp_path / "none", tmp_path / "cache"))

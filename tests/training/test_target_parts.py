"""Training from cached hidden states loads no more of the target than it runs."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers.modeling_utils as library
from safetensors.torch import load_file, save_file

from mtp_research.config.rules import validate
from mtp_research.config.schema import TrainConfig
from mtp_research.heads import native
from mtp_research.heads.init import init_heads
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.block import layers_like_block
from mtp_research.models.target import load_target
from mtp_research.runtime.errors import ConfigError
from mtp_research.training import setup
from mtp_research.training.loop import train_heads
from mtp_research.training.setup import cache_hidden
from tests.heads.release import write_release
from tests.tiny import tiny_target
from tests.training.test_hidden_rows import weights
from tests.training.tiny import save_lab

SHARED = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


class CountedSlice:
    """A lazy tensor of a safetensors file; indexing reads it."""

    def __init__(self, part, name: str, read: list[str]) -> None:
        self._part, self._name, self._read = part, name, read

    def __getitem__(self, index):
        self._read.append(self._name)
        return self._part[index]

    def __getattr__(self, name):
        return getattr(self._part, name)


class CountedFile:
    """A safetensors file that notes the names of the tensors that are read from it."""

    read: list[str] = []  # noqa: RUF012, of all files

    def __init__(self, *args, **kwargs) -> None:
        self._file = OPEN(*args, **kwargs)

    def __enter__(self):
        return self

    def __exit__(self, *fault):
        self._file.__exit__(*fault)

    def keys(self):
        return self._file.keys()

    def get_slice(self, name):
        return CountedSlice(self._file.get_slice(name), name, self.read)

    def get_tensor(self, name):
        self.read.append(name)
        return self._file.get_tensor(name)


OPEN = library.safe_open


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the target's tensors that are read, by the library's loader and by our own."""
    monkeypatch.setattr(CountedFile, "read", [])
    for module in (library, native):
        monkeypatch.setattr(module, "safe_open", CountedFile)
    return CountedFile.read


def cached_lab(folder: Path, recipe: str = "qwen3") -> TrainConfig:
    """A tiny target with answers, and the cache of its hidden states."""
    config = save_lab(folder, recipe=recipe)
    config.trainer.max_steps, config.trainer.batch_size = 3, 12
    config.data.hidden_cache = str(folder / "cache")
    cache_hidden(config)
    return config


def shard(folder: Path) -> None:
    """Split a checkpoint into a file per tensor, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{number:05d}.safetensors" for number, name in enumerate(tensors)}
    for name, file in files.items():
        save_file({name: tensors[name]}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize(
    ("recipe", "init"),
    [("qwen3", "random"), ("glm4_moe", "target_last_layer"), ("gemma3", "target_last_layer")],
)
def test_loss_curve_is_that_of_the_whole_target_to_the_bit(
    recipe: str, init: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cached_lab(tmp_path, recipe)
    config.head.init = init
    whole = copy.deepcopy(config)
    whole.data.check_hidden_cache = True
    seen = []
    load = setup.load_target

    def noted(*args, **kwargs):
        seen.append(kwargs["layers"])
        return load(*args, **kwargs)

    monkeypatch.setattr(setup, "load_target", noted)
    expected = train_heads(whole, tmp_path / "whole")
    assert seen == ["all"]
    result = train_heads(config, tmp_path / "parts")
    assert seen[1:] == (["none", "last"] if init == "target_last_layer" else ["none"])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "parts")) == 3
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    for key in ("acceptance_length", "sampled_acceptance_length", "num_rounds"):
        assert result[key] == expected[key]


@pytest.mark.parametrize(
    ("recipe", "init", "layer", "is_sharded"),
    [
        ("glm4_moe", "target_last_layer", 1, True),
        ("glm4_moe", "random", None, False),
        ("gemma3", "target_last_layer", 1, False),  # the last layer of full attention, of three
        ("qwen3", "random", None, True),
    ],
)
def test_no_tensor_of_another_layer_is_read(
    recipe: str, init: str, layer: int | None, is_sharded: bool, tmp_path: Path, reads: list[str]
) -> None:
    config = save_lab(tmp_path, recipe=recipe)
    folder = Path(config.model.path)
    if is_sharded:
        shard(folder)
    config.trainer.max_steps, config.data.hidden_cache = 1, str(tmp_path / "cache")
    cache_hidden(config)
    assert any(".layers.0." in name for name in reads), "the whole target computes a cache"
    reads.clear()
    config.head.init = init
    train_heads(config, tmp_path / "run")
    layers = {name for name in reads if ".layers." in name}
    assert set(reads) - layers <= SHARED
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(reads)
    read = {int(name.split(".layers.")[1].split(".")[0]) for name in layers}
    assert read == (set() if layer is None else {layer})


def test_native_start_reads_the_modules_and_no_decoder_layer(
    tmp_path: Path, reads: list[str]
) -> None:
    config = save_lab(tmp_path, recipe="glm4_moe")
    folder = Path(config.model.path)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    published = write_release(tiny_target("glm4_moe", dtype=torch.float32), folder)
    config.head.num_mtp_modules = 1
    config.trainer.max_steps, config.data.hidden_cache = 1, str(tmp_path / "cache")
    cache_hidden(config)
    reads.clear()
    train_heads(config, tmp_path / "run")
    assert set(reads) - SHARED == set(published)
    record = json.loads((tmp_path / "run" / "head" / "head.json").read_text())
    assert record["provenance"]["config"]["head"]["init"] == "native"


def test_layers_that_are_left_out_have_no_memory_and_refuse_to_run(tmp_path: Path) -> None:
    target = tiny_target("glm4_moe", dtype=torch.float32)
    target.model.save_pretrained(tmp_path)
    parts = load_target(tmp_path, dtype="float32", device="cpu", layers="none")
    whole = load_target(tmp_path, dtype="float32", device="cpu")
    assert type(parts.model) is type(whole.model)
    devices = {name: p.device.type for name, p in parts.model.named_parameters()}
    assert {name for name, device in devices.items() if device == "cpu"} <= SHARED
    assert devices.keys() == dict(whole.model.named_parameters()).keys()
    hidden, positions = torch.randn(1, 5, 64), torch.arange(5)[None]
    for ours, theirs in zip(
        parts.position_embeddings(hidden, positions),
        whole.position_embeddings(hidden, positions),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    assert torch.equal(parts.logits(hidden), whole.logits(hidden))
    with pytest.raises(ConfigError, match="need all layers of the target, got 2 without weights"):
        parts.forward(positions, position_ids=positions, context=DenseContext())


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    target = tiny_target("qwen3", dtype=torch.float32, tie_word_embeddings=True)
    target.model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    parts = load_target(tmp_path, dtype="float32", device="cpu", layers="none")
    assert parts.lm_head_weight is parts.embed_tokens.weight
    assert torch.equal(parts.lm_head_weight, target.embed_tokens.weight)


@pytest.mark.parametrize(
    "recipe", ["nemotron_h", "gemma3", "exaone_moe", "longcat_flash", "deepseek_v3"]
)
def test_start_of_a_part_is_the_start_of_the_whole(recipe: str, tmp_path: Path) -> None:
    tiny_target(recipe, dtype=torch.float32).model.save_pretrained(tmp_path)
    states = []
    for layers in ("last", "all"):
        target = load_target(tmp_path, dtype="float32", device="cpu", layers=layers)
        torch.manual_seed(0)
        heads = MTPHeads(target, spec=HeadSpec(1))
        init_heads(heads, init="target_last_layer")
        states.append(heads.state_dict())
    part, whole = states
    assert all(torch.equal(tensor, whole[name]) for name, tensor in part.items())
    kept = layers_like_block(target.model, target.family)
    assert 0 < len(kept) < len(target.model.base_model.layers)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"check_hidden_cache": True}, "data.check_hidden_cache"),
        ({"decode_eval_prompts": 1}, "trainer.decode_eval_prompts"),
        ({}, None),
    ],
)
def test_what_runs_the_layers_loads_them_and_says_so(
    change: dict, reason: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = cached_lab(tmp_path)
    for section in (config.data, config.trainer):
        for key, value in change.items():
            if key in {item.name for item in dataclasses.fields(section)}:
                setattr(section, key, value)
    config.trainer.max_steps = 1
    train_heads(config, tmp_path / "run", decode_eval=lambda heads: {"length": 1.0})
    printed = capsys.readouterr()
    lines = [
        line for line in (printed.out + printed.err).splitlines() if "data.hidden_cache" in line
    ]
    if reason is None:
        assert "1 layers not loaded, hidden states from data.hidden_cache" in lines[0]
    else:
        assert f"loaded whole beside data.hidden_cache, for {reason}" in lines[0]


def test_check_of_a_cache_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = save_lab(tmp_path, num_documents=8)
    config.data.check_hidden_cache = True
    with pytest.raises(ConfigError, match=r"data\.check_hidden_cache must be false"):
        validate(config)

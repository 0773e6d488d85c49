"""Training from cached hidden states: the same bits, and refusals of other targets and data."""

import copy
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_research.app.preflight import check_inputs
from mtp_research.config.schema import TrainConfig
from mtp_research.data.hidden_cache import cached_bytes_per_token
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.training.loop import train_heads
from mtp_research.training.setup import build_run, cache_hidden, make_accelerator
from tests.training.tiny import save_lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("lab")
    config = save_lab(folder)
    config.trainer.max_steps, config.trainer.batch_size = 3, 12  # reads its rows more than once
    return config


def cached(config: TrainConfig, folder: Path, **head: str) -> TrainConfig:
    config = copy.deepcopy(config)
    config.data.hidden_cache = str(folder)
    for key, value in head.items():
        setattr(config.head, key, value)
    return config


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "head" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("hidden_source", ["post_norm", "pre_norm"])
def test_training_from_cache_gives_the_bits_of_online_training(
    lab, tmp_path, monkeypatch, hidden_source
):
    online = copy.deepcopy(lab)
    online.head.hidden_source = hidden_source
    expected = train_heads(online, tmp_path / "online")

    config = cached(lab, tmp_path / "cache", hidden_source=hidden_source)
    written = cache_hidden(config)
    assert written["num_shards_written"] == 2  # one of training rows, one of held-out rows
    assert cache_hidden(config)["num_shards_written"] == 0

    num_rows_run, forward = [], Target.forward

    def counted(self, input_ids, **arguments):
        num_rows_run.append(len(input_ids))
        return forward(self, input_ids, **arguments)

    monkeypatch.setattr(Target, "forward", counted)
    config.data.check_hidden_cache = True
    result = train_heads(config, tmp_path / "cached")
    assert num_rows_run == [1, 1]  # a sample of each shard
    assert weights(tmp_path / "cached") == weights(tmp_path / "online")
    for key in ("acceptance_length", "sampled_acceptance_length", "num_rounds"):
        assert result[key] == expected[key]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("weights", "target_sha256"),
        ("tokenizer", "tokenizer_sha256"),
        ("template", "chat_template_sha256"),
        ("norm", "hidden_source"),
        ("documents", "num_rows|documents_sha256"),
        ("length", "seq_len"),
    ],
)
def test_cache_of_another_run_is_refused_naming_the_field(lab, tmp_path, change, field):
    folder = tmp_path / "target"
    shutil.copytree(lab.model.path, folder)
    config = cached(lab, tmp_path / "cache")
    config.model.path = str(folder)
    cache_hidden(config)
    if change == "weights":
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] += 0.5
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    elif change == "tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    elif change == "template":
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    elif change == "norm":
        config.head.hidden_source = "pre_norm"
    elif change == "documents":
        config.data.eval_documents -= 3
    else:
        config.data.seq_len = 48
    with pytest.raises(IntegrityError, match=field):
        build_run(config, accelerator=make_accelerator(config))


def test_cache_whose_numbers_are_not_the_targets_is_refused(lab, tmp_path, monkeypatch):
    config = cached(lab, tmp_path / "cache")
    forward = Target.forward

    def shifted(self, *arguments, **options):
        hidden = forward(self, *arguments, **options)
        return hidden._replace(post_norm=hidden.post_norm + 0.05)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "forward", shifted)
        cache_hidden(config)
    config.data.check_hidden_cache = True
    run = build_run(config, accelerator=make_accelerator(config))
    with pytest.raises(IntegrityError, match="differs from this target"):
        run.rows.hidden([3])
    assert torch.isfinite(run.rows.batch([3]).loss_mask.float()).all()


def test_cache_folder_that_does_not_exist_names_the_command(lab, tmp_path):
    with pytest.raises(ConfigError, match="task=cache"):
        check_inputs(cached(lab, tmp_path / "none"))


def test_short_documents_are_counted_in_the_result(lab, tmp_path):
    config = copy.deepcopy(lab)
    path = tmp_path / "answers.jsonl"
    short = {"id": "short", "domain": "code", "token_ids": [7, 8, 9, 10], "num_prompt_tokens": 1}
    path.write_text(Path(config.data.path).read_text() + json.dumps(short) + "\n")
    config.data.path = str(path)
    config.trainer.max_steps = 1
    held_out = build_run(config, accelerator=make_accelerator(config)).documents.held_out
    expected = 0 if any(document.doc_id == "short" for document in held_out) else 1
    assert expected == 1, "the short document must be one to train on; give it another id"
    assert train_heads(config, tmp_path / "run")["num_short_documents"] == 1


@pytest.mark.parametrize("source", ["post_norm", "pre_norm"])
def test_cache_takes_the_bytes_a_token_that_are_planned(lab, tmp_path, source):
    config = cached(lab, tmp_path / "cache", hidden_source=source)
    cache_hidden(config)
    stored, num_tokens = 0, 0  # padding of the rows as well
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        header = int.from_bytes(path.read_bytes()[:8], "little")
        stored += path.stat().st_size - 8 - header
        num_tokens += load_file(path)["post_norm"].shape[:2].numel()
    width = load_target(config.model.path).config.hidden_size
    planned = cached_bytes_per_token(width, dtype=torch.float32, hidden_source=source)
    assert stored == num_tokens * planned

"""A model folder that promises more than its shards hold is refused before anything is built."""

import json
import pickle
import shutil
import time
import tracemalloc
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from mtp_research.models.loading.source import read_weight_map
from mtp_research.models.target import load_target
from mtp_research.runtime.errors import IntegrityError

LAB_TINY = Path(__file__).resolve().parents[2] / "assets" / "lab_tiny" / "target"


def model_folder(folder: Path, **config: object) -> Path:
    """The shipped target with other values in its config.json."""
    shutil.copytree(LAB_TINY, folder)
    fields = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Message with which `load_target` refuses a folder; it may not get to building the model."""
    with monkeypatch.context() as patched:
        patched.setattr(AutoModelForCausalLM, "from_pretrained", None)
        with pytest.raises(IntegrityError) as caught:
            load_target(folder, dtype="float32", device="cpu")
    assert "\n" not in str(caught.value)
    assert "not callable" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("hidden_size", 200_000, "hold 3,863,064 numbers, got sizes that ask for 3,0"),
        ("intermediate_size", 10**7, "(model.layers.0.mlp.gate_proj.weight: 2,560,000,000)"),
        ("vocab_size", 10**7, "(model.embed_tokens.weight: 2,560,000,000)"),
        ("n_routed_experts", 10**6, "(model.layers.1.mlp.experts.gate_up_proj: 40,960,000,000)"),
        ("n_routed_experts", -3, "must be a whole Hugging Face model"),
        ("num_hidden_layers", 20_000, "must have num_hidden_layers in 1..16384, got 20000"),
        ("num_hidden_layers", 300, "got num_hidden_layers=300 for 8 at most"),
        ("num_hidden_layers", -1, "must have num_hidden_layers in 1..16384, got -1"),
        ("vocab_size", 0, "must have vocab_size in 1..67108864, got 0"),
        ("num_attention_heads", 0, "must have num_attention_heads in 1..65536, got 0"),
        ("num_attention_heads", "eight", "num_attention_heads in 1..65536, got 'eight'"),
        ("hidden_size", True, "hidden_size in 1..1048576, got True"),
        ("max_position_embeddings", 10**12, "in 1..16777216, got 1000000000000"),
        ("rms_norm_eps", "x", "must be a whole Hugging Face model, got: Validation error"),
        ("pad_token_id", 10**9, "must be a whole Hugging Face model, got: Padding_idx"),
    ],
)
def test_size_that_the_shards_do_not_have_is_refused_before_building(
    field: str, value: object, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "m", **{field: value})
    started = time.monotonic()
    assert expected in refusal(folder, monkeypatch)
    assert time.monotonic() - started < 10  # 1.3 s on an idle machine; unchecked: minutes


def test_pickled_weights_are_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    message = refusal(folder, monkeypatch)
    assert "must hold weights as .safetensors, got pytorch_model.bin;" in message
    assert not (tmp_path / "ran").exists()


def write_index(folder: Path, num_entries: int) -> None:
    entries = {f"model.layers.{i}.weight": f"model-{i:07d}.safetensors" for i in range(num_entries)}
    index = {"metadata": {}, "weight_map": entries}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_index_of_too_many_shards_is_refused_cheaply(tmp_path: Path) -> None:
    write_index(tmp_path, 400_001)
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(IntegrityError, match="an index of at most 400,000 tensors"):
        read_weight_map(tmp_path)
    assert time.process_time() - started < 2
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()
    write_index(tmp_path, 1000)
    assert len(read_weight_map(tmp_path) or {}) == 1000


def test_shards_that_an_index_names_and_the_folder_lacks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "m")
    with safe_open(folder / "model.safetensors", framework="pt") as shard:
        names = dict.fromkeys(shard.keys(), "model.safetensors")
    index = {"weight_map": names | {"lm_head.weight": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "1 are missing ['gone.safetensors']" in refusal(folder, monkeypatch)

"""Head folders: what is written comes back, and nothing else is taken."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.record import conventions_phrase, head_name
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads, save_heads
from mtp_research.models.target import Target, load_target, target_hashes
from mtp_research.runtime.errors import ConfigError, IntegrityError
from tests.tiny import tiny_heads, tiny_target

LAB_TINY = Path(__file__).resolve().parents[2] / "assets" / "lab_tiny"


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("qwen3", dtype=torch.float32)


@pytest.fixture
def heads(target: Target) -> MTPHeads:
    return tiny_heads(target, num_mtp_modules=2, recycle_norm="pre_norm", unroll="chain")


def test_phrase_names_every_convention_and_an_older_spec_has_defaults() -> None:
    odd = {
        "num_mtp_modules": 1,
        "hidden_source": "pre_norm",
        "recycle_norm": "pre_norm",
        "concat_order": "hidden_first",
        "zero_position_0": True,
    }
    assert conventions_phrase(odd) == (
        "1 module, reads pre_norm, recycles pre_norm, hidden_first, position 0 zeroed"
    )
    assert conventions_phrase({"num_mtp_modules": 3}) == (
        "3 modules, reads post_norm, recycles post_norm, embedding_first, position 0 kept"
    )


def test_head_json_says_how_it_is_run_and_older_ones_load_without(
    heads: MTPHeads, target: Target, tmp_path: Path
) -> None:
    save_heads(heads, tmp_path)
    file = tmp_path / "head.json"
    record = json.loads(file.read_text(encoding="utf8"))
    assert record["conventions"] == (
        "2 modules, reads post_norm, recycles pre_norm, embedding_first, position 0 kept"
    )
    del record["conventions"]
    file.write_text(json.dumps(record), encoding="utf8")
    assert load_heads(tmp_path, target).spec == heads.spec


def test_saved_heads_come_back_with_their_conventions(
    heads: MTPHeads, target: Target, tmp_path: Path
) -> None:
    save_heads(heads, tmp_path / "head", provenance={"seed": 3})
    loaded = load_heads(tmp_path / "head", target)
    assert loaded.spec == heads.spec
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    expected = heads.state_dict()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in loaded.state_dict().items())
    record = json.loads((tmp_path / "head" / "head.json").read_text())
    assert record["provenance"] == {"seed": 3}


def test_file_holds_no_tensor_of_the_target(
    heads: MTPHeads, target: Target, tmp_path: Path
) -> None:
    save_heads(heads, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names
    assert all(name.startswith("mtp_modules.") for name in names)
    own = {id(parameter) for parameter in heads.parameters()}
    assert not own & {id(parameter) for parameter in target.model.parameters()}


def test_dtype_of_the_file_is_chosen_for_floats(heads: MTPHeads, tmp_path: Path) -> None:
    save_heads(heads, tmp_path, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("fault", ["missing", "extra", "of another shape"])
def test_tensors_that_do_not_fit_are_named(
    fault: str, heads: MTPHeads, target: Target, tmp_path: Path
) -> None:
    save_heads(heads, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "mtp_modules.1.eh_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "extra":
        name = "mtp_modules.7.eh_proj.weight"
        tensors[name] = torch.zeros(1)
    else:
        tensors[name] = tensors[name][:3].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(IntegrityError, match=rf"{fault} \['{name}'\]"):
        load_heads(tmp_path, target)


def test_head_of_another_family_is_refused_with_both_names(heads: MTPHeads, tmp_path: Path) -> None:
    save_heads(heads, tmp_path)
    other = tiny_target("glm4_moe", dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"family 'qwen3' \(this target: 'glm4_moe'\)"):
        load_heads(tmp_path, other)


def refused_field(folder: Path, target: Target) -> str:
    """The one hash that a refusal names."""
    with pytest.raises(IntegrityError, match=r"another model of the same sizes") as caught:
        load_heads(folder, target)
    (field,) = re.findall(
        r"target\.(\w+) [0-9a-f]{12} \(this target: [0-9a-f]{12}\)", str(caught.value)
    )
    return field


def test_head_of_other_weights_is_refused_by_field(heads: MTPHeads, tmp_path: Path) -> None:
    save_heads(heads, tmp_path)
    other = tiny_target("qwen3", dtype=torch.float32)
    load_heads(tmp_path, other)  # the same weights, drawn again
    other.embed_tokens.weight.data[3, :8] *= -1
    assert refused_field(tmp_path, other) == "weights_sha256"


def test_head_of_another_depth_is_refused_by_field(
    heads: MTPHeads, target: Target, tmp_path: Path
) -> None:
    save_heads(heads, tmp_path)
    deeper = tiny_target("qwen3", dtype=torch.float32, num_hidden_layers=4)
    deeper.model.load_state_dict(target.model.state_dict(), strict=False)
    assert refused_field(tmp_path, deeper) == "config_sha256"


def test_head_of_another_tokenizer_is_refused_by_field(heads: MTPHeads, tmp_path: Path) -> None:
    model = tmp_path / "model"
    heads.target.model.save_pretrained(model)
    shutil.copy(LAB_TINY / "target" / "tokenizer.json", model)
    target = load_target(model, dtype="float32", device="cpu")
    save_heads(MTPHeads(target, spec=heads.spec), tmp_path / "head")
    load_heads(tmp_path / "head", target)
    content = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(content, indent=1))  # another form, the same
    load_heads(tmp_path / "head", target)
    ids = content["model"]["vocab"]
    first, second = list(ids)[100:102]
    ids[first], ids[second] = ids[second], ids[first]
    (model / "tokenizer.json").write_text(json.dumps(content))
    assert refused_field(tmp_path / "head", target) == "tokenizer_sha256"
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"tokenizer\.json must hold model\.vocab"):
        load_heads(tmp_path / "head", target)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_hashes_are_those_of_the_model_in_any_dtype(dtype: str) -> None:
    folder = LAB_TINY / "target"
    expected = target_hashes(load_target(folder, dtype="float32", device="cpu"))
    assert target_hashes(load_target(folder, dtype=dtype, device="cpu")) == expected
    recorded = json.loads((LAB_TINY / "heads" / "chain_n3" / "head.json").read_text())["target"]
    assert recorded == recorded | expected


def test_folder_without_hashes_is_taken(heads: MTPHeads, target: Target, tmp_path: Path) -> None:
    save_heads(heads, tmp_path)
    record = json.loads((tmp_path / "head.json").read_text())
    record["target"] = {k: v for k, v in record["target"].items() if not k.endswith("_sha256")}
    (tmp_path / "head.json").write_text(json.dumps(record))
    assert load_heads(tmp_path, target).spec == heads.spec


def test_unknown_convention_is_refused(heads: MTPHeads, target: Target, tmp_path: Path) -> None:
    save_heads(heads, tmp_path)
    record = json.loads((tmp_path / "head.json").read_text())
    record["spec"]["concatenation"] = "sum"
    (tmp_path / "head.json").write_text(json.dumps(record))
    with pytest.raises(IntegrityError, match="concatenation"):
        load_heads(tmp_path, target)


def test_folder_of_a_run_names_the_heads_in_it(
    heads: MTPHeads, target: Target, tmp_path: Path
) -> None:
    heads.save_pretrained(tmp_path / "head")
    (tmp_path / "config.json").write_text("{}")  # a run describes itself
    with pytest.raises(ConfigError, match=f"got that of a run.*set spec.head={tmp_path}/head"):
        load_heads(tmp_path, target)


@pytest.mark.parametrize(
    ("folder", "name"),
    [("runs/a/head", "a"), ("runs/head/ttt", "ttt"), ("head", "head"), ("../head", "head")],
)
def test_heads_are_called_by_their_folder_or_the_run_that_wrote_them(
    folder: str, name: str
) -> None:
    assert head_name(folder) == head_name(Path(folder)) == name


def test_cut_off_file_is_refused(heads: MTPHeads, target: Target, tmp_path: Path) -> None:
    save_heads(heads, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="cannot read"):
        load_heads(tmp_path, target)


def test_head_is_decoded_in_the_order_of_its_training(target: Target, tmp_path: Path) -> None:
    save_heads(tiny_heads(target, num_mtp_modules=2, module_schedule="last"), tmp_path)
    heads = load_heads(tmp_path, target)
    assert SpecSettings(num_speculative_tokens=3).plan(heads).schedule == "last"
    typed = SpecSettings(num_speculative_tokens=3, module_schedule="last")
    assert typed.plan(heads).schedule == "last"
    wrong = r"spec\.module_schedule must be last, .* got cycle: .* set spec\.module_schedule=null"
    with pytest.raises(ConfigError, match=wrong):
        SpecDecoder(target, heads, spec=replace(typed, module_schedule="cycle"))


@pytest.mark.parametrize(("num_mtp_modules", "num_lines"), [(1, 0), (2, 1)])
def test_head_of_an_older_version_counts_as_cycle(
    num_mtp_modules: int,
    num_lines: int,
    target: Target,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_heads(tiny_heads(target, num_mtp_modules=num_mtp_modules), tmp_path)
    record = json.loads((tmp_path / "head.json").read_text())
    del record["spec"]["module_schedule"]
    (tmp_path / "head.json").write_text(json.dumps(record))
    heads = load_heads(tmp_path, target)
    assert heads.spec.module_schedule == "cycle"
    assert caplog.text.count("lacks spec.module_schedule; the head counts as cycle") == num_lines
    with pytest.raises(ConfigError, match=r"spec\.module_schedule must be cycle"):
        SpecSettings(module_schedule="first").plan(heads)
    record["provenance"] = {"config": {"head": {"module_schedule": "last"}}}
    (tmp_path / "head.json").write_text(json.dumps(record))
    assert load_heads(tmp_path, target).spec.module_schedule == "last"


def rewrite(folder: Path, change: Callable[[dict], None]) -> None:
    record = json.loads((folder / "head.json").read_text())
    change(record)
    (folder / "head.json").write_text(json.dumps(record))


def test_one_changed_bit_of_the_weights_is_refused(
    heads: MTPHeads, target: Target, tmp_path: Path
) -> None:
    save_heads(heads, tmp_path)
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-7] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match=r"model\.safetensors must have the sha256 \w{12} of"):
        load_heads(tmp_path, target)


def test_heads_without_a_hash_load_with_one_line(
    heads: MTPHeads, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_heads(heads, tmp_path)
    load_heads(tmp_path, target)
    assert caplog.text == ""
    rewrite(tmp_path, lambda record: record.pop("weights_sha256"))
    load_heads(tmp_path, target)
    assert caplog.text.count("lacks weights_sha256") == len(caplog.records) == 1


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("hidden_source", "pre-norm", 'one of post_norm, pre_norm, got "pre-norm"'),
        ("recycle_norm", None, "one of post_norm, pre_norm, got null"),
        ("concat_order", "hidden-first", "one of embedding_first, hidden_first"),
        ("module_schedule", "round", "one of cycle, first, last"),
        ("zero_position_0", "false", 'true or false, got "false"'),
        ("owns_lm_head", 0, "true or false, got 0"),
        ("num_mtp_modules", 10**6, "an integer in 1..64, got 1000000"),
        ("num_mtp_modules", "3", "an integer in 1..64"),
        ("num_mtp_modules", True, "an integer in 1..64, got true"),
    ],
)
def test_value_that_its_field_does_not_have_is_refused(
    field: str, value: object, expected: str, heads: MTPHeads, target: Target, tmp_path: Path
) -> None:
    save_heads(heads, tmp_path)
    rewrite(tmp_path, lambda record: record["spec"].update({field: value}))
    with pytest.raises(IntegrityError, match=f"spec.{field} must be {re.escape(expected)}"):
        load_heads(tmp_path, target)


def test_secrets_of_a_training_are_not_in_the_record(heads: MTPHeads, tmp_path: Path) -> None:
    secret = "hf_" + "A" * 24
    tags = {"config": {"logger": {"tags": [secret], "project": "https://me:word@host/x"}}}
    save_heads(heads, tmp_path, provenance=tags)
    text = (tmp_path / "head.json").read_text()
    assert secret not in text
    assert "word@" not in text
    assert "[redacted]" in text

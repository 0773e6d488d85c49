"""Published checkpoints in, published checkpoints out; and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear

from mtp_research.app import export_command
from mtp_research.config.ranges import in_own_words
from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.export import export_heads, stitch_heads
from mtp_research.heads.init import init_heads
from mtp_research.heads.native import has_native_heads, load_native_heads, read_index
from mtp_research.heads.weights import load_heads, save_heads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.errors import ConfigError, IntegrityError
from tests import oracle, tiny
from tests.heads.release import RELEASES, change_config, change_mtp_file, write_release


@pytest.fixture(params=sorted(RELEASES))
def target(request: pytest.FixtureRequest) -> Target:
    return tiny.tiny_target(request.param, dtype=torch.float32)


@pytest.fixture
def deepseek() -> Target:
    return tiny.tiny_target("deepseek_v3", dtype=torch.float32)


def assert_equal_tensors(written: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(written) == sorted(expected)
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(written[name], tensor), name


def test_released_modules_come_back_identical(target: Target, tmp_path: Path) -> None:
    released = write_release(target, tmp_path / "release")
    heads = load_heads(tmp_path / "release", target)
    assert heads.spec.num_mtp_modules == RELEASES[target.family_name].num_modules
    assert heads.spec.hidden_source == target.family.hidden_source
    export_heads(heads, tmp_path / "alone", source=tmp_path / "release")
    assert_equal_tensors(load_file(tmp_path / "alone" / "model.safetensors"), released)


def test_stitched_checkpoint_is_the_source_with_other_modules(
    target: Target, tmp_path: Path
) -> None:
    released = write_release(target, tmp_path / "release")
    heads = load_heads(tmp_path / "release", target)
    for parameter in heads.parameters():
        parameter.data = parameter.data + 0.5
    stitch_heads(heads, tmp_path / "new", source=tmp_path / "release")
    before, after = read_index(tmp_path / "release"), read_index(tmp_path / "new")
    assert sorted(before.files) == sorted(after.files)
    changed = before.read(before.files)
    for name, tensor in after.read(after.files).items():
        is_kept = name not in released or name.endswith(("embed_tokens.weight", "head.head.weight"))
        is_kept |= name.endswith(("correction_bias", "expert_bias"))  # no parameters
        assert torch.equal(tensor, changed[name]) == is_kept, name
    again = load_heads(tmp_path / "new", target)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, heads.state_dict()[name].bfloat16().float()) or (
            "correction" in name
        ), name


def test_heads_of_our_own_are_exported_and_come_back(target: Target, tmp_path: Path) -> None:
    num_modules = RELEASES[target.family_name].num_modules
    owns_lm_head = target.family.owns_lm_head
    heads = tiny.tiny_heads(target, num_mtp_modules=num_modules, owns_lm_head=owns_lm_head)
    write_release(target, tmp_path / "release")
    stitch_heads(heads, tmp_path / "new", source=tmp_path / "release")
    loaded = load_heads(tmp_path / "new", target)
    expected = heads.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name].to(torch.bfloat16).to(tensor.dtype)) or (
            "correction" in name and torch.equal(tensor, expected[name])
        ), name


def test_module_equals_a_reference_on_released_tensors(target: Target, tmp_path: Path) -> None:
    """The wrapper from the released tensors by hand; the block is the library's layer."""
    released = write_release(target, tmp_path)
    heads = load_heads(tmp_path, target)
    embedding_norm, hidden_norm, projection, last_norm = (
        None
        if name is None
        else released[name.format(module=0, layer=target.config.num_hidden_layers) + ".weight"]
        for name in RELEASES[target.family_name].wrapper
    )
    token_ids, positions = torch.tensor([[5, 9, 77, 31]]), torch.arange(4)[None]
    hidden = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    eps = getattr(target.config, target.family.norm_eps)
    offset = RELEASES[target.family_name].norm_offset

    def norm(rows: Tensor, weight: Tensor) -> Tensor:
        return (
            rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + offset)
        )

    halves = [norm(target.embed_tokens(token_ids), embedding_norm), norm(hidden, hidden_norm)]
    if target.family_name == "mimo":
        halves.reverse()
    with torch.no_grad():
        context = DenseContext()
        block = heads.mtp_modules[0].block(
            linear(torch.cat(halves, -1), projection.float()),
            position_embeddings=target.position_embeddings(hidden, positions),
            position_ids=positions,
            attention_context=context,
        )
        block = block[0] if isinstance(block, tuple) else block
        weight = target.model.base_model.norm.weight if last_norm is None else last_norm
        expected = norm(block, weight)
        output = heads.run_module(
            heads.mtp_modules[0],
            token_ids=token_ids,
            prev_hidden_states=hidden,
            position_ids=positions,
            context=DenseContext(),
        )
    torch.testing.assert_close(output.post_norm, expected, atol=1e-5, rtol=1e-5)


def test_checkpoint_loads_and_drafts_without_changing_the_text(
    target: Target, tmp_path: Path
) -> None:
    write_release(target, tmp_path)
    if target.family.loads_as is not None:
        change_config(tmp_path, {"auto_map": {"AutoConfig": "evil.Config"}})
    loaded = load_target(tmp_path, dtype="float32", device="cpu")
    assert loaded.family_name == target.family_name
    heads = load_heads(tmp_path, loaded)
    prompt = [5, 9, 77, 31, 2, 64]
    engine = EngineConfig(max_model_len=24)  # what sparse attention allows
    decoder = SpecDecoder(
        loaded, heads, spec=SpecSettings(policy="training", num_speculative_tokens=3), engine=engine
    )
    (record,) = decoder.generate([prompt], max_new_tokens=8)
    output = list(record.output_token_ids)  # ends early at a stop token
    assert len(output) >= 4
    assert output == oracle.greedy_text(loaded, prompt, 8)[: len(output)]


def test_remote_code_is_not_run_and_unknown_families_are_named(
    deepseek: Target, tmp_path: Path
) -> None:
    write_release(deepseek, tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    change_config(tmp_path, {"model_type": "own_model", "auto_map": code})
    with pytest.raises(ConfigError, match=r"\[.*'deepseek_v3'.*\], got model_type 'own_model'"):
        load_target(tmp_path, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_single_file_source_is_stitched_under_names_that_are_read(
    deepseek: Target, tmp_path: Path
) -> None:
    deepseek.model.save_pretrained(tmp_path / "plain")
    heads = tiny.tiny_heads(deepseek, num_mtp_modules=1)
    stitch_heads(heads, tmp_path / "new", source=tmp_path / "plain")
    assert not (tmp_path / "new" / "model.safetensors").exists()
    loaded = load_target(tmp_path / "new", dtype="float32", device="cpu")
    assert loaded.config.num_nextn_predict_layers == 1
    assert load_heads(tmp_path / "new", loaded).spec.num_mtp_modules == 1


def test_stacked_experts_are_read_and_written_as_they_are(deepseek: Target, tmp_path: Path) -> None:
    released = write_release(deepseek, tmp_path / "release")
    stack = "model.layers.2.mlp.experts."
    experts = {name: released.pop(name) for name in list(released) if name.startswith(stack)}
    gate_up = [
        torch.cat([experts[f"{stack}{e}.gate_proj.weight"], experts[f"{stack}{e}.up_proj.weight"]])
        for e in range(8)
    ]
    released[stack + "gate_up_proj"] = torch.stack(gate_up)
    down = [experts[f"{stack}{e}.down_proj.weight"] for e in range(8)]
    released[stack + "down_proj"] = torch.stack(down)
    change_mtp_file(tmp_path / "release", released)
    heads = load_heads(tmp_path / "release", deepseek)
    assert torch.equal(heads.mtp_modules[0].block.mlp.experts.down_proj[3], down[3].float())
    export_heads(heads, tmp_path / "alone", source=tmp_path / "release")
    assert_equal_tensors(load_file(tmp_path / "alone" / "model.safetensors"), released)


def test_fp8_blocks_are_dequantised_tensor_by_tensor(deepseek: Target, tmp_path: Path) -> None:
    released = write_release(deepseek, tmp_path)
    name = "model.layers.2.self_attn.o_proj.weight"
    scale = torch.tensor([[0.5]])
    released[name] = (released[name].float() / 0.5).to(torch.float8_e4m3fn)
    released[name + "_scale_inv"] = scale
    change_mtp_file(tmp_path, released)
    heads = load_heads(tmp_path, deepseek)
    weight = heads.mtp_modules[0].block.self_attn.o_proj.weight
    assert torch.equal(weight, released[name].float() * 0.5)
    del released[name + "_scale_inv"]
    change_mtp_file(tmp_path, released)
    with pytest.raises(IntegrityError, match=f"{name} is stored as torch.float8_e4m3fn"):
        load_heads(tmp_path, deepseek)


def test_scale_blocks_reach_the_last_rows_and_columns() -> None:
    from mtp_research.models.loading.quantised import dequantise

    stored = torch.ones(130, 300).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 7.0).view(2, 3)
    plain = dequantise({"w": stored, "w_scale_inv": scale})["w"]
    assert plain.shape == (130, 300)
    assert plain[127, 127] == 1
    assert plain[128, 299] == 6
    with pytest.raises(IntegrityError, match="needs a scale per tensor, row or 128 x 128 block"):
        dequantise({"w": stored, "w_scale_inv": scale[:, :2]})


def test_command_stitches_heads_and_names_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny.tiny_target("mimo_v2", dtype=torch.float32)
    write_release(target, tmp_path / "release")
    heads = tiny.tiny_heads(target, hidden_source="pre_norm")
    save_heads(heads, tmp_path / "head")
    words = ["--model", tmp_path / "release", "--head", tmp_path / "head", "--out"]
    words = [str(word) for word in words]
    assert export_command.main([*words, str(tmp_path / "new")]) == 0
    assert "3 MTP modules of family mimo_v2" in capsys.readouterr().out
    assert has_native_heads(tmp_path / "new", target)
    shard = "model-00001-of-00002.safetensors"
    assert (tmp_path / "new" / shard).samefile(tmp_path / "release" / shard)
    assert export_command.main([*words, str(tmp_path / "new")]) == 2
    assert "error: --out must be a missing or empty folder" in capsys.readouterr().err
    swapped = ["--model", words[1], "--head", str(tmp_path / "nowhere"), "--out", words[1]]
    assert export_command.main(swapped) == 2
    message = capsys.readouterr().err
    assert "--head" in message
    assert "spec.head" not in message
    assert export_command.main(["--model", str(tmp_path / "nowhere"), *swapped[2:]]) == 2
    message = capsys.readouterr().err
    assert "error: --model must" in message
    assert "set --model " in message
    assert "model.path" not in message
    (tmp_path / "head" / "model.safetensors").write_bytes(b"cut off")
    assert export_command.main([*words, str(tmp_path / "other")]) == 3
    message = capsys.readouterr().err
    assert message.startswith("error: cannot read")
    assert message.count("\n") == 1


def test_messages_of_the_loaders_name_the_options_of_the_command() -> None:
    text = "spec.head must be a folder, my.spec.head is none (a model.paths); set spec.head=PATH."
    wanted = "--head must be a folder, my.spec.head is none (a model.paths); set --head PATH."
    assert in_own_words(text, export_command._OPTIONS) == wanted
    assert in_own_words("leave them out; it must", {}) == "leave them out; it must"


def test_modules_of_a_release_start_training(deepseek: Target, tmp_path: Path) -> None:
    write_release(deepseek, tmp_path)
    target = load_target(tmp_path, dtype="float32", device="cpu")
    heads = tiny.tiny_heads(target, num_mtp_modules=1)
    init_heads(heads, init="native")
    assert torch.equal(
        heads.mtp_modules[0].eh_proj.weight,
        load_heads(tmp_path, target).mtp_modules[0].eh_proj.weight,
    )


FAULTS = {
    "missing": (
        lambda tensors: tensors.pop("model.layers.2.mlp.experts.7.up_proj.weight"),
        r"1 are missing \['model.layers.2.mlp.experts.7.up_proj.weight'\]",
    ),
    "extra": (
        lambda tensors: tensors.update(
            {"model.layers.2.mlp.experts.8.up_proj.weight": torch.zeros(1)}
        ),
        r"1 are extra \['model.layers.2.mlp.experts.8.up_proj.weight'\]",
    ),
    "shape": (
        lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.zeros(64, 64)}),
        r"model.layers.2.eh_proj.weight \[64, 64\], not \[64, 128\]",
    ),
    "copy": (
        lambda tensors: tensors.update(
            {"model.layers.2.embed_tokens.weight": torch.zeros(128, 64)}
        ),
        "model.layers.2.embed_tokens.weight must be a copy",
    ),
    "none": (lambda tensors: tensors.clear(), r"got 0 .num_nextn_predict_layers promises 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_tensors_are_refused_by_name(fault: str, deepseek: Target, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    tensors = write_release(deepseek, tmp_path)
    change(tensors)
    change_mtp_file(tmp_path, tensors)
    with pytest.raises(IntegrityError, match=message) as caught:
        load_heads(tmp_path, deepseek)
    assert caught.value.exit_code == 3


def test_checkpoint_of_another_family_as_head_says_so(deepseek: Target, tmp_path: Path) -> None:
    write_release(tiny.tiny_target("mimo_v2", dtype=torch.float32), tmp_path)
    with pytest.raises(ConfigError, match=r"family deepseek_v3, .* is a checkpoint without"):
        load_heads(tmp_path, deepseek)


def test_module_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    target = tiny.tiny_target("mimo_v2", dtype=torch.float32)
    tensors = write_release(target, tmp_path)
    first, last = "model.mtp.layers.0.", "model.mtp.layers.2."
    tensors |= {n.replace(first, last): t.clone() for n, t in tensors.items() if first in n}
    change_mtp_file(tmp_path, tensors)
    with pytest.raises(IntegrityError, match="modules 0 and 2 are equal"):
        load_heads(tmp_path, target)


def test_config_that_promises_more_modules_is_refused(deepseek: Target, tmp_path: Path) -> None:
    write_release(deepseek, tmp_path)
    change_config(tmp_path, {"num_nextn_predict_layers": 3})
    with pytest.raises(IntegrityError, match=r"got 1 .num_nextn_predict_layers promises 3"):
        load_heads(tmp_path, deepseek)


def test_missing_shard_is_named(deepseek: Target, tmp_path: Path) -> None:
    write_release(deepseek, tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"must hold model-00002-of-00002\.safetensors"):
        load_heads(tmp_path, deepseek)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors"])
def test_index_outside_its_folder_is_refused(file: str, deepseek: Target, tmp_path: Path) -> None:
    write_release(deepseek, tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"]["model.layers.2.enorm.weight"] = file
    path.write_text(json.dumps(content))
    with pytest.raises(IntegrityError, match="must name files of its own folder"):
        load_heads(tmp_path, deepseek)


def test_export_refuses_names_for_one_module_and_folders_in_use(tmp_path: Path) -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    heads = tiny.tiny_heads(target, num_mtp_modules=2)
    with pytest.raises(ConfigError, match=r"hold one MTP module, got 2"):
        export_heads(heads, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is not empty; name another"):
        export_heads(tiny.tiny_heads(target, num_mtp_modules=1), tmp_path)


def test_folder_of_a_plain_model_has_no_modules(tmp_path: Path) -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    target.model.save_pretrained(tmp_path)
    assert not has_native_heads(tmp_path, target)
    with pytest.raises(
        IntegrityError, match=r"must hold MTP modules, the first under mtp\.\*, got 0"
    ):
        load_native_heads(tmp_path, target)

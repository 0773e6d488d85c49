"""A target in a GGUF file: its weights and tokens, unpacked once; files that are no GGUF."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mtp_research import SpecDecoder, SpecSettings, load_target
from mtp_research.app import export_command
from mtp_research.app.preflight import described_target
from mtp_research.bench.shapes import sizes_only
from mtp_research.config.schema import ModelConfig
from mtp_research.heads.weights import save_heads
from mtp_research.models.loading.source import check_source, source_facts
from mtp_research.models.target import load_tokenizer
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from tests import tiny

gguf = pytest.importorskip("gguf")

TOKENS = ["<unk>", "<begin>", "<end>", "a", "b", "Ġ", "ab", "aba"]
TEMPLATE = "{% for message in messages %}<begin>{{ message['content'] }}<end>{% endfor %}<begin>"
SIZES = {
    "vocab_size": len(TOKENS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mtp_research" / "gguf"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).eval()


def interleaved(weight, num_heads):
    """Rows of a query or key projection as llama.cpp orders them: rotary pairs side by side."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def write_gguf(path, model, *, add_bos=None, pattern=None):
    """The model as GGUF, matrices in 8-bit blocks; its weights become what the blocks can hold."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b", "ab a"])
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if pattern is not None:
        writer.add_tokenizer_pre(pattern)
    heads = {"attn_q": SIZES["num_attention_heads"], "attn_k": SIZES["num_key_value_heads"]}
    for name, parameter in model.named_parameters():
        there = gguf_name(name)
        kind = there.split(".")[-2]
        weight = parameter.detach()
        if weight.dim() == 1:
            writer.add_tensor(there, weight.numpy())
            continue
        if kind in heads:
            weight = interleaved(weight, heads[kind])
        blocks = gguf.quants.quantize(weight.contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(there, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name):
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in outer:
        return f"{outer[stem]}.weight"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.weight"


@pytest.fixture
def file(tmp_path, model):
    path = tmp_path / "tiny.Q8_0.gguf"
    write_gguf(path, model)
    return path


def test_gguf_gives_the_weights_of_its_blocks(file, model):
    target = load_target(file, dtype="float32")
    found = dict(target.model.named_parameters())
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        # Half a step of an 8-bit block of 32 numbers, and bfloat16's 8 bits on top of it.
        step = parameter.detach().abs().max() / 127
        torch.testing.assert_close(found[name], parameter, atol=float(step), rtol=2**-8)


def test_gguf_decodes_as_transformers_does(file):
    target = load_target(file, dtype="float32")
    (record,) = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0)).generate(
        [[1, 3, 4, 5]], max_new_tokens=8
    )
    again = LlamaForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    text = again.generate(torch.tensor([[1, 3, 4, 5]]), max_new_tokens=8, do_sample=False)
    assert list(record.output_token_ids) == text[0, 4:].tolist()


def test_heads_of_a_gguf_target_are_exported_with_its_weights(file, tmp_path, capsys):
    target = load_target(file, dtype="float32")
    save_heads(tiny.tiny_heads(target, num_mtp_modules=1), tmp_path / "head")
    words = ["--model", str(file), "--head", str(tmp_path / "head"), "--out", str(tmp_path / "out")]
    assert export_command.main(words) == 0
    assert "1 MTP modules of family llama" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").is_file()
    words = [*words[:-1], str(tmp_path / "served"), "--for", "vllm", "--no-measure"]
    assert export_command.main(words) == 0
    assert "warning: vllm 0.24.0: how it runs heads of family llama is" in capsys.readouterr().out
    found = load_target(tmp_path / "out", dtype="float32").model.state_dict()
    for name, weight in target.model.state_dict().items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("is_unpacked", [False, True])
def test_sizes_of_a_plan_are_those_of_the_file(file, model, is_unpacked):
    if is_unpacked:
        load_target(file)
    sizes = sizes_only(ModelConfig("", "", str(file)), dtype=torch.float32)
    planned, built = (dict(one.named_parameters()) for one in (sizes.target.model, model))
    assert {n: p.shape for n, p in planned.items()} == {n: p.shape for n, p in built.items()}


def test_gguf_special_tokens_and_template_are_those_of_the_file(file):
    tokenizer = load_tokenizer(file)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<begin>", "<end>")
    assert tokenizer.unk_token == "<unk>"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False)
    assert ids == [1, 6, 2, 1]
    assert load_target(file).stop_token_ids == (2,)


def test_gguf_facts_name_the_file_and_how_it_packs(file, cache):
    path = str(file)
    assert source_facts(path) == {}
    assert check_source(path) is None
    target = load_target(path)
    (facts,) = source_facts(path).values()
    assert facts["file"] == "tiny.Q8_0.gguf"
    assert facts["num_tensors_by_type"] == {"Q8_0": 16, "F32": 5}
    assert facts["stored_as"] == "bfloat16"
    assert source_facts(target.path) == {"gguf": facts}
    assert check_source(path) == cache / target.path.split("/")[-1] / "config.json"


def test_gguf_is_unpacked_once_and_anew_when_it_changes(file, model):
    first = load_target(file).path
    assert load_target(file).path == first
    modes = {path.stat().st_mode for path in Path(first).iterdir()}
    assert len(modes) == 1, "weights may be read by whom the rest may"
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    file.unlink()
    write_gguf(file, model)
    again = load_target(file)
    assert again.path != first
    assert again.model.base_model.norm.weight.tolist() == [3.0] * SIZES["hidden_size"]


def test_gguf_cut_short_is_one_line_and_leaves_nothing(file, cache):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(IntegrityError, match="must be a whole GGUF file"):
        load_target(file)
    assert list(cache.iterdir()) == []


def test_gguf_wrong_paths_are_refused_before_anything_is_read(tmp_path, file, monkeypatch):
    with pytest.raises(ConfigError, match=r"must be a file that exists, '.*/no\.gguf' does not"):
        check_source(str(tmp_path / "no.gguf"))
    (tmp_path / "text.gguf").write_text(json.dumps({}))
    with pytest.raises(IntegrityError, match=r"must begin with b'GGUF', got b'\{\}'"):
        check_source(str(tmp_path / "text.gguf"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match=r"install mtp-research\[gguf\]"):
        check_source(str(file))


@pytest.mark.parametrize(
    ("said", "pattern", "begin"),
    [(True, None, (1,)), (None, "llama-bpe", (1,)), (False, "llama-bpe", ()), (None, "smollm", ())],
)
def test_text_begins_as_the_file_says_and_as_llama_cpp_does_where_it_does_not(
    tmp_path, model, said, pattern, begin
):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, add_bos=said, pattern=pattern)
    target = load_target(path)
    assert target.encode("ab") == (*begin, 6)
    assert target.encode("<begin>ab") == (1, 6)
    assert target.encode([{"role": "user", "content": "ab"}]) == (1, 6, 2, 1)


def test_a_file_is_described_by_what_is_in_it(file):
    assert described_target(str(file)) == ("tiny.Q8_0.gguf", "llama")

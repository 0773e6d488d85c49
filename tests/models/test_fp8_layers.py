"""Targets whose weights stay FP8 give the numbers and texts of the de-quantised ones."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from mtp_research.kernels.products.scaled_weights import FP8, dequantise
from safetensors.torch import save_file
from torch import nn

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EngineConfig, EvalConfig, TrainConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.init import init_heads
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads, save_heads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.fp8_layers import Fp8Linear, fp8_linear
from mtp_research.models.loading import kept_fp8
from mtp_research.models.target import Target, load_target, target_hashes
from mtp_research.runtime.errors import ConfigError
from mtp_research.training.unroll import RowInputs, unroll
from tests.decode.loops import run, small_pool, texts_of
from tests.decode.test_captured_loop import stand_in_for_graphs
from tests.models.test_loading import BLOCK, LAYOUTS, logits_of, quantise, read, save
from tests.tiny import tiny_heads, tiny_target
from tests.training.tiny import make_batch

SIZES = {"moe_intermediate_size": 40, "intermediate_size": 72}  # blocks of 32 are cut off
FORMS = ("stored_fp8", "stored")
KEPT = {"dtype": "float32", "device": "cpu", "weights": "stored_fp8"}


def stored_twice(folder: Path, layout: str, recipe: str = "glm4_moe") -> tuple[Target, Target]:
    """The same FP8 checkpoint, kept and de-quantised."""
    quantise(save(folder, recipe, **SIZES), layout=layout)
    return load_target(folder, **KEPT), load_target(folder, **KEPT | {"weights": "stored"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kept_target_gives_the_logits_of_the_dequantised_one(layout: str, tmp_path: Path) -> None:
    kept, plain = stored_twice(tmp_path, layout)
    found = {name: p for name, p in kept.model.named_parameters() if p.dtype == FP8}
    sizes = {name: p.shape for name, p in plain.model.named_parameters()}
    assert {name: p.shape for name, p in found.items()}.items() <= sizes.items()
    others = [name for name, p in plain.model.named_parameters() if name not in found]
    assert not [name for name in others if name.endswith("proj.weight")], (
        "all that was stored as FP8 is"
    )
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(others)
    assert any("experts.gate_up_proj" in name for name in found)
    torch.testing.assert_close(logits_of(kept), logits_of(plain), atol=2e-6, rtol=1e-5)
    assert kept.holds_fp8
    assert not plain.holds_fp8
    assert target_hashes(kept) == target_hashes(plain)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_kept_target_decodes_the_text_of_the_dequantised_one(
    num_drafts: int, layout: str, tmp_path: Path
) -> None:
    texts = []
    for target in stored_twice(tmp_path, layout):
        heads = tiny_heads(target) if num_drafts else None
        spec = SpecSettings(num_speculative_tokens=num_drafts, policy="training")
        texts.append(texts_of(run(SpecDecoder(target, heads, spec=spec, engine=small_pool(64)))))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_train_against_a_kept_target_as_against_the_dequantised_one(
    layout: str, tmp_path: Path
) -> None:
    losses = []
    for target in stored_twice(tmp_path, layout):
        heads = tiny_heads(target, num_mtp_modules=1).requires_grad_(True)
        init_heads(heads, init="target_last_layer")
        (output,) = unroll(heads, RowInputs(**make_batch(heads)), num_depths=1, kind="chain")
        loss = target.logits(output.post_norm).logsumexp(-1).mean()
        loss.backward()
        gradients = {name: p.grad for name, p in heads.named_parameters()}
        losses.append((loss, gradients, {n: p.detach() for n, p in heads.named_parameters()}))
    (kept, kept_gradients, started), (plain, gradients, expected) = losses
    torch.testing.assert_close(kept, plain, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(started[name], expected[name], atol=0, rtol=0)
        if gradient is not None:
            torch.testing.assert_close(kept_gradients[name], gradient, atol=1e-4, rtol=1e-3)


def test_head_of_plain_weights_runs_on_the_fp8_copy_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, plain = stored_twice(tmp_path / "target", "rows")
    for folder, target in (("plain", plain), ("kept", kept)):
        save_heads(tiny_heads(target, num_mtp_modules=1), tmp_path / folder)
    record = json.loads((tmp_path / "kept" / "head.json").read_text())["target"]
    assert record["holds_fp8"] is True
    for folder, target, warns in (("plain", plain, 0), ("plain", kept, 1), ("kept", plain, 1)):
        caplog.clear()
        load_heads(tmp_path / folder, target)
        assert caplog.text.count("acceptance may differ") == warns
    caplog.clear()
    load_heads(tmp_path / "kept", kept)
    assert not caplog.records


def test_deterministic_decoding_of_fp8_weights_is_refused(tmp_path: Path) -> None:
    kept, _ = stored_twice(tmp_path, "blocks")
    spec = SpecSettings(num_speculative_tokens=0)
    engine = dataclasses.replace(small_pool(64), deterministic=True)
    with pytest.raises(ConfigError, match=r"no batch-invariant products .* model\.keep_fp8=false"):
        SpecDecoder(kept, spec=spec, engine=engine)


@pytest.mark.parametrize(
    ("schema", "words", "key"),
    [
        (EvalConfig, "model.tp_plan=tensor", "model.tp_plan"),
        (EvalConfig, "model.device_map=auto", "model.device_map"),
        (EvalConfig, "model.experts=grouped_mm", "model.experts"),
        (EvalConfig, "model.dtype=float64", "model.dtype"),
        (EvalConfig, "engine.deterministic=true", "engine.deterministic"),
        (EvalConfig, "backend=[own,transformers]", "model.keep_fp8"),
        (TrainConfig, "task=target", "model.keep_fp8"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_keys_that_do_not_go_with_fp8_are_refused(schema: type, words: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be "):
        compose_config(schema, ["model.keep_fp8=true", words])


def test_layers_that_something_else_reads_are_dequantised(tmp_path: Path) -> None:
    """Latent attention multiplies by `kv_b_proj` itself, and recurrent layers are code of ours."""
    for recipe, plain_part in (("deepseek_v3", "kv_b_proj"), ("qwen3_next", "linear_attn")):
        kept, plain = stored_twice(tmp_path / recipe, "blocks", recipe)
        for name, parameter in kept.model.named_parameters():
            assert not (plain_part in name and parameter.dtype == FP8), name
        torch.testing.assert_close(logits_of(kept), logits_of(plain), atol=2e-6, rtol=1e-5)


def test_layer_with_scales_of_two_layouts_is_dequantised(tmp_path: Path) -> None:
    """One expert with a scale per row beside others with blocks; and a scale of a whole matrix."""
    quantise(save(tmp_path, "glm4_moe", **SIZES))
    path = tmp_path / "model.safetensors"
    tensors = read(path)
    other = next(name for name in tensors if "experts.1.down_proj.weight_scale" in name)
    tensors[other] = torch.ones(len(tensors[other.removesuffix("_scale_inv")]), 1)
    whole = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    tensors[whole] = torch.tensor(1 / 64)
    save_file(tensors, path, metadata={"format": "pt"})
    kept, plain = (load_target(tmp_path, **KEPT | {"weights": form}) for form in FORMS)
    stack = kept.model.get_submodule(other.partition(".1.down_proj")[0])
    assert {p.dtype for p in stack.parameters()} == {torch.float32}
    layer = kept.model.get_submodule(whole.removesuffix(".weight_scale_inv"))
    assert isinstance(layer, Fp8Linear)
    assert (layer.block, layer.weight_scale.shape) == (0, (layer.out_features, 1))
    torch.testing.assert_close(logits_of(kept), logits_of(plain), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block", [32, 0])
def test_linear_layer_multiplies_by_the_numbers_that_it_stands_for(block: int) -> None:
    layer = Fp8Linear(nn.Linear(40, 70), block=block)
    assert layer.weight_scale.shape == ((3, 2) if block else (70, 1))
    layer.weight.copy_(torch.randn(70, 40).to(FP8))
    layer.weight_scale.copy_(torch.rand(layer.weight_scale.shape))
    scale = layer.weight_scale
    if block:
        scale = scale.repeat_interleave(32, 0)[:70].repeat_interleave(32, 1)[:, :40]
    x = torch.randn(2, 3, 40)
    expected = x @ (layer.weight.float() * scale).T + layer.bias
    torch.testing.assert_close(layer(x), expected)
    operands = (layer.weight, layer.weight_scale, layer.bias.detach(), block)
    torch.library.opcheck(fp8_linear, (x, *operands), test_utils="test_faketensor")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_fp8_target_is_built_from_a_config_alone(layout: str, tmp_path: Path) -> None:
    quantise(save(tmp_path, "glm4_moe", **SIZES), layout=layout)
    stored = load_target(tmp_path, **KEPT)
    (tmp_path / "model.safetensors").unlink()
    drawn = load_target(tmp_path, **KEPT | {"weights": "random_fp8"})
    forms = [
        {name: (p.dtype, p.shape) for name, p in target.model.state_dict().items()}
        for target in (stored, drawn)
    ]
    assert forms[0] == forms[1]
    assert logits_of(drawn).isfinite().all()
    width = drawn.config.initializer_range
    layer = drawn.model.get_submodule("model.layers.0.self_attn.q_proj")
    numbers = layer.weight.float() * layer.weight_scale.max()
    assert numbers.std().item() == pytest.approx(width, rel=0.1)


def test_layers_that_a_config_names_stay_plain_in_a_random_target(tmp_path: Path) -> None:
    quantise(save(tmp_path, "glm4_moe", **SIZES))
    model = load_target(tmp_path, **KEPT | {"weights": "stored"}).model
    names = ["model.layers.0.mlp.gate", "re:.*q_proj$", "model.layers.1.mlp.shared_experts"]
    model.config.quantization_config = LAYOUTS["rows"] | {"ignore": names}
    blocks = kept_fp8.random_blocks(model, model.config)
    assert set(blocks.values()) == {0}
    assert not [name for name in blocks if "shared_experts" in name or "q_proj" in name]
    assert {"model.layers.0.self_attn.k_proj", "model.layers.1.mlp.experts"} <= blocks.keys()
    assert "model.layers.0.mlp.gate_proj" in blocks, "gate is no part of its name"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "needs matrices of decoder layers that are stored as FP8"),
        ({"device_map": "auto"}, "keep_fp8=true does not go with model.device_map"),
        ({"experts": "grouped_mm"}, "grouped_mm does not know FP8 weights"),
    ],
    ids=["plain", "map", "grouped"],
)
def test_what_does_not_go_with_fp8_is_refused(how: dict, message: str, tmp_path: Path) -> None:
    save(tmp_path, "glm4_moe", **SIZES)
    if how:
        quantise(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_target(tmp_path, **KEPT, **how)


def test_oblong_blocks_are_refused_where_they_would_stay(tmp_path: Path) -> None:
    quantise(save(tmp_path, "glm4_moe", **SIZES))
    config = tiny_target("glm4_moe").config
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [BLOCK, 1]}
    with pytest.raises(ConfigError, match="square blocks, powers of two from 16 on, got 32 x 1"):
        kept_fp8.square_block(config)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [128, 0], ids=["blocks", "rows"])
@torch.inference_mode()
def test_linear_layer_on_gpu_is_the_plain_product_for_any_number_of_rows(block: int) -> None:
    layer = Fp8Linear(nn.Linear(1408, 4096, device="cuda"), block=block)
    layer.weight.copy_(torch.randn(4096, 1408, device="cuda").mul_(64).to(FP8))
    layer.weight_scale.uniform_(0.5, 1.0).div_(64 * 1408**0.5)
    layer.bias.data = layer.bias.data.bfloat16()
    plain = dequantise(layer.weight, layer.weight_scale, block=block, dtype=torch.float32)
    for num_rows in (0, 1, 7, 32, 128, 129, 1000):  # the kernel's, and those of a plain copy
        x = torch.randn(2, num_rows, 1408, device="cuda", dtype=torch.bfloat16)[:1]
        expected = x.float() @ plain.T + layer.bias.float()
        torch.testing.assert_close(layer(x).float(), expected, atol=5e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_kept_target_decodes_captured_steps_on_gpu(
    num_drafts: int, layout: str, tmp_path: Path
) -> None:
    """Sizes that divide by 32, so that projections are merged; logits are those of plain copies."""
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 96}
    quantise(save(tmp_path, "glm4_moe", **sizes), layout=layout)
    how = {"dtype": "bfloat16", "device": "cuda"}
    kept, plain = (load_target(tmp_path, **how, weights=form) for form in FORMS)
    ids = torch.arange(5, 25, device="cuda")[None]
    found = []
    with torch.inference_mode():
        for target in (kept, plain):
            context = DenseContext()
            positions = torch.arange(20, device="cuda")[None]
            hidden = target.forward(ids, position_ids=positions, context=context)
            found.append(target.logits(hidden.post_norm).float())
    error = (found[0] - found[1]).norm() / found[1].norm()
    assert error < 0.05, f"relative difference of logits {error:.3f}"
    heads = tiny_heads(kept, num_mtp_modules=1) if num_drafts else None
    spec = SpecSettings(num_speculative_tokens=num_drafts, policy="training")
    assert_captured_texts_but_for_ties(kept, heads, spec, compile=True)


def assert_captured_texts_but_for_ties(
    target: Target, heads: MTPHeads | None, spec: SpecSettings, **changes: bool
) -> None:
    """Captured steps give the plain loop's texts, up to a token that rounding may decide."""
    prompts = [list(range(5, 5 + length)) for length in (3, 9, 20)]
    sampling = SamplingParams(max_new_tokens=16)
    texts = []
    for how in ({}, {"cuda_graphs": True, "capture_mixed": True, **changes}):
        sizes = {"max_num_requests": 4, "max_model_len": 128}
        engine = EngineConfig(**sizes, deferred_output=True, audit=False, **how)
        decoder = SpecDecoder(target, heads, spec=spec, engine=engine)
        texts.append(texts_of(run(decoder, prompts, sampling=sampling)))
    for index, prompt in enumerate(prompts):
        plain, captured = (list(found[str(index)]) for found in texts)
        assert len(captured) == 16
        assert_equal_up_to_a_tie(target, prompt, plain, captured)


@torch.inference_mode()
def assert_equal_up_to_a_tie(
    target: Target, prompt: list[int], left: list[int], right: list[int]
) -> None:
    """Where texts part, the logits of both tokens differ by little of what logits differ by."""
    pairs = enumerate(zip(left, right, strict=True))
    first = next((place for place, (one, other) in pairs if one != other), None)
    if first is None:
        return
    device = target.embed_tokens.weight.device
    text = torch.tensor([[*prompt, *left[:first]]], device=device)
    positions = torch.arange(text.shape[1], device=device)[None]
    hidden = target.forward(text, position_ids=positions, context=DenseContext())
    logits = target.logits(hidden.post_norm[0, -1]).float()
    gap = (logits[left[first]] - logits[right[first]]).abs() / logits.std()
    assert gap < 0.1, f"texts part at token {first} with a gap of {gap:.3f} deviations"


def test_texts_that_part_without_a_tie_are_seen() -> None:
    target, prompt = tiny_target("qwen3", dtype=torch.float32), [5, 6, 7]
    hidden = target.forward(
        torch.tensor([prompt]), position_ids=torch.arange(3)[None], context=DenseContext()
    )
    best, *_, worst = target.logits(hidden.post_norm[0, -1]).argsort(descending=True).tolist()
    assert_equal_up_to_a_tie(target, prompt, [best, 1], [best, 1])
    with pytest.raises(AssertionError, match="part at token 0"):
        assert_equal_up_to_a_tie(target, prompt, [best, 1], [worst, 1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stand_in_captured_steps_of_a_kept_target_give_the_plain_texts(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_graphs(monkeypatch)
    kept, _ = stored_twice(tmp_path, layout)
    heads = tiny_heads(kept, num_mtp_modules=1)
    assert_captured_texts_but_for_ties(kept, heads, SpecSettings(policy="training"))

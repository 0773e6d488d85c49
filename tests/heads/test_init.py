"""What modules start from: copies, replicas; which parts are frozen."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtp_research.config.training_schema import HeadConfig
from mtp_research.heads import init
from mtp_research.heads.init import freeze_parts, init_heads
from mtp_research.heads.weights import save_heads
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.training.setup import build_heads
from tests.tiny import tiny_heads, tiny_target
from tests.training.tiny import save_lab


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("glm4_moe", dtype=torch.float32)


def test_replicate_gives_each_module_the_weights_of_the_one(target: Target, tmp_path: Path) -> None:
    one = tiny_heads(target, num_mtp_modules=1, seed=3)
    save_heads(one, tmp_path)
    three = tiny_heads(target, num_mtp_modules=3)
    init_heads(three, init="replicate", path=tmp_path)
    expected = one.mtp_modules[0].state_dict()
    for module in three.mtp_modules:
        state = module.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    storages = {module.eh_proj.weight.data_ptr() for module in three.mtp_modules}
    assert len(storages) == 3, "modules are tuned apart, so they must not share memory"


def test_replicate_of_several_modules_is_refused(target: Target, tmp_path: Path) -> None:
    save_heads(tiny_heads(target, num_mtp_modules=2), tmp_path)
    with pytest.raises(ConfigError, match="one module"):
        init_heads(tiny_heads(target), init="replicate", path=tmp_path)
    with pytest.raises(ConfigError, match=r"head\.path"):
        init_heads(tiny_heads(target), init="replicate")


def test_replicate_of_another_size_is_refused(target: Target, tmp_path: Path) -> None:
    dense = tiny_target("qwen3", dtype=torch.float32)
    save_heads(tiny_heads(dense, num_mtp_modules=1), tmp_path)
    with pytest.raises(IntegrityError, match="does not fit"):
        init_heads(tiny_heads(target), init="replicate", path=tmp_path)


def test_native_of_a_target_without_mtp_layers_is_refused(target: Target) -> None:
    with pytest.raises(ConfigError, match=r"set head\.init=target_last_layer"):
        init_heads(tiny_heads(target), init="native")


def test_native_with_other_conventions_names_the_key(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "has_native_heads", lambda folder, target: True)
    monkeypatch.setattr(init, "num_published_modules", lambda folder, target: 5)
    heads = tiny_heads(target, hidden_source="pre_norm")
    with pytest.raises(
        ConfigError, match=r"set head\.hidden_source=post_norm head\.num_mtp_modules=5\.$"
    ):
        init_heads(heads, init="native")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("experts", lambda name: ".experts." in name),
        ("mtp_modules.0", lambda name: name.startswith("mtp_modules.0.")),
        ("*.self_attn.*", lambda name: ".self_attn." in name),
    ],
    ids=["part", "module", "pattern"],
)
def test_freeze_parts_stops_gradients_of_what_matches(target: Target, pattern, expected) -> None:
    heads = tiny_heads(target).requires_grad_(True)
    frozen = freeze_parts(heads, patterns=[pattern])
    assert frozen
    for name, parameter in heads.named_parameters():
        assert parameter.requires_grad == (not expected(name)), name
    assert set(frozen) == {name for name, p in heads.named_parameters() if not p.requires_grad}


def test_freeze_parts_refuses_what_matches_nothing_or_everything(target: Target) -> None:
    heads = tiny_heads(target).requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'expert' matches none; parts are .*experts"):
        freeze_parts(heads, patterns=["expert"])
    with pytest.raises(ConfigError, match="leaves no parameter"):
        freeze_parts(heads, patterns=["mtp_modules"])
    assert all(parameter.requires_grad for parameter in heads.parameters())


def test_module_starts_from_the_last_layer_with_its_attention() -> None:
    target = tiny_target("gemma3", dtype=torch.float32)
    heads = tiny_heads(target, num_mtp_modules=1)
    init_heads(heads, init="target_last_layer")
    layers = target.model.base_model.layers
    assert target.config.layer_types[1:] == ["full_attention", "sliding_attention"]
    expected = layers[1].self_attn.q_proj.weight
    assert torch.equal(heads.mtp_modules[0].block.self_attn.q_proj.weight, expected)


def test_block_of_two_layers_starts_from_the_last_layer_of_each_type() -> None:
    target = tiny_target("nemotron_h", dtype=torch.float32)
    heads = tiny_heads(target, num_mtp_modules=1)
    init_heads(heads, init="target_last_layer")
    block, layers = heads.mtp_modules[0].block, target.model.base_model.layers
    kinds = ["linear_attention", "moe", "full_attention", "moe"]
    assert [layer.block_type for layer in layers] == kinds
    assert torch.equal(block.layers[0].mixer.q_proj.weight, layers[2].mixer.q_proj.weight)
    assert torch.equal(block.mlp.experts.up_proj, layers[3].mixer.experts.up_proj)


@pytest.mark.parametrize("init", ["random", "target_last_layer"])
def test_training_seed_chooses_the_weights_to_start_from(init: str, tmp_path: Path) -> None:
    config = save_lab(tmp_path, num_documents=8)
    target = load_target(config.model.path, device="cpu")
    config.head = HeadConfig(num_mtp_modules=2, init=init, module_schedule="last")
    assert config.objective.unroll == "chain"

    def start(seed: int) -> dict[str, torch.Tensor]:
        heads = build_heads(replace(config, seed=seed), target=target)
        assert heads.spec.module_schedule == "last"
        return {name: tensor for name, tensor in heads.named_parameters() if tensor.dim() > 1}

    first, again, other = start(0), start(0), start(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    twins = [name for name in first if name.startswith("mtp_modules.0.")]
    assert not any(
        torch.equal(first[name], first[name.replace("mtp_modules.0.", "mtp_modules.1.")])
        for name in twins
    )


def test_init_noise_is_relative_to_each_matrix_and_zero_copies() -> None:
    target = tiny_target("glm4_moe", dtype=torch.float32)
    exact, noisy = tiny_heads(target), tiny_heads(target)
    init_heads(exact, init="target_last_layer")
    init_heads(noisy, init="target_last_layer", noise=0.1)
    pairs = zip(exact.named_parameters(), noisy.parameters(), strict=True)
    for (name, before), after in pairs:
        if before.dim() == 1:
            assert torch.equal(before, after), name
        else:
            rms = before.square().mean().sqrt()
            assert float((after - before).std() / rms) == pytest.approx(0.1, rel=0.2), name

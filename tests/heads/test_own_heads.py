"""Modules with an output head of their own, as Step-3.5 publishes them."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.export import export_heads, stitch_heads
from mtp_research.heads.init import init_heads
from mtp_research.heads.native import read_index
from mtp_research.heads.weights import load_heads, save_heads
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.errors import ConfigError
from tests import oracle, tiny
from tests.heads.release import write_release

PROMPT = [5, 9, 77, 31, 2, 64]


@pytest.fixture
def step() -> Target:
    return tiny.tiny_target("step3p5", dtype=torch.float32)


def test_each_module_uses_its_own_head() -> None:
    target = tiny.tiny_target("qwen3")
    heads = tiny.tiny_heads(target, owns_lm_head=True)
    rows = torch.randn(2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for index, module in enumerate(heads.mtp_modules):
        expected = linear(rows, module.shared_head.head.weight)
        assert torch.equal(heads.logits(rows, module_idx=index), expected)
        assert not torch.allclose(expected, target.logits(rows))
    with pytest.raises(AssertionError, match="say which one"):
        heads.logits(rows)


@pytest.mark.parametrize("policy", ["training", "eagle"])
def test_drafts_come_from_the_head_of_the_pass_s_module(policy: str) -> None:
    target = tiny.tiny_target("qwen3")
    heads = tiny.tiny_heads(target, num_mtp_modules=2, owns_lm_head=True)
    engine = EngineConfig(deferred_output=False)
    decoder = SpecDecoder(
        target, heads, spec=SpecSettings(policy=policy, num_speculative_tokens=3), engine=engine
    )
    request = decoder.add_request(PROMPT, sampling=SamplingParams(max_new_tokens=12))
    for _ in range(3):
        decoder.step()
        expected, _ = oracle.DRAFTS[policy](heads, list(request.token_ids), 3)
        assert list(request.draft_token_ids) == expected


def test_own_heads_are_kept_in_our_format(step: Target, tmp_path: Path) -> None:
    write_release(step, tmp_path / "release")
    heads = load_heads(tmp_path / "release", step)
    assert heads.spec.owns_lm_head
    save_heads(heads, tmp_path / "head")
    loaded = load_heads(tmp_path / "head", step)
    assert loaded.spec == heads.spec
    expected = heads.state_dict()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in loaded.state_dict().items())


def test_own_heads_are_not_trained(step: Target, tmp_path: Path) -> None:
    write_release(step, tmp_path)
    target = load_target(tmp_path, dtype="float32", device="cpu")
    heads = tiny.tiny_heads(target, hidden_source="pre_norm", recycle_norm="pre_norm")
    with pytest.raises(ConfigError, match=r"not trained; set head\.init=target_last_layer"):
        init_heads(heads, init="native")


def test_heads_on_the_target_s_lm_head_are_exported_with_copies_of_it(
    step: Target, tmp_path: Path
) -> None:
    write_release(step, tmp_path / "release")
    heads = tiny.tiny_heads(step)
    for parameter in heads.parameters():
        parameter.data = parameter.data.bfloat16().float()
    stitch_heads(heads, tmp_path / "new", source=tmp_path / "release")
    loaded = load_heads(tmp_path / "new", step)
    rows = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    for module in range(3):
        assert torch.equal(loaded.logits(rows, module_idx=module), heads.logits(rows))


def test_own_heads_are_exported_alone_under_their_names(step: Target, tmp_path: Path) -> None:
    export_heads(tiny.tiny_heads(step, owns_lm_head=True), tmp_path)
    names = {name for name in read_index(tmp_path).files if "shared_head.output" in name}
    assert names == {
        f"model.layers.{layer}.transformer.shared_head.output.weight" for layer in (3, 4, 5)
    }

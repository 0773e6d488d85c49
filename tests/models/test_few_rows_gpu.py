"""Captured steps with our products, launched one by one and overlapping, on a CUDA device."""

import pytest
import torch
from mtp_research.kernels.products.few_rows_product import FewRowsConfig, few_rows_product
from torch import Tensor

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.models.rewrites import products as few_rows
from tests import tiny
from tests.decode.loops import PROMPTS, run, texts_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("overlaps", [False, True], ids=["one_by_one", "overlapping"])
def test_captured_steps_with_our_products_decode_what_the_plain_loop_decodes(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []  # whether each was gated

    def counted(*operands: Tensor, is_gated: bool = False, config: FewRowsConfig) -> Tensor:
        calls.append(is_gated)
        return few_rows_product(*operands, is_gated=is_gated, config=config)

    def choose(*_: int, **__: torch.dtype) -> FewRowsConfig:
        return FewRowsConfig(16, 32, 2, 3)

    monkeypatch.setattr(few_rows, "few_rows_product", counted)
    monkeypatch.setattr(few_rows, "has_config", lambda *_, **__: True)
    monkeypatch.setattr(few_rows, "choose_config", choose)
    monkeypatch.setattr(few_rows, "choose_gated_config", choose)
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    heads = tiny.tiny_heads(target, num_mtp_modules=2)
    target.model.to("cuda")
    heads.to("cuda")
    sampling = [SamplingParams(max_new_tokens=count, seed=count) for count in (24, 9, 17, 30)]

    def decode(**changes: bool) -> dict[str, list[int]]:
        engine = EngineConfig(max_num_requests=3, deferred_output=True, audit=False, **changes)
        return texts_of(run(SpecDecoder(target, heads, engine=engine), PROMPTS, sampling=sampling))

    plain = decode()
    assert calls == []
    assert decode(cuda_graphs=True, compile=True, overlap_launches=overlaps) == plain
    assert True in calls
    assert False in calls

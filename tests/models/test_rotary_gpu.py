"""Captured steps whose attention launch rotates the rows, on a CUDA device."""

import pytest
import torch
from mtp_research.kernels.attention.store_kv import NewRows
from torch import Tensor

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.rewrites import region_pass
from tests import tiny
from tests.decode.loops import PROMPTS, run, texts_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("recipe", "num_modules", "changes"),
    [
        pytest.param("mimo", 2, {}, id="bias"),
        pytest.param("qwen3", 2, {}, id="norm_before"),
        pytest.param("glm4_moe", 0, {"first_k_dense_replace": 2}, id="half_of_the_dims"),
        pytest.param("exaone_moe", 0, {"mlp_layer_types": ["dense"] * 2}, id="one_layer_rotates"),
    ],
)
def test_captured_steps_that_rotate_in_attention_decode_what_the_plain_loop_decodes(
    recipe: str, num_modules: int, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []  # whether each got angles

    def counted(*parts: Tensor) -> NewRows:
        rows = NewRows(*parts)
        calls.append(rows.cos is not None)
        return rows

    monkeypatch.setattr(region_pass, "NewRows", counted)
    target = tiny.tiny_target(recipe, dtype=torch.float32, **changes)
    heads = tiny.tiny_heads(target, num_mtp_modules=num_modules) if num_modules else None
    target.model.to("cuda")
    if heads is not None:
        heads.to("cuda")
    sampling = [SamplingParams(max_new_tokens=count, seed=count) for count in (24, 9, 17, 30)]

    def decode(**settings: bool) -> dict[str, list[int]]:
        calls.clear()
        engine = EngineConfig(
            max_num_requests=3,
            max_prefill_chunk=4,
            graph_batch_sizes=[3],  # each size is compiled
            deferred_output=True,
            audit=False,
            **settings,
        )
        spec = SpecSettings(num_speculative_tokens=0 if heads is None else 3)
        decoder = SpecDecoder(target, heads, spec=spec, engine=engine)
        return texts_of(run(decoder, PROMPTS, sampling=sampling))

    plain = decode()
    assert calls == []
    before = decode(cuda_graphs=True, compile=True, rotary_in_attention=False)
    assert before == plain, "compiled, rotated before attention"
    assert not any(calls)
    rotated = decode(cuda_graphs=True, compile=True, rotary_in_attention=True)
    assert any(calls)
    assert all(calls) == (recipe != "exaone_moe")  # whose other layer knows no positions
    assert rotated == plain, "compiled, rotated in attention"

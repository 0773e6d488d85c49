"""MTP modules rotate as the target does, whatever scaling it has: in training and in the loop."""

import pytest
import torch
from torch import Tensor

from mtp_research import EngineConfig, SamplingParams, SpecDecoder, SpecSettings
from mtp_research.config.schema import ModelConfig, TrainConfig
from mtp_research.config.training_schema import DataConfig
from mtp_research.data.packing import EncodedDocument
from mtp_research.models.attention.attention import DenseContext
from mtp_research.runtime.errors import ConfigError
from mtp_research.training.documents import HeadDocuments
from mtp_research.training.packed_rows import pack_rows
from mtp_research.training.unroll import RowInputs, unroll
from tests.tiny import tiny_heads, tiny_target
from tests.training.tiny import make_batch

LIMIT = 96  # max_position_embeddings
THETA = 1e4
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 24},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 12,
    },
    "longrope": {
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 48,
    },
}


def scaled_heads(kind):
    parameters = {"rope_type": kind, "rope_theta": THETA, **SCALINGS[kind]}
    target = tiny_target("qwen3", rope_parameters=parameters, max_position_embeddings=LIMIT)
    return tiny_heads(target, num_mtp_modules=1)


class Angles:
    """Cos and sin that layers were called with, by position."""

    def __init__(self, *layers):
        self.found: dict[int, Tensor] = {}
        for layer in layers:
            layer.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, _, __, keywords):
        rows = torch.cat(keywords["position_embeddings"], dim=-1).flatten(0, 1)
        for position, row in zip(keywords["position_ids"].flatten().tolist(), rows, strict=True):
            assert torch.equal(self.found.setdefault(position, row.clone()), row)


@pytest.mark.parametrize("kind", SCALINGS)
def test_modules_get_the_target_s_angles_in_training_and_in_the_loop(kind):
    heads = scaled_heads(kind)
    target = heads.target
    ours, theirs = (
        Angles(layer) for layer in (heads.mtp_modules[0].block, target.model.base_model.layers[0])
    )
    unroll(heads, RowInputs(**make_batch(heads)), num_depths=3, kind="ttt")
    assert ours.found.keys() >= set(range(8))
    trained = dict(ours.found)
    decoder = SpecDecoder(
        target,
        heads,
        spec=SpecSettings(policy="eagle", num_speculative_tokens=3),
        engine=EngineConfig(max_model_len=40),
    )
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    assert len(list(decoder.generate(prompts, sampling=SamplingParams(max_new_tokens=20)))) == 2
    assert ours.found.keys() > trained.keys()  # what both used was compared on the way
    shared = ours.found.keys() & theirs.found.keys()
    assert len(shared) > 20
    for position in shared:
        assert torch.equal(ours.found[position], theirs.found[position]), position
    if kind not in ("default", "dynamic"):
        plain = scaled_heads("default").target
        hidden = torch.zeros(1, 1, 64, dtype=torch.float64)
        cos, sin = plain.position_embeddings(hidden, torch.tensor([[20]]))
        assert not torch.allclose(theirs.found[20], torch.cat((cos, sin), dim=-1)[0, 0])


@pytest.mark.parametrize("kind", SCALINGS)
def test_angles_of_a_row_do_not_depend_on_the_others(kind):
    """The library's own change with the longest text of a pass, for two of these kinds."""
    target = scaled_heads(kind).target
    hidden = torch.zeros(1, 2, 64, dtype=torch.float64)
    before = target.position_embeddings(hidden, torch.tensor([[3, 20]]))
    beside = target.position_embeddings(hidden, torch.tensor([[3, 2 * LIMIT]]))
    assert torch.equal(before[0][:, 0], beside[0][:, 0])
    after = target.position_embeddings(hidden, torch.tensor([[3, 20]]))
    assert torch.equal(before[0], after[0])


@pytest.mark.parametrize(("kind", "limit"), [("dynamic", LIMIT), ("longrope", 48)])
def test_texts_beyond_the_fixed_frequencies_are_refused(kind, limit):
    target = scaled_heads(kind).target
    spec = SpecSettings(num_speculative_tokens=0)
    with pytest.raises(ConfigError, match=rf"set engine\.max_model_len={limit}\."):
        SpecDecoder(target, spec=spec, engine=EngineConfig(max_model_len=limit + 1))
    SpecDecoder(target, spec=spec, engine=EngineConfig(max_model_len=limit))


def test_training_rows_beyond_the_fixed_frequencies_are_refused():
    document = EncodedDocument("one", "code", tuple(range(3, 23)), (False,) * 5 + (True,) * 15)
    data = DataConfig("", seq_len=49, eval_documents=1)
    config = TrainConfig(model=ModelConfig("tiny", "qwen3", "", device="cpu"), data=data)
    documents = HeadDocuments([document], [document], num_short=0, data_sha256="none")
    fixed = {"documents": documents, "num_depths": 3}
    with pytest.raises(ConfigError, match=r"set data\.seq_len=48\."):
        pack_rows(config, target=scaled_heads("longrope").target, **fixed)
    rows = pack_rows(config, target=scaled_heads("yarn").target, **fixed)
    assert rows["train"].token_ids.shape[1] == 49


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_target_computes_what_the_library_does(kind):
    target = scaled_heads(kind).target
    ids = torch.arange(40)[None] + 3
    positions = torch.arange(40)[None]
    with torch.no_grad():
        ours = target.forward(ids, position_ids=positions, context=DenseContext()).post_norm
        target.model.set_attn_implementation("sdpa")
        rotary = target.model.base_model.rotary_emb
        rotary.rope_type = kind  # as it was before we wrapped the model
        library = target.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours, library, rtol=0, atol=1e-10)

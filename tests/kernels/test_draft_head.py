import pytest
import torch
from mtp_research.kernels.draft_head import draft_head, draft_head_ref

from tests.kernels.kernel_cases import HEAD_CASES, make_head_inputs
from tests.kernels.slow import assert_draft_head_close, slow_draft_head

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", HEAD_CASES, ids=lambda case: case.name)
def test_draft_head_ref_matches_slow_loop(case, dtype):
    hidden, keywords = make_head_inputs(case, dtype=dtype)
    out = draft_head_ref(hidden, **keywords)
    assert_draft_head_close(out, slow_draft_head(hidden, **keywords), atol=TOLERANCES[dtype])


def test_draft_head_equal_logits_give_the_smallest_token():
    weight = torch.zeros(300, 16)
    weight[[70, 131, 299]] = 1.0
    assert draft_head(torch.ones(2, 16), weight=weight).token_ids.tolist() == [70, 70]


def test_draft_head_nan_row_stays_inside_the_vocabulary():
    hidden = torch.ones(2, 16)
    hidden[1, 3] = torch.nan
    out = draft_head(hidden, weight=torch.ones(70, 16))
    assert 0 <= out.token_ids[1] < 70
    assert out.logsumexp.isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 2, 16)}, r"hidden must have shape \[R, D\]"),
        ({"weight": torch.zeros(20, 15)}, r"weight must have shape \[V, D\] = \[20, 16\]"),
        ({"weight": torch.zeros(20, 16).double()}, "weight must have dtype torch.float32"),
        ({"norm_weight": torch.ones(15)}, "norm_weight must have shape"),
        ({"backend": "triton"}, "TRITON_INTERPRET=1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_draft_head_wrong_input_names_it(change, message):
    arguments = {"hidden": torch.zeros(3, 16), "weight": torch.zeros(20, 16), **change}
    with pytest.raises(ValueError, match=message):
        draft_head(**arguments)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
def test_draft_head_op_passes_opcheck(norm):
    gain = torch.ones(16) if norm else None
    arguments = (torch.randn(3, 16), torch.randn(20, 16), gain, 1e-6, "reference")
    torch.library.opcheck(torch.ops.mtp_research.draft_head.default, arguments)


def test_draft_head_compiled_fullgraph_gives_the_same():
    hidden, keywords = make_head_inputs(HEAD_CASES[1], dtype=torch.float32)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(rows):
        out = draft_head(rows * 1, **keywords)
        return out.token_ids + 1, out.top_logits - out.logsumexp

    expected = draft_head(hidden, **keywords)
    token_ids, log_probs = step(hidden)
    assert torch.equal(token_ids, expected.token_ids + 1)
    assert torch.equal(log_probs, expected.top_logits - expected.logsumexp)

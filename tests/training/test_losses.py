"""The multi-depth loss against plain autograd, term by term, and its normalisation."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mtp_research.config.training_schema import LOSS_TERMS, parse_loss
from mtp_research.runtime.errors import ConfigError
from mtp_research.training.losses.loss_terms import LossSpec
from mtp_research.training.losses.losses import depth_labels, label_counts, multi_depth_loss
from mtp_research.training.unroll import DepthOutput, same_document
from tests.training.tiny import DOCUMENT_INDEX

VOCAB, HIDDEN, DEPTHS, ETA = 37, 8, 3, 2.0
MIXED = "0.5*ce+2*kl+tv+0.7*lk+1.5*e2e_tv+0.1*hidden"


def make_inputs(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict:
    generator = torch.Generator().manual_seed(seed)
    shape = DOCUMENT_INDEX.shape
    input_ids = torch.randint(0, VOCAB, shape, generator=generator)
    loss_mask = torch.rand(shape, generator=generator) < 0.8
    rows = torch.randn(DEPTHS, *shape, HIDDEN, generator=generator, dtype=dtype)
    return {
        "rows": [row.clone().requires_grad_() for row in rows],
        "labels": depth_labels(
            input_ids, document_index=DOCUMENT_INDEX, loss_mask=loss_mask, num_depths=DEPTHS
        ),
        "lm_head": torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype),
        "target": torch.randn(*shape, HIDDEN, generator=generator, dtype=dtype),
    }


def outputs_of(rows: list[Tensor]) -> list[DepthOutput]:
    return [
        DepthOutput(row, same_document(DOCUMENT_INDEX[: len(row)], offset=depth))
        for depth, row in enumerate(rows, start=1)
    ]


def run(inputs: dict, *, num_step_labels: Tensor | None = None, **spec):
    counts = label_counts(inputs["labels"]) if num_step_labels is None else num_step_labels
    return multi_depth_loss(
        outputs_of(inputs["rows"]),
        labels=inputs["labels"],
        num_step_labels=counts,
        lm_head=inputs["lm_head"],
        spec=LossSpec(**{"depth_decay": 0.6, "lk_eta": ETA} | spec),
        target_post_norm=inputs["target"],
    )


def row_terms(inputs: dict, batch: int, column: int, depth: int) -> dict[str, Tensor]:
    """Everything that the definitions need about one draft."""
    logits = inputs["rows"][depth - 1][batch, column] @ inputs["lm_head"].T
    teacher = inputs["target"][batch, column + depth]
    log_p, log_q = (teacher @ inputs["lm_head"].T).log_softmax(-1), logits.log_softmax(-1)
    label = inputs["labels"][depth - 1][batch, column]
    return {
        "ce": functional.cross_entropy(logits, label),
        "kl": (log_p.exp() * (log_p - log_q)).sum(),
        "tv": (log_p.exp() - log_q.exp()).abs().sum() / 2,
        "hidden": functional.smooth_l1_loss(inputs["rows"][depth - 1][batch, column], teacher),
        "confidence": log_q.exp()[label].detach(),
        "hit": (logits.argmax() == label).double(),
    }


def plain_loss(inputs: dict, *, loss: str, weights: str = "decay", acceptance: str = "row"):
    """The definitions, anchor by anchor."""
    labels = torch.stack(inputs["labels"])
    anchors = {
        (batch, column): {
            depth: row_terms(inputs, batch, column, depth)
            for depth in range(1, DEPTHS + 1)
            if labels[depth - 1, batch, column] >= 0
        }
        for batch, column in (labels >= 0).any(dim=0).nonzero().tolist()
    }
    terms, total = parse_loss(loss), torch.zeros((), dtype=torch.float64)
    for depth in range(1, DEPTHS + 1):
        rows = [depths[depth] for depths in anchors.values() if depth in depths]
        mean_acceptance = torch.stack([1 - row["tv"] for row in rows]).mean()
        for depths in anchors.values():
            if depth not in depths:
                continue
            row = depths[depth]
            alpha = 1 - row["tv"] if acceptance == "row" else mean_acceptance
            towards_kl = torch.exp(-ETA * alpha).detach()
            row = row | {"lk": towards_kl * row["kl"] + (1 - towards_kl) * row["tv"]}
            value = sum(terms[name] * row[name] for name in terms if name != "e2e_tv")
            weight = plain_weight(weights, anchors, depths=depths, depth=depth)
            total = total + weight * value / len(rows)
    full = [depths for depths in anchors.values() if len(depths) == DEPTHS]
    for depths in full if "e2e_tv" in terms else ():
        kept, length = torch.ones((), dtype=torch.float64), 0.0
        for depth in range(1, DEPTHS + 1):
            kept = kept * (1 - depths[depth]["tv"])
            length = length + kept
        total = total + terms["e2e_tv"] * (1 - length / DEPTHS) / len(full)
    return total


def plain_weight(kind: str, anchors: dict, *, depths: dict, depth: int) -> Tensor | float:
    """Weight of a depth at one anchor."""
    if kind == "uniform":
        return 1 / DEPTHS
    if kind == "decay":
        return (1.0, 0.6, 0.36)[depth - 1] / 1.96
    if kind == "dpace":
        raw = {key: confidence_gradients(members) for key, members in anchors.items()}
        scale = len(raw) / sum(sum(found.values()) for found in raw.values())
        return confidence_gradients(depths)[depth] * scale
    hits = [[d[i]["hit"] for d in anchors.values() if i in d] for i in range(1, DEPTHS + 1)]
    rates = torch.stack([torch.stack(found).mean() for found in hits]).requires_grad_()
    length = rates[0] + rates[0] * rates[1] + rates[0] * rates[1] * rates[2]
    (slope,) = torch.autograd.grad(length, rates)
    return slope[depth - 1] / slope.sum()


def confidence_gradients(depths: dict) -> dict[int, Tensor]:
    """d/d log c of sum_j prod_{i<=j} c_i over the depths that have a label."""
    logs = {depth: row["confidence"].log().requires_grad_() for depth, row in depths.items()}
    kept, length = torch.zeros((), dtype=torch.float64), 0.0
    for depth in sorted(logs):
        kept = kept + logs[depth]
        length = length + kept.exp()
    grads = torch.autograd.grad(length, list(logs.values()))
    return dict(zip(logs, grads, strict=True))


def check(inputs: dict, got: Tensor, expected: Tensor) -> None:
    assert abs(got - expected) < 1e-10
    got_grads = torch.autograd.grad(got, inputs["rows"])
    grads = torch.autograd.grad(expected, inputs["rows"])
    for got_grad, grad in zip(got_grads, grads, strict=True):
        assert (got_grad - grad).abs().max() < 1e-10
        assert grad.abs().max() > 1e-5


@pytest.mark.parametrize(
    ("loss", "chunk_rows"), [*((term, 4) for term in LOSS_TERMS), (MIXED, 1), (MIXED, None)]
)
def test_multi_depth_loss_float64_equals_plain_autograd(loss, chunk_rows):
    inputs = make_inputs()
    got = run(inputs, loss=loss, chunk_rows=chunk_rows).loss
    check(inputs, got, plain_loss(inputs, loss=loss))


@pytest.mark.parametrize("weights", ["uniform", "dpace", "expected_length"])
@pytest.mark.parametrize("loss", ["ce", MIXED])
def test_multi_depth_loss_depth_weights_equal_plain_autograd(loss, weights):
    inputs = make_inputs(seed=3)
    with torch.no_grad():  # make some drafts right
        for depth, row in enumerate(inputs["rows"], start=1):
            for batch, column in (inputs["labels"][depth - 1] >= 0).nonzero().tolist()[::2]:
                label = inputs["labels"][depth - 1][batch, column]
                row[batch, column] = inputs["lm_head"][label]
    got = run(inputs, loss=loss, depth_weights=weights).loss
    check(inputs, got, plain_loss(inputs, loss=loss, weights=weights))


def test_multi_depth_loss_lk_by_batch_mean_equals_plain_autograd():
    inputs = make_inputs(seed=1)
    got = run(inputs, loss=MIXED, lk_acceptance="batch").loss
    check(inputs, got, plain_loss(inputs, loss=MIXED, acceptance="batch"))
    by_row = run(inputs, loss=MIXED).loss
    assert abs(by_row - got) > 1e-4


@pytest.mark.parametrize("loss", ["ce", MIXED])
def test_multi_depth_loss_counts_labels_hits_and_acceptance(loss):
    inputs = make_inputs()
    result = run(inputs, loss=loss)
    for depth, (row, label) in enumerate(zip(inputs["rows"], inputs["labels"], strict=True), 1):
        drafts = (row @ inputs["lm_head"].T).argmax(dim=-1)
        assert result.num_labels[depth - 1] == (label >= 0).sum()
        assert result.num_correct[depth - 1] == ((drafts == label) & (label >= 0)).sum()
        rows = (label >= 0).nonzero().tolist()
        expected = sum(1 - row_terms(inputs, *where, depth)["tv"] for where in rows)
        got = result.sum_acceptance[depth - 1]
        assert abs(got - (expected if loss == MIXED else 0)) < 1e-10


@pytest.mark.parametrize("loss", ["ce", "kl+hidden", "e2e_tv"])
def test_multi_depth_loss_split_batch_sums_to_the_whole(loss):
    inputs = make_inputs()
    counts = label_counts(inputs["labels"])
    total = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        part = {key: [x[row : row + 1] for x in inputs[key]] for key in ("rows", "labels")}
        part |= {"lm_head": inputs["lm_head"], "target": inputs["target"][row : row + 1]}
        outputs = [DepthOutput(*pair) for pair in zip(part["rows"], part["labels"], strict=True)]
        total = (
            total
            + multi_depth_loss(
                outputs,
                labels=part["labels"],
                num_step_labels=counts,
                lm_head=part["lm_head"],
                spec=LossSpec(loss, depth_decay=0.6),
                target_post_norm=part["target"],
            ).loss
        )
    assert abs(total - run(inputs, loss=loss).loss) < 1e-12


@pytest.mark.parametrize("weights", ["decay", "dpace", "expected_length"])
@pytest.mark.parametrize("loss", ["ce", MIXED])
def test_multi_depth_loss_without_labels_is_zero_with_zero_gradient(loss, weights):
    inputs = make_inputs()
    inputs["labels"] = [torch.full_like(label, -1) for label in inputs["labels"]]
    result = run(inputs, loss=loss, depth_weights=weights)
    assert result.loss == 0
    assert all(grad.abs().max() == 0 for grad in torch.autograd.grad(result.loss, inputs["rows"]))


def test_multi_depth_loss_unlabelled_rows_may_hold_nan():
    inputs = make_inputs()
    expected = run(inputs, loss=MIXED)
    with torch.no_grad():
        for row, label in zip(inputs["rows"], inputs["labels"], strict=True):
            row[label < 0] = torch.nan
    got = run(inputs, loss=MIXED)
    assert torch.equal(got.loss, expected.loss)
    for grad, label in zip(
        torch.autograd.grad(got.loss, inputs["rows"]), inputs["labels"], strict=True
    ):
        assert torch.isfinite(grad).all()
        assert grad[label < 0].abs().max() == 0


def test_multi_depth_loss_more_depths_than_tokens_is_zero():
    inputs = make_inputs()
    short = {key: [x[:, :2] for x in inputs[key]] for key in ("rows", "labels")}
    short |= {"lm_head": inputs["lm_head"], "target": inputs["target"][:, :2]}
    short["labels"] = [torch.full_like(label, -1) for label in short["labels"]]
    result = multi_depth_loss(
        [
            DepthOutput(row, label >= 0)
            for row, label in zip(short["rows"], short["labels"], strict=True)
        ],
        labels=short["labels"],
        num_step_labels=label_counts(short["labels"]),
        lm_head=short["lm_head"],
        spec=LossSpec(),
    )
    assert result.loss == 0


def test_multi_depth_loss_term_without_target_is_refused():
    inputs = make_inputs()
    with pytest.raises(ValueError, match="target_post_norm"):
        run(inputs | {"target": None}, loss="kl")


def test_depth_labels_hand_example():
    input_ids = torch.tensor([[10, 11, 12, 13, 20, 21, 22]])
    document_index = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    loss_mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1]], dtype=torch.bool)
    first, second = depth_labels(
        input_ids, document_index=document_index, loss_mask=loss_mask, num_depths=2
    )
    assert first.tolist() == [[12, 13, -1, -1, 22, -1, -1]]
    assert second.tolist() == [[13, -1, -1, -1, -1, -1, -1]]
    assert label_counts([first, second]).tolist() == [3, 1, 1]


def test_depth_labels_masked_token_has_no_label():
    labels = depth_labels(
        torch.tensor([[1, 2, 3, 4]]),
        document_index=torch.zeros(1, 4, dtype=torch.long),
        loss_mask=torch.tensor([[False, False, False, True]]),
        num_depths=1,
    )
    assert labels[0].tolist() == [[-1, 4, -1, -1]]


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("ce", {"ce": 1.0}),
        ("kl+0.1*hidden", {"kl": 1.0, "hidden": 0.1}),
        ("2*tv + 1e-3*lk", {"tv": 2.0, "lk": 1e-3}),
    ],
)
def test_parse_loss_reads_a_weighted_sum(text, terms):
    assert parse_loss(text) == terms


@pytest.mark.parametrize("text", ["", "mse", "ce+ce", "0*ce", "-1*ce", "ce+", "nan*ce", "ce*2"])
def test_parse_loss_bad_sum_is_refused(text):
    with pytest.raises(ConfigError, match=r"objective\.loss"):
        LossSpec(loss=text)


def test_loss_spec_unknown_depth_weights_are_refused():
    with pytest.raises(ConfigError, match=r"objective\.depth_weights"):
        LossSpec(depth_weights="linear")


@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_one_list_of_rows_and_rows_beside_a_teacher_give_the_same_cross_entropy(weights):
    found = []
    for fused_rows in (True, False):
        inputs = make_inputs()
        result = run(inputs, loss="0.7*ce", depth_weights=weights, fused_rows=fused_rows)
        (2 * result.loss).backward()
        found.append((result, [row.grad for row in inputs["rows"]]))
    (one, one_grads), (other, other_grads) = found
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(one_grads, other_grads)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["ce", "0.0001*ce", "kl+0.5*ce"])
@pytest.mark.parametrize("half_logits", [False, True])
def test_loss_on_gpu_is_near_the_exact_one(loss, half_logits):
    exact = make_inputs(dtype=torch.bfloat16)  # the same rounded values on both sides
    for name in ("lm_head", "target"):
        exact[name] = exact[name].double()
    exact["rows"] = [row.detach().double().requires_grad_() for row in exact["rows"]]
    wanted = run(exact, loss=loss)
    wanted.loss.backward()
    moved = {
        "rows": [r.detach().bfloat16().cuda().requires_grad_() for r in exact["rows"]],
        "labels": [labels.cuda() for labels in exact["labels"]],
        "lm_head": exact["lm_head"].bfloat16().cuda(),
        "target": exact["target"].bfloat16().cuda(),
    }
    found = run(moved, loss=loss, half_logits=half_logits)
    found.loss.backward()
    assert found.num_correct.tolist() == wanted.num_correct.tolist()
    torch.testing.assert_close(found.loss.cpu().double(), wanted.loss, rtol=5e-3, atol=0)
    for got, row in zip(moved["rows"], exact["rows"], strict=True):
        error = (got.grad.cpu().double() - row.grad).norm() / row.grad.norm()
        assert error < 1e-2
        assert (got.grad.cpu()[row.grad == 0] == 0).all()

"""Unrolls against a reference that runs one row at a time with an explicit key list."""

import pytest
import torch
from torch import Tensor

from mtp_research.policy.fields import module_index
from mtp_research.runtime.errors import ConfigError
from mtp_research.training.unroll import UNROLLS, RowInputs, draw_sources, shift_left, unroll
from tests.training.tiny import documents, make_batch, trainable_heads

SEED = 11


class ExplicitKeys:
    """Attention of one row over a list of (key, value) rows; its own row is added to the list."""

    def __init__(self, rows: list[tuple[Tensor, Tensor]]) -> None:
        self.rows = rows

    def attend(self, module, call):
        query, key, value, scale, sliding_window, sinks = call
        self.rows.append((key, value))
        repeat = query.shape[1] // key.shape[1]
        scores, values = [], []
        if sinks is not None:
            scores.append(sinks[None, :, None].expand(query.shape[:3]))
            values.append(torch.zeros(1, query.shape[1], 1, value.shape[3], dtype=value.dtype))
        for row_key, row_value in self.rows[-(sliding_window or len(self.rows)) :]:
            scores.append((query * row_key.repeat_interleave(repeat, dim=1)).sum(-1) * scale)
            values.append(row_value.repeat_interleave(repeat, dim=1))
        weights = torch.softmax(torch.stack(scores), dim=0)
        return (weights[..., None] * torch.stack(values)).sum(0).transpose(1, 2)


def run_row(heads, module_idx, *, token, hidden, position, keys):
    return heads.run_module(
        heads.mtp_modules[module_idx],
        token_ids=torch.tensor([[token]]),
        prev_hidden_states=hidden[None, None],
        position_ids=torch.tensor([[position]]),
        context=ExplicitKeys(keys),
    )


def reference_streams(heads, tokens, hidden, *, num_depths, choose) -> dict:
    """Rows (t, d) of one document, in order of d, then t.

    `choose(t, depth)` says which source: 0 is H_t, j the recycled output of row (t, j).
    """
    outputs, sources = {}, {(t, 0): vector for t, vector in enumerate(hidden)}
    for depth in range(1, num_depths + 1):
        keys: list = []
        module_idx = module_index("cycle", depth - 1, heads.spec.num_mtp_modules)
        for t in range(len(tokens) - depth):
            output = run_row(
                heads,
                module_idx,
                token=tokens[t + depth],
                hidden=sources[t, choose(t, depth)],
                position=t,
                keys=keys,
            )
            outputs[t, depth] = output.post_norm[0, 0]
            sources[t, depth] = heads.recycled(output)[0, 0]
    return outputs


def mixed_choices(shape, *, num_depths) -> dict[int, Tensor]:
    """Depth -> `[B, S]` source of each token, as the seeded unroll draws them."""
    torch.manual_seed(SEED)
    return {depth: torch.randint(depth, shape) for depth in range(2, num_depths + 1)}


def reference_draft_rows(heads, tokens, hidden, *, num_depths) -> dict:
    """`ttt` and `shared_context`, anchor by anchor: every key list is built anew."""
    outputs = {}
    for t in range(len(tokens) - 1):
        own: dict = {}  # draft row j -> its source
        for depth in range(1, min(num_depths, len(tokens) - 1 - t) + 1):
            module_idx = module_index("cycle", depth - 1, heads.spec.num_mtp_modules)
            keys: list = []
            for s in range(t + 1):
                output = run_row(
                    heads, module_idx, token=tokens[s + 1], hidden=hidden[s], position=s, keys=keys
                )
            for j in range(2, depth + 1):
                output = run_row(
                    heads,
                    module_idx,
                    token=tokens[t + j],
                    hidden=own[j],
                    position=t + j - 1,
                    keys=keys,
                )
            outputs[t, depth] = output.post_norm[0, 0]
            own[depth + 1] = heads.recycled(output)[0, 0]
    return outputs


def reference(heads, batch, *, kind, num_depths) -> dict:
    """(row, column, depth) -> output, over all documents of the batch."""
    outputs = {}
    drawn = mixed_choices(batch["input_ids"].shape, num_depths=num_depths)
    for row, column, length in documents(batch["document_index"]):
        tokens = batch["input_ids"][row, column : column + length].tolist()
        hidden = batch["hidden"][row, column : column + length]
        choices = {
            "chain": lambda t, depth: depth - 1,
            "independent": lambda t, depth: 0,
            "mixed": lambda t, depth, row=row, column=column: (
                int(drawn[depth][row, column + t]) if depth > 1 else 0
            ),
        }
        if kind in choices:
            found = reference_streams(
                heads, tokens, hidden, num_depths=num_depths, choose=choices[kind]
            )
        else:
            found = reference_draft_rows(heads, tokens, hidden, num_depths=num_depths)
        outputs |= {(row, column + t, depth): output for (t, depth), output in found.items()}
    return outputs


@pytest.mark.parametrize("num_depths", [1, 3])
@pytest.mark.parametrize(
    ("recipe", "kind", "num_mtp_modules", "recycle_norm"),
    [
        pytest.param("glm4_moe", "chain", 3, "post_norm", id="glm4_moe-chain-n3"),
        pytest.param("glm4_moe", "ttt", 1, "post_norm", id="glm4_moe-ttt-n1"),
        pytest.param("qwen3", "chain", 1, "pre_norm", id="qwen3-chain-n1-pre_norm"),
        pytest.param("qwen3", "ttt", 1, "pre_norm", id="qwen3-ttt-n1-pre_norm"),
        pytest.param("qwen3", "chain", 2, "post_norm", id="qwen3-chain-n2"),
        pytest.param("glm4_moe", "shared_context", 2, "post_norm", id="glm4_moe-shared_context-n2"),
        pytest.param("qwen3", "shared_context", 3, "post_norm", id="qwen3-shared_context-n3"),
        pytest.param("qwen3", "independent", 3, "post_norm", id="qwen3-independent-n3"),
        pytest.param("qwen3", "independent", 1, "post_norm", id="qwen3-independent-n1"),
        pytest.param("deepseek_v3", "chain", 2, "post_norm", id="deepseek_v3-chain-n2"),
        pytest.param("deepseek_v3", "ttt", 1, "post_norm", id="deepseek_v3-ttt-n1"),
        pytest.param("mimo_v2", "chain", 3, "post_norm", id="mimo_v2-chain-n3"),
        pytest.param("mimo_v2", "ttt", 1, "post_norm", id="mimo_v2-ttt-n1"),
        pytest.param("qwen3", "mixed", 1, "pre_norm", id="qwen3-mixed-n1-pre_norm"),
        pytest.param("glm4_moe", "mixed", 3, "post_norm", id="glm4_moe-mixed-n3"),
    ],
)
def test_unroll_random_batch_equals_per_anchor_reference(
    recipe, kind, num_mtp_modules, recycle_norm, num_depths
):
    heads = trainable_heads(recipe, num_mtp_modules=num_mtp_modules, recycle_norm=recycle_norm)
    batch = make_batch(heads)
    torch.manual_seed(SEED)
    outputs = unroll(heads, RowInputs(**batch), num_depths=num_depths, kind=kind)
    expected = reference(heads, batch, kind=kind, num_depths=num_depths)

    rows = {
        (row, column, depth)
        for depth, output in enumerate(outputs, start=1)
        for row, column in output.valid.nonzero().tolist()
    }
    assert rows == expected.keys()
    probe = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss = torch.zeros((), dtype=torch.float64)
    expected_loss = torch.zeros((), dtype=torch.float64)
    for row, column, depth in sorted(rows):
        got = outputs[depth - 1].post_norm[row, column]
        torch.testing.assert_close(got, expected[row, column, depth], rtol=0, atol=1e-10)
        loss = loss + torch.sin(got) @ probe
        expected_loss = expected_loss + torch.sin(expected[row, column, depth]) @ probe

    names, parameters = zip(*heads.named_parameters(), strict=True)
    got_grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    expected_grads = torch.autograd.grad(expected_loss, parameters, allow_unused=True)
    for name, got, wanted in zip(names, got_grads, expected_grads, strict=True):
        wanted = torch.zeros(()) if wanted is None else wanted
        got = torch.zeros_like(wanted) if got is None else got
        assert (got - wanted).abs().max() < 1e-10, name
    assert any(grad is not None and grad.abs().max() > 1e-3 for grad in got_grads)


@pytest.mark.parametrize("kind", UNROLLS)
def test_unroll_perturbed_neighbour_changes_nothing(kind):
    heads = trainable_heads("qwen3")
    batch = make_batch(heads)
    changed = dict(batch, input_ids=batch["input_ids"].clone(), hidden=batch["hidden"].clone())
    changed["input_ids"][0, 7:] = 5
    changed["hidden"][0, 7:] += 3.0

    def first_document(inputs):
        torch.manual_seed(SEED)
        outputs = unroll(heads, RowInputs(**inputs), num_depths=3, kind=kind)
        loss = sum(
            torch.sin(output.post_norm[0, : 7 - d]).sum() for d, output in enumerate(outputs, 1)
        )
        return loss, torch.autograd.grad(loss, list(heads.parameters()))

    loss, grads = first_document(batch)
    changed_loss, changed_grads = first_document(changed)
    assert torch.equal(loss, changed_loss)
    assert all(torch.equal(a, b) for a, b in zip(grads, changed_grads, strict=True))


def test_unroll_ttt_with_one_module_equals_shared_context():
    heads = trainable_heads("qwen3")
    batch = make_batch(heads)
    ttt = unroll(heads, RowInputs(**batch), num_depths=3, kind="ttt")
    shared = unroll(heads, RowInputs(**batch), num_depths=3, kind="shared_context")
    for left, right in zip(ttt, shared, strict=True):
        assert torch.equal(left.post_norm[left.valid], right.post_norm[right.valid])


def test_unroll_depth_beyond_every_document_has_no_valid_row():
    heads = trainable_heads()
    outputs = unroll(heads, RowInputs(**make_batch(heads)), num_depths=14, kind="chain")
    assert [int(output.valid.sum()) for output in outputs[7:]] == [1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        ({}, {"kind": "tree", "num_depths": 3}, "objective.unroll"),
        ({}, {"kind": "chain", "num_depths": 0}, "objective.num_depths"),
        ({"num_mtp_modules": 2}, {"kind": "ttt", "num_depths": 3}, "shared_context"),
    ],
    ids=["unknown", "no-depth", "ttt-n2"],
)
def test_unroll_bad_argument_names_the_key(spec, arguments, message):
    heads = trainable_heads(**spec)
    with pytest.raises(ConfigError, match=message):
        unroll(heads, RowInputs(**make_batch(heads)), **arguments)


def test_draw_sources_takes_each_source_equally_often():
    sources = [torch.full((40, 50, 1), float(index)) for index in range(3)]
    torch.manual_seed(SEED)
    drawn = draw_sources(sources)
    shares = [float((drawn == index).double().mean()) for index in range(3)]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.04)  # 3 standard errors of 2000 draws


def test_shift_left_never_wraps():
    values = torch.tensor([[1, 2, 3]])
    assert shift_left(values, offset=1, fill=-1).tolist() == [[2, 3, -1]]
    assert shift_left(values, offset=5, fill=-1).tolist() == [[-1, -1, -1]]

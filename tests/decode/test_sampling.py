"""Noise that behaves like noise, and probabilities against a loop over sorted tokens."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp_research.decode.sampling.sampling import (
    SamplingTensors,
    Stream,
    keep_top,
    sample_from,
    sampling_tensors,
    target_probabilities,
    uniform_noise,
)
from mtp_research.decode.sampling.sampling_params import SamplingParams
from tests.decode.chi_square import chi_square_p_value, smallest_of
from tests.oracle_processors import probabilities

CPU = torch.device("cpu")
N = 20_000


def _flat_p_value(uniform: Tensor, num_cells: int = 64) -> float:
    counts = torch.bincount((uniform * num_cells).long(), minlength=num_cells)
    return chi_square_p_value(counts, torch.full((num_cells,), len(uniform) / num_cells))


def _joint_p_value(first: Tensor, second: Tensor, num_cells: int = 16) -> float:
    """Uniformity on the unit square: fails for any dependence that cells of this size can show."""
    cell = (first * num_cells).long() * num_cells + (second * num_cells).long()
    counts = torch.bincount(cell, minlength=num_cells**2)
    return chi_square_p_value(counts, torch.full((num_cells**2,), len(first) / num_cells**2))


def _f64(values: list[float] | float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _params(**fields) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0} | fields))


@pytest.mark.parametrize("stream", Stream)
def test_noise_over_positions_and_over_seeds_is_uniform(stream: Stream) -> None:
    counter, zero = torch.arange(N), torch.zeros(1, dtype=torch.int64)
    p_values = [
        _flat_p_value(uniform_noise(zero + 7, counter, stream)),
        _flat_p_value(uniform_noise(counter, zero + 7, stream)),
        _flat_p_value(uniform_noise(zero + 7, zero + 7, stream, index=counter)),
        _flat_p_value(uniform_noise(counter * 1_000_003, zero, stream)),
    ]
    assert smallest_of(p_values) > 1e-3


def test_noise_of_streams_neighbours_and_seeds_is_independent() -> None:
    position, seed = torch.arange(N), torch.tensor([3])
    noise = {stream: uniform_noise(seed, position, stream) for stream in Stream}
    pairs = [_joint_p_value(noise[a], noise[b]) for a, b in itertools.combinations(Stream, 2)]
    draft = noise[Stream.DRAFT]
    pairs.append(_joint_p_value(draft[:-1], draft[1:]))  # neighbouring positions
    pairs.append(_joint_p_value(draft, uniform_noise(seed + 1, position, Stream.DRAFT)))
    pairs.append(_joint_p_value(draft, uniform_noise(seed, position, Stream.DRAFT, index=1)))
    # (seed, position) must not be interchangeable or additive
    pairs.append(_joint_p_value(draft, uniform_noise(position, seed, Stream.DRAFT)))
    assert smallest_of(pairs) > 1e-3


def test_joint_test_shared_noise_is_found() -> None:
    noise = uniform_noise(torch.tensor([3]), torch.arange(N), Stream.DRAFT)
    assert _joint_p_value(noise, noise) < 1e-9
    assert _joint_p_value(noise, (noise * 2) % 1) < 1e-9


def test_noise_numbers_are_distinct_and_inside_the_unit_interval() -> None:
    seed, position = torch.arange(40)[:, None], torch.arange(500)
    noise = torch.stack([uniform_noise(seed, position, stream) for stream in Stream])
    assert noise.min() >= 0
    assert noise.max() < 1
    assert noise.unique().numel() == noise.numel()


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**64 + 5, -(2**70)])
def test_noise_any_integer_seed_is_accepted(seed: int) -> None:
    params = sampling_tensors([_params(seed=seed)], device=CPU)
    noise = uniform_noise(params.seed, torch.arange(100), Stream.ACCEPT)
    assert 0.3 < float(noise.mean()) < 0.7


def test_noise_batch_order_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    seed = torch.randint(0, 2**60, (50,), generator=generator)
    position = torch.randint(0, 10_000, (50,), generator=generator)
    together = uniform_noise(seed, position, Stream.RESAMPLE)
    order = torch.randperm(50, generator=generator)
    assert torch.equal(
        uniform_noise(seed[order], position[order], Stream.RESAMPLE), together[order]
    )
    alone = [
        uniform_noise(s[None], p[None], Stream.RESAMPLE)
        for s, p in zip(seed, position, strict=True)
    ]
    assert torch.equal(torch.cat(alone), together)


@settings(max_examples=80)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 2.5]),
            st.sampled_from([0, 1, 2, 5, 100]),
            st.sampled_from([0.05, 0.5, 0.83, 1.0]),
            st.sampled_from([0.0, 0.05, 0.4, 1.0]),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 2**20),
)
def test_target_probabilities_any_batch_equals_slow_reference(rows, seed: int) -> None:
    params = [_params(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in rows]
    logits = torch.randn(len(rows), 2, 11, generator=torch.Generator().manual_seed(seed)) * 2
    probs = target_probabilities(logits, sampling_tensors(params, device=CPU))
    for row, column in itertools.product(range(len(rows)), range(2)):
        expected = probabilities(logits[row, column].double().tolist(), params[row])
        assert probs[row, column].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_p": 0.5}, {"top_p": 0.4, "top_k": 3}])
def test_target_probabilities_ties_keep_the_first_tokens(fields: dict) -> None:
    params = sampling_tensors([_params(**fields)], device=CPU)
    probs = target_probabilities(torch.zeros(1, 1, 4), params)
    assert probs[0, 0].tolist() == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ([{"top_k": 5}, {"top_k": 9, "top_p": 0.5}, {}], 16),
        ([{"top_k": 8}, {"min_p": 0.1}], 8),
        ([{"top_k": 8}, {"top_p": 0.9}], None),
        ([{"top_k": 8}, {"top_p": 0.9, "temperature": 0.0}], 8),
    ],
)
def test_top_k_bound_covers_every_request_that_truncates(fields, bound: int | None) -> None:
    params = [_params(**row) for row in fields]
    assert sampling_tensors(params, device=CPU).top_k_bound == bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_target_probabilities_do_not_depend_on_how_much_was_sorted(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 1, 3000, generator=torch.Generator().manual_seed(4)).to(dtype)
    mine = _params(top_k=40, top_p=0.9, min_p=0.02)  # bfloat16 values hold many ties
    alone = target_probabilities(logits, sampling_tensors([mine], device=CPU))
    both = sampling_tensors([mine, _params(top_p=0.5)], device=CPU)
    assert both.top_k_bound is None
    assert torch.equal(target_probabilities(logits.expand(2, 1, -1), both)[:1], alone)


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e300])
def test_target_probabilities_extreme_temperature_stays_finite(temperature: float) -> None:
    params = sampling_tensors([_params(temperature=temperature)], device=CPU)
    probs = target_probabilities(torch.tensor([[[3e4, -3e4, 2.9e4]]]), params)[0, 0]
    expected = [1 / 3] * 3 if temperature > 1 else [1, 0, 0]
    assert probs.tolist() == pytest.approx(expected)


def test_target_probabilities_masked_tokens_get_none() -> None:
    logits = torch.tensor([[[-torch.inf, 1.0, -torch.inf, 0.0]]])
    probs = target_probabilities(logits, sampling_tensors([_params(top_p=0.99)], device=CPU))
    assert probs[0, 0, [0, 2]].tolist() == [0, 0]
    assert float(probs.sum()) == pytest.approx(1)


def test_target_probabilities_without_truncation_do_not_depend_on_the_batch() -> None:
    logits = torch.randn(1, 1, 5000, generator=torch.Generator().manual_seed(1)) * 30
    whole = _params()
    alone = target_probabilities(logits, sampling_tensors([whole], device=CPU))
    both = sampling_tensors([whole, _params(top_p=0.5)], device=CPU)
    assert torch.equal(target_probabilities(logits.expand(2, 1, -1), both)[:1], alone)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 5}], ids=str)
@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)],
)
def test_a_compiled_step_of_a_batch_of_any_size_draws_the_same_tokens(
    device: str, backend: str, cut: dict
) -> None:
    """At the vocabulary of SmolLM2: from some length on Inductor writes scans in another way."""
    params = sampling_tensors([_params(seed=1, **cut)] * 3, device=torch.device(device))
    logits = torch.randn(3, 1, 49_152, generator=torch.Generator().manual_seed(0)).to(device)

    # Read, not made inside: Inductor multiplies an index as int32, which the hash's factors exceed.
    positions = torch.arange(3, device=device)[:, None]

    def draw(logits: Tensor, params: SamplingTensors, position: Tensor) -> Tensor:
        noise = uniform_noise(params.seed[:, None], position, Stream.RESAMPLE)
        return sample_from(target_probabilities(logits, params), noise)

    for tensor in (logits, positions, *(one for one in params if isinstance(one, Tensor))):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)  # as steps mark them: requests, not tokens
    compiled = torch.compile(draw, backend=backend, fullgraph=True)
    drawn = compiled(logits, params, positions)
    assert torch.equal(drawn, draw(logits, params, positions))


def test_what_compiled_steps_are_told_of_an_operator_is_what_it_returns() -> None:
    """Shapes, dtypes and strides, of arguments that lie in another order too."""
    logits = torch.rand(7, 3, 4).permute(2, 1, 0)
    params = sampling_tensors([_params(top_p=0.5, top_k=2)] * 4, device=CPU)
    laws = params.temperature, params.top_k, params.top_p, params.top_k_bound
    torch.library.opcheck(keep_top, (logits, *laws))
    torch.library.opcheck(sample_from, (logits.double(), torch.rand(3, 4).double().t()))


def test_sample_from_follows_the_weights() -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    uniform = uniform_noise(torch.tensor([1]), torch.arange(N), Stream.RESAMPLE)
    counts = torch.bincount(sample_from(weights.expand(N, -1), uniform), minlength=6)
    assert chi_square_p_value(counts, weights / weights.sum() * N) > 1e-3


@pytest.mark.parametrize(
    ("weights", "uniform", "expected"),
    [
        pytest.param([0, 0, 1, 1], 0.0, 2, id="zero-noise-skips-empty-head"),
        pytest.param([1, 1, 0, 0], 1 - 2**-53, 1, id="largest-noise-skips-empty-tail"),
        pytest.param([0.1] * 10 + [0], 1 - 2**-53, 9, id="rounded-sum"),
        pytest.param([1e-300, 0], 0.5, 0, id="tiny-weight"),
        pytest.param([0, 5], 0.5, 1, id="only-the-last"),
        pytest.param([2, 2], 0.5, 1, id="boundary-belongs-to-the-next"),
    ],
)
def test_sample_from_edges_return_weighted_tokens(weights, uniform: float, expected: int) -> None:
    picked = sample_from(_f64(weights), _f64(uniform))
    assert int(picked) == expected


@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-12, 0.3, 1.0, 1e6]), min_size=1, max_size=9),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_sample_from_never_returns_a_token_without_weight(weights, uniform: float) -> None:
    picked = int(sample_from(_f64(weights), _f64(uniform)))
    assert 0 <= picked < len(weights)
    assert weights[picked] > 0 or sum(weights) == 0

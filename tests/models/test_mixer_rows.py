"""A recurrent layer row by row: as separate calls would, with its projections run once."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from mtp_research.models.recurrent import MixerState, library_cache, run_rows, zero_state
from tests import tiny_recurrent

NUM_REQUESTS, NUM_ROWS = 2, 4


@pytest.fixture(scope="module", params=sorted(tiny_recurrent.RECIPES))
def mixer(request: pytest.FixtureRequest) -> nn.Module:
    return list(tiny_recurrent.tiny_target(request.param).mixers.values())[-1]


def random_state(mixer: nn.Module) -> MixerState:
    generator = torch.Generator().manual_seed(3)
    return MixerState(
        *(
            torch.randn(NUM_REQUESTS, *part.shape[1:], generator=generator, dtype=part.dtype)
            for part in zero_state(mixer)
        )
    )


def random_rows() -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(NUM_REQUESTS, NUM_ROWS, 64, generator=generator, dtype=torch.float64)


def snapshots(mixer: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """Output of `run_rows` and the memory after each row."""
    state, seen = random_state(mixer), []
    output = run_rows(
        mixer,
        mixer.forward,
        random_rows(),
        cache=library_cache(mixer.layer_idx, state),
        after_row=lambda row: seen.append((row, state.recurrent.clone())),
    )
    assert [row for row, _ in seen] == [1, 2, 3, 4]
    return output, [memory for _, memory in seen]


@torch.no_grad()
def test_rows_equal_calls_of_the_layer_one_by_one(mixer: nn.Module) -> None:
    output, memories = snapshots(mixer)
    state, rows = random_state(mixer), random_rows()
    cache = library_cache(mixer.layer_idx, state)
    for row in range(NUM_ROWS):
        expected = mixer(rows[:, row : row + 1], cache_params=cache)
        torch.testing.assert_close(output[:, row : row + 1], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(memories[row], state.recurrent, rtol=0, atol=1e-12)
    assert not torch.equal(memories[0], memories[-1])


@torch.no_grad()
def test_every_projection_runs_once(mixer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[nn.Module] = Counter()
    forward = nn.Linear.forward

    def counted(linear: nn.Linear, hidden: Tensor) -> Tensor:
        calls[linear] += 1
        return forward(linear, hidden)

    state = random_state(mixer)  # asks the layer itself, which projects too
    monkeypatch.setattr(nn.Linear, "forward", counted)
    run_rows(
        mixer,
        mixer.forward,
        random_rows(),
        cache=library_cache(mixer.layer_idx, state),
        after_row=lambda _: None,
    )
    linears = [child for child in mixer.children() if isinstance(child, nn.Linear)]
    assert calls == Counter(linears)


@torch.no_grad()
def test_projections_are_back_after_a_fault(mixer: nn.Module) -> None:
    def broken(*_: object, **__: object) -> Tensor:
        raise RuntimeError("broken layer")

    with pytest.raises(RuntimeError, match="broken layer"):
        run_rows(
            mixer,
            broken,
            random_rows(),
            cache=library_cache(mixer.layer_idx, random_state(mixer)),
            after_row=lambda _: None,
        )
    linears = [child for child in mixer.children() if isinstance(child, nn.Linear)]
    assert not any("forward" in vars(linear) for linear in linears)


def test_zero_state_is_what_the_library_allocates(mixer: nn.Module) -> None:
    state = zero_state(mixer)
    is_mamba = hasattr(mixer, "ssm_state_size")  # twice the value heads of the delta nets
    num_heads = 8 if is_mamba else 4
    assert state.conv.shape == (1, 2 * 2 * 16 + num_heads * 16, 4)
    assert state.recurrent.shape == (1, num_heads, 16, 16)
    assert not any(part.any() for part in state)

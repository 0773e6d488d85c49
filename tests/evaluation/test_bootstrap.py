import numpy as np
import pytest

from mtp_research.evaluation.stats import bootstrap
from mtp_research.evaluation.stats.bootstrap import (
    Estimate,
    Ratio,
    estimate,
    estimate_difference,
)


def _ratio(num_prompts: int) -> Ratio:
    generator = np.random.default_rng(1)
    return Ratio(generator.integers(1, 9, num_prompts) * 1.0, np.full(num_prompts, 3.0))


def test_percentile_interval_matches_a_loop_over_draws():
    ratio = _ratio(30)
    figure = estimate({"x": ratio}, seed=4, num_draws=500)["x"]
    generator = np.random.default_rng(4)
    draws = []
    for chosen in generator.integers(30, size=(500, 30)):
        draws.append(ratio.top[chosen].sum() / ratio.bottom[chosen].sum())
    assert figure.value == pytest.approx(ratio.top.sum() / ratio.bottom.sum())
    assert (figure.low, figure.high) == pytest.approx(tuple(np.quantile(draws, (0.025, 0.975))))


def test_chunked_resampling_gives_a_like_interval(monkeypatch: pytest.MonkeyPatch):
    whole = estimate({"x": _ratio(50)}, seed=0)["x"]
    monkeypatch.setattr(bootstrap, "_MAX_CELLS", 333)  # 6 draws at a time
    chunked = estimate({"x": _ratio(50)}, seed=0)["x"]
    assert chunked == pytest.approx(whole, rel=0.02)


def test_undefined_statistic_is_none_and_leaves_others_alone():
    zero = Ratio(np.zeros(5), np.zeros(5))
    figures = estimate({"zero": zero, "x": _ratio(5)}, seed=0, num_draws=50)
    assert tuple(figures["zero"]) == (None, None, None)
    assert figures["x"].value is not None


def test_draws_without_a_bottom_are_left_out():
    """One prompt of ten has rounds; a third of the draws miss it and must not turn it into NaN."""
    top, bottom = np.zeros(10), np.zeros(10)
    top[0], bottom[0] = 6.0, 3.0
    figure = estimate({"x": Ratio(top, bottom)}, seed=0, num_draws=200)["x"]
    assert tuple(figure) == (2.0, 2.0, 2.0)


def test_one_prompt_has_a_value_and_no_interval() -> None:
    ratio = Ratio(np.array([3.0]), np.array([4.0]))
    assert estimate({"a": ratio}, seed=0) == {"a": Estimate(0.75)}
    assert estimate_difference({"a": ratio}, {"a": ratio}, seed=0) == {"a": Estimate(0.0)}
    two = Ratio(np.array([3.0, 1.0]), np.array([4.0, 4.0]))
    assert estimate({"a": two}, seed=0)["a"].low is not None

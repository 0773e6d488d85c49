"""Synthetic acceptance of a profile: the measured length comes back; bad files are refused."""

import json
import math
from pathlib import Path

import pytest
import torch

from mtp_research.config.schema import EngineConfig, VerifyOptions
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.verify.profile_reader import PROFILE_FILE, profile_rates
from mtp_research.decode.verify.verify_rules import verify_synthetic
from mtp_research.runtime.errors import ConfigError, IntegrityError
from tests import tiny
from tests.decode.test_verify import make_inputs

MEASURED = (700, 450, 200)  # of 1000 rounds: acceptance length 2.35


def condition(label: str = "training", accepted: tuple[int, ...] = MEASURED) -> dict[str, object]:
    return {
        "label": label,
        "num_speculative_tokens": len(accepted),
        "num_rounds": 1000,
        "num_accepted_per_position": list(accepted),
        "acceptance_rate_per_position": [count / 1000 for count in accepted],
    }


def write(folder: Path, *conditions: dict[str, object]) -> str:
    path = folder / PROFILE_FILE
    path.write_text(json.dumps({"schema_version": 1, "conditions": conditions}))
    return str(path)


def settings(path: str, **options: str) -> SpecSettings:
    return SpecSettings(
        num_speculative_tokens=3,
        verify="synthetic",
        verify_options=VerifyOptions(synthetic_profile=path, **options),
    )


def test_step_reads_the_rates_and_no_file(tmp_path: Path) -> None:
    path = write(tmp_path, condition())
    spec = settings(path)
    Path(path).unlink()
    with pytest.raises(ConfigError):
        settings(path)
    options = VerifyOptions(synthetic_rates=[0.7, 0.45, 0.2])
    Path(write(tmp_path, condition()))
    assert spec.step_options == options


def test_rule_gives_the_length_of_the_profile_to_a_hundredth(tmp_path: Path) -> None:
    num_rounds = 400_000  # standard error of the mean below .002
    spec = settings(write(tmp_path, condition()))
    inputs = make_inputs(
        torch.zeros(num_rounds, 4, 3), [[0, 1, 0]] * num_rounds, options=spec.step_options
    )
    accepted = verify_synthetic(inputs).num_accepted
    assert 1 + float(accepted.double().mean()) == pytest.approx(2.35, abs=0.01)
    for position, count in enumerate(MEASURED):
        measured = float((accepted > position).double().mean())
        assert measured == pytest.approx(count / 1000, abs=0.005)


def test_loop_replays_the_profile_round_after_round(tmp_path: Path) -> None:
    decoder = SpecDecoder(
        tiny.tiny_target("qwen3"),
        "oracle",
        spec=settings(write(tmp_path, condition())),
        engine=EngineConfig(max_num_requests=40),  # all in one batch: a step costs what it costs
    )
    for seed in range(40):
        sampling = SamplingParams(max_new_tokens=100, seed=seed)
        decoder.add_request([1, 2, 3], sampling=sampling)
    while decoder.has_work:
        decoder.step()
    rounds = [a for record in decoder.stats.records for a in record.num_accepted_per_round]
    error = torch.tensor(rounds).double().std() / math.sqrt(len(rounds))
    assert len(rounds) > 1500
    assert decoder.stats.acceptance_length == pytest.approx(2.35, abs=3 * float(error))


def test_condition_is_named_where_several_fit(tmp_path: Path) -> None:
    path = write(tmp_path, condition(), condition("eagle", (500, 100, 0)), condition("one", (9,)))
    with pytest.raises(ConfigError, match=r"training, eagle, one.*set spec\.synthetic_condition"):
        profile_rates(path, condition=None, num_speculative_tokens=3)
    rates = profile_rates(path, condition="eagle", num_speculative_tokens=2)
    assert rates == (0.5, 0.1)  # the first two of three


@pytest.mark.parametrize(
    ("label", "num_drafts", "expected"),
    [
        (None, 4, "must hold rates of spec.k=4 drafts, got at most 3"),
        ("one", 2, "must hold rates of spec.k=2 drafts, got at most 1"),
        ("other", 3, "must be a condition of .* \\(training, one\\), got other"),
    ],
)
def test_profile_that_does_not_fit_is_refused(
    tmp_path: Path, label: str | None, num_drafts: int, expected: str
) -> None:
    path = write(tmp_path, condition(), condition("one", (9,)))
    with pytest.raises(ConfigError, match=expected) as fault:
        profile_rates(path, condition=label, num_speculative_tokens=num_drafts)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    "change",
    [
        {"num_rounds": 600},
        {"num_rounds": 0},
        {"num_rounds": 1000.0},
        {"num_rounds": None},
        {"num_accepted_per_position": [700, 450, 201]},
        {"num_accepted_per_position": [450, 700, 200]},
        {"num_accepted_per_position": [700, 450]},
        {"num_accepted_per_position": 3},
        {"acceptance_rate_per_position": [0.7, 0.45]},
        {"acceptance_rate_per_position": [0.7, 0.45, None]},
        {"acceptance_rate_per_position": [0.7, 0.45, float("nan")]},
        {"num_speculative_tokens": 2},
    ],
    ids=str,
)
def test_changed_profile_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = write(tmp_path, condition() | change)
    with pytest.raises(IntegrityError, match=r"condition 1; the file was edited or damaged") as e:
        profile_rates(path, condition=None, num_speculative_tokens=2)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"x"', '{"schema_version": 2}', '{"schema_version": 1}', "\ud800"],
)  # fmt: skip
def test_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / PROFILE_FILE
    path.write_text(text, encoding="utf8", errors="surrogatepass")
    with pytest.raises(IntegrityError, match="evaluate again") as fault:
        profile_rates(str(path), condition=None, num_speculative_tokens=2)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"synthetic_rates": [0.5, 0.5, 0.5]}, "must be null where synthetic_rates"),
        ({"synthetic_length": 2.0}, "must be null where synthetic_rates or synthetic_length"),
    ],
)
def test_profile_beside_rates_or_length_is_refused(
    tmp_path: Path, options: dict, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        settings(write(tmp_path, condition()), **options)


def test_condition_without_a_profile_is_refused() -> None:
    options = VerifyOptions(synthetic_condition="training")
    with pytest.raises(ConfigError, match="must be null without synthetic_profile"):
        SpecSettings(verify="synthetic", verify_options=options)

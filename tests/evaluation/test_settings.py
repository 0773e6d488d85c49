"""From configuration keys to the decoder's setting types, and what is refused on the way."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig, SamplingConfig, SpecConfig, VerifyOptions
from mtp_research.decode.draft.draft_length import (
    BatchTableLength,
    ConfidenceLength,
    ExpectedGainLength,
)
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.evaluation.run.decoders import spec_settings
from mtp_research.evaluation.run.settings_check import (
    check_settings,
    draft_length,
    sampling_params,
)
from mtp_research.runtime.errors import ConfigError


def test_defaults_of_the_schema_are_those_of_the_types() -> None:
    made = spec_settings(SpecConfig(verify="greedy"), policy="training", num_speculative_tokens=3)
    wanted = SpecSettings(verify="greedy", verify_options=made.verify_options)
    assert made == wanted
    for item in dataclasses.fields(VerifyOptions):
        assert getattr(made.verify_options, item.name) == getattr(VerifyOptions(), item.name)
    made = sampling_params(SamplingConfig(), seed=0, stop_token_ids=())
    assert made == SamplingParams()


def test_every_setting_of_a_lossy_rule_has_a_key() -> None:
    keys = {item.name for item in dataclasses.fields(SpecConfig)}
    assert {item.name for item in dataclasses.fields(VerifyOptions)} <= keys


def test_keys_reach_the_types() -> None:
    words = [
        "spec.verify=relaxed",
        "spec.relaxed_top_n=4",
        "spec.relaxed_delta=0.25",
        "spec.relaxed_thinking_token_ids=[7,8]",
        "sampling.repetition_penalty=1.2",
        "sampling.presence_penalty=-0.5",
        "sampling.min_tokens=3",
        "sampling.ignore_eos=true",
    ]
    config = compose_config(EvalConfig, words)
    check_settings(config)
    made = spec_settings(config.spec, policy="training", num_speculative_tokens=3)
    options = made.verify_options
    assert (made.verify, options.relaxed_top_n, options.relaxed_delta) == ("relaxed", 4, 0.25)
    assert options.relaxed_thinking_token_ids == [7, 8]
    params = sampling_params(config.sampling, seed=5, stop_token_ids=(1,))
    assert (params.repetition_penalty, params.presence_penalty) == (1.2, -0.5)
    assert (params.min_tokens, params.seed, params.stop_token_ids) == (3, 5, ())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["spec.draft_length=confidence", "spec.draft_p_min=0.5"], ConfidenceLength(0.5)),
        (
            ["spec.draft_length=batch_table", "spec.draft_table={1:3,8:1}"],
            BatchTableLength(((1, 3), (8, 1))),
        ),
        (["spec.draft_length=expected_gain"], ExpectedGainLength()),
        (
            ["spec.draft_length=expected_gain", "spec.draft_cost_ratio=0.2"],
            ExpectedGainLength(0.2),
        ),
    ],
)
def test_length_rule_is_made_from_its_keys(words: list[str], expected: object) -> None:
    config = compose_config(EvalConfig, words)
    check_settings(config)
    assert draft_length(config.spec) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["spec.relaxed_top_n=4"], "spec.relaxed_top_n must be left alone for spec.verify=greedy"),
        (
            ["spec.verify=relaxed", "spec.relaxed_delta=2"],
            "spec.relaxed_delta must be a number in 0.0..1.0",
        ),
        (
            ["spec.verify=relaxed", "spec.relaxed_thinking_token_ids=[7]"],
            "must hold the begin and the end token, got [7]",
        ),
        (["spec.verify=synthetic"], "spec.synthetic_rates must hold spec.k=3 rates, got 0"),
        (["spec.draft_p_min=0.5"], "set spec.draft_length=confidence"),
        (["spec.draft_cost_ratio=0.5"], "set spec.draft_length=expected_gain"),
        (["spec.draft_length=batch_table"], "set spec.draft_table={1:3,32:1}"),
        (
            ["spec.draft_length=batch_table", "spec.draft_table={8:1}"],
            "rising batch sizes, from 1 on",
        ),
        (
            ["spec.draft_length=confidence", "spec.head=oracle"],
            "spec.draft_length must be fixed for spec.head=oracle",
        ),
        (["sampling.min_tokens=65"], "sampling.min_tokens must be in 0..max_new_tokens=64"),
    ],
)
def test_setting_that_is_wrong_or_ignored_is_refused(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as fault:
        check_settings(compose_config(EvalConfig, words))
    assert expected in str(fault.value)
    assert "\n" not in str(fault.value)


def test_synthetic_rates_and_length_are_two_ways_to_one_rule() -> None:
    common = ["spec.verify=synthetic", "spec.k=2"]
    check_settings(compose_config(EvalConfig, [*common, "spec.synthetic_rates=[0.5,0.25]"]))
    words = [*common, "spec.synthetic_length=1.5", "spec.synthetic_schedule=geometric"]
    check_settings(compose_config(EvalConfig, words))


def test_settings_are_checked_without_torch() -> None:
    probe = (
        "import sys; sys.modules['torch'] = None\n"
        "from mtp_research.config.schema import EvalConfig, ModelConfig\n"
        "from mtp_research.evaluation.run.settings_check import check_settings\n"
        "check_settings(EvalConfig(ModelConfig('a', 'b', 'c')))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr

"""The shipped targets and heads: lossless on shipped prompts, walk = loop round for round."""

from pathlib import Path

import pytest
import torch

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EngineConfig, EvalConfig
from mtp_research.evaluation.run.prompts import encode_prompt, load_prompts
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import Target, load_target, load_tokenizer
from tests.training.walks import assert_walk_is_loop, greedy_records

ASSETS = Path(__file__).resolve().parent.parent / "assets" / "lab_tiny"
STOP = (1, 5)
NUM_NEW = 10
ENGINE = EngineConfig(max_num_requests=64, max_num_batched_tokens=1024, max_model_len=512)


@pytest.fixture(scope="session")
def target() -> Target:
    return load_target(ASSETS / "target", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(ASSETS / "target")
    return [encode_prompt(prompt, tokenizer) for prompt in load_prompts(None)]


@pytest.fixture(scope="session")
def baseline(target: Target, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [
        record.output_token_ids
        for record in greedy_records(
            target, None, prompts, num_drafts=0, num_new=NUM_NEW, stop=STOP
        )
    ]


def test_assets_hold_enough_prompts_and_a_small_target(prompts: list[tuple[int, ...]]) -> None:
    assert len(prompts) >= 96
    assert (ASSETS / "target" / "model.safetensors").stat().st_size <= 8_000_000


@pytest.mark.parametrize(
    ("num_drafts", "policy"),  # below, as many as and above the modules
    [(1, "training"), (3, "eagle"), (3, "training"), (5, "eagle")],
)
def test_greedy_text_equals_plain_decoding_on_all_shipped_prompts(
    target: Target,
    prompts: list[tuple[int, ...]],
    baseline: list[tuple[int, ...]],
    policy: str,
    num_drafts: int,
) -> None:
    # With three drafts each prompt meets one policy; the other numbers see an eighth of them.
    some = slice(policy == "training", None, 2 if num_drafts == 3 else 8)
    heads, chosen = load_heads(ASSETS / "heads" / "chain_n3", target), prompts[some]
    records = greedy_records(
        target, heads, chosen, policy=policy, num_drafts=num_drafts, num_new=NUM_NEW, stop=STOP
    )
    assert [record.output_token_ids for record in records] == baseline[some]
    assert sum(sum(record.num_accepted_per_round) for record in records) > 0


def test_plain_decoding_equals_transformers_generate(
    prompts: list[tuple[int, ...]], baseline: list[tuple[int, ...]]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=torch.float32).eval()
    for prompt, expected in list(zip(prompts, baseline, strict=True))[::12]:
        generated = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=list(STOP)
        )
        assert tuple(generated[0, len(prompt) :].tolist()) == expected


@pytest.mark.parametrize(
    ("name", "unroll", "num_depths"),
    [
        ("chain_n3", "chain", 3),
        ("chain_n1", "chain", 3),
        ("ttt_n1", "ttt", 4),
    ],
)
def test_replay_walk_equals_the_loop_round_for_round(
    target: Target, prompts: list[tuple[int, ...]], name: str, unroll: str, num_depths: int
) -> None:
    heads = load_heads(ASSETS / "heads" / name, target)
    chosen = prompts[::16]
    walked = assert_walk_is_loop(heads, chosen, unroll=unroll, num_depths=num_depths)
    assert walked.num_rounds > 5 * len(chosen)


def test_what_eval_takes_unasked_keeps_the_text_and_accepts_drafts() -> None:
    config = compose_config(EvalConfig, [])
    target = load_target(config.model.path, dtype="float32", device="cpu")
    heads = load_heads(str(config.spec.head), target)
    prompts = [encode_prompt(prompt, target.tokenizer) for prompt in load_prompts(None)[::32]]
    plain = greedy_records(target, None, prompts, num_drafts=0, num_new=24)
    for policy in config.spec.policy:
        drafted = greedy_records(target, heads, prompts, policy=policy, num_drafts=3, num_new=24)
        assert [one.output_token_ids for one in drafted] == [one.output_token_ids for one in plain]
        accepted = [number for one in drafted for number in one.num_accepted_per_round]
        assert 1 + sum(accepted) / len(accepted) > 1.5, policy

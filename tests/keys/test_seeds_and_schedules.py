"""What no single key says: rates follow their curve, and one seed is never used twice."""

import json
import math
from pathlib import Path

import pytest

from mtp_research.studies import regenerate
from tests.keys.lab import LAB_TINY, Lab

PEAK, NUM_STEPS = 0.002, 4


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("seeds"))


def test_optimizer_gets_warm_up_cosine_and_weight_decay_of_matrices(lab: Lab) -> None:
    changes = {"max_steps": NUM_STEPS, "warmup_fraction": 0.5, "weight_decay": 0.3}
    steps = lab.parts("heads", {f"trainer.{k}": value for k, value in changes.items()})["rates"]
    expected = [
        PEAK * min(1, (step + 1) / 2) * (1 + math.cos(math.pi * step / NUM_STEPS)) / 2
        for step in range(NUM_STEPS)
    ]
    assert expected[0] < expected[1] > expected[2] > expected[3]
    for found in (0, 1):  # groups: matrices, then vectors
        assert [groups[found]["lr"] for groups in steps] == pytest.approx(expected)
        assert {groups[found]["weight_decay"] for groups in steps} == {(0.3, 0.0)[found]}


def test_micro_batches_of_a_run_have_rows_and_noise_of_their_own(lab: Lab) -> None:
    parts = lab.parts("heads", {"trainer.gradient_accumulation_steps": 2})
    assert [len(set(parts[name])) for name in ("rows", "noise")] == [4, 4]


def test_equal_prompts_of_one_evaluation_are_sampled_apart_and_again_alike(lab: Lab) -> None:
    sampled = {"sampling.temperature": 3.0, "spec.verify": "standard"}
    parts = lab.parts("evaluate", {"prompts.path": "same prompts", **sampled})
    texts = parts["texts"]["training"]
    assert len(set(map(tuple, texts.values()))) == len(texts) == 3
    again = {"grid.num_speculative_tokens": [1], "prompts.path": "same prompts", **sampled}
    assert lab.parts("evaluate", again)["seeds"] == parts["seeds"]  # across conditions


def documents(folder: Path, *words: str) -> dict[str, tuple[list[int], list[int]]]:
    """Prompt and answer of each document that a regeneration writes."""
    output = folder / "answers.jsonl"
    target = ["--target", str(LAB_TINY / "target"), "--output", str(output), "--dtype", "float32"]
    sizes = ["--max-new-tokens", "6", "--max-model-len", "256", "--device", "cpu"]
    assert regenerate.main([*target, *sizes, *words]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    cuts = {line["id"]: (line["token_ids"], line["num_prompt_tokens"]) for line in lines}
    return {name: (tokens[:cut], tokens[cut:]) for name, (tokens, cut) in cuts.items()}


def test_regeneration_seed_reaches_answers_and_what_the_target_invents(
    lab: Lab, tmp_path: Path
) -> None:
    words = ["--source", str(lab.known["same prompts"]()), "--self-text", "3"]
    words += ["--temperature", "1", "--top-k", "0", "--top-p", "1"]
    found = [
        documents(tmp_path / str(n), *words, "--seed", str(seed))
        for n, seed in enumerate((0, 1, 1))
    ]
    assert found[2] == found[1]
    asked = [{k: v[1] for k, v in one.items() if "self-text" not in k} for one in found]
    assert asked[0].keys() == asked[1].keys()
    assert all(asked[0][name] != asked[1][name] for name in asked[0])  # another seed
    assert len(set(map(tuple, asked[0].values()))) == 3  # one seed, equal prompts
    invented = [sorted(v[0] for k, v in one.items() if "self-text" in k) for one in found]
    assert invented[0] != invented[1]

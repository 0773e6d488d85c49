"""Two ranks that share experts and are dealt requests decode what one process does, over gloo."""

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import mtp_research.evaluation.run.evaluate  # noqa: F401, once, before ranks are forked
from mtp_research.__main__ import run_evaluation
from mtp_research.app.cli import run_entry
from mtp_research.config.schema import EngineConfig, EvalConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models import rank_parts
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from tests.decode.loops import PROMPTS, draft_rightly
from tests.ranks import run_ranks
from tests.tiny import tiny_heads, tiny_target

# Experts beside recurrent layers, which no other plan splits, latent attention and the usual one.
MODELS = ("qwen3_next", "glm4_moe_lite", "glm4_moe")
DRAWN = {"temperature": 1.0, "top_p": 0.9}
# Name -> settings of speculation, of sampling and of the engine. Drafts are made from "plain".
CASES: dict[str, tuple[dict, dict, dict]] = {
    "plain": ({"num_speculative_tokens": 0}, {}, {}),
    "eagle": ({"policy": "eagle"}, {}, {}),
    "training": ({"policy": "training"}, {}, {"deferred_output": True}),
    "drawn plain": ({"num_speculative_tokens": 0}, DRAWN, {"deferred_output": True}),
    "drawn training": ({"policy": "training"}, DRAWN, {}),
}
OF_OTHERS = ("plain", "eagle")  # cases of all models but the last
LAB = Path(__file__).resolve().parents[2] / "assets" / "lab_tiny"


def decode(target: Target, *, names: list[str], prompts: dict[str, list[int]]) -> dict[str, Any]:
    """Texts and accepted counts of the prompts that are this rank's, by case and request."""
    found: dict[str, Any] = {}
    for name in names:
        spec, sampled, engine = CASES[name]
        # With one module passes without a row: a rank inside its prompts drafts nothing.
        num_modules = 1 if name == "eagle" else 3
        decoder = SpecDecoder(
            target,
            tiny_heads(target, num_mtp_modules=num_modules),
            spec=SpecSettings(**spec),
            engine=EngineConfig(max_num_requests=2, block_size=4, max_prefill_chunk=3, **engine),
        )
        for key, prompt in prompts.items():
            params = SamplingParams(max_new_tokens=5 + int(key), seed=int(key), **sampled)
            decoder.add_request(prompt, sampling=params, request_id=key)
        with pytest.MonkeyPatch.context() as patch:
            if name in ("eagle", "training"):
                outputs = {key: tuple(text) for key, (text, _) in found["plain"].items()}
                draft_rightly(patch, outputs, chance=0.7)
            while decoder.has_work:
                decoder.step()
                decoder.check_integrity()
            decoder.serve_peers()
        found[name] = {
            one.request_id: [list(one.output_token_ids), list(one.num_accepted_per_round)]
            for one in decoder.stats.records
        }
    return found


def held(target: Target) -> dict[str, int]:
    """Numbers of each parameter of target and modules that lie here."""
    heads = tiny_heads(target)
    heads.split()
    named = [*target.model.named_parameters(), *heads.named_parameters()]
    return {name: parameter.numel() for name, parameter in named}


def evaluate(output: Path, *words: str) -> int:
    """Exit code of eval.py on lab_tiny, run in this process."""
    keys = {
        "model.path": LAB / "target",
        "spec.head": LAB / "heads" / "chain_n1",
        "prompts.path": LAB / "prompts" / "dialog.jsonl",
        "output_dir": output,
        **{"spec.k": 2, "prompts.max_prompts": 3, "sampling.max_new_tokens": 6},
        **{"model.dtype": "float32", "model.device": "cpu", "spec.policy": "[training]"},
    }
    argv = [*(f"{key}={value}" for key, value in keys.items()), *words]
    return run_entry(EvalConfig, run_evaluation, argv=argv)


def write_found(folder: str) -> None:
    """The work of one rank: its share of the requests, what it exchanges, holds and refuses."""
    torch.set_num_threads(1)
    rank, found = int(os.environ["RANK"]), {}
    for name in MODELS:
        target = load_target(Path(folder) / name, dtype="float32", device="cpu", tp_plan="data")
        mine = {str(n): prompt for n, prompt in enumerate(PROMPTS) if n % 2 == rank}
        names = list(CASES if name == MODELS[-1] else OF_OTHERS)
        with pytest.MonkeyPatch.context() as patch:
            shapes = recorded_shapes(patch)
            found[name] = decode(target, names=names, prompts=mine)
        found[f"{name} shapes"] = shapes
        found[f"{name} held"] = held(target)
    found["one"] = decode(target, names=["plain"], prompts={"1": PROMPTS[1]} if rank else {})
    found["evaluated"] = evaluate(Path(folder) / "dealt", "model.tp_plan=data")
    found["lost"] = lose_a_rank(target, Path(folder) / f"rank_{rank}.json", found)


def recorded_shapes(patch: pytest.MonkeyPatch) -> list[list[int]]:
    """Shape of every part that is gathered from here on."""
    plain, shapes = rank_parts._all_gather, []

    def gather(output: torch.Tensor, part: torch.Tensor) -> None:
        shapes.append(list(part.shape))
        plain(output, part)

    patch.setattr(rank_parts, "_all_gather", gather)
    return shapes


def lose_a_rank(target: Target, file: Path, found: dict[str, Any]) -> dict[str, object]:
    """The second rank ends after its report; what the first one says, and after how long."""
    decoder = SpecDecoder(target, spec=SpecSettings(0), engine=EngineConfig(max_model_len=64))
    file.write_text(json.dumps(found))
    if os.environ["RANK"] == "1":
        os._exit(0)
    started = time.perf_counter()
    with pytest.raises(EnvironmentFault) as fault:
        list(decoder.generate([PROMPTS[0]]))
    lost = {"said": str(fault.value), "seconds": time.perf_counter() - started}
    file.write_text(json.dumps(found | {"lost": lost}))
    return lost


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        tiny_target(name, dtype=torch.float32).model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def ranks(models: Path) -> list[dict]:
    """What each of two ranks found."""
    said = run_ranks(__name__, "write_found", str(models))
    assert said.count("results: ") == said.count('"conditions": ') == 1, "the first rank alone"
    return [json.loads((models / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", MODELS)
def test_dealt_requests_get_the_texts_of_one_process(
    name: str, models: Path, ranks: list[dict]
) -> None:
    target = load_target(models / name, dtype="float32", device="cpu")
    names = list(CASES if name == MODELS[-1] else OF_OTHERS)
    prompts = {str(n): prompt for n, prompt in enumerate(PROMPTS)}
    alone = json.loads(json.dumps(decode(target, names=names, prompts=prompts)))
    accepted = [n for _, rounds in alone["eagle"].values() for n in rounds]
    assert {0, 3} <= set(accepted), "some drafts must be right, some wrong"
    for case in names:
        shares = [rank[name][case] for rank in ranks]
        assert [sorted(share) for share in shares] == [["0", "2"], ["1", "3"]]
        assert shares[0] | shares[1] == alone[case], case
    if name == MODELS[-1]:
        assert [rank["one"]["plain"] for rank in ranks] == [{}, {"1": alone["plain"]["1"]}]


@pytest.mark.parametrize("name", MODELS)
def test_ranks_exchange_equal_parts(name: str, ranks: list[dict]) -> None:
    shapes = [rank[f"{name} shapes"] for rank in ranks]
    assert shapes[0] == shapes[1]
    assert len({tuple(shape) for shape in shapes[0]}) > 3, "steps of several sizes"


@pytest.mark.parametrize("name", MODELS)
def test_experts_alone_are_split(name: str, models: Path, ranks: list[dict]) -> None:
    whole = held(load_target(models / name, dtype="float32", device="cpu"))
    expected = {key: size // 2 if ".experts." in key else size for key, size in whole.items()}
    assert sum(expected.values()) < sum(whole.values())
    assert any(key.startswith("mtp_modules") and ".experts." in key for key in whole)
    assert [rank[f"{name} held"] for rank in ranks] == [expected, expected]


def test_eval_of_dealt_prompts_is_that_of_one_process(models: Path, ranks: list[dict]) -> None:
    assert [rank["evaluated"] for rank in ranks] == [0, 0]
    assert evaluate(models / "alone") == 0
    reports = []
    for folder in ("alone", "dealt", "dealt/rank_1"):
        report = json.loads((models / folder / "results.json").read_text())
        text = (models / folder / "generations.jsonl").read_text()
        decided = ("label", "audit", "lossless", "acceptance")  # by no clock
        conditions = report["summary"]["conditions"]
        reports.append([text, *([one[key] for key in decided] for one in conditions)])
    for one, other in pairwise(reports):
        assert one == other


def test_rank_that_ends_is_one_line_of_the_other(ranks: list[dict]) -> None:
    lost = ranks[0]["lost"]
    assert lost["said"].startswith("all processes of torchrun are needed, and another one has")
    assert "\n" not in lost["said"]
    assert lost["seconds"] < 30


@pytest.mark.parametrize(
    ("recipe", "num_ranks", "message"),
    [
        ("qwen3", "2", "model.tp_plan=data needs a model with experts, got qwen3"),
        ("longcat_flash", "2", "needs routed experts that transformers deals to ranks"),
        ("glm4_moe", "3", "divides {'n_routed_experts': 8"),
        ("glm4_moe", "1", "model.tp_plan=data needs 2 or more processes"),
    ],
    ids=["no_experts", "no_plan", "uneven", "alone"],
)
def test_target_whose_experts_cannot_be_shared_is_refused(
    recipe: str, num_ranks: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_target(recipe, dtype=torch.float32).model.save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", num_ranks)
    with pytest.raises(ConfigError, match=message):
        load_target(tmp_path, device="cpu", tp_plan="data")

"""Two ranks that were dealt requests replay the same steps and decode what one process does.

Graphs are called again (`stand_in_for_graphs`), the ranks are real processes over gloo.
"""

import json
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed
from torch._dynamo.utils import counters

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.draft_length import BatchTableLength
from mtp_research.decode.graphs import decode_graphs, mixed_graphs
from mtp_research.decode.graphs.capture import Kind, SharedSteps
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.rewrites import regions
from mtp_research.models.target import Target, load_target
from tests.decode.loops import PROMPTS, draft_rightly
from tests.decode.test_captured_loop import stand_in_for_graphs
from tests.decode.toy_grammar import PAIRS
from tests.ranks import run_ranks
from tests.tiny import tiny_heads, tiny_target

ENGINE: dict[str, Any] = {
    "max_num_requests": 4,
    "block_size": 4,
    "max_prefill_chunk": 3,
    "max_model_len": 48,
    "max_num_batched_tokens": 16,
}
ON_GPU = ENGINE | {"block_size": 16}  # the least that kernels take
CAPTURED = {"cuda_graphs": True, "deferred_output": True, "audit": False}
NUM_TOKENS = (14, 9, 12, 5)  # of each request: the last one's rank is idle soon
TOLD = {"repetition_penalty": 1.3, "logprobs": 2}
AS_PAIRS = {"grammar": PAIRS, "stop_token_ids": (1, 2)}
LIMIT = timedelta(seconds=8)  # for which ranks that fail wait for each other


class Case(NamedTuple):
    """Requests dealt to two ranks, and how they are decoded."""

    spec: dict[str, Any]
    deal: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 1, 2), (3,))
    engine: dict[str, Any] = {}  # noqa: RUF012, never changed
    of_last: dict[str, Any] = {}  # noqa: RUF012, sampling of the last request
    warms_up: bool = False
    compiles: bool = False


EAGLE = {"policy": "eagle", "num_speculative_tokens": 3}
TRAINING = {"policy": "training", "num_speculative_tokens": 3}
NO_DRAFTS = {"num_speculative_tokens": 0}
COMPILED = {"compile": True, "graph_batch_sizes": [4]}
FEWER = {"draft_length": BatchTableLength(((1, 3), (2, 1)))}
MIXED = {"capture_mixed": True}
CASES = {
    "plain": Case(NO_DRAFTS),
    "plain mixed": Case(NO_DRAFTS, engine=MIXED),
    "eagle": Case(EAGLE),
    "training mixed": Case(TRAINING, engine=MIXED),
    "second rank alone in parts": Case(EAGLE, ((), (0, 1, 2, 3)), {"graph_batch_sizes": [2]}),
    "first rank alone mixed": Case(TRAINING, ((0, 1, 2, 3), ()), MIXED, warms_up=True),
    "large mixed": Case(TRAINING, engine=MIXED),
    "warm": Case(EAGLE, engine=MIXED, warms_up=True),
    "lengths": Case(EAGLE | FEWER, ((0, 2), (1, 3)), MIXED, warms_up=True),
    "told": Case(EAGLE, engine=MIXED, of_last=TOLD, warms_up=True),
    "grammar": Case(EAGLE, engine=MIXED, of_last=AS_PAIRS, warms_up=True),
    "compiled": Case(NO_DRAFTS, ((1,), ()), COMPILED, compiles=True),
}


def decode_alone(target: Target) -> dict[str, Any]:
    """Texts and accepted counts of all requests by case, decoded by one process as they come."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        everybody = (tuple(range(len(PROMPTS))), ())
        one = case._replace(deal=everybody, engine={}, warms_up=False, compiles=False)
        found[name] = decode(target, one, rank=0, texts=found.get("plain", {}), is_captured=False)
    return found


def decode_dealt(target: Target, texts: dict[str, Any]) -> dict[str, Any]:
    """What this rank does of every case in captured steps; `texts` are those of `plain` alone."""
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            stand_in_for_graphs(patch)
            patch.setattr(mixed_graphs, "MIXED_ROWS", (4,) if "large" in name else (8, 16, 32))
            if case.compiles:
                trace_without_compiling(patch)
            found[name] = decode(target, case, rank=rank, texts=texts)
    return found


def write_dealt(folder: str) -> None:
    """The work of one rank."""
    torch.set_num_threads(1)
    target = load_dealt(Path(folder))
    alone = json.loads((Path(folder) / "alone.json").read_text())
    found = decode_dealt(target, alone["plain"])
    (Path(folder) / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(found))


def load_dealt(folder: Path) -> Target:
    """This rank's part."""
    return load_target(folder / "target", dtype="float32", device="cpu", tp_plan="data")


def decode(
    target: Target, case: Case, *, rank: int, texts: dict[str, Any], is_captured: bool = True
) -> dict[str, Any]:
    """Text and accepted counts of this rank's requests, and what it replayed."""
    engine = EngineConfig(**ENGINE | (CAPTURED if is_captured else {}) | case.engine)
    heads = tiny_heads(target, num_mtp_modules=1 if case.spec.get("policy") == "eagle" else 3)
    decoder = SpecDecoder(target, heads, spec=SpecSettings(**case.spec), engine=engine)
    if case.warms_up:
        decoder.warm_up(SamplingParams(), num_requests=len(case.deal[rank]) or 1)
    for pool in decoder.cache._pools:
        pool[:, :-1] = 7.0
    num_builds = decoder.num_builds
    for number in case.deal[rank]:
        sampled = case.of_last if number == len(PROMPTS) - 1 else {}
        params = SamplingParams(max_new_tokens=NUM_TOKENS[number], **sampled)
        decoder.add_request(PROMPTS[number], sampling=params, request_id=str(number))
    with pytest.MonkeyPatch.context() as patch:
        outputs = {name: tuple(text) for name, (text, _) in texts.get("requests", {}).items()}
        if outputs:
            draft_rightly(patch, outputs, chance=0.7)
        seen = watch(patch, decoder)
        while decoder.has_work:
            decoder.step()
            decoder.check_integrity()
        decoder.serve_peers()
    records = decoder.stats.records
    most = [1 + one.num_target_forwards + sum(one.num_accepted_per_round) for one in records]
    return seen | {
        "is_counted": all(
            len(one.output_token_ids) <= count for one, count in zip(records, most, strict=True)
        ),
        "requests": {
            one.request_id: [list(one.output_token_ids), list(one.num_accepted_per_round)]
            for one in records
        },
        "num_counted": decoder.stats.num_emitted_tokens,
        "is_untouched": all(bool((pool[:, :-1] == 7.0).all()) for pool in decoder.cache._pools),
        "graph_breaks": list(counters["graph_break"]),
        "num_late_builds": (decoder.num_builds or 0) - (num_builds or 0),
    }


def watch(patch: pytest.MonkeyPatch, decoder: SpecDecoder) -> dict[str, Any]:
    """Kinds of what is replayed from here on, how often for nobody, and steps that just come."""
    seen: dict[str, Any] = {"replayed": [], "num_idle": 0, "num_others": 0}
    if decoder.graphs is None:
        return seen
    note, run, agreed = SharedSteps.note_replay, decoder.graphs.run, decoder.graphs.agreed

    def noting(self: SharedSteps, kind: Kind) -> None:
        seen["replayed"].append([int(value) for value in kind])
        note(self, kind)

    def running(shape: Any, entries: list, *args: Any, **how: Any) -> object:
        seen["num_idle"] += not entries
        return run(shape, entries, *args, **how)

    def agreeing(most: list[int]) -> object:
        shape = agreed(most)
        seen["num_others"] += shape is None and most[0] > 0
        return shape

    patch.setattr(SharedSteps, "note_replay", noting)
    patch.setattr(decoder.graphs, "run", running)
    patch.setattr(decoder.graphs, "agreed", agreeing)
    return seen


def trace_without_compiling(patch: pytest.MonkeyPatch) -> None:
    """Let what `torch.compile` traces run as it was traced."""
    torch_compile = torch.compile

    def traced(function: Any, **_: object) -> Any:
        return torch_compile(function, dynamic=False, backend=lambda graph, _: graph.forward)

    regions.compiled_once.cache_clear()
    patch.setattr(torch, "compile", traced)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dealt")
    tiny_target("glm4_moe", dtype=torch.float32).model.save_pretrained(folder / "target")
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict:
    """What one process decodes of the cases that ranks replay."""
    target = load_target(folder / "target", dtype="float32", device="cpu")
    found = json.dumps(decode_alone(target))
    (folder / "alone.json").write_text(found)
    return json.loads(found)


@pytest.fixture(scope="module")
def ranks(folder: Path, alone: dict) -> list[dict]:
    """What each of two ranks replayed."""
    run_ranks(__name__, "write_dealt", str(folder))
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_captured_steps_of_dealt_requests_give_the_texts_of_one_process(
    name: str, alone: dict, ranks: list[dict]
) -> None:
    case, shares = CASES[name], [rank[name] for rank in ranks]
    expected = alone[name]["requests"]
    for share, numbers in zip(shares, case.deal, strict=True):
        assert sorted(share["requests"]) == sorted(map(str, numbers))
        for key, (text, accepted) in share["requests"].items():
            assert text == expected[key][0]
            # One process limits drafts by another batch size.
            assert accepted == expected[key][1] or name == "lengths"
        assert share["is_counted"], "the host knows how many rows were verified"
        assert share["num_counted"] == sum(len(text) for text, _ in share["requests"].values())
    if name not in ("plain", "plain mixed", "lengths", "compiled"):
        accepted = [n for _, rounds in expected.values() for n in rounds]
        assert {0, 3} <= set(accepted), "some drafts must be right, some wrong"


@pytest.mark.parametrize("name", CASES)
def test_ranks_replay_the_same_steps_and_a_rank_without_requests_too(
    name: str, ranks: list[dict]
) -> None:
    case, shares = CASES[name], [rank[name] for rank in ranks]
    assert shares[0]["replayed"] == shares[1]["replayed"]
    assert shares[0]["num_others"] == shares[1]["num_others"]
    assert max(share["num_idle"] for share in shares) >= 3 or name == "lengths"
    if case.warms_up and name not in ("told", "grammar"):
        assert [share["num_late_builds"] for share in shares] == [0, 0]
    for share, numbers in zip(shares, case.deal, strict=True):
        assert share["is_untouched"] == (not numbers), "a rank without requests writes no page"


def test_ranks_capture_what_one_of_them_needs_and_drafts_follow_the_longest_limit(
    ranks: list[dict],
) -> None:
    first, second = (rank["told"]["num_late_builds"] for rank in ranks)
    assert (first, second > 0) == (0, True), "the second one's request is sampled otherwise"
    kinds = {(is_mixed, limit) for is_mixed, _, limit in ranks[0]["lengths"]["replayed"]}
    assert {(0, 3), (0, 1)} <= kinds
    assert max(rows for _, rows, _ in ranks[0]["large mixed"]["replayed"]) > 4


def test_what_is_compiled_is_traced_whole(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["compiled"]["num_late_builds"] > 1
        assert rank["compiled"]["graph_breaks"] == []


@pytest.mark.parametrize("fault", ["no replay of an idle rank", "ended"])
def test_rank_that_does_not_take_part_ends_both(fault: str, folder: Path) -> None:
    run_ranks(__name__, "go_wrong", str(folder), fault)
    found = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{fault} *.json"))]
    assert len(found) == (1 if fault == "ended" else 2)
    for rank in found:
        assert rank["said"].startswith("EnvironmentFault: all processes of torchrun are needed")
        assert "\n" not in rank["said"]
        assert rank["seconds"] < 60


def test_rank_with_another_bucket_ends_both(folder: Path) -> None:
    with pytest.raises(AssertionError, match="a distributed collective mismatch"):
        run_ranks(__name__, "go_wrong", str(folder), "another bucket")


def go_wrong(folder: str, fault: str) -> None:
    """The work of a rank in such a run: what it said in the end, and after how many seconds."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo", timeout=LIMIT)
    target = load_dealt(Path(folder))
    started = time.perf_counter()
    said = "nothing"
    with pytest.MonkeyPatch.context() as patch:
        stand_in_for_graphs(patch)
        if rank == 1:
            plant(patch, fault)
        try:
            decode(target, CASES["eagle"], rank=rank, texts={})
        except (RuntimeError, AssertionError, OSError) as met:
            said = f"{type(met).__name__}: {met}"
    seconds = time.perf_counter() - started
    file = Path(folder) / f"{fault} {rank}.json"
    file.write_text(json.dumps({"said": said, "seconds": seconds}))


def plant(patch: pytest.MonkeyPatch, fault: str) -> None:
    """Let this rank do something else than the ranks have agreed on."""
    graphs = decode_graphs.StepGraphs
    if fault == "another bucket":
        patch.setattr(decode_graphs, "bucket_of", lambda *_: 4)
    run = graphs.run

    def skipping(self: Any, shape: Any, entries: list, *args: Any, **how: Any) -> object:
        return run(self, shape, entries, *args, **how) if entries else None

    def ending(self: Any, shape: Any, entries: list, *args: Any, **how: Any) -> object:
        if not entries:
            os._exit(0)
        return run(self, shape, entries, *args, **how)

    if fault == "no replay of an idle rank":
        patch.setattr(graphs, "run", skipping)
    if fault == "ended":
        patch.setattr(graphs, "run", ending)


# NVLink multicast can put GPUs that others share out of service.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiled"])
def test_two_gpus_replay_the_texts_of_one_process(
    num_drafts: int, compiles: bool, folder: Path
) -> None:
    target = load_target(folder / "target", dtype="float32", device="cuda")
    expected = texts_on_gpu(target, num_drafts, range(len(PROMPTS)), ON_GPU)
    run_ranks(__name__, "write_on_gpu", str(folder), str(num_drafts), str(int(compiles)))
    found = [json.loads((folder / f"gpu_{rank}.json").read_text()) for rank in range(2)]
    assert found[0] | found[1] == expected


def write_on_gpu(folder: str, num_drafts: str, compiles: str) -> None:
    """The texts of a rank on its own GPU; the second one has a request alone."""
    os.environ |= WITHOUT_MULTICAST
    target = load_target(Path(folder) / "target", dtype="float32", device="cuda", tp_plan="data")
    rank, engine = int(os.environ["RANK"]), ON_GPU | CAPTURED | MIXED
    engine |= {"compile": bool(int(compiles)), "graph_batch_sizes": [2, 4]}
    texts = texts_on_gpu(target, int(num_drafts), ((0, 1, 2), (3,))[rank], engine)
    (Path(folder) / f"gpu_{rank}.json").write_text(json.dumps(texts))


def texts_on_gpu(
    target: Target, num_drafts: int, numbers: Iterable[int], engine: dict[str, Any]
) -> dict[str, list[int]]:
    """Texts of these prompts by number."""
    decoder = SpecDecoder(
        target,
        tiny_heads(target, num_mtp_modules=1).to(target.device),
        spec=SpecSettings(policy="eagle", num_speculative_tokens=num_drafts),
        engine=EngineConfig(**engine),
    )
    decoder.warm_up(SamplingParams())
    for number in numbers:
        sampling = SamplingParams(max_new_tokens=NUM_TOKENS[number])
        decoder.add_request(PROMPTS[number], sampling=sampling, request_id=str(number))
    while decoder.has_work:
        decoder.step()
    decoder.serve_peers()
    return {one.request_id: list(one.output_token_ids) for one in decoder.stats.records}

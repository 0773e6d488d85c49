"""Two ranks that split a target decode what one process decodes: real processes over gloo."""

import itertools
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from mtp_research.bench.shapes import sizes_only
from mtp_research.config.schema import EngineConfig, ModelConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.target import Target, load_target, target_hashes
from mtp_research.policy.fields import POLICIES
from mtp_research.runtime.errors import ConfigError, IntegrityError
from tests.decode import split_cases
from tests.decode.loops import draft_rightly, run, texts_of
from tests.models import sharded_cases
from tests.models.sharded_cases import FAMILIES, FAULTS, SHARDED, SPLIT
from tests.ranks import run_ranks
from tests.tiny import tiny_heads, tiny_target

# Recipe -> plan. Attention of glm4_moe_lite is latent, mimo_v2's has sinks and windows.
PLANS = {
    "qwen3": "tensor",
    "glm4_moe": "tensor",
    "glm4_moe_lite": "tensor",
    "mimo_v2": "tensor",
    "glm4_moe-experts": "experts",
    "qwen3-tied": "tensor",
}
DRAFTED = ("eagle", "training")
DRAWN = ("qwen3", "glm4_moe-experts")  # at temperature 1, where ranks must draw alike
# What of a decoder layer is whole on every rank: what transformers' plan leaves alone, and buffers.
READ_WHOLE = {
    "split": {
        *("input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate.weight"),
        *("self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate.e_score_correction_bias"),
    },
    "sharded": {"mlp.gate.e_score_correction_bias"},
}


def decode(target: Target, *, name: str) -> dict[str, object]:
    """Texts without drafts, and with drafts that are often right; greedy or drawn."""
    found: dict[str, object] = {}
    heads = tiny_heads(target)
    engine = EngineConfig(max_num_requests=4, block_size=4, max_prefill_chunk=3)
    sampling = SamplingParams(max_new_tokens=7, temperature=float(name in DRAWN), seed=5)
    plain = texts_of(
        run(
            SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine),
            sampling=sampling,
        )
    )
    found["plain"] = plain
    for policy in DRAFTED if name in DRAWN else DRAFTED[:1]:
        with pytest.MonkeyPatch.context() as patch:
            draft_rightly(patch, plain, chance=0.7)
            decoder = SpecDecoder(target, heads, spec=SpecSettings(policy=policy), engine=engine)
            records = run(decoder, sampling=sampling)
        found[policy] = texts_of(records)
        found[f"{policy} accepted"] = [r.num_accepted_per_round for r in records.values()]
    found["kv_heads"] = [layer.num_kv_heads for layer in target.kv_layers]
    found["hashes"] = target_hashes(target)
    found["num_parameters"] = sum(local_size(part) for part in target.model.parameters())
    return found


def local_size(part: torch.Tensor) -> int:
    """Numbers of a parameter that lie on this rank."""
    return (part.to_local() if isinstance(part, DTensor) else part).numel()


def decode_split(folder: Path) -> dict[str, object]:
    """What one rank decodes of every model in `folder`."""
    torch.set_num_threads(1)
    return {
        name: decode(load_split(folder / name, plan), name=name) for name, plan in PLANS.items()
    }


def write_found(folder: str) -> None:
    """The work of one rank: what it decodes and loads of the models in `folder`."""
    found = decode_split(Path(folder)) | sharded_cases.load_split(Path(folder))
    found |= {"cases": split_cases.observe(Path(folder))}
    file = Path(folder) / f"rank_{os.environ['RANK']}.json"
    file.write_text(json.dumps(found))
    found |= {"lost": split_cases.lose_a_rank(Path(folder))}  # the last thing that both do
    file.write_text(json.dumps(found))


def load_split(path: Path, plan: str) -> Target:
    return load_target(path, dtype="float64", device="cpu", tp_plan=plan)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in PLANS:
        is_tied = name.endswith("-tied")
        recipe, _, _ = name.partition("-")
        # A bias of o_proj, which one rank alone may add
        changes = {"tie_word_embeddings": is_tied} | ({"attention_bias": True} if is_tied else {})
        model = tiny_target(recipe, dtype=torch.float32, **changes).model
        model.save_pretrained(folder / name)
    sharded_cases.write_checkpoints(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(models: Path) -> list[dict]:
    """What each of two ranks found."""
    run_ranks(__name__, "write_found", str(models))
    return [json.loads((models / f"rank_{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_decode_what_one_process_decodes(models: Path, ranks: list[dict]) -> None:
    for name, plan in PLANS.items():
        target = load_target(models / name, dtype="float64", device="cpu")
        alone = json.loads(json.dumps(decode(target, name=name)))
        accepted = [count for rounds in alone["eagle accepted"] for count in rounds]
        assert name in DRAWN or {0, 3} <= set(accepted), "some drafts must be right, some wrong"
        whole, _ = alone.pop("kv_heads"), alone.pop("num_parameters")
        is_split = plan == "tensor" and not target.family.latent_attention
        for rank in ranks:
            split, held = rank[name].pop("kv_heads"), rank[name].pop("num_parameters")
            assert plan != "tensor" or held == planned_size(models / name)
            assert split == [heads // 2 if is_split else heads for heads in whole]
            assert rank[name] == alone, f"{name} over two ranks"


def planned_size(folder: Path) -> int:
    """Numbers of one of two ranks by the plan that `mtp plan` makes of the configuration."""
    model = ModelConfig("", "", str(folder))
    target = sizes_only(model, dtype=torch.float64, num_ranks=2).target
    return sum(part.numel() for part in target.model.parameters())


@pytest.fixture(scope="module")
def alone(models: Path) -> dict:
    """What one process finds of the cases."""
    return json.loads(json.dumps(split_cases.observe(models, plan="none")))


@pytest.mark.parametrize("name", split_cases.MODELS)
def test_every_policy_and_way_of_sampling_gives_the_texts_of_one_process(
    name: str, alone: dict, ranks: list[dict]
) -> None:
    accepted = [n for rounds in alone["glm4_moe"]["eagle"]["accepted"] for n in rounds]
    assert {0, 3} <= set(accepted), "some drafts must be right, some wrong"
    drafted = [n for rounds in alone["glm4_moe"]["confidence"]["drafted"] for n in rounds]
    assert min(drafted) < max(drafted), "some drafts must be sure enough, some not"
    for rank in ranks:
        for case, expected in alone[name].items():
            if case.endswith("logprobs"):
                assert rank["cases"][name][case] == pytest.approx(expected, abs=1e-4), case
            elif not case.endswith("sent"):
                assert rank["cases"][name][case] == expected, case


def test_greedy_steps_exchange_best_tokens_and_no_logits(ranks: list[dict]) -> None:
    rows, logits_bytes = 4 * 4, 4 * 64  # requests and K + 1; float32 of half the vocabulary
    for rank in ranks:
        found = rank["cases"]["glm4_moe"]
        for case in ("plain", *POLICIES, "vocabulary", "synthetic", "confidence"):
            assert 0 < found[f"{case} sent"]["gathered"] <= 16 * rows, case
        assert found["top eagle sent"]["gathered"] <= 16 * 8 * rows  # of a bound of 8 candidates
        assert found["all block sent"]["gathered"] > 2 * logits_bytes
        assert found["penalties sent"]["gathered"] > 2 * logits_bytes


# Of GLM's layers and modules: norms, routers and the projection of a module's input.
HELD_WHOLE = ("norm.weight", "norm.bias", "mlp.gate.weight", "eh_proj.weight", "o_proj.bias")


def test_no_rank_holds_lm_head_experts_or_modules_whole(alone: dict, ranks: list[dict]) -> None:
    for rank in ranks:
        held = rank["cases"]["glm4_moe held"]
        for name, whole in alone["glm4_moe held"].items():
            is_whole = name.endswith(HELD_WHOLE)
            assert held[name] * (1 if is_whole else 2) == whole, name
        by_expert = rank["cases"]["glm4_moe-experts held"]
        for name, whole in alone["glm4_moe-experts held"].items():
            parts = ("mlp.experts.", "embed_tokens", "lm_head", "shared_head.head")
            is_split = any(part in name for part in parts)
            assert by_expert[name] * (1 + is_split) == whole, name


def test_compiled_and_replayed_steps_of_two_ranks_give_the_texts_of_one(
    alone: dict, ranks: list[dict]
) -> None:
    texts = alone["glm4_moe-experts"]["plain"]["texts"]
    assert [rank["cases"]["compiled"] for rank in ranks] == [texts, texts]


def test_what_parts_cannot_do_is_refused(ranks: list[dict]) -> None:
    for rank in ranks:
        vocabulary, saved, unseeded = rank["cases"]["refused"]
        assert "must be a multiple of 2 for as many processes" in vocabulary
        assert "heads are saved whole" in saved
        assert "seed must be set" in unseeded


def test_ranks_with_unequal_memory_get_equal_pools(ranks: list[dict]) -> None:
    first, second = (rank["cases"]["blocks"] for rank in ranks)
    assert first == second


def test_rank_that_ends_is_one_line_of_the_other(ranks: list[dict]) -> None:
    lost = ranks[0]["lost"]
    assert lost["said"].startswith(
        "all processes of torchrun are needed, and another one has ended"
    )
    assert "\n" not in lost["said"]
    assert lost["seconds"] < 30


@pytest.mark.parametrize("name", SPLIT)
def test_split_checkpoint_decodes_as_whole_one(name: str, models: Path, ranks: list[dict]) -> None:
    how = {key: value for key, value in SPLIT[name].items() if key != "tp_plan"}
    alone = json.loads(json.dumps(sharded_cases.decode(sharded_cases.load(models / name, **how))))
    assert [rank[f"{name} split"]["texts"] for rank in ranks] == [alone, alone]


@pytest.mark.parametrize("name", [*SHARDED, *FAMILIES])
def test_layers_spread_over_ranks_are_those_of_whole_target(
    name: str, models: Path, ranks: list[dict]
) -> None:
    target = sharded_cases.load(models / name.partition(" ")[0], **SHARDED.get(name, {}))
    layers = sum(p.numel() for p in target.model.base_model.layers.parameters())
    shared = sum(p.numel() for p in target.model.parameters()) - layers
    for rank in ranks:
        found = rank[f"{name} sharded"]
        assert found["gaps"] == []
        assert found["is_one_tree"], "layers that are roots have a pool of GPU memory each"
        assert found["hidden"] == pytest.approx(sharded_cases.hidden_of(target), abs=1e-5)
        assert found["held"] == pytest.approx(shared + layers / 2, rel=0.02)  # a norm of odd size
        assert found["kept"] == found["held"], "a layer keeps nothing of what it gathered"


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *itertools.product(["lab_tiny", "index", "fp8"], READ_WHOLE),
        ("fp8 kept", "sharded"),
        ("fp8_rows kept", "sharded"),
    ],
)
def test_rank_reads_its_slices_alone(name: str, way: str, models: Path, ranks: list[dict]) -> None:
    sizes: Counter[str] = Counter()
    for file in (models / name.partition(" ")[0]).glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            sizes[of_all_experts(key)] += tensor.numel()
    reads = [Counter(), Counter()]
    for rank, read in zip(ranks, reads, strict=True):
        for key, count in rank[f"{name} {way}"]["read"].items():
            read[of_all_experts(key)] += count
        scales = {key for key in sizes if "_scale" in key}  # a number for each block or row
        numbers = {key: size for key, size in sizes.items() if key not in scales}
        assert all(read[key] <= size for key, size in numbers.items()), "no number is read twice"
        layers = {key for key, size in numbers.items() if read[key] == size and ".layers." in key}
        assert {key.split(".", 3)[3] for key in layers} <= READ_WHOLE[way]
        assert all(
            2 * read[key] == size
            for key, size in numbers.items()
            if key not in layers and "layers" in key
        )
    assert all(sum(read[key] for read in reads) >= size for key, size in sizes.items())


def of_all_experts(name: str) -> str:
    """A tensor's name without the number of its expert: a rank may own whole experts."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_one_rank_ends_both(fault: str, ranks: list[dict]) -> None:
    other, met = (rank["faults"][fault] for rank in ranks)
    assert FAULTS[fault] in met[0]
    assert "\n" not in met[0]
    assert other[0] == f"rank 1 could not load its part of the target: {met[0]}"
    assert max(met[1], other[1]) < 30


def test_entries_end_alike_on_all_ranks_and_training_writes_nothing(
    models: Path, ranks: list[dict]
) -> None:
    assert [rank["exit_codes"] for rank in ranks] == [[IntegrityError.exit_code] * 2] * 2
    assert not (models / "refused_training").exists()


def test_eval_of_random_weights_on_two_ranks_is_that_of_one(
    models: Path, ranks: list[dict]
) -> None:
    assert [rank["evaluated"] for rank in ranks] == [0, 0]
    assert sharded_cases.evaluate(models, "only_config", "alone") == 0
    alone, split = ((models / name / "generations.jsonl") for name in ("alone", "texts"))
    assert alone.read_text() == split.read_text()


def test_plan_without_torchrun_is_refused(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.tp_plan=tensor needs 2 or more .* torchrun"):
        load_target(models / "qwen3", device="cpu", tp_plan="tensor")


@pytest.mark.parametrize(
    ("recipe", "plan", "message"),
    [
        ("qwen3_next", "tensor", "recurrent layers"),
        ("qwen3", "experts", "needs a model with experts"),
        ("qwen3", "tensor", "divides {'num_attention_heads': 4, 'num_key_value_heads': 2"),
    ],
    ids=["recurrent", "no_experts", "uneven"],
)
def test_target_that_cannot_be_split_is_refused(
    recipe: str, plan: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_target(recipe, dtype=torch.float32).model.save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3" if "divides" in message else "2")
    with pytest.raises(ConfigError, match=message):
        load_target(tmp_path, device="cpu", tp_plan=plan)

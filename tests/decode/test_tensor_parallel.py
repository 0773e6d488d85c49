"""Two ranks that split a target decode what one process decodes: real processes over gloo."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.target import Target, load_target, target_hashes
from mtp_research.runtime.errors import ConfigError
from tests.decode.loops import draft_rightly, run, texts_of
from tests.tiny import tiny_heads, tiny_target

ROOT = Path(__file__).resolve().parents[2]
# Recipe -> plan. Attention of glm4_moe_lite is latent, mimo_v2's has sinks and windows.
PLANS = {
    "qwen3": "tensor",
    "glm4_moe": "tensor",
    "glm4_moe_lite": "tensor",
    "mimo_v2": "tensor",
    "glm4_moe-experts": "experts",
    "qwen3-tied": "tensor",
}
DRAWN = ("qwen3", "glm4_moe-experts")  # at temperature 1, where ranks must draw alike
RANK = """
import json, os, sys
from pathlib import Path
from tests.decode.test_tensor_parallel import decode_split
folder = Path(sys.argv[1])
found = decode_split(folder)
(folder / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(found))
"""


def decode(target: Target, *, draws: bool) -> dict[str, object]:
    """Texts without drafts, and with drafts that are often right; greedy or drawn."""
    found: dict[str, object] = {}
    heads = tiny_heads(target)
    engine = EngineConfig(max_num_requests=4, block_size=4, max_prefill_chunk=3)
    sampling = SamplingParams(max_new_tokens=10, temperature=float(draws), seed=5)
    plain = texts_of(
        run(
            SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine),
            sampling=sampling,
        )
    )
    found["plain"] = plain
    for policy in ("eagle", "training"):
        with pytest.MonkeyPatch.context() as patch:
            draft_rightly(patch, plain, chance=0.7)
            decoder = SpecDecoder(target, heads, spec=SpecSettings(policy=policy), engine=engine)
            records = run(decoder, sampling=sampling)
        found[policy] = texts_of(records)
        found[f"{policy} accepted"] = [r.num_accepted_per_round for r in records.values()]
    found["kv_heads"] = [layer.num_kv_heads for layer in target.kv_layers]
    found["hashes"] = target_hashes(target)
    return found


def decode_split(folder: Path) -> dict[str, object]:
    """What one rank decodes of every model in `folder`."""
    torch.set_num_threads(1)
    return {
        name: decode(load_split(folder / name, plan), draws=name in DRAWN)
        for name, plan in PLANS.items()
    }


def load_split(path: Path, plan: str) -> Target:
    return load_target(path, dtype="float64", device="cpu", tp_plan=plan)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in PLANS:
        is_tied = name.endswith("-tied")
        recipe, _, _ = name.partition("-")
        model = tiny_target(recipe, dtype=torch.float32, tie_word_embeddings=is_tied).model
        model.save_pretrained(folder / name)
    return folder


def run_ranks(folder: Path, *, num_ranks: int = 2) -> list[dict]:
    """What each rank found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    for rank in range(num_ranks):
        env = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-c", RANK, str(folder)]
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
        )
    errors = [process.communicate(timeout=110)[1] for process in processes]
    for process, text in zip(processes, errors, strict=True):
        assert process.returncode == 0, text[-3000:]
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(num_ranks)]


def test_two_ranks_decode_what_one_process_decodes(models: Path) -> None:
    ranks = run_ranks(models)
    for name, plan in PLANS.items():
        target = load_target(models / name, dtype="float64", device="cpu")
        alone = json.loads(json.dumps(decode(target, draws=name in DRAWN)))
        accepted = [count for rounds in alone["eagle accepted"] for count in rounds]
        assert name in DRAWN or {0, 3} <= set(accepted), "some drafts must be right, some wrong"
        whole = alone.pop("kv_heads")
        is_split = plan == "tensor" and not target.family.latent_attention
        for rank in ranks:
            split = rank[name].pop("kv_heads")
            assert split == [heads // 2 if is_split else heads for heads in whole]
            assert rank[name] == alone, f"{name} over two ranks"


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

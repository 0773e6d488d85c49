"""Checkpoints for two ranks, and what each rank finds when it loads its part of them.

`tests/decode/test_tensor_parallel.py` runs `load_split` in the processes that it needs anyhow, and
compares what they found.
"""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers.modeling_utils
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mtp_research.__main__ import run_evaluation, run_training
from mtp_research.app.cli import run_entry
from mtp_research.config.schema import EngineConfig, EvalConfig, TrainConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.loading import lazy_tensors
from mtp_research.models.loading.placement import whole
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.errors import IntegrityError
from tests.decode.loops import run, texts_of
from tests.models.test_loading import quantise
from tests.tiny import tiny_target

LAB_TINY = Path(__file__).resolve().parents[2] / "assets" / "lab_tiny" / "target"
IDS = torch.arange(5, 25)[None]
# Name -> how it is loaded by ranks. lab_tiny has tied embeddings and experts, `index` four shards.
SPLIT: dict[str, dict] = {
    "lab_tiny": {"tp_plan": "tensor"},
    "index": {"tp_plan": "tensor"},
    "fp8": {"tp_plan": "tensor"},
    "random": {"tp_plan": "tensor", "weights": "random"},
    "random-tied": {"tp_plan": "tensor", "weights": "random"},
    "random-experts": {"tp_plan": "experts", "weights": "random"},
}
# Name -> how it is loaded with its layers spread over ranks; of a folder, what it stores as FP8.
SHARDED: dict[str, dict] = {
    "lab_tiny": {},
    "index": {},
    "fp8": {},
    "fp8 kept": {"weights": "stored_fp8"},
    "fp8_rows kept": {"weights": "stored_fp8"},
    "fp8 drawn": {"weights": "random_fp8"},
    "random": {"weights": "random"},
    "random-tied": {"weights": "random"},
}
FAMILIES = ("ernie4_5_moe", "mimo_v2", "minimax_m2", "glm4_moe_lite", "qwen3_next")
# Checkpoint -> the change to it, and what the rank that meets the fault says; the other rank's
# files are whole.
FAULTS = {
    "missing_shard": "files of its index, 1 are missing",
    "truncated": "model-00002-of-",
    "wrong_shape": "1 of another shape",
    "missing_tensor": "1 are missing ['model.layers.1.self_attn.o_proj.weight']",
}
EVAL = ["spec.k=0", "prompts.max_prompts=2", "model.dtype=float32", "model.weights=random"]


def write_checkpoints(folder: Path) -> None:
    """All that is loaded below, in `folder`."""
    shutil.copytree(LAB_TINY, folder / "lab_tiny")
    _save(folder / "index", max_shard_size="100KB")
    # 48 rows are a block and a half: the second rank's begin inside one.
    for name, layout in (("fp8", "blocks"), ("fp8_rows", "rows")):
        _save(folder / name, intermediate_size=96, moe_intermediate_size=40)
        quantise(folder / name, layout=layout)
    for name, changes in (("", {}), ("-tied", {"tie_word_embeddings": True}), ("-experts", {})):
        _save(folder / f"random{name}", **changes)
        (folder / f"random{name}" / "model.safetensors").unlink()
    for name in FAMILIES:
        _save(folder / name, name)
    shutil.copytree(LAB_TINY, folder / "only_config")
    (folder / "only_config" / "model.safetensors").unlink()
    for name in FAULTS:
        for rank in range(2):
            shutil.copytree(folder / "index", folder / f"{name}_{rank}")
        _damage(folder / f"{name}_1", name)


def _save(path: Path, recipe: str = "glm4_moe", *, max_shard_size: str = "1GB", **changes) -> None:
    model = tiny_target(recipe, dtype=torch.float32, **changes).model
    model.save_pretrained(path, max_shard_size=max_shard_size)


def _damage(path: Path, fault: str) -> None:
    shard = path / sorted(file.name for file in path.glob("*-00002-of-*"))[0]
    if fault == "missing_shard":
        shard.unlink()
    elif fault == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        name = "model.layers.1.self_attn.o_proj.weight"
        file = path / index[name]
        tensors = load_file(file)
        changed = {} if fault == "missing_tensor" else {name: tensors[name][:, :-1].clone()}
        del tensors[name]
        save_file(tensors | changed, file, metadata={"format": "pt"})


def load_split(folder: Path) -> dict[str, object]:
    """What this rank reads, keeps and decodes, and how it ends where a rank meets a fault."""
    rank = os.environ["RANK"]
    found: dict[str, object] = {"faults": {}}
    for name in FAULTS:
        start = time.perf_counter()
        with pytest.raises(IntegrityError) as fault:
            load_target(folder / f"{name}_{rank}", device="cpu", tp_plan="tensor")
        found["faults"][name] = [str(fault.value), time.perf_counter() - start]
    damaged = folder / f"truncated_{rank}"
    found["exit_codes"] = [
        evaluate(folder, damaged.name, "refused", "model.tp_plan=tensor"),
        train(damaged, folder / "refused_training"),
    ]
    for name, how in SPLIT.items():
        with counting_reads() as counts:
            target = load(folder / name, **how)
        found[f"{name} split"] = facts_of(target, counts) | {"texts": decode(target)}
    for name, how in (SHARDED | {key: {} for key in FAMILIES}).items():
        path = folder / name.partition(" ")[0]
        with counting_reads() as counts:
            target = load(path, layers="sharded", **how)
        found[f"{name} sharded"] = facts_of(target, counts) | {
            "hidden": hidden_of(target),
            "kept": sum(local.numel() for local in locals_of(target)),
            "gaps": gaps(target, load(path, **how)),
            "is_one_tree": isinstance(target.model.base_model, FSDPModule),
        }
    found["evaluated"] = evaluate(folder, "only_config", "texts", "model.tp_plan=tensor")
    return found


def load(path: Path, **how: str) -> Target:
    return load_target(path, dtype="float32", device="cpu", **how)


def decode(target: Target) -> dict[str, tuple[int, ...]]:
    """Greedy texts."""
    engine = EngineConfig(max_num_requests=4, block_size=4, max_prefill_chunk=3)
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    return texts_of(run(decoder, sampling=SamplingParams(max_new_tokens=10)))


@torch.no_grad()
def hidden_of(target: Target) -> list[float]:
    """A few numbers of the last hidden states."""
    places = torch.arange(IDS.shape[1])[None]
    hidden = target.forward(IDS, position_ids=places, context=DenseContext())
    return hidden.post_norm[0, -1, :4].tolist()


def evaluate(folder: Path, model: str, output: str, *words: str) -> int:
    """Exit code of eval.py, run in this process."""
    paths = [f"model.path={folder / model}", f"output_dir={folder / output}", "overwrite=true"]
    shape = ["model.device=cpu", "sampling.max_new_tokens=4"]
    stored = ["model.weights=stored"] if model.startswith("truncated") else []
    return run_entry(EvalConfig, run_evaluation, argv=[*EVAL, *shape, *paths, *stored, *words])


def train(model: Path, output: Path) -> int:
    """Exit code of train.py with layers spread over the ranks, run in this process."""
    words = ["trainer.shard_target=true", "model.device=cpu", f"output_dir={output}"]
    words += ["model.family=glm4_moe", "data.path=assets/lab_tiny/regenerated.jsonl.xz"]
    argv = [*words, f"model.path={model}", "head=shared_n1"]
    return run_entry(TrainConfig, run_training, argv=argv)


def locals_of(target: Target) -> list[Tensor]:
    """This rank's parts, a tied one once."""
    return [
        p.data.to_local() if isinstance(p.data, DTensor) else p.data
        for p in target.model.parameters()
    ]


def facts_of(target: Target, counts: Counter[str]) -> dict[str, object]:
    """Numbers read of each stored tensor, and numbers that this rank holds."""
    return {"read": dict(counts), "held": sum(local.numel() for local in locals_of(target))}


def gaps(target: Target, other: Target) -> list[str]:
    """Names of tensors that differ, put together from all ranks, from those of a whole target."""
    expected = other.model.state_dict()
    parts = target.model.state_dict()
    assert parts.keys() == expected.keys()
    return [name for name, part in parts.items() if not torch.equal(whole(part), expected[name])]


class CountedSlice:
    """A slice of a file that notes how many numbers are read through it."""

    def __init__(self, name: str, counts: Counter[str], stored: object) -> None:
        self._name, self._counts, self._stored = name, counts, stored
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, index: object) -> Tensor:
        part = self._stored[index]
        self._counts[self._name] += part.numel()
        return part


class CountedFile:
    """A safetensors file whose reads are counted; tensors that are read whole count as well."""

    def __init__(self, counts: Counter[str], path: object, **how: object) -> None:
        self._counts, self._file = counts, safe_open(path, **how)
        self.keys, self.metadata = self._file.keys, self._file.metadata

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(name, self._counts, self._file.get_slice(name))

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[...]

    def __enter__(self) -> "CountedFile":
        return self

    def __exit__(self, *fault: object) -> None:
        self._file.__exit__(*fault)


@contextmanager
def counting_reads() -> Iterator[Counter[str]]:
    """Count what the loaders read, by the name of the tensor in the files."""
    counts: Counter[str] = Counter()
    opened: Callable = lambda path, **how: CountedFile(counts, path, **how)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.modeling_utils, "safe_open", opened)
        patch.setattr(lazy_tensors, "safe_open", opened)
        yield counts

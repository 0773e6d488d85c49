"""Small runs of every task, each watched: one change of the configuration in, parts of it out.

    Lab.parts("heads", {"trainer.batch_size": 2})   parts of a training of two steps

A baseline is run once for all rows that start from it. `RUNS` names the runs; each returns the
parts that `watch` notes and those that it reads from the folder it wrote.
"""

import dataclasses
import functools
import json
import lzma
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_research.__main__ import run_evaluation, run_training
from mtp_research.app.cli import compose_config, run_entry
from mtp_research.config.schema import EvalConfig, TrainConfig
from mtp_research.config.training_schema import MatrixConfig
from mtp_research.decode import build
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.graphs import decode_graphs
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.evaluation.backends import own_backend
from mtp_research.evaluation.run import evaluate as evaluate_module
from mtp_research.evaluation.run.prompt_files import Prompt
from mtp_research.evaluation.run.prompts import load_prompts
from mtp_research.models.rewrites import apply_rewrites
from mtp_research.models.target import load_target
from mtp_research.pretrain import pretrain
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from mtp_research.studies import matrix_cell
from tests.keys.row import Changes, Config, with_keys
from tests.keys.watch import Models, Parts, Watch, digests
from tests.models.test_loading import quantise
from tests.pretrain.test_pretrain import ARCHITECTURES, make_config, write_corpus
from tests.tiny import tiny_target
from tests.training.tiny import save_lab

LAB_TINY = REPOSITORY_ROOT / "assets" / "lab_tiny"
PROMPTS = [
    {"id": "sum", "category": "arith", "question": "What is 48 + 37?"},
    {"id": "code", "category": "code", "prompt": "def add(a, b):\n    return a + b\n\n\ndef add(a"},
    {"id": "tea", "category": "howto", "question": "How do I make tea?"},
]
_CHECK = "def check(add):\n    assert add(2, 3) == 5\n"
_SCORED = [
    PROMPTS[0] | {"answer": "48 + 37 = 85\n#### 85"},
    PROMPTS[1] | {"test": _CHECK, "entry_point": "add"},
    {"id": "tea", "category": "howto", "turns": ["How do I make tea?", "And coffee?"]},
]
_EARLY_TOKEN = 435  # third of the greedy answer to the first prompt
_LONG_PROMPT = {"category": "code", "prompt": "def add(a, b):\n    return a + b\n\n\n" * 3}
_MANY = [{"id": f"q{n}", "category": "arith", "question": f"What is {n}?"} for n in range(5)]


class Lab:
    """Targets, documents, prompts and finished runs on disk, and the parts of each baseline."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models = Models()
        self._kept: dict[str, Parts] = {}
        self._num_runs = 0
        (root / "lab").mkdir()
        self.train = save_lab(root / "lab", num_documents=24)
        self.train.trainer.max_steps = 2
        self.train.head.num_mtp_modules = 1
        self.train.data.eval_documents = 3
        matrix = {"num_mtp_modules": [1], "unrolls": ["chain"], "policies": ["training"]}
        self.train.matrix = MatrixConfig(**matrix, num_prompts=2, max_new_tokens=16)  # type: ignore[arg-type]
        self.eval = compose_config(EvalConfig, EVAL_WORDS)
        self.eval.prompts.path = self._prompts("prompts", PROMPTS)

        # What a row names, made when it is asked for.
        self.known: dict[str, Callable[[], object]] = {
            "other prompts": lambda: self._prompts("other", PROMPTS[:1]),
            "same prompts": lambda: self._prompts(
                "same", [_LONG_PROMPT | {"id": i} for i in "abc"]
            ),
            "many prompts": lambda: self._prompts("many", _MANY),
            "scored prompts": lambda: self._prompts("scored", _SCORED),
            "stopping target": self._stopping_target,
            "copied target": self._copied_target,
            "head of module 0": self._head_of_module_0,
            "one profile": lambda: self._profile("one", always=9, never=0),
            "other profile": lambda: self._profile("two", always=0, never=0),
            "other documents": self._other_documents,
            "fp8 target": self._fp8_target,
            "other target": lambda: str(self._other_target()),
            "other corpus": self._other_corpus,
            "written cache": lambda: f"{_cached(self)['folder']}/cache",
            "engine states": self._engine_states,
            "finished heads": lambda: f"{_finished(self)['folder']}/head",
            "one layer": lambda: {**ARCHITECTURES["glm4_moe"], "num_hidden_layers": 1},
        }
        self.corpus = write_corpus(root / "corpus")

    def parts(self, run: str, changes: Changes) -> Parts:
        """Parts of a run with the keys of `changes` set."""
        name = json.dumps([run, dict(changes)], sort_keys=True, default=repr)
        if name not in self._kept:
            self._num_runs += 1
            folder = self.root / f"run{self._num_runs}"
            folder.mkdir()
            changes = {key: self._named(value) for key, value in changes.items()}
            PREPARED.get(run, lambda _: None)(self)
            watch = Watch(self.models)
            with watch.around():
                try:
                    own = RUNS[run](self, folder, changes)
                except (ValueError, RuntimeError, ZeroDivisionError, OSError) as fault:
                    own = {"fault": f"{type(fault).__name__}: {fault}"}
            self._kept[name] = watch.parts | own
        return self._kept[name]

    def _named(self, value: object) -> object:
        if isinstance(value, list):
            return [self._named(one) for one in value]
        return self.known[value]() if isinstance(value, str) and value in self.known else value

    def _engine_states(self) -> str:
        """Hidden states of all documents, as vLLM writes them and of no model."""
        folder = self.root / "states"
        folder.mkdir(exist_ok=True)
        size = load_target(self.train.model.path, device="cpu").config.hidden_size
        for number, line in enumerate(Path(self.train.data.path).read_text().splitlines()):
            token_ids = torch.tensor(json.loads(line)["token_ids"])
            tensors = {"token_ids": token_ids, "hidden_states": torch.rand(len(token_ids), 1, size)}
            save_file(tensors, folder / f"hs_{number}.safetensors")
        return str(folder)

    def _prompts(self, name: str, prompts: Iterable[Changes]) -> str:
        path = self.root / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(one)}\n" for one in prompts))
        return str(path)

    def _copied_target(self) -> str:
        """The shipped target with one matrix of its weights turned round."""
        folder = self.root / "copied"
        shutil.copytree(LAB_TINY / "target", folder, dirs_exist_ok=True)
        weights = load_file(folder / "model.safetensors")
        weights["model.embed_tokens.weight"] = -weights["model.embed_tokens.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    def _fp8_target(self) -> str:
        """The shipped target with its matrices stored as FP8."""
        folder = self.root / "fp8"
        if not folder.exists():
            shutil.copytree(LAB_TINY / "target", folder)
            quantise(folder)
        return str(folder)

    def _head_of_module_0(self) -> str:
        """The shipped heads, recorded as trained with their first module alone."""
        folder = self.root / "module_0"
        shutil.copytree(LAB_TINY / "heads" / "chain_n3", folder, dirs_exist_ok=True)
        record = json.loads((folder / "head.json").read_text())
        record["spec"]["module_schedule"] = "first"
        (folder / "head.json").write_text(json.dumps(record))
        return str(folder)

    def _stopping_target(self) -> str:
        """The shipped target, which ends at a token that it writes early."""
        folder = self.root / "stopping"
        shutil.copytree(LAB_TINY / "target", folder, dirs_exist_ok=True)
        path = folder / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [_EARLY_TOKEN]}))
        return str(folder)

    def _profile(self, name: str, **accepted: int) -> str:
        """Conditions by name, of 9 rounds in which so many accepted each draft."""
        path = self.root / f"{name}_profile.json"
        conditions = [
            {
                "label": label,
                "num_speculative_tokens": 3,
                "num_rounds": 9,
                "num_accepted_per_position": [count] * 3,
                "acceptance_rate_per_position": [count / 9] * 3,
            }
            for label, count in accepted.items()
        ]
        path.write_text(json.dumps({"schema_version": 1, "conditions": conditions}))
        return str(path)

    def _other_documents(self) -> str:
        """The same, read backwards."""
        path = self.root / "other_answers.jsonl"
        lines = Path(self.train.data.path).read_text().splitlines(keepends=True)
        path.write_text("".join(reversed(lines)))
        return str(path)

    def _other_target(self) -> Path:
        if not (self.root / "target2").exists():
            tiny_target("qwen3", dtype=torch.float32, seed=5).model.save_pretrained(
                self.root / "target2"
            )
        return self.root / "target2"

    def _other_corpus(self) -> str:
        """The same without the last document of a domain."""
        other = self.root / "corpus2"
        shutil.copytree(self.corpus, other, dirs_exist_ok=True)
        path = other / "arith.train.jsonl.xz"
        lines = lzma.decompress(path.read_bytes()).splitlines(keepends=True)
        path.write_bytes(lzma.compress(b"".join(lines[:-1])))
        return str(other)


EVAL_WORDS = [
    "model=lab_tiny",
    *("model.dtype=float32", "model.device=cpu", "spec.k=3", "spec.policy=training"),
    *("baseline=false", "sampling.max_new_tokens=8", "engine.max_num_requests=3"),
    *("engine.max_model_len=256", "prompts.max_prompts=null"),
]


def _heads(lab: Lab, folder: Path, changes: Changes) -> Parts:
    prompts = functools.partial(load_prompts, lab.eval.prompts.path)
    with pytest.MonkeyPatch.context() as patch:  # the shipped prompts take a second to make
        patch.setattr(matrix_cell, "load_prompts", lambda _, **asked: prompts(**asked))
        patch.setattr(matrix_cell, "PROBE_NEW_TOKENS", 4)
        run_training(with_keys(lab.train, changes), folder)
    return _trained(folder)


def _probe(lab: Lab, folder: Path, changes: Changes) -> Parts:
    """The decoder of `trainer.decode_eval_prompts`, built and run on the shipped heads."""
    shipped: dict[str, Any] = {
        "trainer.decode_eval_prompts": 1,
        "model.path": str(LAB_TINY / "target"),
    }
    target = lab.models.target(shipped["model.path"], dtype="float32", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        prompts = load_prompts(lab.eval.prompts.path)[:1]
        patch.setattr(matrix_cell, "load_prompts", lambda *_, **__: prompts)
        patch.setattr(matrix_cell, "PROBE_NEW_TOKENS", 2)
        probe = matrix_cell.decode_probe(with_keys(lab.train, shipped | dict(changes)))
        assert probe is not None
        probe(lab.models.heads(LAB_TINY / "heads" / "chain_n3", target))
    return {}


def _trained(folder: Path) -> Parts:
    """What a training left in its folder."""
    steps = sorted(path for path in folder.glob("step_*") if path.is_dir())
    found: Parts = {"folder": str(folder), "saved": [path.name for path in steps]}
    if not (folder / "metrics.jsonl").is_file():
        return found | {"files": sorted(path.name for path in folder.iterdir())}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    by_kind = {
        kind: [line for line in lines if line["kind"] == kind]
        for kind in ("train", "eval", "decode")
    }
    weights = load_file(steps[-1] / "head.safetensors")
    state = json.loads((steps[-1] / "state.json").read_text())
    record = json.loads((folder / "head" / "head.json").read_text())
    return found | {
        "weights": digests(weights),
        "moments": digests(load_file(steps[-1] / "optimizer.safetensors")),
        "dtype": str(next(iter(weights.values())).dtype),
        "loss": [line["loss"] for line in by_kind["train"]],
        "measured": [line["step"] for line in by_kind["eval"]],
        "walk": by_kind["eval"],
        "decoded": by_kind["decode"],
        "spec": record["spec"],
        "config": record["provenance"]["config"],
        "data_kind": record["provenance"]["data_kind"],
        "settings": state["settings"],
    }


def _again(lab: Lab, folder: Path, changes: Changes) -> Parts:
    """The same command in the folder of a run that has saved both of its steps."""
    finished = Path(str(_finished(lab)["folder"]))
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    changes = {"trainer.save_every": 1} | dict(changes)
    if str(changes.get("trainer.resume", "")).startswith("step"):
        changes["trainer.resume"] = str(folder / str(changes["trainer.resume"]))
    run_training(with_keys(lab.train, changes), folder)
    return _trained(folder)


def _cache(lab: Lab, folder: Path, changes: Changes) -> Parts:
    wanted = {"task": "cache", "data.hidden_cache": str(folder / "cache")} | dict(changes)
    config = with_keys(lab.train, wanted)
    run_training(config, folder)
    files = sorted((folder / "cache").rglob("*.safetensors"))
    return {
        "folder": str(folder),
        "cache": {path.parent.name + path.name: digests(load_file(path)) for path in files},
        "files": sorted(path.name for path in folder.iterdir()),
    }


def _matrix(lab: Lab, folder: Path, changes: Changes) -> Parts:
    one_step = {"task": "matrix", "trainer.max_steps": 1}
    run_training(with_keys(lab.train, one_step | dict(changes)), folder)
    stored = json.loads((folder / "matrix.json").read_text())
    return {
        "cells": [[*cell["key"].values(), cell["seed"]] for cell in stored["cells"]],
        "depths": [cell["num_speculative_tokens"] for cell in stored["cells"]],
        "rounds": [cell["accepted_per_round"] for cell in stored["cells"]],
        "heads": [cell["head_sha256"] for cell in stored["cells"]],
        "prompts": stored["prompts"],
        "dtype": stored["settings"]["dtype"],
        "draws": stored["bootstrap_seed"],
    }


def _broken_matrix(lab: Lab, folder: Path, changes: Changes) -> Parts:
    """A matrix whose walk is that of another policy, so that the rounds of its cells differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(matrix_cell.WALK_UNROLL, "training", "independent")
        return _matrix(lab, folder, {"matrix.num_prompts": 4} | dict(changes))


def _target(lab: Lab, folder: Path, changes: Changes) -> Parts:
    """`task=target`: two steps on a corpus of two domains."""
    sizes: dict[str, Any] = {"max_steps": 2, "warmup_steps": 1, "batch_size": 4, "log_every": 9}
    model = make_config(lab.corpus, **sizes, max_seconds=1e9)
    config = dataclasses.replace(lab.train, model=model, task="target")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "evaluate_target", lambda *_, **__: {})
        run_training(with_keys(config, changes), folder)
    record = json.loads((folder / "target" / "PROVENANCE.json").read_text())
    lines = (folder / pretrain.LOG_FILE).read_text().splitlines()
    weights = load_file(folder / "target" / "model.safetensors")
    return {
        "weights": digests(weights),
        "dtype": str(next(iter(weights.values())).dtype),
        "bias": digests({n: t for n, t in weights.items() if "correction" in n}),
        "num_parameters": record["num_parameters"],
        "num_steps": record["training"]["num_steps"],
        "num_tokens": record["training"]["num_tokens"],
        "data": record["data_sha256"],
        "logged": len(lines),
        "model": record["model"],
    }


def _finished(lab: Lab) -> Parts:
    return lab.parts("heads", {"trainer.save_every": 1})


def _cached(lab: Lab) -> Parts:
    return lab.parts("cache", {})


def _whole_prompts(path: str, **asked: Any) -> list[Prompt]:
    """The prompts of a file with all turns and fields of their rows."""
    rows = {row["id"]: row for row in map(json.loads, Path(path).read_text().splitlines())}
    return [
        dataclasses.replace(
            one,
            turns=tuple(rows[one.question_id].get("turns", one.turns)),
            reference=rows[one.question_id],
        )
        for one in load_prompts(path, **asked)
    ]


def _evaluate(lab: Lab, folder: Path, changes: Changes) -> Parts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_backend, "warm_up", lambda *_, **__: 1)
        patch.setattr(evaluate_module, "load_prompts", _whole_prompts)
        run_evaluation(with_keys(lab.eval, changes), folder)
    if changes.get("task") == "fault_price":
        return {"conditions": [path.name for path in folder.glob("fault_price.json")]}
    stored = json.loads((folder / "results.json").read_text())
    by_label = {one["label"]: one for one in stored["conditions"]}

    def of_records(name: str) -> dict[str, dict[str, object]]:
        return {
            label: {record["request_id"]: record[name] for record in one["records"]}
            for label, one in by_label.items()
        }

    def of_conditions(*names: str) -> list[list[object]]:
        return [[one[name] for name in names] for one in stored["conditions"]]

    return {
        "labels": list(by_label),
        "texts": of_records("output_token_ids"),
        "rounds": of_records("num_accepted_per_round"),
        "drafted": of_records("num_drafted_per_round"),
        "finished": of_records("finish_reason"),
        "steps": of_conditions("num_steps", "rows_per_step"),
        "said": of_conditions(
            *("verify", "draft_sampling", "draft_length", "head", "max_num_requests")
        ),
        "audit": of_conditions("audit"),
        "lossless": of_conditions("lossless"),
        "num_passes": [1 + len(one["repeats"]) for one in stored["conditions"]],
        "prompts": [one["question_id"] for one in stored["prompts"]],
        "skipped": stored["skipped_prompts"],
        "scores": of_conditions("scores"),
        "thinking": stored["run"]["thinking_token_ids"],
        "paired": [one["reference"] for one in stored["summary"].get("paired", [])],
        "draws": stored["seed"],
        "dtype": stored["dtype"],
        "hashes": stored["run"]["target"],
        "config": stored["config"],
    }


def _evaluate_again(lab: Lab, folder: Path, changes: Changes) -> Parts:
    """Other settings in the folder of a finished evaluation."""
    _evaluate(lab, folder, {})
    return _evaluate(lab, folder, {"spec.num_speculative_tokens": 2} | dict(changes))


def _price(lab: Lab, folder: Path, changes: Changes) -> Parts:
    """`task=fault_price`, of one unclean policy and its clean form."""
    wanted = {"task": "fault_price", "spec.policy": ["window"], "baseline": True}
    wanted |= {"sampling.max_new_tokens": 6} | dict(changes)
    run_evaluation(with_keys(lab.eval, wanted), folder)
    stored = json.loads((folder / "fault_price.json").read_text())
    conditions = stored["conditions"]
    return {
        "conditions": [[c["head"], c["num_speculative_tokens"], c["policy"]] for c in conditions],
        "rounds": [one["accepted_per_round"] for one in conditions],
        "texts": [one["text_sha256"] for one in conditions],
        "prompts": stored["prompts"],
        "draws": stored["seed"],
        "dtype": stored["dtype"],
    }


def _train_entry(lab: Lab, folder: Path, changes: Changes) -> Parts:
    paths = {"model.path": lab.train.model.path, "data.path": lab.train.data.path}
    return _entry(TrainConfig, folder, paths | dict(changes))


def _eval_entry(lab: Lab, folder: Path, changes: Changes) -> Parts:
    return _entry(EvalConfig, folder, {"prompts.path": lab.eval.prompts.path} | dict(changes))


def _entry(schema: type[Config], folder: Path, changes: Changes) -> Parts:
    """A command line up to where the work starts or is submitted."""
    found: Parts = {"started_in": None}

    def start(_: Config, place: Path) -> None:
        found["started_in"] = str(place).replace(str(folder), "")[:20]

    sbatch = folder / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\necho 1 > '{folder}/submitted'\n")
    sbatch.chmod(0o755)
    words = [f"{key}={value}" for key, value in changes.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(sbatch.parent), prepend=os.pathsep)
        patch.chdir(folder)
        code = run_entry(schema, start, argv=words)
    scripts = [path.read_text().replace(str(folder), "") for path in folder.rglob("job.sh")]
    found |= {"job": scripts, "submitted": (folder / "submitted").exists()}
    return found | {"code": code}


def _graphs(lab: Lab, folder: Path, changes: Changes) -> Parts:
    """What a decoder asks of captured and compiled steps; nothing is captured without a GPU."""
    wanted = {"cuda_graphs": True, "deferred_output": True, "audit": False, "compile": True}
    engine = {f"engine.{name}": value for name, value in wanted.items()} | dict(changes)
    config = with_keys(lab.eval, engine)
    asked: Parts = {"merged": [], "rotated": [], "regions": [], "graphs": None}
    merge = lambda _, **options: cast(list, asked["merged"]).append(options)  # noqa: E731
    rotate = lambda *_, **options: cast(list, asked["rotated"]).append(options)  # noqa: E731
    regional = lambda *_, **options: cast(list, asked["regions"]).append(str(options))  # noqa: E731
    target = lab.models.target(str(LAB_TINY / "target"), dtype="float32", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_graphs, "require_capturable", lambda *_, **__: None)
        patch.setattr(decode_graphs, "StepGraphs", lambda _, **sizes: asked.update(graphs=sizes))
        patch.setattr(apply_rewrites, "merge_projections", merge)
        patch.setattr(apply_rewrites, "leave_rotary_to_attention", rotate)
        patch.setattr(apply_rewrites, "compile_layers_once", regional)
        SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=config.engine)
    return asked


def _small_gpu(lab: Lab, folder: Path, changes: Changes) -> Parts:
    """The pool of a decoder on a device with two megabytes of free memory."""
    config = with_keys(lab.eval, changes)
    target = lab.models.target(str(LAB_TINY / "target"), dtype="float32", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "free_for_pool", lambda _: 1 << 21)
        SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=config.engine)
    return {}


def _priorities(lab: Lab, folder: Path, changes: Changes) -> Parts:
    """Who is served first: one that came early, or one of a better priority two steps later."""
    config = with_keys(lab.eval, {"engine.max_num_requests": 1} | dict(changes))
    target = lab.models.target(str(LAB_TINY / "target"), dtype="float32", device="cpu")
    spec = SpecSettings(num_speculative_tokens=0)
    decoder = SpecDecoder(target, spec=spec, engine=config.engine)
    sampling = SamplingParams(max_new_tokens=4)
    for name, priority in (("running", 0), ("early", 1), ("late", 0)):
        if name == "late":
            decoder.step()
            decoder.step()
        decoder.add_request((7, 8, 9), sampling=sampling, request_id=name, priority=priority)
    known = []
    while decoder.has_work:
        decoder.step()
        known.append(decoder.stats.num_emitted_tokens)
    return {"order": [one.request_id for one in decoder.stats.records], "known": known}


PREPARED: dict[str, Callable[[Lab], Parts]] = {"again": _finished}
_OF_TRAINING = (_heads, _again, _cache, _matrix, _broken_matrix, _target, _train_entry, _probe)
_OF_DECODING = (_evaluate, _evaluate_again, _price, _eval_entry, _graphs, _small_gpu, _priorities)
RUNS: dict[str, Callable[[Lab, Path, Changes], Parts]] = {
    run.__name__.removeprefix("_"): run for run in (*_OF_TRAINING, *_OF_DECODING)
}

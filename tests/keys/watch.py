"""What a run shows of itself: its inputs as they arrive, and the files that it leaves.

A run is watched from outside: `Watch` wraps the few calls that every run makes (model, batch,
optimizer, request, decoder) and notes what reaches them, whoever handed it on. The notes and what
is read from the run folder are the *parts* of a run, which the rows name.
"""

import dataclasses
import functools
import hashlib
import logging
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from mtp_research.decode.decoder import SpecDecoder
from mtp_research.evaluation.run import evaluate as evaluate_module
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.rewrites.invariant import InvariantProducts
from mtp_research.models.target import Target, load_target, load_tokenizer
from mtp_research.pretrain import pretrain
from mtp_research.runtime.provenance import run_record
from mtp_research.studies import fault_price, matrix_workers, policy_matrix
from mtp_research.training import setup
from mtp_research.training.losses.losses import HeadObjective
from mtp_research.training.parallel import parallel

Parts = dict[str, Any]  # what a run shows of itself, by name


def digest(*tensors: Tensor) -> str:
    """Short hash of shapes and bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().contiguous().cpu()
        found.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


class Models:
    """Loads each target, head and tokenizer once."""

    def __init__(self) -> None:
        self._targets: dict[str, Target] = {}
        self.heads = functools.cache(load_heads)
        self.tokenizer = functools.cache(load_tokenizer)
        self.record = functools.cache(run_record)

    def target(self, path: str, **asked: object) -> Target:
        """The target at `path`, placed as asked."""
        key = f"{path} {asked}"
        if key not in self._targets:
            self._targets[key] = load_target(path, **asked)  # type: ignore[arg-type]
        return self._targets[key]


class Watch:
    """Notes of one run."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.parts: Parts = {
            name: [] for name in ("rows", "noise", "hidden", "rates", "pools", "speculated")
        }
        self.parts |= {"seeds": {}, "warnings": [], "loaded": [], "start": None, "loss_spec": None}
        self.parts |= {"compiled": [], "num_recomputed": 0, "num_forwards": 0, "num_products": 0}
        self.parts |= {"wandb": [], "printed": [], "fault": None, "workers": 1, "engine": None}

    @contextmanager
    def around(self) -> Iterator[None]:
        """Wrap the calls for the time of a run."""
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self._list("warnings").append(record.getMessage())
        logging.getLogger("mtp_research").addHandler(handler)
        hook = register_optimizer_step_pre_hook(self._note_rates)
        try:
            with pytest.MonkeyPatch.context() as patch:
                self._wrap_training(patch)
                self._wrap_decoding(patch)
                self._replace_services(patch)
                yield
        finally:
            hook.remove()
            logging.getLogger("mtp_research").removeHandler(handler)

    def _list(self, name: str) -> list:
        found = self.parts[name]
        assert isinstance(found, list)
        return found

    def _count(self, name: str) -> None:
        self.parts[name] = int(str(self.parts[name])) + 1

    def _note_rates(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        names = ("lr", "betas", "weight_decay")
        groups = [{name: group[name] for name in names} for group in optimizer.param_groups]
        self._list("rates").append(groups)

    def _wrap_training(self, patch: pytest.MonkeyPatch) -> None:
        forward, logits = HeadObjective.forward, pretrain.next_token_logits
        joint = pretrain.joint_loss
        make, recompute = setup.make_engine, parallel.checkpoint

        def objective(self_: HeadObjective, batch, hidden, *rest):
            if self.parts["start"] is None:
                self.parts["start"] = digests(self_.heads.state_dict())
                self.parts["loss_spec"] = dataclasses.asdict(self_.loss_spec)
            self._list("rows").append(digest(batch.input_ids))
            self._list("noise").append(torch.initial_seed())
            self._list("hidden").append(digest(hidden.source))
            return forward(self_, batch, hidden, *rest)

        def predicted(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
            if self.parts["start"] is None:
                self.parts["start"] = digests(model.state_dict())
            self._list("rows").append((tuple(input_ids.shape), digest(input_ids)))
            return logits(model, input_ids)

        def joined(heads: MTPHeads, rows: Tensor, **rest: float) -> Tensor:
            if self.parts["start"] is None:
                self.parts["start"] = digests(heads.target.model.state_dict())
            self._list("rows").append((tuple(rows[:, :-1].shape), digest(rows[:, :-1])))
            return joint(heads, rows, **rest)

        def made(*args, **kwargs):
            engine = make(*args, **kwargs)
            self.parts["engine"] = type(engine).__name__
            return engine

        def recomputed(*args, **kwargs):
            self._count("num_recomputed")
            return recompute(*args, **kwargs)

        def compiled(module: torch.nn.Module, **_: object) -> None:
            self._list("compiled").append(type(module).__name__)

        patch.setattr(HeadObjective, "forward", objective)
        patch.setattr(pretrain, "next_token_logits", predicted)
        patch.setattr(pretrain, "joint_loss", joined)
        patch.setattr(setup, "make_engine", made)
        patch.setattr(parallel, "checkpoint", recomputed)
        patch.setattr(torch.nn.Module, "compile", compiled)

    def _wrap_decoding(self, patch: pytest.MonkeyPatch) -> None:
        build, add = SpecDecoder.__init__, SpecDecoder.add_request
        run, products = Target.forward, InvariantProducts.__init__

        def built(decoder: SpecDecoder, *args, **kwargs) -> None:
            build(decoder, *args, **kwargs)
            pool = (decoder.num_blocks, decoder.cache.block_size, decoder.pool_bytes)
            self._list("pools").append((*pool, decoder.max_model_len))
            spec = decoder.spec
            drafts = (spec.policy, spec.num_speculative_tokens, spec.module_schedule)
            self._list("speculated").append(drafts)

        def added(decoder: SpecDecoder, *args, **kwargs):
            seeds = self.parts["seeds"]
            assert isinstance(seeds, dict)
            seeds[kwargs.get("request_id")] = kwargs["sampling"].seed
            return add(decoder, *args, **kwargs)

        def forwarded(target: Target, *args, **kwargs):
            self._count("num_forwards")
            return run(target, *args, **kwargs)

        def invariant(mode: InvariantProducts, *args, **kwargs) -> None:
            self._count("num_products")
            products(mode, *args, **kwargs)

        patch.setattr(SpecDecoder, "__init__", built)
        patch.setattr(SpecDecoder, "add_request", added)
        patch.setattr(Target, "forward", forwarded)
        patch.setattr(InvariantProducts, "__init__", invariant)

    def _replace_services(self, patch: pytest.MonkeyPatch) -> None:
        """Models that are kept, W&B and worker processes that only note what they are asked for."""

        def load(path: str, **asked: object) -> Target:
            self._list("loaded").append(asked)
            return self.models.target(str(path), **asked)

        def load_anew(path: str, **asked: object) -> Target:  # training rewrites targets in place
            self._list("loaded").append(asked)
            return load_target(path, **asked)  # type: ignore[arg-type]

        for place in (evaluate_module, fault_price):
            patch.setattr(place, "load_target", load)
            patch.setattr(place, "load_heads", self.models.heads)
            patch.setattr(place, "load_tokenizer", self.models.tokenizer)
        for place in (evaluate_module, fault_price, policy_matrix, pretrain):
            patch.setattr(place, "run_record", lambda: dict(self.models.record()))
        shown = lambda *_, verbose, **__: self._list("printed").append(verbose)  # noqa: E731
        patch.setattr(evaluate_module, "print_report", shown)
        patch.setattr(setup, "load_target", load_anew)
        service = MagicMock()
        service.init.side_effect = self._wandb_run
        patch.setitem(sys.modules, "wandb", service)
        for name in ("evaluation.report.page", "studies.study_pages", "evaluation.report.charts"):
            patch.setitem(sys.modules, f"mtp_research.{name}", _no_charts())
        patch.delenv("WANDB_MODE", raising=False)

        def pool(size: int, *_: object, **__: object) -> None:
            self.parts["workers"] = size
            raise ZeroDivisionError(f"{size} processes")

        patch.setattr(matrix_workers, "ProcessPoolExecutor", pool)

    def _wandb_run(self, **asked: object) -> MagicMock:
        """Note what the configuration decides; names and folders differ from run to run."""
        self._list("wandb").append({name: asked[name] for name in ("mode", "project", "tags")})
        return MagicMock()


def _no_charts() -> types.ModuleType:
    """Pages whose libraries take seconds to import, without content."""
    module = types.ModuleType("no_charts")
    module.__dict__.update(
        results_sections=lambda *_: [],
        matrix_section=lambda *_, **__: MagicMock(frame=(), drawn=()),
        fault_section=lambda *_, **__: MagicMock(frame=(), drawn=()),
        chart_files=lambda *_, **__: {},
    )
    return module

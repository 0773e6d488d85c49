"""What a training step costs: operations by part, tokens a second, MFU, and memory by part.

MFU is useful operations a second over the rate of a large bfloat16 product that is timed in the
same run, on the same GPU. On a CPU there is neither that rate nor an allocator to ask, so a run
there reports tokens a second and operations a second alone.

Letters: N MTP modules, D hidden, V vocabulary, S row length.
"""

import statistics
import time
from typing import cast

import torch
from torch import nn

from mtp_research.heads.stack import MTPHeads
from mtp_research.models.loading.placement import EXPERTS_DIM
from mtp_research.models.target import Target

_TOP_K_FIELDS = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k")
_GIB = 1 << 30


def flops_per_token(
    heads: MTPHeads, *, seq_len: int, num_depths: int, has_teacher: bool, runs_target: bool = True
) -> dict[str, float]:
    """Useful floating-point operations per token of a training step; recomputation does not count.

    2 N_act for the target, 6 P_act a depth for the modules, 4 D V a depth for lm_head (logits and
    their way back; it is frozen), 2 D V for the teacher's logits; attention over S / 2 keys.

    Args:
        heads: the modules and their target, whole, on the meta device or not yet spread over ranks.
        seq_len: S, tokens of a row.
        num_depths: depths that are trained.
        has_teacher: the loss reads the target's own logits.
        runs_target: its hidden states are computed in the step, not read.
    """
    target, config = heads.target, heads.target.config
    hidden, vocab = config.hidden_size, config.vocab_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    attention = 4 * config.num_attention_heads * head_dim * seq_len / 2  # forward, one layer
    decoder = cast(nn.ModuleList, target.model.base_model.layers)
    top_k = experts_per_token(target)
    layers = active_parameters(decoder, top_k=top_k)
    modules = active_parameters(heads.mtp_modules, top_k=top_k) / len(heads.mtp_modules)
    return {
        "target": 2 * layers + attention * len(decoder) if runs_target else 0.0,
        "modules": num_depths * (6 * modules + 3 * attention),
        "lm_head": num_depths * 4 * hidden * vocab,
        "teacher": 2 * hidden * vocab if has_teacher else 0.0,
    }


def active_parameters(module: nn.Module, *, top_k: int) -> float:
    """Parameters that one token meets: of the routed experts only those it is sent to."""
    total = 0.0
    for name, parameter in module.named_parameters():
        share = 1.0
        if ".experts." in name and parameter.ndim == EXPERTS_DIM:
            share = top_k / parameter.shape[0]
        total += parameter.numel() * share
    return total


def experts_per_token(target: Target) -> int:
    """Routed experts that a token is sent to, by any name that families have for it; 0 for none."""
    found = (getattr(target.config, name, None) for name in _TOP_K_FIELDS)
    return next(filter(None, found), 0)


def product_tflops(device: torch.device, *, repeats: int = 10) -> float:
    """Median rate of a bfloat16 8192^3 product of random data; 256^3 on a CPU."""
    is_gpu = device.type == "cuda"
    size = 8192 if is_gpu else 256
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    times = []
    for _ in range(repeats + 3):  # the first ones warm up
        started = time.perf_counter()
        torch.mm(left, right)
        if is_gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(times[3:]) / 1e12


class StepCosts:
    """Memory and speed of a run, as its figures for people.

    Args:
        device: of this rank.
        num_ranks: over which tokens are summed.
    """

    def __init__(self, device: torch.device, *, num_ranks: int) -> None:
        self._device = device
        self._num_ranks = num_ranks
        self._parts: dict[str, int] = {}  # bytes by part
        self._flops = 0.0  # of a token
        self._product_tflops: float | None = None
        self._started, self._num_tokens = time.perf_counter(), 0
        self._held = self._allocated()

    def mark(self, part: str) -> None:
        """What was allocated since the last mark, and still is, is `part`."""
        held = self._allocated()
        self._parts[part] = held - self._held
        self._held = held

    def know(self, flops: float) -> None:
        """Take the operations of a token; times the product that MFU is measured against."""
        self._flops = flops
        if self._device.type == "cuda":
            self._product_tflops = product_tflops(self._device)

    def end_warm_up(self) -> None:
        """The first step is done: what it left is the optimizer's."""
        self.mark("optimizer")
        self.start()

    def start(self) -> None:
        """Forget the steps until now."""
        self._started, self._num_tokens = time.perf_counter(), 0

    def count(self, num_tokens: int) -> None:
        """Count tokens of a finished step, of all ranks."""
        self._num_tokens += num_tokens

    def figures(self) -> dict[str, object]:
        """Speed since `start`, and memory of this rank; empty where no step was counted.

        `tokens_per_s` is of all ranks, `tflops_per_s` of one, `mfu` a share, `memory_gib` by part:
        those that were marked, and `transient`, the most above them since the process began.
        """
        if not self._num_tokens:
            return {}
        seconds = time.perf_counter() - self._started
        rate = self._num_tokens / seconds
        found: dict[str, object] = {"tokens_per_s": rate}
        tflops = self._flops * rate / self._num_ranks / 1e12
        found["tflops_per_s"] = tflops
        if self._product_tflops is not None:
            found["mfu"] = tflops / self._product_tflops
        if memory := self.memory_gib():
            found["memory_gib"] = memory
        return found

    def memory_gib(self) -> dict[str, float]:
        """Memory of this rank's GPU by part, see `figures`; empty on a CPU."""
        if self._device.type != "cuda":
            return {}
        parts = self._parts | {"transient": self._peak() - self._held}
        return {part: size / _GIB for part, size in parts.items()}

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

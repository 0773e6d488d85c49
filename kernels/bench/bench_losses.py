"""The multi-depth distillation against Liger and eager PyTorch; masks of grammars.

Where it sits: the benchmarks `distill` and `mask` of `kernels.bench`. `mask` times masked logits
alone and with the argmax that reads them, beside the reference in compiled PyTorch. `distill` has a
line per contender and number of depths: median time, peak memory above the inputs, and the errors
of loss and gradient against float64 on some rows. The drafts are the teacher's rows with noise,
scaled until a sampled draft is accepted with `--alpha`. Without a CUDA device its sizes default to
tiny ones, times are the host's and there is no memory figure: a test of the command.
Letters: T rows, k depths, D hidden, V vocabulary, B requests, J verified rows a request.
"""

import argparse
import functools
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from mtp_research.kernels.bench.bench_runner import (
    Bench,
    Row,
    Rows,
    compiled,
    measure_wall,
    num_rotated,
    show_row,
    time_calls,
)
from mtp_research.kernels.losses import distill as kernel
from mtp_research.kernels.losses.distill_rows import Mixture, distill_rows, distill_rows_ref
from mtp_research.kernels.losses.logit_rows import mask_logits, mask_logits_ref
from torch import Tensor
from torch.nn import functional

GPU_SIZES = {"rows": 8192, "hidden": 4096, "vocab": 151552}
CPU_SIZES = {"rows": 48, "hidden": 32, "vocab": 1000}
HEADER = f"{'contender':<18}{'loss':<5}{'k':>2}{'ms':>10}{'spread':>8}{'GB':>7}{'TF/s':>7}" + (
    f"{'loss error':>12}{'grad error':>12}"
)
MIXTURES = {"ce": Mixture(ce=1.0), "kl": Mixture(kl=1.0), "lk": Mixture(lk=1.0)}
ETA = 3.0
# B, J, V: steps of MiMo-7B, and a vocabulary whose rows are not aligned.
MASK_SIZES = ((1, 4, 151_936), (8, 4, 151_936), (32, 4, 151_936), (32, 4, 50_257))
_LOGIT_STD = 4.0
_NUM_REFERENCE_ROWS = 128
_NUM_CALIBRATION_ROWS = 64


class Inputs(NamedTuple):
    """What every contender reads."""

    rows: list[Tensor]  # k times [T, D]
    teacher: Tensor  # [T, D]
    lm_head: Tensor  # [V, D]
    labels: Tensor  # [T] int64
    alpha: float  # mean acceptance of a sampled draft, measured

    def depths(self, num_depths: int) -> Self:
        """The first depths only."""
        return self._replace(rows=self.rows[:num_depths])


class Outcome(NamedTuple):
    """Mean loss of each depth `[k]` and the gradients of its sum over rows, `[T, D]` each."""

    losses: Tensor
    grads: list[Tensor]


def _measure_distill(ceilings: dict[str, float], options: argparse.Namespace) -> Rows:
    defaults = GPU_SIZES if torch.cuda.is_available() else CPU_SIZES
    sizes = {name: getattr(options, name) or default for name, default in defaults.items()}
    inputs = make_inputs(**sizes, num_depths=max(options.depths), alpha=options.alpha, seed=0)
    print(f"{sizes}\nmeasured acceptance {inputs.alpha:.4f}\n{HEADER}")
    rows: Rows = []
    for num_depths in options.depths:
        for loss in options.losses:
            rows += _compare(inputs.depths(num_depths), loss=loss, options=options)
    parts = _parts(inputs, num_repeats=options.repeats)
    print(f"one chunk, ms: {parts}")
    return [*rows, {"alpha": options.alpha, "sizes": sizes, "parts_ms": parts}]


def _add_distill_options(parser: argparse.ArgumentParser) -> None:
    for name in GPU_SIZES:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--losses", nargs="+", default=["kl"], choices=list(MIXTURES))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--chunk-rows", type=int, nargs="+", default=[0], help="0: the default")
    parser.add_argument("--alpha", type=float, default=0.98, help="acceptance of sampled drafts")
    parser.add_argument("--repeats", type=int, default=5)


DISTILL = Bench(_measure_distill, _add_distill_options, words=("--depths", "3"), needs_gpu=False)


def _measure_mask(ceilings: dict[str, float], options: argparse.Namespace) -> Rows:
    """Rows of every size and dtype: masks alone, then with the argmax of verification."""
    rows: Rows = []
    for dtype in (torch.bfloat16, torch.float32):  # float32 is what logit processors return
        for size in MASK_SIZES:
            rows += _mask_rows(size, dtype, copy=ceilings["copy_tb_per_s"])
    return rows


MASK = Bench(_measure_mask)


def _mask_rows(size: tuple[int, int, int], dtype: torch.dtype, *, copy: float) -> Rows:
    words = (*size[:2], -(-size[2] // 32))
    logits = torch.randn(size, device="cuda", dtype=dtype)
    bitmask = torch.randint(-(2**31), 2**31, words, device="cuda", dtype=torch.int32)
    is_right = torch.equal(mask_logits(logits, bitmask), mask_logits_ref(logits, bitmask))
    assert is_right, f"mask_logits differs from its reference at {size}, {dtype}"
    sets = [(torch.randn_like(logits), bitmask) for _ in range(num_rotated(logits.nbytes))]

    def best_of_masked(logits: Tensor, bitmask: Tensor) -> Tensor:
        return mask_logits(logits, bitmask).argmax(dim=-1)

    def best_of_ref(logits: Tensor, bitmask: Tensor) -> Tensor:
        return mask_logits_ref(logits, bitmask).argmax(dim=-1)

    rows: Rows = []
    for name, num_passes, pair in (
        ("mask_logits", 2, (mask_logits, mask_logits_ref)),
        ("mask and argmax", 1, (best_of_masked, best_of_ref)),
    ):
        ours, usual = (
            time_calls([functools.partial(function, *inputs) for inputs in sets])
            for function in map(compiled, pair)
        )
        row: Row = {"kernel": name, "shape": f"B={size[0]} J={size[1]} V={size[2]} {dtype}"}
        row["bytes"] = num_passes * logits.nbytes + bitmask.nbytes  # that must move
        rows.append(show_row(row, ours, usual, copy=copy))
    return rows


def _compare(inputs: Inputs, *, loss: str, options: argparse.Namespace) -> Rows:
    """A row per contender, printed as it is measured."""
    expected, rows = reference(inputs, loss=loss), []
    for name in options.contenders:
        for chunk_rows in options.chunk_rows if name == "distill" else [0]:
            call = functools.partial(CONTENDERS[name], inputs, loss=loss, chunk_rows=chunk_rows)
            label = name + (f" C={chunk_rows}" if chunk_rows else "")
            row: Row = {"contender": label, "loss": loss, "k": len(inputs.rows)}
            row |= _measure(call, inputs, loss=loss, expected=expected, repeats=options.repeats)
            print(_line(row))
            rows.append(row)
    return rows


def _measure(
    call: Callable[[], Outcome], inputs: Inputs, *, loss: str, expected: Outcome, repeats: int
) -> Row:
    """Figures of one contender, or why there are none."""
    try:
        outcome, wall = measure_wall(call, device=inputs.lm_head.device, num_repeats=repeats)
    except (ImportError, NotImplementedError, RuntimeError) as fault:  # out of memory is one
        return {"skipped": f"{type(fault).__name__}: {str(fault).splitlines()[0]}"}
    num_rows = len(expected.grads[0])
    got = torch.stack([grad[:num_rows].double() for grad in outcome.grads])
    wanted = torch.stack(list(expected.grads))
    return {
        "median_ms": round(wall.median_ms, 3),
        "spread_ms": round(wall.spread_ms, 3),
        "peak_bytes": wall.peak_bytes,
        "gradient_bytes": sum(grad.nbytes for grad in outcome.grads),
        "tflop_per_s": round(num_flops(inputs, loss=loss) / wall.median_ms / 1e9, 1),
        "loss_error": float((outcome.losses.double() - expected.losses).abs().max()),
        "loss": float(expected.losses.mean()),
        "grad_error": float((got - wanted).norm() / wanted.norm()),
        "loss_name": loss,
    }


def _line(row: Row) -> str:
    head = f"{row['contender']:<18}{row.get('loss_name', row['loss']):<5}{row['k']:>2}"
    if "skipped" in row:
        return f"{head}  skipped: {row['skipped']}"
    peak = row["peak_bytes"]
    memory = f"{'-':>7}" if peak is None else f"{peak / 1e9:>7.2f}"
    return (
        f"{head}{row['median_ms']:>10.2f}{row['spread_ms']:>8.2f}{memory}"
        f"{row['tflop_per_s']:>7.0f}{row['loss_error']:>12.1e}{row['grad_error']:>12.1e}"
    )


def _parts(inputs: Inputs, *, num_repeats: int) -> dict[str, float]:
    """Milliseconds of each piece of one chunk, to see where the time goes."""
    chunk = min(kernel.default_chunk_rows(inputs.lm_head), len(inputs.teacher))
    rows, labels, head = inputs.rows[0][:chunk], inputs.labels[:chunk], inputs.lm_head
    logits, teacher_logits = (
        kernel._project(x[:chunk], weight=head) for x in (rows, inputs.teacher)
    )
    lse, teacher_lse = (
        kernel.summarise_rows(x, labels=labels).lse for x in (logits, teacher_logits)
    )
    grad, outputs = torch.empty(logits.shape, dtype=head.dtype, device=head.device), rows.clone()
    valid = torch.ones_like(labels, dtype=torch.bool)
    teacher = {"teacher_logits": teacher_logits, "teacher_lse": teacher_lse}
    rest = {"labels": labels, "valid": valid, "eta": ETA, "grad": grad, **teacher}
    divergence = functools.partial(distill_rows, logits, lse=lse, **rest)
    pieces: dict[str, Callable[[], object]] = {
        "project": lambda: kernel._project(rows, weight=head),
        "summarise": lambda: kernel.summarise_rows(logits, labels=labels),
        "divergence_kl": functools.partial(divergence, mixture=MIXTURES["kl"]),
        "divergence_lk": functools.partial(divergence, mixture=MIXTURES["lk"]),
        "back_project": lambda: torch.mm(grad, head, out=outputs),
    }
    walls = {
        name: measure_wall(piece, device=head.device, num_repeats=num_repeats)[1]
        for name, piece in pieces.items()
    }
    return {"chunk_rows": chunk} | {name: round(wall.median_ms, 3) for name, wall in walls.items()}


def make_inputs(
    *, rows: int, hidden: int, vocab: int, num_depths: int, alpha: float, seed: int
) -> Inputs:
    """Random rows in bfloat16 on a GPU, float32 on a CPU; drafts near the teacher's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    lm_head = (draw(vocab, hidden) * (_LOGIT_STD / hidden**0.5)).to(dtype)
    teacher = draw(rows, hidden)
    sample, noise = teacher[:_NUM_CALIBRATION_ROWS].to(dtype), draw(rows, hidden)
    probe = (teacher + 0.01 * noise).to(dtype)[:_NUM_CALIBRATION_ROWS]
    size = 0.01 * (1 - alpha) / _total_variation(probe, sample, lm_head)
    drafts = [(teacher + size * draw(rows, hidden)).to(dtype) for _ in range(num_depths)]
    measured = 1 - _total_variation(drafts[0][:_NUM_CALIBRATION_ROWS], sample, lm_head)
    labels = torch.randint(0, vocab, (rows,), generator=generator, device=device)
    return Inputs(drafts, teacher.to(dtype), lm_head, labels, measured)


def reference(inputs: Inputs, *, loss: str) -> Outcome:
    """In float64, chunk by chunk: losses over all rows, gradients of the first chunk."""
    head, losses, grads = inputs.lm_head.double(), [], []
    for rows in inputs.rows:
        total = head.new_zeros(())
        for start in range(0, len(rows), _NUM_REFERENCE_ROWS):
            part = slice(start, start + _NUM_REFERENCE_ROWS)
            logits, teacher_logits = (x[part].double() @ head.T for x in (rows, inputs.teacher))
            value, grad = _reference_rows(logits, teacher_logits, inputs.labels[part], loss=loss)
            total += value
            if start == 0:
                grads.append(grad @ head)
        losses.append(total / len(rows))
    return Outcome(torch.stack(losses), grads)


def _reference_rows(
    logits: Tensor, teacher_logits: Tensor, labels: Tensor, *, loss: str
) -> tuple[Tensor, Tensor]:
    """Sum of the losses and the gradient in the logits `[C, V]`."""
    lse, grad = logits.logsumexp(-1), torch.empty_like(logits)
    valid = torch.ones_like(labels, dtype=torch.bool)
    teacher = {"teacher_logits": teacher_logits, "teacher_lse": teacher_logits.logsumexp(-1)}
    rest = {"labels": labels, "valid": valid, "eta": ETA, "grad": grad, **teacher}
    divergence = distill_rows_ref(logits, lse=lse, mixture=MIXTURES[loss], **rest)
    nll = lse - logits.gather(1, labels[:, None])[:, 0]
    return _row_loss(loss, nll=nll, kl=divergence.kl, tv=divergence.tv).sum(), grad


def run_distill(inputs: Inputs, *, loss: str, chunk_rows: int) -> Outcome:
    """The distillation of this package; the statistics come with it."""
    shape = (len(inputs.rows), len(inputs.labels))
    result = kernel.distill(
        inputs.rows,
        labels=inputs.labels,
        valid=torch.ones(shape, dtype=torch.bool, device=inputs.labels.device),
        lm_head=inputs.lm_head,
        teacher=None if loss == "ce" else inputs.teacher,
        mixtures=[MIXTURES[loss]],
        eta=ETA,
        chunk_rows=chunk_rows or None,
    )
    rows = _row_loss(loss, nll=result.nll, kl=result.kl, tv=result.tv)
    return Outcome(rows.mean(dim=1), result.grads[0])


def run_liger(inputs: Inputs, *, loss: str, chunk_rows: int) -> Outcome:
    """One fused linear call per depth: JSD with beta 0 is KL(teacher || draft)."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction

    if loss == "lk":
        raise NotImplementedError("Liger has no lk")
    head = inputs.lm_head

    def mean_of(rows: Tensor) -> Tensor:
        if loss == "kl":
            return LigerFusedLinearJSDFunction.apply(rows, head, inputs.teacher, head, None, 0.0)
        value = LigerFusedLinearCrossEntropyFunction.apply(rows, head, inputs.labels)
        return value[0] if isinstance(value, tuple) else value

    return _by_depth(inputs, mean_of)


def run_liger_kl(inputs: Inputs, *, loss: str, chunk_rows: int) -> Outcome:
    """Liger's KL to given probabilities: `[T, V]` of them, made once for all depths."""
    from liger_kernel.ops.fused_linear_kl_div import LigerFusedLinearKLDivFunction

    if loss != "kl":
        raise NotImplementedError("a Kullback-Leibler divergence only")
    probabilities = inputs.teacher.new_empty(len(inputs.teacher), len(inputs.lm_head))
    for part in torch.arange(len(inputs.teacher)).split(512):
        logits = torch.mm(inputs.teacher[part], inputs.lm_head.T, out_dtype=torch.float32)
        probabilities[part] = logits.softmax(-1).to(probabilities.dtype)

    def mean_of(rows: Tensor) -> Tensor:
        return LigerFusedLinearKLDivFunction.apply(rows, inputs.lm_head, probabilities, None)

    return _by_depth(inputs, mean_of)


def _by_depth(inputs: Inputs, losses_of: Callable[[Tensor], Tensor]) -> Outcome:
    """Losses and gradients by autograd, from the mean loss of a depth or the losses of its rows."""
    losses, grads = [], []
    for rows in inputs.rows:
        leaf = rows.detach().requires_grad_()
        value = losses_of(leaf)
        value.sum().backward()
        losses.append(value.mean().detach())
        assert leaf.grad is not None, "backward gives the leaf a gradient"
        grads.append(leaf.grad if value.ndim else leaf.grad.mul_(len(leaf)))
    return Outcome(torch.stack(losses), grads)


def run_eager(inputs: Inputs, *, loss: str, chunk_rows: int) -> Outcome:
    """Float32 logits of all rows by autograd, one depth after the other."""

    def losses_of(rows: Tensor) -> Tensor:
        log_draft = (rows @ inputs.lm_head.T).float().log_softmax(-1)
        if loss == "ce":
            return functional.nll_loss(log_draft, inputs.labels, reduction="none")
        log_teacher = (inputs.teacher @ inputs.lm_head.T).float().log_softmax(-1)
        kl = functional.kl_div(log_draft, log_teacher, log_target=True, reduction="none").sum(-1)
        tv = kl if loss == "kl" else (log_teacher.exp() - log_draft.exp()).abs().sum(-1) / 2
        return _row_loss(loss, nll=kl, kl=kl, tv=tv)

    return _by_depth(inputs, losses_of)


CONTENDERS: dict[str, Callable[..., Outcome]] = {
    **{"distill": run_distill, "liger": run_liger, "liger_kl": run_liger_kl, "eager": run_eager}
}


def num_flops(inputs: Inputs, *, loss: str) -> int:
    """Of the products that must run: the teacher once, each depth there and back."""
    num_products = 2 * len(inputs.rows) + (loss != "ce")
    return num_products * 2 * inputs.teacher.numel() * len(inputs.lm_head)


def _row_loss(loss: str, *, nll: Tensor, kl: Tensor, tv: Tensor) -> Tensor:
    if loss == "lk":
        towards_kl = torch.exp(-ETA * (1 - tv)).detach()
        return towards_kl * kl + (1 - towards_kl) * tv
    return {"ce": nll, "kl": kl}[loss]


def _total_variation(rows: Tensor, teacher: Tensor, lm_head: Tensor) -> float:
    draft, target = ((x.float() @ lm_head.float().T).softmax(-1) for x in (rows, teacher))
    return float((draft - target).abs().sum(-1).mean() / 2)

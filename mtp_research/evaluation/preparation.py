"""A condition's decoder, ready for the clock: built, prompts checked, steps captured, warmed up.

Second stage of the flow: prompts -> decode loop -> statistics -> report. Letter: K drafts per step.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from mtp_research.decode.build import Heads
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.memory import NUM_SPARE_BLOCKS, free_bytes, plan_side_by_side
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.errors import ConfigError
from mtp_research.evaluation.conditions import Condition
from mtp_research.evaluation.decoders import build_decoder, needs_of
from mtp_research.evaluation.prompts import EncodedPrompts
from mtp_research.evaluation.timed_decode import warm_up
from mtp_research.models.target import Target

_GIB = 1 << 30


class Prepared(NamedTuple):
    """A decoder and what it took.

    Attributes:
        decoder: idle and warm.
        num_warm_ups: uncounted decodings.
        capture_s: seconds of compiling and capturing its steps; None without captured steps.
    """

    decoder: SpecDecoder
    num_warm_ups: int
    capture_s: float | None


def prepare_decoder(
    condition: Condition,
    target: Target,
    heads: Heads,
    *,
    encoded: EncodedPrompts,
    sampling: Sequence[SamplingParams],
    num_blocks: int | None,
    most_warm_ups: int,
) -> Prepared:
    """Build the decoder and warm it up.

    Args:
        condition: one column of the table.
        target: the frozen model.
        heads: of `spec.head`; not read for K = 0.
        encoded: all prompts of the evaluation; each is checked before minutes of capture.
        sampling: parameters of each.
        num_blocks: of its pool; None leaves them to `engine.num_blocks` or the free memory.
        most_warm_ups: see `warm_up`.

    Raises:
        ConfigError: a setting does not fit the target, the heads or a prompt.
        IntegrityError: the heads' token ranking is damaged.
    """
    decoder = build_decoder(condition, target, heads, num_blocks=num_blocks)
    for prompt, token_ids, params in zip(encoded.prompts, encoded.token_ids, sampling, strict=True):
        decoder.arrivals.checked(token_ids, sampling=params, request_id=prompt.question_id)
    decoder.cache.fill(0.0)  # touch the pool's pages before the clock starts
    capture_s = None
    if decoder.graphs is not None:
        tell = _teller(condition.label)
        tell(_pool_line(decoder))
        with torch.inference_mode():
            decoder.graphs.prepare(sampling[0], tell=tell)
        capture_s = decoder.graphs.capture_s
    num_warm_ups = warm_up(decoder, encoded, sampling, most=most_warm_ups)
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    return Prepared(decoder, num_warm_ups, capture_s)


def equal_pools(
    conditions: Sequence[Condition], target: Target, heads: Mapping[str | None, Heads]
) -> int | None:
    """Blocks for each decoder of a group whose decoders all live at once, so that pools are equal.

    Args:
        conditions: the group.
        target: the frozen model, loaded.
        heads: by `spec.head`, loaded.

    Returns:
        Blocks without the spare one; None where `engine.num_blocks` says it, or memory sets no
        limit.

    Raises:
        ConfigError: there is no room for one longest request in every pool.
    """
    engine, free = conditions[0].config.engine, free_bytes(target.device)
    if engine.num_blocks is not None or free is None:
        return None
    needs = [needs_of(c, target, heads.get(c.config.spec.head)) for c in conditions]
    try:
        planned = plan_side_by_side(needs, free=free, memory_fraction=engine.memory_fraction)
    except ConfigError as fault:
        raise ConfigError(
            f"with timing.passes > 1 the pools of {len(needs)} conditions live at once: {fault} "
            "With timing.passes=1 there is one at a time."
        ) from None
    return None if planned is None else planned - NUM_SPARE_BLOCKS


def _teller(label: str) -> Callable[[str], None]:
    """Writes lines about a condition for whoever waits for it."""

    def tell(line: str) -> None:
        sys.stderr.write(f"{label}: {line}\n")
        sys.stderr.flush()

    return tell


def _pool_line(decoder: SpecDecoder) -> str:
    free = free_bytes(decoder.target.device)
    rest = "" if free is None else f"; {free / _GIB:.2f} GiB of the device stay free"
    num_blocks = decoder.scheduler.blocks.num_blocks
    return f"KV pool: {num_blocks} blocks, {decoder.cache.num_bytes / _GIB:.2f} GiB{rest}"

"""What the layer of a region sees of the pass that runs it: its attention, by ops that ask.

Where it sits: `regions` compiles a layer with `RegionContext` in place of the pass, whose rows,
pages and lengths so never enter the code; it says in `running` which pass runs. Like the ops over
pages, these do not declare that they write them; see `paged`.

Letters: T packed rows, D hidden, P rotary dims.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mtp_research.kernels import checks
from mtp_research.kernels.attention.attention_rows import AttentionRows, PagedKV, Scoring
from mtp_research.kernels.attention.paged_attention import attend_pages
from mtp_research.kernels.attention.store_kv import NewRows
from mtp_research.kernels.latent.expanded_attention import (
    ExpandedRows,
    absorbed,
    attend_latent_rows,
)
from mtp_research.kernels.latent.head_product import head_product
from mtp_research.kernels.latent.latent_attention import attend_latents
from mtp_research.models.attention.attention import AttentionCall
from mtp_research.models.attention.paged import Angles, PassOverPages, expansion_of
from mtp_research.models.family import KVKind, KVPages
from mtp_research.models.rewrites.invariant import InvariantProducts
from mtp_research.runtime.ahead import foresee, foreseen_passes, foreseen_rows


class RegionPass(NamedTuple):
    """The pass that a region runs in, and the pages of its layer."""

    pages: KVPages
    slot_mapping: Tensor  # [T] int64
    rows: AttentionRows  # of the pass
    backend: str  # kernel backend
    expanded: ExpandedRows | None = None  # how a latent layer reads prompts; None: absorbed


class _Running(threading.local):
    """The pass whose layer runs in this thread."""

    now: RegionPass
    longest = 0  # rows of a request at most, where they differ and the calling code cannot tell


running = _Running()


@contextlib.contextmanager
def uneven_rows(longest: int) -> Iterator[None]:
    """Requests of the passes in the block have up to `longest` rows; 0: all have as many.

    For compiled code that serves both, and tells its layers nothing of it.
    """
    before, running.longest = running.longest, longest
    try:
        yield
    finally:
        running.longest = before


class RegionContext(PassOverPages):
    """What the layer of a region is handed: it attends in the pass that is running."""

    def __init__(self, kind: KVKind, stores: bool, angles: Angles, both: Tensor) -> None:
        self._kind, self._stores, self._angles, self._both = kind, stores, angles, both
        self._latents: tuple[Tensor, Tensor] | None = None

    @property
    def stores_in_launch(self) -> bool:
        """See `PassOverPages`."""
        return self._stores

    def update(self, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        """Cache protocol: `attend` stores the rows; latents are handed over here alone."""
        self._latents = (key, value)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Cache protocol: positions are passed explicitly, so the cache claims to be empty."""
        return 0

    def attend(
        self, module: nn.Module, call: AttentionCall, *, angles: Angles | None = None
    ) -> Tensor:
        """See `PassOverPages`."""
        if self._kind == "latent":
            assert self._latents is not None, "a latent layer hands its rows to the cache first"
            latent, rope = (rows[0].transpose(0, 1) for rows in self._latents)
            query, weight = call.query[0], expansion_of(module)
            if not self._stores:  # there may be prompt rows
                return attend_rows_here(query, weight, latent, rope, call.scale)[None]
            return absorbed(
                query,
                weight,
                lambda query, query_rope: attend_latents_here(
                    query, query_rope, latent, rope, call.scale
                ),
                rope_dim=rope.shape[2],
                product=multiply_heads,
            )[None]
        both = None
        if angles is not None:
            is_own = angles.cos is self._angles.cos
            both = self._both if is_own else torch.stack((angles.cos[0], angles.sin[0]))
        return attend_here(
            call.query[0].transpose(0, 1),
            call.key[0].transpose(0, 1),
            call.value[0].transpose(0, 1),
            both,
            call.scale,
            call.sliding_window,
            None if call.sinks is None else call.sinks.float(),
        )[None]


@torch.library.custom_op("mtp_research::attend_here", mutates_args=())
def attend_here(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: torch.Tensor | None,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`store_and_attend` in the pass that is running."""
    now, cos_sin = running.now, () if angles is None else angles.unbind()
    return attend_pages(
        query,
        PagedKV(now.pages.keys, now.pages.values),
        now.rows,
        Scoring(scale, sliding_window, sinks),
        new_rows=NewRows(key, value, now.slot_mapping, *cos_sin),
        backend=now.backend,
    )


@attend_here.register_fake
def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: torch.Tensor | None,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    for size in foreseen_passes():  # the one that is running is one of them
        now, new, cos_sin = running.now, query.new_empty, ()
        ints = functools.partial(new, dtype=torch.int32)
        if angles is not None:  # whose rows have a symbol of their own
            cos_sin = (new(size.num_rows, angles.shape[2], dtype=angles.dtype),) * 2
        rows = AttentionRows(
            ints(size.num_requests, now.rows.block_table.shape[1]),
            ints(size.num_requests),
            ints(size.num_requests + 1),
            size.longest,
            are_settled=True,
        )
        foresee(
            query.shape[0],
            size.num_rows,
            attend_pages,
            query,
            PagedKV(now.pages.keys, now.pages.values),
            rows,
            Scoring(scale, sliding_window, sinks),
            new_rows=NewRows(key, value, new(size.num_rows, dtype=torch.int64), *cos_sin),
            backend=now.backend,
        )
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


@torch.library.custom_op("mtp_research::attend_latents_here", mutates_args=())
def attend_latents_here(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`store_and_attend_latents` in the pass that is running."""
    now = running.now
    return attend_latents(
        query_latent,
        query_rope,
        now.pages.keys[:, :, 0],
        now.rows,
        scale=scale,
        new_rows=NewRows(latent, rope, now.slot_mapping),
        backend=now.backend,
    )


@attend_latents_here.register_fake
def _fake_latents(query_latent: torch.Tensor, *_: object) -> torch.Tensor:
    return query_latent.new_empty(query_latent.shape)


@torch.library.custom_op("mtp_research::multiply_heads", mutates_args=())
def multiply_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`head_product`, chosen in the call by the number of rows."""
    return head_product(x, weight)


@multiply_heads.register_fake
def _fake_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for num_rows in foreseen_rows():
        foresee(x.shape[1], num_rows, head_product, x, weight)
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[2])


@torch.library.custom_op("mtp_research::attend_rows_here", mutates_args=())
def attend_rows_here(
    query: torch.Tensor,
    weight: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`attend_latent_rows` in the pass that is running."""
    now = running.now
    is_invariant = now.backend == checks.INVARIANT
    with InvariantProducts([]) if is_invariant else contextlib.nullcontext():
        return attend_latent_rows(
            query,
            weight,
            now.pages.keys[:, :, 0],
            now.rows,
            scale=scale,
            new_rows=NewRows(latent, rope, now.slot_mapping),
            backend=now.backend,
            expanded=now.expanded,
        )


@attend_rows_here.register_fake
def _fake_rows(
    query: torch.Tensor, weight: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, _: float
) -> torch.Tensor:
    value_dim = weight.shape[1] - (query.shape[2] - rope.shape[2])
    return query.new_empty(query.shape[1], query.shape[0], value_dim)

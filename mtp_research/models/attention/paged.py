"""Paged attention behind Hugging Face layers: context and cache object of a packed forward pass.

Tokens of all requests of a step are packed as one row `[1, T]`. `PagedContext` is passed twice: as
`past_key_values`, so that the layer hands over its new keys and values, and as `attention_context`,
so that the attention function reads pages.

Layers with multi-head latent attention hand over one latent and one rotary key per token, and
afterwards keys and values of every head, expanded for this pass's rows only. We keep the former and
ignore the latter: head h's key projection is applied to the query and its value projection to the
output, so that the pages hold what all heads share. `torch.compile` drops the unused expansion.

Compiled code takes the pages through ops that write the new rows, then attend. `torch.compile`
turns an op that writes into its argument into one that returns a new value, and may copy the whole
pool to do so. These ops therefore do not declare their write. That is safe because every reader of
a written row is such an op again, and each call depends on the one before it: a layer's input on
the layer below, a later pass on the token that the earlier one drafted.

Families with a learned index over keys (DeepSeek sparse attention) run densely (`route_sparse`):
a row with no more keys than `index_topk` selects all of them, so that dense latent attention is
exact up to there; longer texts are refused. The index is neither computed nor stored.

Letters: R requests, T packed rows, M blocks per table, H / Hkv heads, Dk / Dv head dims, L latent,
P rotary dims, B x S a batch in training, D hidden.
Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2, "absorbed".
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from mtp_research.kernels import checks
from mtp_research.kernels.attention.attention_rows import AttentionRows, PagedKV, Scoring
from mtp_research.kernels.attention.paged_attention import RowGroup, attend_pages
from mtp_research.kernels.attention.store_kv import MAX_STORED_ROWS, KeptRows, NewRows, store_rows
from mtp_research.kernels.latent.expanded_attention import (
    ExpandedRows,
    LatentDims,
    Prompts,
    absorbed,
    attend_latent_rows,
    expanded_rows,
    pays_expanded,
)
from mtp_research.kernels.latent.latent_attention import attend_latents
from mtp_research.models.attention.attention import AttentionCall, AttentionContext, DenseContext
from mtp_research.models.family import KVPages, KVStack
from mtp_research.runtime.errors import ConfigError


class PagePool(Protocol):
    """Owner of the pages (`KVCache` of the decode loop)."""

    @property
    def runs_regions(self) -> bool:
        """Whether layers of its passes run as compiled regions, in compiled steps or not."""
        ...

    def pages(self, layer: int) -> KVPages:
        """Pages of a cache layer, writable."""
        ...

    def stack(self, layer: int) -> KVStack:
        """The same among those of other layers: one argument of compiled code for all of them."""
        ...


class Angles(NamedTuple):
    """Rotary cos and sin of the rows of a pass, each `[1, T, P]`, P the dims that are rotated."""

    cos: Tensor
    sin: Tensor


def stores_in_launch(max_query_len: int, *, backend: str) -> bool:
    """Whether attention of compiled code may store the new rows in its own launch."""
    return max_query_len <= MAX_STORED_ROWS and backend in ("auto", "triton")


class PassOverPages:
    """What layers of compiled passes over pages may ask their context for."""

    @property
    def stores_in_launch(self) -> bool:
        """Whether attention of compiled code may store the new rows in its own launch."""
        raise NotImplementedError

    def attend(
        self, module: nn.Module, call: AttentionCall, *, angles: Angles | None = None
    ) -> Tensor:
        """See `AttentionContext`; with `angles`, query and key come before their rotation."""
        raise NotImplementedError


@dataclass(frozen=True)
class PagedContext(PassOverPages):
    """Where the rows of one packed forward pass are written and what they may read.

    `kv_layer` is used instead of the layer's own index where it is set: for MTP modules, whose KV
    layer depends on the draft step and not on the module alone.
    """

    pool: PagePool  # owner of the pages
    slot_mapping: Tensor  # [T] int64, `block_id * block_size + offset`; -1 writes nothing
    block_table: Tensor  # [R, M] int32, pages of each request
    seq_lens: Tensor  # [R] int32, KV length including this pass's rows
    query_start_loc: Tensor  # [R + 1] int32, first packed row of each request
    max_query_len: int  # largest number of rows of one request; sizes the launch grid
    has_equal_rows: bool = False  # all have as many, or `region_pass.uneven_rows` says
    has_one_layer: bool = False  # the pass is through a single layer
    backend: str = "auto"  # or `reference`, `triton`
    kv_layer: int | None = None
    prompts: Prompts | None = None  # the pass's, where the host knows them; latent layers read them
    _expanded: dict[LatentDims, ExpandedRows | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    _new_latents: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )
    # What the reference made of the tensors above, which are the same for all layers
    _row_groups: dict[tuple[object, ...], list[RowGroup]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _kept_rows: dict[tuple[object, ...], KeptRows] = field(
        default_factory=dict, repr=False, compare=False
    )
    _kept_angles: list[tuple[Tensor, Tensor]] = field(
        default_factory=list, repr=False, compare=False
    )
    # Output of the layer before and what is to be added to it, if that layer left it apart
    _apart: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False, compare=False)

    @property
    def stores_in_launch(self) -> bool:
        """See `PassOverPages`."""
        return stores_in_launch(self.max_query_len, backend=self.backend)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        """Cache protocol: write the new rows `[1, Hkv, T, D]` into the pages, hand them back.

        Latent layers hand over the latent and the rotary key here, and `attend` gets what was
        expanded from them: the two are kept for it.
        """
        pages = self.pages_of(layer_idx)
        if pages.kind == "latent":
            self._new_latents[layer_idx] = (key, value)
            return key, value
        if torch.compiler.is_compiling():
            return key, value  # `attend` stores them
        store_rows(
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            key_cache=pages.keys,
            value_cache=pages.values,
            slot_mapping=self.slot_mapping,
            backend=self.backend,
            kept=self._kept_rows,
        )
        return key, value

    @property
    def rows(self) -> AttentionRows:
        """The rows of the pass, as the kernels take them."""
        return AttentionRows(
            self.block_table, self.seq_lens, self.query_start_loc, self.max_query_len
        )

    def attend(
        self, module: nn.Module, call: AttentionCall, *, angles: Angles | None = None
    ) -> Tensor:
        """See `AttentionContext`; keys and values are read from the pages.

        With `angles`, in compiled passes, query and key come before their rotary embedding.
        """
        pages = self.pages_of(cast(int, module.layer_idx))
        is_compiling = torch.compiler.is_compiling()
        assert angles is None or (is_compiling and pages.kind != "latent"), "rows come rotated here"
        if pages.kind == "latent":
            return self._attend_latents(module, call, pages)[None]
        sinks = None if call.sinks is None else call.sinks.float()
        if not is_compiling:
            return attend_pages(
                call.query[0].transpose(0, 1),
                PagedKV(pages.keys, pages.values),
                self.rows,
                Scoring(call.scale, call.sliding_window, sinks),
                backend=self.backend,
                groups=self._row_groups,
            )[None]
        return store_and_attend(
            call.query[0].transpose(0, 1),
            call.key[0].transpose(0, 1),
            call.value[0].transpose(0, 1),
            None if angles is None else self.angles_of_pass(angles),
            pages.keys,
            pages.values,
            self.slot_mapping,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.max_query_len,
            call.scale,
            call.sliding_window,
            sinks,
            self.backend,
        )[None]

    def angles_of_pass(self, angles: Angles) -> Tensor:
        """Cos and sin as `[2, T, P]`, the same for all layers of the pass that share them."""
        for cos, both in self._kept_angles:
            if cos is angles.cos:
                return both
        both = torch.stack((angles.cos[0], angles.sin[0]))
        if not self.has_one_layer:
            both = materialised(both)
        self._kept_angles.append((angles.cos, both))
        return both

    def leave_apart(self, output: Tensor, branch: Tensor) -> Tensor:
        """The `output` of a layer, to which the next one adds `branch`; see `regions`."""
        self._apart.append((output, branch))
        return output

    def take_apart(self, hidden: Tensor) -> Tensor | None:
        """What the layer that is called with `hidden` must add to it; None: nothing."""
        if not self._apart:
            return None
        output, branch = self._apart.pop()
        assert output is hidden, "something changed a layer's output: engine.layer_regions=false"
        return branch

    def _attend_latents(self, module: nn.Module, call: AttentionCall, pages: KVPages) -> Tensor:
        latent, rope = self._new_latents.pop(cast(int, module.layer_idx))
        new_rows = NewRows(latent[0].transpose(0, 1), rope[0].transpose(0, 1), self.slot_mapping)
        cache, weight = pages.keys[:, :, 0], expansion_of(module)
        if not torch.compiler.is_compiling():
            return attend_latent_rows(
                call.query[0],
                weight,
                cache,
                self.rows,
                scale=call.scale,
                new_rows=new_rows,
                backend=self.backend,
                expanded=self.expanded(latent_dims(module), block_size=cache.shape[1]),
            )

        def attend(query_latent: Tensor, query_rope: Tensor) -> Tensor:
            return store_and_attend_latents(
                query_latent,
                query_rope,
                *new_rows[:2],
                cache,
                self.slot_mapping,
                self.block_table,
                self.seq_lens,
                self.query_start_loc,
                self.max_query_len,
                call.scale,
                self.backend,
            )

        return absorbed(call.query[0], weight, attend, rope_dim=rope.shape[-1])

    def expanded(self, dims: LatentDims, *, block_size: int) -> ExpandedRows | None:
        """How layers of these sizes read the prompts; None: absorbed, as all rows that decode.

        Batch-invariant attention is absorbed for all rows, so that no row's bits tell its batch.
        """
        prompts = self.prompts
        if prompts is None or self.backend == checks.INVARIANT:
            return None
        if dims not in self._expanded:
            pays = pays_expanded(prompts.spans, dims)
            plan = expanded_rows(self.rows, prompts, block_size=block_size) if pays else None
            self._expanded[dims] = plan
        return self._expanded[dims]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Cache protocol: positions are passed explicitly, so the cache claims to be empty."""
        return 0

    def pages_of(self, layer_idx: int) -> KVPages:
        """Pages of the layer with this index."""
        return self.pool.pages(layer_idx if self.kv_layer is None else self.kv_layer)

    def stack_of(self, layer_idx: int) -> KVStack:
        """The same as part of a stack."""
        return self.pool.stack(layer_idx if self.kv_layer is None else self.kv_layer)


def expansion_of(module: nn.Module) -> Tensor:
    """Weight `[H, nope + Dv, L]` that makes keys and values of a latent."""
    dims = cast(int, module.qk_nope_head_dim) + cast(int, module.v_head_dim)
    return cast(nn.Linear, module.kv_b_proj).weight.unflatten(0, (-1, dims))


def latent_dims(module: nn.Module) -> LatentDims:
    """Sizes of a latent attention of Hugging Face."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return LatentDims(*(cast(int, getattr(module, name)) for name in names))


@torch.library.custom_op("mtp_research::materialised", mutates_args=())
def materialised(values: torch.Tensor) -> torch.Tensor:
    """A copy of `values`, which many layers hand to the ops below.

    Compiled code would compute such a value anew for every few of the ops that read it, in launches
    of their own; the output of an op it keeps.
    """
    return values + 0  # not `clone`, which would be captured as a node of the copy engine


@materialised.register_fake
def _fake_materialised(values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


@torch.library.custom_op("mtp_research::end_kernel", mutates_args=("values",))
def _end_kernel(values: torch.Tensor) -> None:
    """Nothing. The compiler, to which it writes `values`, lets no kernel reach over it."""


@_end_kernel.register_fake
def _fake_end_kernel(values: torch.Tensor) -> None:
    pass


def fusion_barrier(values: torch.Tensor) -> torch.Tensor:
    """The same `values`; in compiled code, what reads them is not in the kernel that makes them.

    For results of reductions over a vocabulary: Triton 3.6 gives up (`PassManager::run failed`) on
    a kernel that reduces and then does the bookkeeping of a step. Launches nothing; nothing may
    have read the values before.
    """
    if torch.compiler.is_compiling():
        _end_kernel(values)
    return values


@torch.library.custom_op("mtp_research::store_and_attend", mutates_args=())
def store_and_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """Attention output `[T, H, Dv]` of `query` `[T, H, Dk]` after `key` and `value` were stored.

    Args are the fields of `NewRows`, `PagedKV`, `AttentionRows` and `Scoring`, and:
        angles: `[2, T, P]`, rotary cos and sin for `query` and `key`; None if they are rotated.
    """
    cos_sin = () if angles is None else angles.unbind()
    return attend_pages(
        query,
        PagedKV(key_cache, value_cache),
        AttentionRows(block_table, seq_lens, query_start_loc, max_query_len),
        Scoring(scale, sliding_window, sinks),
        new_rows=NewRows(key, value, slot_mapping, *cos_sin),
        backend=backend,
    )


@store_and_attend.register_fake
def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


@torch.library.custom_op("mtp_research::store_and_attend_latents", mutates_args=())
def store_and_attend_latents(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    latent_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    backend: str,
) -> torch.Tensor:
    """Attended latents `[T, H, L]` after `latent` `[T, 1, L]` and `rope` `[T, 1, P]` were stored.

    They lie behind each other in a slot of `latent_cache` `[num_blocks, block_size, L + P]`. Other
    args as in `latent_attention`.
    """
    return attend_latents(
        query_latent,
        query_rope,
        latent_cache,
        AttentionRows(block_table, seq_lens, query_start_loc, max_query_len),
        scale=scale,
        new_rows=NewRows(latent, rope, slot_mapping),
        backend=backend,
    )


@store_and_attend_latents.register_fake
def _fake_latents(query_latent: torch.Tensor, *_: object) -> torch.Tensor:
    return query_latent.new_empty(query_latent.shape)


def route_sparse(attentions: Iterable[nn.Module], *, config: PreTrainedConfig) -> None:
    """Let DeepSeek-V3 attentions with an index attend to all keys, in place.

    `config` of the model then says what their forward does: rotate interleaved pairs.
    """
    config.rope_interleave = True
    for attention in attentions:
        attention.forward = partial(_attend_densely, attention, num_keys=config.index_topk)


def require_exact_length(
    num_tokens: int, *, limit: int | None, key: str = "engine.max_model_len"
) -> None:
    """Refuse (`ConfigError`) texts that are computed here otherwise than the model means them."""
    if limit is not None and num_tokens > limit:
        raise ConfigError(
            f"{key} must be <= {limit} for this model, got {num_tokens}: its sparse attention is "
            "run densely (index_topk), or its rotary frequencies are those of short texts "
            f"(rope_type dynamic or longrope), which is exact up to there; set {key}={limit}."
        )


def _attend_densely(
    attention: nn.Module,
    hidden_states: Tensor,
    *,
    num_keys: int,
    attention_context: AttentionContext,
    prev_topk_indices: Tensor | None = None,
    **kwargs: object,  # the library's
) -> tuple[Tensor, None] | tuple[Tensor, None, None]:
    """Output `[B, S, D]` of DeepSeek-V3's attention on the layer's weights."""
    if isinstance(attention_context, DenseContext):
        require_exact_length(hidden_states.shape[1], limit=num_keys)
    output, _ = DeepseekV3Attention.forward(
        attention, hidden_states, attention_context=attention_context, **kwargs
    )
    # Layers that hand their selection on to the next expect a third result.
    hands_on = "skip_topk" in vars(attention)
    return (output, None, None) if hands_on else (output, None)

"""Cases of the kernel tests, shared by the reference, interpreter and GPU runs.

Every pool is poisoned: pages that no request owns, and slots past a request's length, hold NaN.
"""

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionCase:
    """One ragged batch. `query_lens[r]` rows end at `seq_lens[r]`."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 16
    sliding_window: int | None = None
    sinks: bool = False
    kv_start: tuple[int, ...] | None = None
    positions: tuple[int, ...] | None = None
    num_padded_rows: int = 0
    num_splits: int | None = 1

    def with_splits(self, num_splits: int | None) -> "AttentionCase":
        return replace(self, name=f"{self.name}-splits{num_splits}", num_splits=num_splits)


@dataclass(frozen=True)
class AttentionInputs:
    """The tensors of a case, named as the arguments of `paged_attention`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    sinks: Tensor | None
    positions: Tensor | None
    kv_start: Tensor | None

    def to(self, device: str) -> "AttentionInputs":
        moved = {k: v if v is None else v.to(device) for k, v in vars(self).items()}
        return AttentionInputs(**moved)

    def keywords(self) -> dict[str, Tensor | None]:
        return {name: value for name, value in vars(self).items() if name != "query"}


def make_inputs(
    case: AttentionCase, *, dtype: torch.dtype, seed: int = 0, values_in_keys: bool = False
) -> AttentionInputs:
    """Random rows, a shuffled NaN-poisoned pool; unused table entries point at foreign pages.

    With `values_in_keys` the values are the front part of the keys, as latents are.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    size = case.block_size
    num_owned = [-(-seq_len // size) for seq_len in case.seq_lens]
    num_foreign = 3
    num_blocks = sum(num_owned) + num_foreign
    order = torch.randperm(num_blocks, generator=generator).tolist()
    foreign, order = order[:num_foreign], order[num_foreign:]
    width = max([*num_owned, 0]) + 2
    block_table = torch.full((len(case.seq_lens), width), foreign[0], dtype=torch.int32)
    kv_shape = (num_blocks, size, case.num_kv_heads)
    key_cache = torch.full((*kv_shape, case.key_dim), torch.nan, dtype=dtype)
    value_cache = torch.full((*kv_shape, case.value_dim), torch.nan, dtype=dtype)
    for request, seq_len in enumerate(case.seq_lens):
        low = case.kv_start[request] if case.kv_start else 0
        for column in range(num_owned[request]):
            block_table[request, column] = order.pop()
        for pos in range(low, seq_len):
            block = int(block_table[request, pos // size])
            key_cache[block, pos % size] = randn(case.num_kv_heads, case.key_dim)
            value_cache[block, pos % size] = randn(case.num_kv_heads, case.value_dim)
    if values_in_keys:
        value_cache = key_cache[..., : case.value_dim]
    starts = torch.tensor([0, *case.query_lens]).cumsum(0).to(torch.int32)
    num_rows = int(starts[-1]) + case.num_padded_rows
    query = randn(num_rows, case.num_heads, case.key_dim)
    query[int(starts[-1]) :] = torch.nan
    sinks = torch.randn(case.num_heads, generator=generator) if case.sinks else None
    kv_start = None if case.kv_start is None else torch.tensor(case.kv_start, dtype=torch.int32)
    positions = None if case.positions is None else torch.tensor(case.positions)
    return AttentionInputs(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32),
        query_start_loc=starts,
        sinks=sinks,
        positions=positions,
        kv_start=kv_start,
    )


@dataclass(frozen=True)
class StoreCase:
    """Rows of one step; `num_skipped` of them go to slot -1."""

    name: str
    num_rows: int
    num_skipped: int = 0
    num_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 16


def make_store_inputs(
    case: StoreCase, *, dtype: torch.dtype, seed: int = 0
) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """(key, value) and the keywords of `store_kv`: distinct shuffled slots over a random pool."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    num_blocks = case.num_rows // case.block_size + 2
    num_slots = num_blocks * case.block_size
    slots = torch.randperm(num_slots, generator=generator)[: case.num_rows]
    slots[torch.randperm(case.num_rows, generator=generator)[: case.num_skipped]] = -1
    key = randn(case.num_rows, case.num_heads, case.key_dim)
    value = randn(case.num_rows, case.num_heads, case.value_dim)
    pool_shape = (num_blocks, case.block_size, case.num_heads)
    pool = {
        "key_cache": randn(*pool_shape, case.key_dim),
        "value_cache": randn(*pool_shape, case.value_dim),
        "slot_mapping": slots,
    }
    return (key, value), pool


STORE_CASES = [
    StoreCase("some_skipped", num_rows=9, num_skipped=3),
    StoreCase("one_row_one_head", num_rows=1, num_heads=1, key_dim=8, value_dim=8),
    StoreCase("no_rows", num_rows=0),
    StoreCase("all_skipped", num_rows=4, num_skipped=4),
    StoreCase("odd_heads_odd_dims", num_rows=5, num_heads=3, key_dim=24, value_dim=40),
    StoreCase("several_blocks", num_rows=70, num_skipped=1, block_size=32),
    StoreCase("heads_over_tiles", num_rows=3, num_heads=37, key_dim=64, value_dim=8),
]


def random_case(seed: int) -> AttentionCase:
    """A small random batch; the same for the same seed."""
    rng = random.Random(seed)
    num_requests = rng.randint(1, 5)
    query_lens = tuple(rng.choice([0, 1, 2, 4, 5, 17]) for _ in range(num_requests))
    seq_lens = tuple(length + rng.choice([0, 1, 15, 40]) for length in query_lens)
    num_kv_heads = rng.choice([1, 2])
    kv_start = tuple(rng.randint(0, length) for length in seq_lens)
    return AttentionCase(
        f"random{seed}",
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_heads=num_kv_heads * rng.choice([1, 3, 4]),
        num_kv_heads=num_kv_heads,
        key_dim=rng.choice([8, 16, 24]),
        value_dim=rng.choice([8, 16, 24]),
        block_size=rng.choice([16, 32]),
        sliding_window=rng.choice([None, 1, 16, 30]),
        sinks=rng.random() < 0.5,
        kv_start=rng.choice([None, kv_start]),
        num_padded_rows=rng.choice([0, 3]),
    )


def slow_arguments(case: AttentionCase) -> dict[str, float | int | None]:
    """The scalar arguments that the slow and the real functions share."""
    return {"scale": case.key_dim**-0.5, "sliding_window": case.sliding_window}


def call_arguments(case: AttentionCase) -> dict[str, float | int | None]:
    """`slow_arguments` plus the bound on q_len that the real functions need."""
    return {**slow_arguments(case), "max_query_len": max([*case.query_lens, 0])}


MIXED = AttentionCase("mixed", query_lens=(1, 4, 19, 3), seq_lens=(1, 37, 19, 70))

ATTENTION_CASES = [
    AttentionCase("one_row_one_key", query_lens=(1,), seq_lens=(1,), num_heads=1, num_kv_heads=1),
    AttentionCase("verify", query_lens=(4, 4, 4), seq_lens=(35, 16, 90)),
    MIXED,
    AttentionCase("empty_requests", query_lens=(0, 2, 0, 0), seq_lens=(0, 33, 5, 0)),
    AttentionCase("padded_rows", query_lens=(1, 3), seq_lens=(20, 3), num_padded_rows=7),
    AttentionCase("no_rows_but_padding", query_lens=(0,), seq_lens=(9,), num_padded_rows=3),
    AttentionCase("group_1", query_lens=(2, 5), seq_lens=(40, 5), num_heads=3, num_kv_heads=3),
    AttentionCase("group_4", query_lens=(5, 4), seq_lens=(21, 60), num_heads=4, num_kv_heads=1),
    AttentionCase("group_6", query_lens=(3, 1), seq_lens=(21, 40), num_heads=6, num_kv_heads=1),
    AttentionCase("group_8", query_lens=(4, 2), seq_lens=(64, 17), num_heads=8, num_kv_heads=1),
    AttentionCase("group_12", query_lens=(6, 1), seq_lens=(30, 32), num_heads=12, num_kv_heads=1),
    AttentionCase("value_narrower", query_lens=(4,), seq_lens=(50,), key_dim=24, value_dim=16),
    AttentionCase("value_wider", query_lens=(4,), seq_lens=(50,), key_dim=8, value_dim=40),
    AttentionCase("large_blocks", query_lens=(3, 2), seq_lens=(65, 100), block_size=64),
    AttentionCase("window_1", query_lens=(4, 1), seq_lens=(30, 9), sliding_window=1),
    AttentionCase("window_in_block", query_lens=(4, 20), seq_lens=(90, 20), sliding_window=5),
    AttentionCase("window_over_blocks", query_lens=(4, 40), seq_lens=(90, 70), sliding_window=37),
    AttentionCase("window_over_all", query_lens=(2,), seq_lens=(30,), sliding_window=1000),
    AttentionCase("sinks", query_lens=(4, 9), seq_lens=(80, 9), sinks=True),
    AttentionCase("sinks_window", query_lens=(4,), seq_lens=(80,), sinks=True, sliding_window=20),
    AttentionCase("kv_start", query_lens=(4, 3), seq_lens=(60, 20), kv_start=(17, 0)),
    AttentionCase("kv_start_hides_rows", query_lens=(4,), seq_lens=(4,), kv_start=(2,), sinks=True),
    AttentionCase(
        "positions",
        query_lens=(3, 2),
        seq_lens=(40, 24),
        positions=(7, -1, 39, 23, 20),
        sliding_window=18,
    ),
]


LATENT = {"num_kv_heads": 1, "key_dim": 24, "value_dim": 16}
LATENT_CASES = [  # Dk is the latent and the rotary key together, Dv the latent
    AttentionCase("latent_mixed", (1, 4, 19, 3), (1, 37, 19, 70), **LATENT),
    AttentionCase("latent_padded", (1, 0, 3), (20, 9, 3), num_padded_rows=7, **LATENT),
    AttentionCase(
        "latent_odd_heads", (5, 2), (33, 90), num_heads=5, num_kv_heads=1, key_dim=48, value_dim=40
    ),
    AttentionCase("latent_positions", (3, 2), (40, 24), positions=(7, -1, 39, 23, 20), **LATENT),
    AttentionCase("latent_kv_start", (4, 3), (60, 20), kv_start=(17, 0), **LATENT),
    AttentionCase("latent_no_rows", (0,), (9,), num_padded_rows=3, **LATENT),
]


def latent_keywords(inputs: AttentionInputs, case: AttentionCase) -> dict[str, object]:
    """The arguments of `latent_attention`; the queries are strided views of one tensor."""
    latent, rope = inputs.query.split((case.value_dim, case.key_dim - case.value_dim), dim=-1)
    arguments = {
        name: value
        for name, value in inputs.keywords().items()
        if name not in ("key_cache", "value_cache", "sinks")
    }
    return {
        "query_latent": latent,
        "query_rope": rope,
        "latent_cache": inputs.key_cache[:, :, 0],
        "scale": case.key_dim**-0.5,
        "max_query_len": max([*case.query_lens, 0]),
        **arguments,
    }

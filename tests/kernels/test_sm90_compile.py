"""Every shipped kernel shape compiles for sm_90 without a GPU: no spills, fits shared memory.

A usual run compiles one program of each kind; those marked `every_case` are compiled by
`make test-triton-36` and, as they are launched, by the tests that need a GPU.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention import attention_launch, store_kv
from mtp_research.kernels.attention.paged_attention_triton import attention_kernel
from mtp_research.kernels.attention.splits import merge_splits_kernel
from mtp_research.kernels.latent import latent_attention as latent_attention_launch
from mtp_research.kernels.latent.latent_attention_triton import latent_attention_kernel

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402 - after the skip
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

SHARED_MEMORY_BYTES = 227 * 1024
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@dataclass(frozen=True)
class Shape:
    """One compiled variant of the attention kernel."""

    query_len: int
    num_heads: int = 32
    num_kv_heads: int = 8
    key_dim: int = 128
    value_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    split: bool = True
    sliding_window: int | None = None
    optional: bool = False  # sinks, positions and kv_start given
    invariant: bool = False
    new_rows: bool = False  # stored by the programs
    rotary_dim: int = 0  # of new rows and queries, rotated by the programs
    num_ragged: int = 0  # requests whose tiles are counted through
    shared: bool = False  # splits, by the lengths of texts
    num_keys: int | None = None  # of all tables
    two_an_sm: bool = False

    @property
    def config(self) -> attention_launch.LaunchConfig:
        rows = self.query_len * self.num_heads // self.num_kv_heads
        dims = {"key_dim": self.key_dim, "value_dim": self.value_dim}
        config = attention_launch.choose_config(
            1 if self.invariant else rows,
            **dims,
            element_bytes=self.dtype.itemsize,
            num_keys=self.num_keys,
        )
        return attention_launch.keep_two_an_sm(config, **dims) if self.two_an_sm else config


def kinds_first(cases, usual):
    """Parameters of `cases`, if need be by name; `every_case` has those that are not `usual`."""
    cases = cases if isinstance(cases, dict) else {str(case): case for case in cases}
    assert set(usual) <= set(cases)
    return [
        pytest.param(case, id=name, marks=() if name in usual else pytest.mark.every_case)
        for name, case in cases.items()
    ]


def narrow(head_dim: int, query_len: int, **changes) -> Shape:
    return Shape(query_len, key_dim=head_dim, value_dim=head_dim, **changes)


SHAPES = {
    "decode": Shape(1),
    "decode_direct_page64": Shape(1, split=False, block_size=64),
    "verify_group4": Shape(4, new_rows=True),
    "verify_group12_page64": Shape(4, num_heads=96, block_size=64, new_rows=True),
    "verify_rotated": Shape(4, new_rows=True, rotary_dim=128),
    "verify_rotated_direct": Shape(4, split=False, new_rows=True, rotary_dim=128),
    "verify_group12_half_rotated": Shape(
        4, num_heads=96, block_size=64, new_rows=True, rotary_dim=64
    ),
    "verify_16_rows_rotated": Shape(16, split=False, new_rows=True, rotary_dim=128),
    "verify_rotated_shared": Shape(4, new_rows=True, rotary_dim=128, shared=True),
    "verify_two_an_sm": Shape(4, new_rows=True, rotary_dim=128, shared=True, two_an_sm=True),
    "verify_narrow_tiles": Shape(4, new_rows=True, rotary_dim=128, num_keys=8 * 1024),
    "prefill": Shape(512, split=False),
    "prefill_ragged": Shape(512, split=False, num_ragged=33),
    "prefill_ragged_shared": Shape(512, num_ragged=33, shared=True),
    "prefill_ragged_shared_head_dim_64": narrow(
        64, 512, num_heads=9, num_kv_heads=3, num_ragged=32, shared=True
    ),
    "prefill_ragged_shared_head_dim_256": Shape(
        512, 16, 2, key_dim=256, value_dim=256, num_ragged=32, shared=True
    ),
    "prefill_ragged_shared_window_sinks_positions": Shape(
        64, sliding_window=128, optional=True, num_ragged=32, shared=True
    ),
    "verify_window_sinks_positions": Shape(4, sliding_window=128, optional=True, new_rows=True),
    "prefill_window_sinks_positions": Shape(64, sliding_window=128, optional=True, split=False),
    "head_dim_64": Shape(4, num_heads=16, num_kv_heads=4, key_dim=64, value_dim=64, new_rows=True),
    "head_dim_256": Shape(
        4, num_heads=16, num_kv_heads=2, key_dim=256, value_dim=256, new_rows=True
    ),
    "head_dim_256_rotated": Shape(
        4, 16, 2, key_dim=256, value_dim=256, new_rows=True, rotary_dim=64
    ),
    "head_dim_256_few_rows_rotated": Shape(
        1, key_dim=256, value_dim=256, new_rows=True, rotary_dim=256
    ),
    "key_192_value_128_rotated": Shape(
        4, 64, 4, key_dim=192, sliding_window=128, optional=True, new_rows=True, rotary_dim=64
    ),
    "key_192_value_128": Shape(4, num_heads=64, num_kv_heads=4, key_dim=192),
    "float16": Shape(4, dtype=torch.float16, new_rows=True),
    "float32": Shape(4, dtype=torch.float32),
    "float32_head_dim_256": Shape(
        4, key_dim=256, value_dim=256, dtype=torch.float32, new_rows=True
    ),
    "float32_head_dim_256_rotated": Shape(
        4, key_dim=256, value_dim=256, dtype=torch.float32, new_rows=True, rotary_dim=256
    ),
    "head_dim_256_few_rows": Shape(1, key_dim=256, value_dim=256),
    "key_192_value_128_few_rows": Shape(1, key_dim=192, new_rows=True),
    "head_dim_64_many_rows": narrow(64, 8),
    **{f"head_dim_{dim}": narrow(dim, 4) for dim in (16, 32)},
    **{f"head_dim_{dim}_many_rows": narrow(dim, 8) for dim in (16, 32)},
    **{f"float32_head_dim_{d}": narrow(d, 4, dtype=torch.float32) for d in (16, 32, 64)},
    "invariant": Shape(512, invariant=True),
    "invariant_head_dim_256": Shape(1, key_dim=256, value_dim=256, invariant=True),
    "invariant_window_sinks": Shape(1, sliding_window=128, optional=True, invariant=True),
    "invariant_float32": Shape(1, dtype=torch.float32, invariant=True),
}

# One of each: rows of a product, split or direct, masks, rotation, widths, data types.
USUAL = {
    *("decode", "verify_group12_page64", "verify_rotated", "verify_rotated_direct"),
    *("verify_rotated_shared", "verify_two_an_sm", "verify_narrow_tiles"),
    *("prefill_ragged", "verify_window_sinks_positions", "head_dim_16", "head_dim_256_rotated"),
    *("key_192_value_128_rotated", "key_192_value_128_few_rows", "float32"),
    "invariant_window_sinks",
}


def _compile(kernel, *, types, constants, num_warps, num_stages=3, divisible=()):
    """Compiles as a launch would with pointers, strides and `divisible` divisible by 16.

    A kernel that can overlap the one in front does.
    """
    constants = {"READS_EARLY": True} | constants | {"OVERLAPS": True}
    types = types | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {name: constants.get(name) for name, kind in signature.items() if kind[0] == "c"}
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, (name, kind) in enumerate(signature.items())
        if kind[0] == "*" or (kind[0] != "c" and (name.startswith("stride") or name in divisible))
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return compile_unassembled(source, {"num_warps": num_warps, "num_stages": num_stages})


def compile_unassembled(source, options):
    """The program down to PTX, which the tests assemble themselves.

    What is kept without a binary must never be launched: it has a folder of its own.
    """
    folder = f"{triton.knobs.cache.dir}/not_assembled"
    with (
        mock.patch.object(CUDABackend, "make_cubin", return_value=b""),
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder),
    ):
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _compile_attention(shape, *, reads_early=True):
    config = shape.config
    constants = attention_launch.attention_constants(
        shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        block_size=shape.block_size,
        sliding_window=shape.sliding_window,
        split=shape.split,
        split_keys=attention_launch.INVARIANT_SPLIT_KEYS if shape.invariant else 0,
        config=config,
        num_stored_rows=shape.query_len if shape.new_rows else 0,
        rotary_dim=shape.rotary_dim,
        num_ragged_requests=shape.num_ragged,
        num_sharing_requests=32 if shape.shared else 0,
    ) | {"READS_EARLY": reads_early}
    data = POINTERS[shape.dtype]
    types = dict.fromkeys(attention_kernel.arg_names, "i32")
    types |= dict.fromkeys(("block_table", "seq_lens", "query_start_loc"), "*i32")
    types |= {"query": data, "key_cache": data, "value_cache": data, "scale_log2": "fp32"}
    types |= {"out": data, "arrived": "*i32" if shape.shared else "constexpr"}
    types |= dict.fromkeys(("partial", "lse"), "*fp32" if shape.split else "constexpr")
    given = {"sinks": "*fp32", "positions": "*i64", "kv_start": "*i32"}
    types |= given if shape.optional else dict.fromkeys(given, "constexpr")
    new = {"new_key": data, "new_value": data, "slot_mapping": "*i64"}
    types |= new if shape.new_rows else dict.fromkeys(new, "constexpr")
    types |= dict.fromkeys(("cos", "sin"), data if shape.rotary_dim else "constexpr")
    types |= dict.fromkeys(constants, "constexpr")
    compiled = _compile(
        attention_kernel,
        types=types,
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return compiled, config


def waits_first(compiled):
    """Whether a program reads no more than single numbers while the kernel in front still runs."""
    before, _, behind = compiled.asm["ptx"].partition("griddepcontrol.wait")
    touches = re.compile(r"\bst\.global|cp\.async|\bld\.global(\.\w+)*\.v\d")
    return not touches.search(before) and bool(touches.search(behind))


def starts_next_first(compiled):
    """Whether the next kernel may begin before this one waits, and not behind its wait."""
    start, wait = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
    return compiled.asm["ptx"].index(start) < compiled.asm["ptx"].index(wait)


def _num_spilled_bytes(compiled, folder, *, may_wait=False):
    """Bytes of registers that ptxas spills to local memory, stores and loads together.

    Products that wait for each other are a fault too, unless they `may_wait`.
    """
    ptxas = Path(triton.knobs.nvidia.ptxas.path)
    if not ptxas.is_file():
        pytest.skip(f"ptxas is not part of this triton wheel: {ptxas}")
    source = folder / "kernel.ptx"
    source.write_text(compiled.asm["ptx"])
    command = [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", folder / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert may_wait or "serialized" not in report  # ptxas C7515
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert found, f"ptxas printed no spill line: {report}"
    return int(found[1]) + int(found[2])


@pytest.mark.parametrize("shape", kinds_first(SHAPES, USUAL))
def test_attention_kernel_sm90_has_no_spills_and_fits_shared_memory(shape, tmp_path):
    compiled, _ = _compile_attention(shape)
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
    assert waits_first(compiled)
    assert not starts_next_first(compiled)
    # All that a program reads is on its way at once. So much of float32, which is for comparisons,
    # has no room in registers.
    may_spill = shape is SHAPES["float32_head_dim_256_rotated"]
    assert may_spill or _num_spilled_bytes(compiled, tmp_path) == 0


def test_a_stage_more_leaves_room_for_two_programs_an_sm_and_not_for_a_third():
    usual, more = (SHAPES[name] for name in ("verify_rotated_shared", "verify_two_an_sm"))
    assert SHARED_MEMORY_BYTES // _compile_attention(usual)[0].metadata.shared == 3
    assert SHARED_MEMORY_BYTES // _compile_attention(more)[0].metadata.shared == 2


def test_rows_that_are_not_settled_are_read_behind_the_wait():
    compiled, _ = _compile_attention(SHAPES["verify_group4"], reads_early=False)
    before, _, behind = compiled.asm["ptx"].partition("griddepcontrol.wait")
    assert "ld.global" not in before
    assert "ld.global" in behind
    compiled, _ = _compile_attention(SHAPES["verify_group4"])
    before, _, _ = compiled.asm["ptx"].partition("griddepcontrol.wait")
    assert "ld.global" in before


def _compiled_key(shape):
    """What of a launch decides registers and shared memory; half-precision dtypes are alike."""
    padded = [attention_launch.padded_head_dim(dim) for dim in (shape.key_dim, shape.value_dim)]
    return shape.config, *padded, shape.dtype.itemsize


def test_every_tile_shape_that_a_launch_can_choose_is_compiled_above():
    dims = [(dim, dim) for dim in range(8, 264, 8)] + [(192, 128)]
    dtypes = (torch.bfloat16, torch.float32)
    reachable = {
        _compiled_key(Shape(query_len, 4, 1, key_dim, value_dim, dtype=dtype, invariant=invariant))
        for key_dim, value_dim in dims
        for query_len in (1, 4, 5, 512)
        for dtype in dtypes
        for invariant in (False, True)
    }
    # float32 keys of 192 with values of 128 are for tests: their tile is the one of 256.
    missing = reachable - {_compiled_key(shape) for shape in SHAPES.values()}
    assert {key for key in missing if key[1:] != (256, 128, 4)} == set()


@pytest.mark.parametrize(
    "name",
    kinds_first(
        ("decode", "verify_group4", "verify_group12_page64"), {"decode", "verify_group12_page64"}
    ),
)
def test_attention_kernel_sm90_pipelines_keys_and_values(name):
    # One buffer each is what a page-table load beside its dependent loads would leave.
    compiled, config = _compile_attention(SHAPES[name])
    pattern = rf"ttg\.local_alloc : .*memdesc<(\d+)x{config.block_n}x128xbf16"
    buffers = [int(count) for count in re.findall(pattern, compiled.asm["ttgir"])]
    assert len(buffers) == 2, "expected one buffer ring for K and one for V"
    assert min(buffers) >= 2


@pytest.mark.parametrize(
    ("name", "instruction"), [("decode", "mma.sync"), ("prefill_ragged", "wgmma")]
)
def test_attention_kernel_sm90_uses_tensor_cores(name, instruction):
    compiled, _ = _compile_attention(SHAPES[name])
    assert instruction in compiled.asm["ptx"]


def test_rotation_sm90_rounds_products_before_it_adds_them():
    compiled, _ = _compile_attention(SHAPES["verify_rotated"])
    # What is fused is a subtraction from zero, of queries and of keys; a sum differs in every line.
    addends = re.findall(r"fma\.rn\.bf16x2\s+(?:%\w+, ){3}(%\w+);", compiled.asm["ptx"])
    assert "mul.bf16x2" in compiled.asm["ptx"]
    assert len(set(addends)) <= 2


@pytest.mark.parametrize(
    ("num_splits", "dim"),
    [
        (64, 256),
        (16, 64),
        pytest.param(4, 256, marks=pytest.mark.every_case),
        pytest.param(attention_launch.MAX_SPLITS, 256, marks=pytest.mark.every_case),
    ],
)
def test_merge_splits_kernel_sm90_has_no_spills(num_splits, dim, tmp_path):
    num_warps = attention_launch.merge_warps(num_splits, value_dim=dim)
    constants = {"NUM_HEADS": 32, "VALUE_DIM": dim, "PADDED_VALUE_DIM": dim}
    constants |= {"PADDED_SPLITS": num_splits}
    types = dict.fromkeys(("num_requests", "num_splits", "num_row_heads"), "i32")
    types |= {"partial": "*fp32", "lse": "*fp32", "query_start_loc": "*i32", "out": "*bf16"}
    compiled = _compile(merge_splits_kernel, types=types, constants=constants, num_warps=num_warps)
    assert waits_first(compiled)
    assert not starts_next_first(compiled)
    assert _num_spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize(
    ("num_heads", "key_dim", "value_dim", "dtype"),
    [
        pytest.param(8, 128, 128, torch.bfloat16, id="heads"),
        pytest.param(1, 512, 64, torch.bfloat16, id="latent"),
        pytest.param(
            *(96, 64, 64, torch.float16), id="heads_over_tiles", marks=pytest.mark.every_case
        ),
        pytest.param(4, 192, 128, torch.bfloat16, id="key_192_value_128"),
        pytest.param(2, 256, 256, torch.float32, id="float32", marks=pytest.mark.every_case),
    ],
)
def test_store_kv_kernel_sm90_moves_16_bytes_a_thread(
    num_heads, key_dim, value_dim, dtype, tmp_path
):
    kernel = store_kv._store_kv_kernel
    constants = store_kv.store_constants(
        num_heads, key_dim=key_dim, value_dim=value_dim, block_size=16
    )
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("key", "value", "key_cache", "value_cache"), POINTERS[dtype])
    types |= {"slot_mapping": "*i64"} | dict.fromkeys(constants, "constexpr")
    compiled = _compile(kernel, types=types, constants=constants, num_warps=4)
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    # The row of a latent is too short for 16 bytes a thread.
    width = "v4" if num_heads * key_dim * dtype.itemsize >= 16 * 128 else "v2"
    assert f"ld.global.{width}" in compiled.asm["ptx"]
    assert f"st.global.{width}" in compiled.asm["ptx"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_part_mark_kernel_sm90_has_no_spills_and_moves_16_bytes(dtype, tmp_path):
    pointer = (POINTERS | {torch.int64: "*i64"})[dtype]
    types = {"values": pointer, "out": pointer, "num_values": "i32", "BLOCK": "constexpr"}
    constants = {"BLOCK": checks.MARK_BLOCK}
    compiled = _compile(
        checks._part_mark_kernel,
        types=types,
        constants=constants,
        num_warps=checks.MARK_WARPS,
        divisible=("num_values",),
    )
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.name == checks.MARK_KERNEL_NAME  # what a trace is searched for
    assert "ld.global.v" in compiled.asm["ptx"]


LATENTS = {
    f"{num_rows}-{dtype}-{'split' if split else 'direct'}": (num_rows, dtype, split)
    # float32 takes one tile shape whatever the rows; float16 compiles to what bfloat16 does.
    for num_rows, dtype in (
        (16, torch.bfloat16),
        (32, torch.bfloat16),
        (80, torch.bfloat16),
        (80, torch.float32),
    )
    for split in (True, False)
}


@pytest.mark.parametrize(
    "case",
    kinds_first(
        LATENTS, {"16-torch.bfloat16-split", "80-torch.bfloat16-direct", "80-torch.float32-split"}
    ),
)
def test_latent_attention_kernel_sm90_has_no_spills(case, tmp_path):
    num_rows, dtype, split = case
    _check_latent(num_rows, split=split, split_keys=0, dtype=dtype, folder=tmp_path)


@pytest.mark.parametrize(
    "dtype",
    kinds_first((torch.float16, torch.float32), {"torch.float16"}),
)
def test_invariant_latent_attention_kernel_sm90_has_no_spills(dtype, tmp_path):
    keys = attention_launch.INVARIANT_SPLIT_KEYS
    _check_latent(1, split=True, split_keys=keys, dtype=dtype, folder=tmp_path)


def _check_latent(num_rows, *, split, split_keys, dtype, folder):
    config = latent_attention_launch.choose_latent_config(num_rows, element_bytes=dtype.itemsize)
    constants = latent_attention_launch.latent_constants(
        16,
        latent_dim=512,
        rope_dim=64,
        block_size=64,
        split=split,
        split_keys=split_keys,
        config=config,
        num_stored_rows=store_kv.MAX_STORED_ROWS,
    )
    kernel, data = latent_attention_kernel, POINTERS[dtype]
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("block_table", "seq_lens", "query_start_loc"), "*i32")
    types |= dict.fromkeys(("query_latent", "query_rope", "latent_cache"), data)
    types |= {"out": "*fp32", "lse": "*fp32"} if split else {"out": data, "lse": "constexpr"}
    types |= {"positions": "constexpr", "kv_start": "constexpr", "scale_log2": "fp32"}
    types |= {"new_latent": data, "new_rope": data, "slot_mapping": "*i64"}
    types |= dict.fromkeys(constants, "constexpr")
    compiled = _compile(
        kernel,
        types=types,
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
    assert waits_first(compiled)
    assert not starts_next_first(compiled)
    # ptxas gives up where the loop over keys may be empty; Hopper's own program does not wait.
    assert _num_spilled_bytes(compiled, folder, may_wait=not split) == 0


@pytest.mark.parametrize(
    "num_splits",
    kinds_first((8, latent_attention_launch.MAX_LATENT_SPLITS), {"8"}),
)
def test_merge_of_latent_splits_sm90_has_no_spills(num_splits, tmp_path):
    constants = {"NUM_HEADS": 128, "VALUE_DIM": 512, "PADDED_VALUE_DIM": 512}
    constants |= {"PADDED_SPLITS": num_splits}
    types = dict.fromkeys(("num_requests", "num_splits", "num_row_heads"), "i32")
    types |= {"partial": "*fp32", "lse": "*fp32", "query_start_loc": "*i32", "out": "*bf16"}
    num_warps = latent_attention_launch.merge_warps(num_splits)
    compiled = _compile(merge_splits_kernel, types=types, constants=constants, num_warps=num_warps)
    assert waits_first(compiled)
    assert not starts_next_first(compiled)
    assert _num_spilled_bytes(compiled, tmp_path) == 0

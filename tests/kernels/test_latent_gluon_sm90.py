"""The Gluon programs of latent attention, compiled for sm_90 without a GPU."""

import re
import subprocess
from pathlib import Path

import pytest
from mtp_research.kernels.attention import store_kv as new_rows
from mtp_research.kernels.latent import latent_attention as latent_attention_launch
from mtp_research.kernels.latent.latent_gluon import latent_attention_gluon_kernel

triton = pytest.importorskip("triton")
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402 - after the skip

from tests.kernels.test_sm90_compile import (  # noqa: E402
    compile_unassembled,
    starts_next_first,
    waits_first,
)

SHARED_MEMORY_BYTES = 227 * 1024
INDEXES = {
    "block_table": "*i32",
    "seq_lens": "*i32",
    "query_start_loc": "*i32",
    "slot_mapping": "*i64",
    "scale_log2": "fp32",
}
TENSORS = ("query_latent", "query_rope", "latent_cache", "new_latent", "new_rope")


@pytest.mark.parametrize(
    ("num_rows", "split", "optional"),
    [
        pytest.param(16, True, False, id="16"),
        pytest.param(32, False, False, id="32_direct", marks=pytest.mark.every_case),
        pytest.param(32, True, True, id="32_positions"),
        pytest.param(64, True, False, id="64", marks=pytest.mark.every_case),
        pytest.param(80, True, True, id="80_positions", marks=pytest.mark.every_case),
        pytest.param(80, False, False, id="80_direct"),
    ],
)
def test_gluon_latent_attention_sm90_neither_spills_nor_waits_for_each_product(
    num_rows, split, optional, tmp_path
):
    compiled = _compile(num_rows, split=split, optional=optional)
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
    report = _ptxas_report(compiled, tmp_path)
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", report), report
    # ptxas warns where it has to finish every product before the next one.
    assert "wgmma.mma_async instructions are serialized" not in report
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "cp.async.cg.shared.global [ %" in compiled.asm["ptx"]
    assert ", 0x10" in compiled.asm["ptx"]
    assert waits_first(compiled)
    assert not starts_next_first(compiled)


def _compile(num_rows, *, split, optional):
    kernel = latent_attention_gluon_kernel
    config = latent_attention_launch.choose_latent_config(num_rows, element_bytes=2, hopper=True)
    assert config.gluon
    constants = latent_attention_launch.latent_constants(
        16,
        latent_dim=512,
        rope_dim=64,
        block_size=16,
        split=split,
        config=config,
        num_stored_rows=new_rows.MAX_STORED_ROWS,
    ) | {"READS_EARLY": True, "OVERLAPS": True}
    types = dict.fromkeys(kernel.arg_names, "i32") | INDEXES | dict.fromkeys(TENSORS, "*bf16")
    types |= {"out": "*fp32", "lse": "*fp32"} if split else {"out": "*bf16", "lse": "constexpr"}
    given = {"positions": "*i64", "kv_start": "*i32"}
    types |= given if optional else dict.fromkeys(given, "constexpr")
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in kernel.arg_names}
    constants = {name: constants.get(name) for name, kind in signature.items() if kind[0] == "c"}
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, (name, kind) in enumerate(signature.items())
        if kind[0] == "*" or name.startswith("stride")
    }
    source = GluonASTSource(kernel, signature, constants, aligned)
    return compile_unassembled(source, {"num_warps": config.num_warps})


def _ptxas_report(compiled, folder):
    ptxas = Path(triton.knobs.nvidia.ptxas.path)
    if not ptxas.is_file():
        pytest.skip(f"ptxas is not part of this triton wheel: {ptxas}")
    source = folder / "kernel.ptx"
    source.write_text(compiled.asm["ptx"])
    command = [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr

"""What the kernels of a loop can run, refused by key before the pool is planned.

The kernels refuse it too, but only in the first step: after loading, planning and capture. With
`engine.deterministic` text is the same to the bit for any K, batch, order and prompt chunk, in
bfloat16 too.

Letters: Dk / Dv head dims, L latent size, P rotary key size.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.heads.stack import MTPHeads
from mtp_research.kernels import checks
from mtp_research.kernels.attention.paged_attention_triton import attention_kernel
from mtp_research.kernels.checks import INVARIANT
from mtp_research.models.family import LayerGeometry
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError

if TYPE_CHECKING:
    from mtp_research.models.rewrites.invariant import InvariantProducts


def kernel_backend(engine: EngineConfig) -> str:
    """The backend that attention kernels are called with."""
    return INVARIANT if engine.deterministic else engine.backend


def build_products(
    target: Target, heads: object, *, engine: EngineConfig
) -> "InvariantProducts | None":
    """The mode that a deterministic step runs in; None for the usual arithmetic.

    Raises:
        ConfigError: settings or a target whose arithmetic follows the batch.
    """
    if not engine.deterministic:
        return None
    if engine.compile:
        raise ConfigError(
            "engine.deterministic=true needs engine.compile=false, got true: compiled code chooses "
            "the order of its sums by the batch; set engine=h200_deterministic."
        )
    own = "triton" if target.device.type == "cuda" else "reference"
    if engine.backend not in ("auto", own):
        raise ConfigError(
            f"engine.deterministic=true needs engine.backend=auto or {own} on "
            f"{target.device.type}, got {engine.backend}; set engine.backend=auto."
        )
    if target.has_recurrent_state:
        raise ConfigError(
            "engine.deterministic=true does not support recurrent layers, whose scan follows the "
            f"prompt chunks, got family {target.family_name}; set engine.deterministic=false."
        )
    from mtp_research.models.rewrites.invariant import InvariantProducts

    models = [target.model, *([heads] if isinstance(heads, MTPHeads) else [])]
    return InvariantProducts(models)


def require_kernel_support(
    layers: Sequence[LayerGeometry],
    *,
    dtype: torch.dtype,
    device: torch.device,
    engine: EngineConfig,
) -> None:
    """Refuse a target whose attention the backend's kernels do not compute.

    Raises:
        ConfigError: the backend resolves to Triton and a dtype, head size or page size is outside
            what its kernels support; names the key, the value and the supported set.
    """
    backend, pool = kernel_backend(engine), torch.empty(0, dtype=dtype, device=device)
    try:
        resolved = checks.resolve_backend(backend, tensor=pool, kernel=attention_kernel)
    except ValueError:
        return  # no Triton here: the entries and the kernels say so
    if resolved != "triton":
        return
    key = f"model.dtype={str(dtype).removeprefix('torch.')}"
    try:
        checks.check_kernel_dtype("the KV pool's", pool, kernel=attention_kernel)
        key = f"engine.block_size={engine.block_size}"
        checks.check_block_size(engine.block_size)
        for index, layer in enumerate(layers):
            for name, size, high in _sizes(layer):
                key = f"model.path with a size of {size} in KV layer {index}"
                checks.check_head_dim(name, size, high=high)
    except ValueError as fault:
        reason = str(fault).replace("backend='reference'", "engine.backend=reference")
        raise ConfigError(f"{key} does not fit engine.backend={engine.backend}: {reason}") from None


def _sizes(layer: LayerGeometry) -> Iterator[tuple[str, int, int]]:
    if layer.num_kv_heads == 0:
        return  # holds nothing
    if layer.kind == "latent":
        yield "L", layer.value_dim, checks.MAX_LATENT_DIM
        yield "P", layer.key_dim - layer.value_dim, checks.MAX_HEAD_DIM
        return
    yield "Dk", layer.key_dim, checks.MAX_HEAD_DIM
    yield "Dv", layer.value_dim, checks.MAX_HEAD_DIM

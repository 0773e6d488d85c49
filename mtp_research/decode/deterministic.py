"""What `engine.deterministic` changes: kernels by name, products by mode, and what cannot follow.

Text is then the same to the bit for any K, batch, order and prompt chunk, in bfloat16 too.
"""

from mtp_research.config import EngineConfig
from mtp_research.errors import ConfigError
from mtp_research.heads.stack import MTPHeads
from mtp_research.kernels.checks import INVARIANT
from mtp_research.models.invariant import InvariantProducts
from mtp_research.models.target import Target


def kernel_backend(engine: EngineConfig) -> str:
    """The backend that attention kernels are called with."""
    return INVARIANT if engine.deterministic else engine.backend


def build_products(
    target: Target, heads: object, *, engine: EngineConfig
) -> InvariantProducts | None:
    """The mode that a deterministic step runs in; None for the usual arithmetic.

    Args:
        target: the frozen model.
        heads: what drafts; its experts are routed too where it has modules.
        engine: says whether.

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
    models = [target.model, *([heads] if isinstance(heads, MTPHeads) else [])]
    return InvariantProducts(models)

"""MTP modules that are trained together with a fresh target, as releases with modules were made.

With D = `model.pretrain.num_mtp_modules` and the weight `mtp_loss_weight`, a step minimises

    CE(x_{t+1})  +  weight / D * sum over d = 1..D of CE_d(x_{t+d+1})

Depth d is module d - 1 of the unroll `chain`, over the hidden states of the same pass, so that its
gradient reaches the target, embedding and lm_head too. Rows are continuous, as for the target:
attention is causal over the whole row, and `<|bos|>` is no label. The modules are saved with the
target under their family's published names, from where `head.init=native` and `spec.head` read
them.

Letters: B rows of a batch, S tokens of a row, D modules.
Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from mtp_research.config.training_schema import PretrainConfig
from mtp_research.data.tokenizer import BOS_ID
from mtp_research.heads.export import native_tensors
from mtp_research.heads.native import SINGLE_FILE, native_views
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.fresh import TargetModel
from mtp_research.models.target import Target, trained_target
from mtp_research.runtime.files import write_tensors
from mtp_research.training.unroll import RowInputs, unroll


def new_modules(model: TargetModel, pretrain: PretrainConfig, *, seed: int) -> MTPHeads | None:
    """Random modules on a target that is being trained; None for `num_mtp_modules` 0.

    They are run as the family's releases are. The global generator is left as it was.

    Raises:
        ConfigError: the family is not supported, or its published names hold fewer modules.
    """
    if pretrain.num_mtp_modules == 0:
        return None
    target = trained_target(model)
    family = target.family
    spec = HeadSpec(
        num_mtp_modules=pretrain.num_mtp_modules,
        hidden_source=family.hidden_source,
        recycle_norm=family.recycle_norm,
        concat_order=family.concat_order,
        owns_lm_head=family.owns_lm_head,
        unroll="chain",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = MTPHeads(target, spec=spec)
    native_views(heads, family.native)  # refuses now what could not be saved
    return heads


def joint_loss(heads: MTPHeads, rows: Tensor, *, weight: float) -> Tensor:
    """Loss of target and modules over rows `[B, S + 1]`, 0-dim; see the module."""
    target, input_ids = heads.target, rows[:, :-1]
    positions = torch.arange(input_ids.shape[1], device=rows.device).expand_as(input_ids)
    one_document = torch.zeros_like(input_ids)
    hidden = target.forward(input_ids, position_ids=positions, context=DenseContext(one_document))
    inputs = RowInputs(input_ids, heads.source(hidden), positions, one_document)
    num_depths = heads.spec.num_mtp_modules
    loss = _cross_entropy(target.logits(hidden.post_norm), rows[:, 1:])
    for depth, output in enumerate(unroll(heads, inputs, num_depths=num_depths, kind="chain"), 1):
        # Row t of depth d consumes x_{t+d}: the last d rows have none.
        logits = heads.logits(output.post_norm[:, :-depth], module_idx=depth - 1)
        loss = loss + weight / num_depths * _cross_entropy(logits, rows[:, depth + 1 :])
    return loss


def count_modules(target: Target, num_modules: int) -> None:
    """Say in the target's configuration how many modules its checkpoint will hold, in place."""
    if target.family.native.count_field is not None:
        setattr(target.config, target.family.native.count_field, num_modules)


def add_modules(heads: MTPHeads, folder: Path) -> int:
    """Add the modules to the saved target in `folder`; returns the bytes of its weights."""
    path = folder / SINGLE_FILE
    assert path.is_file(), f"a target of task=target is saved as one {SINGLE_FILE}"
    tensors = load_file(path) | native_tensors(heads)
    unfinished = folder / f".{SINGLE_FILE}.tmp"
    write_tensors(tensors, unfinished)
    unfinished.replace(path)
    return path.stat().st_size


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=BOS_ID
    )

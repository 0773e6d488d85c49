"""Loaded modules against references that were written on released tensors alone.

The project's side is float32, the reference float64 (tests/heads/references.py). The error of a
tensor is its largest difference over the reference's largest magnitude.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.family import NormPoint
from tests import tiny
from tests.heads import references, references_mtp
from tests.heads.reference_parts import Checkpoint, read_checkpoint
from tests.heads.references import Inputs, Passed, Reference
from tests.heads.release import RELEASES, write_release

NUM_ROWS = 20  # five windows; `index_topk` of the sparse recipes is 24
LARGEST_ERROR = 1e-6
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
GROUPS = {"n_group": 4, "topk_group": 2}
EXAONE_2 = {"mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [6]}
GLM_ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}


@dataclass(frozen=True)
class Case:
    """A recipe, possibly changed, and the reference of its modules.

    Attributes:
        recipe: of the tiny target.
        reference: of one module.
        changes: of the recipe.
        num_modules: written to the release, 0 for its usual number.
        reads: which hidden state of the target the first module gets.
    """

    recipe: str
    reference: Reference
    changes: dict = field(default_factory=dict)
    num_modules: int = 0
    reads: NormPoint = "post_norm"


# By family and, behind a space, what is special about the recipe.
CASES = {
    "deepseek_v3": Case("deepseek_v3", references.deepseek, num_modules=3),
    "deepseek_v3 groups": Case("deepseek_v3", references.deepseek, GROUPS),
    "deepseek_v3 yarn": Case("deepseek_v3", references.deepseek, {"rope_parameters": YARN}),
    "deepseek_v32": Case("deepseek_v32", references.deepseek),
    "ernie4_5_moe": Case("ernie4_5_moe", references_mtp.ernie4_5_moe, reads="pre_norm"),
    "exaone_moe": Case("exaone_moe", references_mtp.exaone_moe),
    "exaone_moe window": Case("exaone_moe", references_mtp.exaone_moe, EXAONE_2),
    "gemma3": Case("gemma3", references_mtp.gemma3),
    "glm4_moe": Case("glm4_moe", references.glm4_moe, num_modules=3),
    "glm4_moe air": Case("glm45_air", references.glm4_moe),
    "glm4_moe_lite": Case("glm4_moe_lite", references.deepseek),
    "glm_moe_dsa": Case("glm_moe_dsa", references.deepseek),
    "hy_v3": Case("hy_v3", references.hy_v3),
    "kimi_k2": Case("kimi_k2", references.deepseek),
    "longcat_flash": Case("longcat_flash", references.longcat_flash),
    "mimo": Case("mimo", references.mimo, reads="pre_norm"),
    "mimo_v2": Case("mimo_v2", references.mimo_v2, reads="pre_norm"),
    "nemotron_h": Case("nemotron_h", references_mtp.nemotron_h, GROUPS),
    "qwen3": Case("qwen3", references_mtp.qwen3),
    "qwen3_5": Case("qwen3_5", references_mtp.qwen_gated),
    "qwen3_5 moe": Case("qwen3_5_moe", references_mtp.qwen_gated),
    "qwen3_5 tied": Case("qwen3_5", references_mtp.qwen_gated, {"tie_word_embeddings": True}),
    "qwen3_next": Case("qwen3_next", references_mtp.qwen_gated),
    "step3p5": Case("step3p5", references.step3p5, reads="pre_norm"),
}
FAMILIES_REFERENCED = {name.split()[0] for name in CASES}
# What must be noticed: a case, and a change of what its reference reads.
TENSOR_FAULTS = {
    "halves of the projection swapped": ("deepseek_v3", "eh_proj.weight", lambda t: t.roll(64, 1)),
    "no shared expert": ("deepseek_v3", "shared_experts.down_proj.weight", torch.zeros_like),
    "no correction": ("glm4_moe", "e_score_correction_bias", torch.zeros_like),
    "no sinks": ("mimo_v2", "attention_sink_bias", lambda t: t - 1e9),
    "plain norms": ("qwen3_next", "mtp.norm.weight", lambda t: t - 1),
    "own norm for the target's": ("ernie4_5_moe", "model.norm.weight", torch.ones_like),
}
CONFIG_FAULTS = {
    "other pairs turned": ("deepseek_v3", {"rope_interleave": False}),
    "every group allowed": ("deepseek_v3 groups", {"topk_group": 4}),
    "no stretching": ("deepseek_v3 yarn", {"rope_parameters": YARN | {"rope_type": "default"}}),
    "whole heads turned": ("glm4_moe", {"rope_parameters": GLM_ROPE}),
    "a row more in the window": ("mimo_v2", {"sliding_window": 5}),
    "values not scaled": ("mimo_v2", {"attention_value_scale": 1.0}),
    "other latent scale": ("longcat_flash", {"q_lora_rank": 31}),
}


class Both(NamedTuple):
    """What a case's project side runs on, and the same for its reference."""

    heads: MTPHeads
    checkpoint: Checkpoint
    token_ids: Tensor  # [1, S]
    hidden: Tensor  # [1, S, D] float32


def both_sides(case: Case, folder: Path) -> Both:
    """A tiny random release of the case, loaded by the project and as plain tensors."""
    target = tiny.tiny_target(case.recipe, dtype=torch.float32, **case.changes)
    write_release(target, folder, num_modules=case.num_modules)
    generator = torch.Generator().manual_seed(11)
    return Both(
        load_heads(folder, target),
        read_checkpoint(folder),
        torch.randint(3, 128, (1, NUM_ROWS), generator=generator),
        torch.randn(1, NUM_ROWS, 64, generator=generator),
    )


def passed_by_project(both: Both, module: int) -> Passed:
    """Module `module` over the whole sequence."""
    with torch.no_grad():
        output = both.heads.run_module(
            both.heads.mtp_modules[module],
            token_ids=both.token_ids,
            prev_hidden_states=both.hidden,
            position_ids=torch.arange(NUM_ROWS)[None],
            context=DenseContext(),
        )
        logits = both.heads.logits(output.post_norm, module_idx=module)
    return Passed(output.post_norm[0], logits[0], both.heads.recycled(output)[0])


def passed_by_reference(case: Case, both: Both, module: int) -> Passed:
    embeddings = both.checkpoint.embedding[both.token_ids[0]]
    return case.reference(both.checkpoint, module, Inputs(embeddings, both.hidden[0].double()))


def error(found: Passed, expected: Passed) -> float:
    """Largest error of the three tensors."""
    errors = []
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        errors.append(float((one.double() - other).abs().max() / other.abs().max()))
    return max(errors)


@pytest.mark.parametrize("name", CASES)
def test_loaded_module_equals_its_reference(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    both = both_sides(case, tmp_path)
    assert both.heads.spec.hidden_source == case.reads
    for module in range(both.heads.spec.num_mtp_modules):
        found = passed_by_project(both, module)
        assert error(found, passed_by_reference(case, both, module)) <= LARGEST_ERROR, module


def test_every_family_with_published_modules_has_a_reference() -> None:
    assert set(RELEASES) == FAMILIES_REFERENCED


@pytest.mark.parametrize("fault", [*TENSOR_FAULTS, *CONFIG_FAULTS])
def test_fault_in_one_of_the_two_is_noticed(fault: str, tmp_path: Path) -> None:
    name = (TENSOR_FAULTS | CONFIG_FAULTS)[fault][0]
    both = both_sides(CASES[name], tmp_path)
    if fault in TENSOR_FAULTS:
        _, part, change = TENSOR_FAULTS[fault]
        changed = {n: change(t) for n, t in both.checkpoint.tensors.items() if n.endswith(part)}
        assert changed
        checkpoint = replace(both.checkpoint, tensors=both.checkpoint.tensors | changed)
    else:
        config = both.checkpoint.config | CONFIG_FAULTS[fault][1]
        checkpoint = replace(both.checkpoint, config=config)
    expected = passed_by_reference(CASES[name], both._replace(checkpoint=checkpoint), 0)
    assert error(passed_by_project(both, 0), expected) > 1000 * LARGEST_ERROR

"""Latent attention on a CUDA device: the interpreter's cases in all dtypes, and real sizes."""

from dataclasses import replace

import pytest
import torch
from mtp_research.kernels.bench.bench_attention import (
    latent_attention,
    latent_attention_ref,
)
from torch import Tensor

from tests.kernels.append_cases import FULL_LATENT_CASES, check_new_rows
from tests.kernels.kernel_cases import (
    LATENT_CASES,
    AttentionCase,
    latent_keywords,
    make_inputs,
    slow_arguments,
)
from tests.kernels.slow import slow_paged_attention
from tests.kernels.test_expanded_attention import DEEPSEEK, GLM_FLASH
from tests.kernels.test_expanded_attention import Case as PromptCase

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_in_new_memory")]

# Largest absolute difference to float64 (slow loop) or float32 (reference) of the same inputs.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}
FULL = {"num_kv_heads": 1, "key_dim": 576, "value_dim": 512}
# More than four requests: tiles of 32 and of 64 rows (16 up to there).
SIX_OF_32 = AttentionCase("32_rows", (2, 1, 2, 2, 1, 2), (300, 65, 64, 2, 129, 700), 16, **FULL)
SIX_OF_80 = AttentionCase("80_rows", (4, 3, 1, 4, 2, 4), (300, 65, 64, 4, 129, 700), 20, **FULL)
# Keys that each row sees end at its position, and begin at its request's kv_start.
LAST_KEYS = {
    "32_rows": (7, -1, 64, 63, 20, 1, 0, 128, 698, 699),
    "80_rows": (7, -1, 299, 64, 64, 3, 63, 3, 2, 1, 0, 128, 64, 300, 699, 650, 64, -1),
}
LARGE_CASES = [
    AttentionCase("decode_16", (1,) * 4, (1000, 2048, 1, 77), 16, **FULL),
    AttentionCase("verify_20_page64", (4,) * 3, (1000, 2048, 130), 20, block_size=64, **FULL),
    AttentionCase("verify_128", (4, 4), (900, 130), 128, **FULL),
    AttentionCase("prefill_mixed", (150, 4, 1), (150, 700, 40), 16, **FULL),
    AttentionCase("decode_32", (2, 1), (300, 65), 16, **FULL),
    AttentionCase("positions", (3, 2), (140, 24), 20, positions=(7, -1, 139, 23, 20), **FULL),
    AttentionCase("kv_start", (4, 3, 1), (260, 20, 70), 20, kv_start=(117, 0, 64), **FULL),
    AttentionCase("padded", (1, 0, 3), (200, 9, 3), 20, num_padded_rows=7, **FULL),
    AttentionCase("no_rows", (0,), (9,), 16, num_padded_rows=3, **FULL),
    *(
        changed
        for case in (SIX_OF_32, SIX_OF_80)
        for changed in (
            case,
            replace(case, name=f"{case.name}_page64", block_size=64, num_padded_rows=5),
            replace(case, name=f"{case.name}_positions", positions=LAST_KEYS[case.name]),
            replace(case, name=f"{case.name}_kv_start", kv_start=(117, 64, 3, 1, 128, 63)),
        )
    ),
]


def _moved(arguments: dict[str, object]) -> dict[str, object]:
    return {k: v.to("cuda") if isinstance(v, Tensor) else v for k, v in arguments.items()}


@pytest.mark.parametrize("num_splits", [1, 3, None])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", LATENT_CASES, ids=lambda case: case.name)
def test_latent_attention_on_gpu_matches_slow_loop(case, dtype, num_splits):
    inputs = make_inputs(case, dtype=dtype, values_in_keys=True)
    expected = slow_paged_attention(inputs.query, **inputs.keywords(), **slow_arguments(case))
    arguments = _moved(latent_keywords(inputs, case))
    out = latent_attention(arguments.pop("query_latent"), **arguments, num_splits=num_splits)
    torch.testing.assert_close(out.cpu().double(), expected, atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize("num_splits", [1, None])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_latent_attention_of_real_sizes_on_gpu_matches_reference(case, dtype, num_splits):
    arguments = latent_keywords(make_inputs(case, dtype=dtype, values_in_keys=True), case)
    arguments["scale"] = 192**-0.5
    wide = {
        k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }
    expected = latent_attention_ref(wide.pop("query_latent"), **wide)
    moved = _moved(arguments)
    out = latent_attention(moved.pop("query_latent"), **moved, num_splits=num_splits)
    torch.testing.assert_close(out.cpu().float(), expected, atol=TOLERANCES[dtype], rtol=1e-2)


@pytest.mark.parametrize(
    "case",
    FULL_LATENT_CASES,
    ids=lambda case: f"{len(case.query_lens)}-{case.num_heads}-{case.num_splits}",
)
def test_latent_attention_of_real_sizes_on_gpu_stores_new_rows(case):
    check_new_rows(case, torch.bfloat16, device="cuda", backend="triton")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("dims", [GLM_FLASH, DEEPSEEK], ids=["glm_flash", "deepseek"])
@pytest.mark.parametrize(
    ("others", "prompts"),
    [
        ([], [(0, 150)]),
        ([], [(700, 260), (0, 1), (0, 65)]),
        ([(300, 4), (64, 4), (0, 1)], [(0, 150), (511, 130), (0, 0), (0, 33), (0, 0)]),
    ],
    ids=["one", "behind_context", "beside_decoding"],
)
def test_expanded_prompts_on_gpu_match_the_float32_reference(others, prompts, dims, dtype):
    options = {"dims": dims, "heads": 6, "block": 16}
    case = PromptCase(others, prompts, dtype=dtype, device="cuda", **options)
    wide = PromptCase(others, prompts, dtype=dtype, **options)  # the same rounded numbers
    for name in ("query", "weight", "cache"):
        setattr(wide, name, getattr(wide, name).float())
    key, value = (rows.float() for rows in wide.new_rows[:2])
    wide.new_rows = wide.new_rows._replace(key=key, value=value)
    expected = wide.attend(None, backend="reference")
    tolerance = max(TOLERANCES[dtype], 1e-4)
    launched = case.prompts(num_launched=min(40, case.query.shape[1]))
    for plan in (None, case.prompts(), launched):
        found = case.attend(plan).cpu().float()
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-2)

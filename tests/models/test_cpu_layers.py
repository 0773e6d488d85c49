"""Products of a few rows on a CPU: the library's numbers, only where asked, and taken back."""

import pytest
import torch
from torch import nn

from mtp_research import EngineConfig, SpecDecoder, SpecSettings, load_target
from mtp_research.models.rewrites.cpu_layers import MAX_ROWS, FewRowsLinear, put_weights_left
from mtp_research.runtime.provenance import REPOSITORY_ROOT

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs MKL")
TARGET = str(REPOSITORY_ROOT / "assets" / "lab_tiny" / "target")


def frozen(num_outputs, depth, *, bias=False, dtype=torch.float32):
    return nn.Linear(depth, num_outputs, bias=bias, dtype=dtype).requires_grad_(False)


def left_of(model):
    return {name for name, module in model.named_modules() if type(module) is FewRowsLinear}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize("sizes", [(640, 256), (256, 640)])
def test_output_is_the_librarys(sizes, num_rows, bias):
    torch.manual_seed(0)
    linear = frozen(*sizes, bias=bias)
    x = torch.randn(1, num_rows, sizes[1])
    expected = linear(x)
    assert put_weights_left([linear], enabled=True) == 1
    with torch.inference_mode():
        output = linear(x)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert output.is_contiguous()


def test_few_rows_are_computed_with_the_weight_left(monkeypatch):
    linear = frozen(640, 256)
    put_weights_left([linear], enabled=True)
    seen = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *of: seen.append(of[1].shape) or product(*of))
    with torch.inference_mode():
        for num_rows in (1, 2, MAX_ROWS, MAX_ROWS + 1):
            linear(torch.randn(num_rows, 256))
    assert seen == [(256, 2), (256, 2), (256, MAX_ROWS)]  # one row doubled, too many left alone


@pytest.mark.parametrize(
    "linear",
    [
        frozen(640, 128),  # too small
        frozen(640, 2048),  # too deep
        frozen(640, 256, dtype=torch.float64),
        nn.Linear(256, 640, bias=False),  # trained
    ],
    ids=["small", "deep", "float64", "trained"],
)
def test_others_are_left_alone(linear):
    assert put_weights_left([linear], enabled=True) == 0
    assert type(linear) is nn.Linear


def test_decoder_says_whether_and_the_last_one_counts():
    target = load_target(TARGET, dtype="float32")
    spec = SpecSettings(num_speculative_tokens=0)
    names = target.model.state_dict().keys()
    for engine, is_left in (
        (EngineConfig(), True),
        (EngineConfig(few_rows_kernel=False), False),
        (EngineConfig(), True),
        (EngineConfig(deterministic=True), False),  # whose products are others
    ):
        SpecDecoder(target, spec=spec, engine=engine)
        assert ("lm_head" in left_of(target.model)) is is_left
        assert bool(left_of(target.model)) is is_left
    assert target.model.state_dict().keys() == names

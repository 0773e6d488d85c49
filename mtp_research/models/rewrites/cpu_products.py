"""Products of a few rows on a CPU, in the order that its library is fast at.

PyTorch hands `x W^T` of a few float32 rows to MKL as a product whose long side is W's, and MKL then
takes up to six times as long as for `W x^T`, which is the same product, and twice as long for one
row as for two. Steps of a decode loop have few rows, so that a verified row would cost more than
the bandwidth says. Here a weight that is large and not deep is put on the left, and one row is
doubled.

Measured on an AMD EPYC (Zen 4), 2 cores, MKL of torch 2.13; other CPUs are not. Letters: T rows,
N outputs, K depth.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

MAX_ROWS = 8
# A smaller weight stays in the caches and gains nothing; for a deeper one, or one that is deeper
# than wide with more than two rows, PyTorch's own order is as fast.
_MIN_WEIGHTS = 100_000
_MAX_DEPTH = 1024
_PAIR = 2


def put_weights_left(models: Iterable[nn.Module], *, enabled: bool) -> int:
    """Let frozen float32 linears on a CPU run `FewRowsLinear`, or give them back, in place.

    Names, parameters and state dicts stay. Returns how many linears run it now.
    """
    count = 0
    for model in models:
        for module in model.modules():
            if type(module) is FewRowsLinear and not enabled:
                module.__class__ = nn.Linear
            elif enabled and type(module) is nn.Linear and _gains(module):
                module.__class__ = FewRowsLinear
            count += type(module) is FewRowsLinear
    return count


def _gains(linear: nn.Linear) -> bool:
    weight = linear.weight
    is_plain = type(weight.data) is Tensor and not weight.requires_grad
    is_plain = is_plain and "forward" not in vars(linear)
    is_float = weight.dtype == torch.float32 and weight.device.type == "cpu"
    is_sized = weight.numel() >= _MIN_WEIGHTS and weight.shape[1] <= _MAX_DEPTH
    return torch.backends.mkl.is_available() and is_plain and is_float and is_sized


class FewRowsLinear(nn.Linear):
    """A linear layer whose weight is the left operand where the rows are few."""

    def forward(self, input: Tensor) -> Tensor:
        """Output `[..., N]` of `[..., K]`."""
        num_outputs, depth = self.weight.shape
        num_rows = input.numel() // depth
        is_few = 0 < num_rows <= MAX_ROWS and (num_outputs >= depth or num_rows <= _PAIR)
        if not is_few or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return functional.linear(input, self.weight, self.bias)
        rows = input.reshape(num_rows, depth)
        if num_rows == 1:
            rows = torch.cat((rows, rows))
        output = torch.mm(self.weight, rows.t())[:, :num_rows].t()
        if self.bias is not None:
            output = output + self.bias
        return output.contiguous().view(*input.shape[:-1], num_outputs)

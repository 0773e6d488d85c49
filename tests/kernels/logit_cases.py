"""Cases of `mask_logits` and `best_tokens`, against numpy."""

from typing import NamedTuple

import numpy
import torch
from mtp_research.kernels.losses.logit_rows import best_tokens, mask_logits
from torch import Tensor


class MaskCase(NamedTuple):
    """Sizes of one call; `is_strided` makes both arguments views with gaps, words not adjacent."""

    name: str
    num_requests: int
    num_rows: int  # J
    num_masks: int  # K+1
    vocab_size: int
    is_strided: bool = False

    def make(self, dtype: torch.dtype, *, device: str) -> tuple[Tensor, Tensor]:
        """Logits and masks: NaN, both infinities, forbidden and allowed, at places that repeat."""
        generator = torch.Generator().manual_seed(0)
        gap = 3 * self.is_strided
        shape = (self.num_requests, self.num_rows + gap, self.vocab_size + gap)
        logits = torch.randn(shape, generator=generator).to(device, dtype)
        logits = logits[:, : self.num_rows, gap:]
        logits[..., ::7], logits[..., 2::11], logits[..., 3::13] = -torch.inf, torch.nan, torch.inf
        words = (self.num_requests, self.num_masks, -(-self.vocab_size // 32))
        words = words[::-1] if self.is_strided else words
        masks = torch.randint(-(2**31), 2**31, words, generator=generator, dtype=torch.int32)
        masks = masks.to(device)
        return logits, masks.permute(2, 1, 0) if self.is_strided else masks


MASK_CASES = [
    MaskCase("one_word", 1, 1, 1, 5),
    MaskCase("ragged", 3, 4, 4, 4096 + 33),
    MaskCase("fewer_rows", 3, 2, 4, 8192),
    MaskCase("strided", 3, 2, 4, 4096 + 77, is_strided=True),
    MaskCase("nobody", 0, 4, 4, 64),
]


def slow_mask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """The definition, on the host."""
    words = numpy.ascontiguousarray(bitmask[:, : logits.shape[1]].cpu().numpy())
    allowed = numpy.unpackbits(words.view(numpy.uint8), axis=-1, bitorder="little")
    allowed = torch.from_numpy(allowed[..., : logits.shape[-1]]).bool()
    values = logits.cpu()
    is_number = ~values.isnan() & ~values.isposinf()
    forbidden = torch.where(is_number, -torch.inf, torch.nan).to(values.dtype)
    return torch.where(allowed, values, forbidden)


def check_mask(case: MaskCase, dtype: torch.dtype, *, device: str, backend: str) -> None:
    """The same bits as the definition, and arguments that stay as they were."""
    logits, bitmask = case.make(dtype, device=device)
    before = logits.clone()
    out = mask_logits(logits, bitmask, backend=backend)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, logits.shape, True)
    torch.testing.assert_close(out.cpu(), slow_mask(logits, bitmask), **EXACTLY)
    torch.testing.assert_close(logits, before, **EXACTLY)


EXACTLY = {"atol": 0, "rtol": 0, "equal_nan": True}


class BestCase(NamedTuple):
    """Rows `shape` of logits over a vocabulary; `is_strided` makes them a view with gaps."""

    name: str
    shape: tuple[int, ...]
    vocab_size: int
    is_strided: bool = False

    def make(self, dtype: torch.dtype, *, device: str) -> Tensor:
        """Many equal ones; of six rows the last four: two NaN, all -inf, two inf, all NaN."""
        generator = torch.Generator().manual_seed(0)
        width = self.vocab_size * (1 + self.is_strided)
        logits = torch.randint(-40, 40, (*self.shape, width), generator=generator).to(dtype) / 8
        logits = logits[..., :: 1 + self.is_strided].to(device)
        rows = logits.view(-1, self.vocab_size) if not self.is_strided else logits
        last = self.vocab_size - 1
        for row in range(2, len(rows)):
            kind = row % 6
            if kind == 2:
                rows[row, [last // 3, last]] = torch.nan
            elif kind == 3:
                rows[row] = -torch.inf
            elif kind == 4:
                rows[row, [last // 2, last]] = torch.inf
            elif kind == 5:
                rows[row] = torch.nan
        return logits


BEST_CASES = [
    BestCase("one_token", (6,), 1),
    BestCase("short", (6,), 100),
    BestCase("one_part_and_one_token", (6,), 4097),
    BestCase("two_reads_a_part", (2, 3), 16 * 4096 + 5),
    BestCase("even_parts", (7, 1), 49_152),
    BestCase("strided", (6,), 9_001, is_strided=True),
    BestCase("nobody", (0, 4), 5_000),
]


def check_best(case: BestCase, dtype: torch.dtype, *, device: str, backend: str) -> None:
    """The first of the largest; of a row with NaN, one that is."""
    logits = case.make(dtype, device=device)
    best = best_tokens(logits, backend=backend)
    assert (best.dtype, best.shape) == (torch.int64, logits.shape[:-1])
    values = logits.double().cpu().numpy().reshape(-1, case.vocab_size)
    for row, index in zip(values, best.flatten().tolist(), strict=True):
        is_nan = numpy.isnan(row)
        assert is_nan[index] if is_nan.any() else index == row.argmax()

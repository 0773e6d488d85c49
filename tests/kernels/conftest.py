import pytest
import torch
from torch import Tensor


@pytest.fixture
def nan_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills every new_empty with NaN, so that an output nobody wrote is seen."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self: Tensor, *size: int, **options: torch.dtype) -> Tensor:
        made = new_empty(self, *size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)

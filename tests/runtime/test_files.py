"""Files that others may read."""

import os
import stat

import pytest
import torch
from safetensors.torch import load_file

from mtp_research.runtime.files import write_tensors


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_written_tensors_may_be_read_as_the_mask_says(tmp_path, mask: int, mode: int) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(mask)
    try:
        write_tensors({"weight": torch.arange(3)}, path)
        assert os.umask(mask) == mask  # as it was
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert load_file(path)["weight"].tolist() == [0, 1, 2]

"""Files that others may read."""

import os
import stat

import pytest
import torch
from safetensors.torch import load_file

from mtp_research.models.fresh import save_target
from mtp_research.runtime.files import write_tensors
from tests.tiny import tiny_target


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


def test_saved_target_may_be_read_by_others(tmp_path) -> None:
    before = os.umask(0o022)
    try:
        size = save_target(tiny_target("qwen3").model, tmp_path)
    finally:
        os.umask(before)
    path = tmp_path / "model.safetensors"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert size == path.stat().st_size > 0

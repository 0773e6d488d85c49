"""Settings that must stand before torch or transformers is imported, and the GPU marker."""

import contextlib
import gc
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Else each process that compiles for a CPU asks the C++ compiler first which vectors it knows: 8 s.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Two workers on two cores: more threads than one each only makes them wait for one another.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MKL_NUM_THREADS"] = "1"
    # Its models look at every loaded module once each: one second now, six behind transformers.
    with contextlib.suppress(ImportError):
        import wandb  # noqa: F401

import pytest
from hypothesis import settings

from mtp_research.runtime.threads import wait_passively

os.fsync = lambda _: (
    None
)  # what a test writes need not survive a power cut; each takes milliseconds
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
wait_passively()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    # A test that leaves two threads behind makes all tests after it up to thirty times slower.
    torch = sys.modules.get("torch")
    if torch is not None and "PYTEST_XDIST_WORKER" in os.environ:
        assert torch.get_num_threads() == 1, f"{item.nodeid} left torch with more than one thread"


def pytest_collection_finish() -> None:
    # What was imported stays; without this each full collection walks all of torch again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # cycles are few, and looking for them is a 30th of the time

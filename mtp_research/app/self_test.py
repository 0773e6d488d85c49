"""What the doctor runs in processes of their own: a kernel, and a sum over two processes."""

import sys

import torch
from torch import Tensor

from mtp_research.kernels.attention.store_kv import store_kv


def kernel() -> str:
    """Copy rows into pages by the kernel and by plain PyTorch; on a CPU in Triton's interpreter.

    The interpreter computes bfloat16 wrongly without a word, so that it must be refused there.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in [torch.float32, torch.float16] + [torch.bfloat16] * (device == "cuda"):
        by_kernel, expected = (_store(dtype, device, name) for name in ("triton", "reference"))
        assert torch.equal(by_kernel, expected), f"the kernel differs from plain PyTorch in {dtype}"
    if device == "cuda":
        return f"compiled for {torch.cuda.get_device_name()}"
    try:
        _store(torch.bfloat16, device, "triton")
    except ValueError:
        return "in Triton's interpreter; bfloat16 is refused there, as it must be"
    raise AssertionError("the interpreter took bfloat16, which it computes wrongly")


def processes() -> str:
    """Sum over the processes of torch.distributed.run, as data-parallel training needs it."""
    import torch.distributed as dist

    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    dist.init_process_group(backend)
    value = torch.ones(1, device=f"cuda:{dist.get_rank()}" if backend == "nccl" else "cpu")
    dist.all_reduce(value)
    assert value.item() == dist.get_world_size(), f"the sum over processes is {value.item()}"
    dist.destroy_process_group()
    return f"two processes sum over {backend}"


def _store(dtype: torch.dtype, device: str, backend: str) -> Tensor:
    rows = torch.arange(320.0).view(2, 5, 2, 16).to(device, dtype)
    pool = torch.zeros(2, 3, 16, 2, 16, device=device, dtype=dtype)
    slots = torch.tensor([3, -1, 40, 17, 0], device=device)
    store_kv(*rows, key_cache=pool[0], value_cache=pool[1], slot_mapping=slots, backend=backend)
    return pool


if __name__ == "__main__":
    sys.stdout.write({"kernel": kernel, "processes": processes}[sys.argv[1]]() + "\n")

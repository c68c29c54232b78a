"""A pretended CUDA device on a machine without one, for the CPU-only build of PyTorch 2.13.

    import pretended_cuda

    pretended_cuda.install(devices=1)              # before a tensor of the device is made
    x = torch.ones(3, device="cuda")
    with pretended_cuda.Watch("/path/of/the/code") as watch:
        (x + 1).sum().item()
    print(watch.launches, watch.waits)             # 2, 1
    print(watch.table())                           # by the line that caused them

Tests run on it with ``pytest --device pretended``, which pretends ``--devices`` of them.

**How it works.** A CPU-only build has the dispatch key CUDA with its autograd and autocast, and no kernel for it.
`kernels.cpp`, compiled once (`build`), supplies an allocator, a device guard, CUDA's hooks, generators, and one fallback kernel,
which computes each operator on the host on tensors that share the memory of its arguments. Tensors are therefore real
ones on ``cuda:0`` with true values, and PyTorch itself refuses what it refuses on a GPU: operands on two devices,
``numpy()``, a generator of the host. `install` supplies what `torch.cuda` asks of CUDA's libraries. Memory that was never
written holds NaN. A copy to pinned memory with ``non_blocking`` arrives when the host waits, and a pinned source that
changes before that is an error.

**Events** are counted by kind: ``launch`` of a kernel; ``sync``, the host waits for a result (``item``, ``tolist``, copies to the
host, ``nonzero``, masks as indices, ``unique``, ``synchronize``); ``h2d``, a copy to the device for which the host waits until
all earlier work has ended (``torch.tensor(..., device="cuda")``, ``to("cuda")`` without ``non_blocking``, indices of the
host); ``event``, a wait for an event; ``h2d_async`` and ``d2h_async``, copies that the host does not wait for.

**What it cannot show**: time (two events lie 1 ms apart) and memory bandwidth; kernels by Triton (`torch.compile` returns the function
as it is, so flex attention is unfused and its launches are too many), CUDA graphs, NCCL, flash and cuDNN attention;
rounding of CUDA's kernels, their order of random numbers and most of their gaps of dtypes; errors of memory; several streams, and
the host's reading of the device's memory in any way but a copy. Launches are counted by operator, of which some take several.
"""

from pretended_cuda.build import missing
from pretended_cuda.device import install
from pretended_cuda.watch import Watch

__all__ = ["Watch", "install", "missing"]

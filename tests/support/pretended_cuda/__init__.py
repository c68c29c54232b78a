"""A pretended CUDA device on a machine without one, for the CPU-only build of PyTorch 2.13.

    pretended_cuda.install(devices=1)  # before a tensor of the device is made
    x = torch.ones(3, device="cuda")
    with pretended_cuda.Watch("/path/of/the/code") as watch:
        (x + 1).sum().item()
    print(watch.kinds, watch.table(1))  # two launches and a wait, and the lines that caused it

Tests run on it with ``pytest --device pretended [--devices 2]``.

**How it works.** A CPU-only build has the dispatch key CUDA, with its autograd and autocast, and no kernel for it.
`kernels.cpp`, compiled once and kept in the user's cache, adds an allocator, a device guard, CUDA's hooks, generators, and a
fallback kernel, which computes each operator on the host, on tensors that share the memory of its arguments. So
tensors are real ones on ``cuda:0`` with true values, and PyTorch refuses what it refuses on a GPU: operands on two
devices, ``numpy()``, a generator of the host. `install` answers what `torch.cuda` asks of CUDA's libraries. Memory that
was never written holds NaN. A ``non_blocking`` copy to pinned memory arrives when the host waits, and a pinned source
that changes before that is an error.

**Events** by kind: ``launch`` of a kernel; ``sync``, the host waits for a result (``item``, ``tolist``, copies to the host,
``nonzero``, masks as indices, ``unique``, ``synchronize``); ``h2d``, a copy to the device before which the host waits for all
earlier work (``torch.tensor(..., device="cuda")``, ``to("cuda")`` without ``non_blocking``, indices of the host); ``event``, a
wait for an event; ``h2d_async`` and ``d2h_async``, copies for which nobody waits; ``unfused``, a wait inside flex attention,
which is no wait once it is compiled.

**What it cannot show**: time (two events lie 1 ms apart), memory bandwidth, lack of memory; kernels by Triton (`torch.compile`
returns functions as they are), CUDA graphs, NCCL, flash and cuDNN attention; rounding and random numbers of CUDA's
kernels, and most of the dtypes that they lack; several streams. Launches are lower bounds: some operators take several.
"""

from pretended_cuda.build import missing
from pretended_cuda.device import install
from pretended_cuda.watch import Watch

__all__ = ["Watch", "install", "missing"]

"""Puts the pretended device below `torch.cuda`."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pretended_cuda import build, watch

MEMORY = 80 << 30  # bytes of a device
kernels: Any = None  # the compiled module, once a device is pretended


class Event:
    """`torch.cuda.Event`, a millisecond after the one before."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.timed, self.copies = enable_timing, 0

    def record(self, stream: Any = None) -> None:
        self.copies = kernels.copies()  # those that were asked for before it

    def synchronize(self) -> None:
        kernels.settle(self.copies)
        watch.heard("event", "Event.synchronize")

    def query(self) -> bool:
        kernels.settle(self.copies)  # the device is as fast as can be
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        if not (self.timed and end.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return 1.0


class Stream:
    """`torch.cuda.Stream`, the only one of its device."""

    device_type, stream_id, cuda_stream = 1, 0, 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        index = None if device is None else torch.device(device).index
        self.device_index = kernels.device() if index is None else index
        self.device = torch.device("cuda", self.device_index)

    def synchronize(self) -> None:
        kernels.wait("Stream.synchronize")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def wait_event(self, other: Any) -> None:
        pass

    wait_stream = wait_event


def without_device_check() -> list[str]:
    """Operators whose CUDA wrappers compare no devices, because TensorIterator or a composite operator does."""
    import torchgen

    text = Path(torchgen.__file__).with_name("packaged").joinpath("ATen/native/native_functions.yaml").read_text()
    entries = [entry for entry in re.split(r"\n(?=- func: )", text) if "device_check: NoCheck" in entry]
    return ["aten::" + re.match(r"- func: ([\w.]+)|", entry)[1] for entry in entries]  # type: ignore[index]


def install(devices: int = 1) -> None:
    """Pretends devices until the process ends.

    `torch.compile` returns functions as they are.

    Raises:
        RuntimeError: the machine lacks something (`build.missing`), or another number is pretended already.
    """
    global kernels
    if kernels is not None:
        if torch.cuda.device_count() != devices:
            raise RuntimeError(f"{torch.cuda.device_count()} devices are pretended already, not {devices}")
        return
    if lacks := build.missing():
        raise RuntimeError(f"no device can be pretended here, which takes {lacks}")
    kernels = build.load_kernels()
    kernels.start(devices, without_device_check())
    _answer_torch_cuda(devices)
    create = torch._C.StorageBase.__new__

    def compile_without_triton(model: Any = None, **options: Any) -> Any:
        return (lambda function: function) if model is None else model

    def new_storage(cls: Any, *size: Any, device: Any = None, **options: Any) -> Any:  # a CPU-only build refuses
        if device is None or torch.device(device).type != "cuda":
            return create(cls, *size, **({} if device is None else {"device": device}), **options)
        return torch.empty(*size or (0,), dtype=torch.uint8, device=device).untyped_storage()

    torch.compile = compile_without_triton  # type: ignore[assignment]
    torch.UntypedStorage.__new__ = staticmethod(new_storage)  # type: ignore[assignment]


def _answer_torch_cuda(devices: int) -> None:
    """Gives `torch.cuda` what it asks of CUDA's libraries."""
    properties = SimpleNamespace(
        name="Pretended GPU", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, warp_size=32,
        L2_cache_size=50 << 20, is_integrated=0, is_multi_gpu_board=0, gcnArchName="", uuid="0",
    )  # fmt: skip

    def stats(device: int) -> dict[str, Any]:
        held, peak = kernels.memory()
        counts = {"current": held, "peak": peak, "allocated": peak, "freed": 0}
        return {f"{kind}_bytes": {"all": counts} for kind in ("allocated", "reserved", "active")}

    def free_memory(device: Any = None) -> tuple[int, int]:
        return MEMORY - kernels.memory()[0], MEMORY

    functions: dict[str, Callable[..., Any]] = {
        "init": lambda: None, "isInBadFork": lambda: False, "getDeviceCount": lambda: devices,
        "getDevice": kernels.device, "setDevice": kernels.set_device, "exchangeDevice": kernels.set_device,
        "maybeExchangeDevice": lambda index: kernels.device() if index < 0 else kernels.set_device(index),
        "synchronize": lambda: kernels.wait("torch.cuda.synchronize"), "emptyCache": lambda: None,
        "memoryStats": stats, "resetPeakMemoryStats": lambda device: kernels.forget_peak(),
        "resetAccumulatedMemoryStats": lambda device: kernels.forget_peak(), "ipc_collect": lambda: None,
        "getArchFlags": lambda: "sm_90", "canDeviceAccessPeer": lambda *_: True,
        "clearCublasWorkspaces": lambda: None, "isCurrentStreamCapturing": lambda: False,
        "getCurrentRawStream": lambda index: 0, "getAllocatorBackend": lambda: "native",
    }  # fmt: skip
    for key, function in functions.items():
        setattr(torch._C, f"_cuda_{key}", function)
    cuda: Any = torch.cuda
    cuda._exchange_device, cuda._maybe_exchange_device = functions["exchangeDevice"], functions["maybeExchangeDevice"]
    cuda.is_current_stream_capturing = functions["isCurrentStreamCapturing"]
    cuda._cudart = SimpleNamespace(cudaMemGetInfo=free_memory)
    cuda.mem_get_info = cuda.memory.mem_get_info = free_memory
    cuda._get_device_properties = lambda device: properties
    cuda._queued_calls.clear()
    cuda.default_generators = tuple(kernels.generator(index) for index in range(devices))
    cuda.Event, cuda.Stream, cuda.stream, cuda.set_stream = Event, Stream, nullcontext, lambda stream: None
    cuda.current_stream = cuda.default_stream = lambda device=None: Stream(device)
    torch.version.cuda = "13.0"  # type: ignore[assignment]
    torch.backends.cuda.is_built = lambda: True

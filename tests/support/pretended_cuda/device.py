"""Puts the pretended device below `torch.cuda`."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pretended_cuda import build, watch

MEMORY = 80 << 30  # bytes of a device
_kernels: Any = None


def kernels() -> Any:
    """The compiled module of the installed device."""
    if _kernels is None:
        raise RuntimeError("no device is pretended: call pretended_cuda.install()")
    return _kernels


class Event:
    """`torch.cuda.Event`, a millisecond after the one before."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.timed, self.copies = enable_timing, 0

    def record(self, stream: Any = None) -> None:
        self.copies = _kernels.copies()  # those that were asked for before the event

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        _kernels.settle(self.copies)
        watch.heard("event", "Event.synchronize")

    def elapsed_time(self, end: "Event") -> float:
        if not (self.timed and end.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return 1.0


class Stream:
    """`torch.cuda.Stream`: the only one of a device."""

    device_type, stream_id, cuda_stream = 1, 0, 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        index = None if device is None else torch.device(device).index
        self.device = torch.device("cuda", _kernels.device() if index is None else index)
        self.device_index = self.device.index

    def synchronize(self) -> None:
        _kernels.wait("Stream.synchronize")

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        pass


class StreamContext:
    """`torch.cuda.stream`."""

    def __init__(self, stream: Any) -> None:
        pass

    def __enter__(self) -> "StreamContext":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def without_device_check() -> list[str]:
    """Operators whose CUDA wrappers compare no devices: TensorIterator and composite operators do it themselves."""
    import torchgen

    file = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = re.split(r"\n(?=- func: )", file.read_text())
    names = [re.match(r"- func: ([\w.]+)\(", entry) for entry in entries if "device_check: NoCheck" in entry]
    return [f"aten::{name[1]}" for name in names if name]


def install(
    devices: int = 1, name: str = "Pretended GPU", capability: tuple[int, int] = (9, 0), backend: str | None = None
) -> None:
    """Pretends devices from now on, until the process ends.

    Args:
        devices: how many.
        name: of each.
        capability: of each, as `torch.cuda.get_device_capability` gives it.
        backend: what `torch.compile` uses, such as ``"eager"``, which shows graph breaks and recompilations; None: it
            returns functions as they are.

    Raises:
        RuntimeError: a machine that lacks something (`build.missing`), or another number than before.
    """
    global _kernels
    if _kernels is not None:
        if torch.cuda.device_count() != devices:
            raise RuntimeError(f"{torch.cuda.device_count()} devices are pretended already, not {devices}")
        return
    if lacks := build.missing():
        raise RuntimeError(f"no device can be pretended here; it needs {lacks}")
    _kernels = build.kernels()
    _kernels.start(devices, without_device_check())
    _answer_torch_cuda(devices, name, capability)
    torch.compile = _compile(torch.compile, backend)  # type: ignore[assignment]
    _allow_storages()


def _answer_torch_cuda(devices: int, name: str, capability: tuple[int, int]) -> None:
    """Gives `torch.cuda` what it asks of CUDA's libraries."""
    properties = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=MEMORY, multi_processor_count=132,
        warp_size=32, L2_cache_size=50 << 20, is_integrated=0, is_multi_gpu_board=0, gcnArchName="", uuid="0",
    )  # fmt: skip

    def stats(device: int) -> dict[str, Any]:
        held, peak = _kernels.memory()
        counts = {"current": held, "peak": peak, "allocated": peak, "freed": 0}
        return {f"{kind}_bytes": {"all": counts} for kind in ("allocated", "reserved", "active")}

    def free_memory(device: Any = None) -> tuple[int, int]:
        return MEMORY - _kernels.memory()[0], MEMORY

    functions: dict[str, Callable[..., Any]] = {
        "init": lambda: None, "isInBadFork": lambda: False, "getDeviceCount": lambda: devices,
        "getDevice": _kernels.device, "setDevice": _kernels.set_device, "exchangeDevice": _kernels.set_device,
        "maybeExchangeDevice": lambda index: _kernels.device() if index < 0 else _kernels.set_device(index),
        "synchronize": lambda: _kernels.wait("torch.cuda.synchronize"), "memoryStats": stats,
        "emptyCache": lambda: None, "resetPeakMemoryStats": lambda device: _kernels.forget_peak(),
        "resetAccumulatedMemoryStats": lambda device: _kernels.forget_peak(), "ipc_collect": lambda: None,
        "getArchFlags": lambda: f"sm_{capability[0]}{capability[1]}", "canDeviceAccessPeer": lambda *_: True,
        "clearCublasWorkspaces": lambda: None, "isCurrentStreamCapturing": lambda: False,
        "getCurrentRawStream": lambda index: 0, "getAllocatorBackend": lambda: "native",
    }  # fmt: skip
    for key, function in functions.items():
        setattr(torch._C, f"_cuda_{key}", function)
    cuda: Any = torch.cuda
    cuda._exchange_device, cuda._maybe_exchange_device = functions["exchangeDevice"], functions["maybeExchangeDevice"]
    cuda._cudart = SimpleNamespace(cudaMemGetInfo=free_memory)
    cuda.mem_get_info = cuda.memory.mem_get_info = free_memory
    cuda._get_device_properties = lambda device: properties
    cuda._queued_calls.clear()
    cuda.default_generators = tuple(_kernels.generator(index) for index in range(devices))
    cuda.Event, cuda.Stream, cuda.stream = Event, Stream, StreamContext
    cuda.current_stream = cuda.default_stream = lambda device=None: Stream(device)
    cuda.set_stream = lambda stream: None
    cuda.is_current_stream_capturing = functions["isCurrentStreamCapturing"]
    torch.version.cuda = "13.0"  # type: ignore[assignment]
    torch.backends.cuda.is_built = lambda: True


def _compile(compile_: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    """`torch.compile` without Triton."""

    def compile_without_triton(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile_without_triton(function, **options)
        return model if backend is None else compile_(model, **options | {"backend": backend})

    return compile_without_triton


def _allow_storages() -> None:
    """Lets `torch.UntypedStorage` be made on the device, which a CPU-only build refuses."""
    create = torch._C.StorageBase.__new__

    def new(cls: Any, *size: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return create(cls, *size, **({} if device is None else {"device": device}), **options)
        return torch.empty(*size or (0,), dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = staticmethod(new)  # type: ignore[assignment]

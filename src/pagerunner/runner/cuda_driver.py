"""The few calls of the CUDA driver that virtual memory needs, each one checked. `cuda.bindings` is imported on first use."""

from __future__ import annotations

import ctypes
import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

_DEVICE_BYTES = 4  # of a device's number, before the driver's handle


class DriverError(RuntimeError):
    """A call of the CUDA driver failed; the text names the call and the driver's reason."""


class OutOfDeviceMemory(DriverError):
    """The device has no memory left for a piece."""


class Driver(Protocol):
    """Virtual memory of one device. Addresses and handles are integers or opaque; sizes are multiples of `granularity`."""

    granularity: int

    def reserve(self, size: int) -> int:
        """Reserve `size` bytes of addresses; returns the first."""

    def free_addresses(self, address: int, size: int) -> None:
        """Give a reserved range back; nothing in it may be mapped."""

    def create(self, size: int) -> Any:
        """Take `size` bytes of the device's memory; returns a handle. Raises OutOfDeviceMemory."""

    def map(self, address: int, size: int, handle: Any) -> None:
        """Put a handle's memory behind reserved addresses."""

    def allow_access(self, address: int, size: int) -> None:
        """Make mapped addresses readable and writable."""

    def unmap(self, address: int, size: int) -> None:
        """Take the memory away from behind addresses; its handle lives on."""

    def release(self, handle: Any) -> None:
        """Give a handle's memory back to the device."""

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device."""

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""

    def tensor(self, address: int, size: int, on_free: Callable[[], None]) -> torch.Tensor:
        """The bytes of a range, uint8 [size]. `on_free` is called when no tensor views them any more."""


class _Range:
    """What torch reads to make a tensor over addresses, and keeps alive as long as one does."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class _Calls:
    """Calls of the driver by name. Raises ModuleNotFoundError without the package cuda-bindings (torch's CUDA builds depend on it)."""

    def __init__(self) -> None:
        self._cu: Any = importlib.import_module("cuda.bindings.driver")

    def _call(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self._cu, name)(*args)
        results = self._cu.CUresult
        if status == results.CUDA_SUCCESS:
            return values[0] if len(values) == 1 else values
        kind = OutOfDeviceMemory if status == results.CUDA_ERROR_OUT_OF_MEMORY else DriverError
        raise kind(f"{name} failed: {getattr(status, 'name', status)}")


class Visit(_Calls):
    """A look at a device that this process doesn't use: what a look takes of it, some hundred MiB, is given back."""

    def memory(self, device: int) -> tuple[int, int]:
        """Free and total bytes of the device, as a process that uses it has them."""
        self._call("cuInit", 0)
        number = self._call("cuDeviceGet", device)
        context = self._call("cuDevicePrimaryCtxRetain", number)
        try:
            self._call("cuCtxPushCurrent", context)
            try:
                free, total = self._call("cuMemGetInfo")
            finally:
                self._call("cuCtxPopCurrent")
        finally:
            self._call("cuDevicePrimaryCtxRelease", number)
        return int(free), int(total)


class CudaDriver(_Calls):
    """See Driver. Calls go to the device's primary context, which torch uses too."""

    def __init__(self, device: int = 0) -> None:
        """See _Calls."""
        super().__init__()
        self._device = device
        torch.empty(1, device=self._torch_device)  # makes the primary context
        prop = self._cu.CUmemAllocationProp()
        prop.type = self._cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = device
        access = self._cu.CUmemAccessDesc()
        access.location = prop.location
        access.flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._prop, self._access = prop, access
        kind = self._cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(self._call("cuMemGetAllocationGranularity", prop, kind))

    @property
    def _torch_device(self) -> torch.device:
        return torch.device("cuda", self._device)

    def reserve(self, size: int) -> int:
        """See Driver.reserve."""
        return int(self._call("cuMemAddressReserve", size, 0, self._cu.CUdeviceptr(0), 0))

    def free_addresses(self, address: int, size: int) -> None:
        """See Driver.free_addresses."""
        self._call("cuMemAddressFree", address, size)

    def create(self, size: int) -> Any:
        """See Driver.create."""
        return self._call("cuMemCreate", size, self._prop, 0)

    def map(self, address: int, size: int, handle: Any) -> None:
        """See Driver.map."""
        self._call("cuMemMap", address, size, 0, handle, 0)

    def allow_access(self, address: int, size: int) -> None:
        """See Driver.allow_access."""
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def unmap(self, address: int, size: int) -> None:
        """See Driver.unmap."""
        self._call("cuMemUnmap", address, size)

    def release(self, handle: Any) -> None:
        """See Driver.release."""
        self._call("cuMemRelease", handle)

    def memory(self) -> tuple[int, int]:
        """See Driver.memory."""
        free, total = torch.cuda.mem_get_info(self._torch_device)
        return free, total

    def synchronize(self) -> None:
        """See Driver.synchronize."""
        torch.cuda.synchronize(self._torch_device)

    def tensor(self, address: int, size: int, on_free: Callable[[], None]) -> torch.Tensor:
        """See Driver.tensor. The beginning of the range must be mapped: torch asks the driver what it points to."""
        held = _Range(address, size)
        weakref.finalize(held, on_free).atexit = False  # at exit the driver takes everything back by itself
        return torch.as_tensor(held, device=self._torch_device)

    def share(self, size: int) -> tuple[int, bytes]:
        """Take `size` bytes of zeros: their address, and the handle by which other processes of the machine open them."""
        address = self._call("cuMemAlloc", size)
        self._call("cuMemsetD8", address, 0, size)
        self.synchronize()
        try:
            handle = bytes(self._call("cuIpcGetMemHandle", address).reserved)
        except DriverError:
            self.unshare(address)
            raise
        return int(address), self._device.to_bytes(_DEVICE_BYTES, "little") + handle

    def open_shared(self, handle: bytes) -> int:
        """The address of another process's memory, which may be another device's. Raises DriverError if this device can't reach it, or not with
        atomic operations, which don't pass every bus."""
        device = int.from_bytes(handle[:_DEVICE_BYTES], "little")
        atomics = self._cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        if device != self._device and not self._call("cuDeviceGetP2PAttribute", atomics, self._device, device):
            raise DriverError(
                f"device {self._device} has no atomic operations on the memory of device {device}, as devices have over NVLink"
            )
        opened = self._cu.CUipcMemHandle()
        opened.reserved = handle[_DEVICE_BYTES:]
        return int(self._call("cuIpcOpenMemHandle", opened, 1))  # 1: access between the devices is switched on

    def close_shared(self, address: int) -> None:
        """Take memory away from here that `open_shared` has opened."""
        self._call("cuIpcCloseMemHandle", address)

    def unshare(self, address: int) -> None:
        """Give memory of `share` back. No other process has it open any more."""
        self._call("cuMemFree", address)


class _BatchAttributes(ctypes.Structure):
    """CUmemcpyAttributes: how copies read their sources, hints about source and target, flags."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = 1


class BatchedCopies:
    """Copies between addresses of the device and of page-locked host memory, a batch by one call of the driver.

    A copy takes 0.65 us of the host so, where torch's take 7; and the device copies pages of 144 KiB at 44 GB/s instead of 21. Where
    the driver doesn't have the call (before CUDA 12.8), or refuses a batch, there is a call for each copy.
    """

    def __init__(self, library: Any = None) -> None:
        library = ctypes.CDLL("libcuda.so.1") if library is None else library
        self._newer = getattr(library, "cuMemcpyBatchAsync_v2", None)
        self._older = getattr(library, "cuMemcpyBatchAsync", None)
        self._single = library.cuMemcpyAsync

    def __call__(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Begin copies (target, source, bytes) on a stream that isn't the default one. They read when it is the stream's turn, in any order."""
        if not copies:
            return
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        columns = np.ascontiguousarray(np.array(copies, dtype=np.uint64).T)
        targets, sources, sizes = (pointer(column.ctypes.data) for column in columns)
        attributes, first, failed = _BatchAttributes(order=_IN_STREAM_ORDER), size(0), size(0)
        given = (targets, sources, sizes, size(len(copies)), ctypes.byref(attributes), ctypes.byref(first), size(1))
        if self._newer is not None:
            status = self._newer(*given, pointer(stream))
        elif self._older is not None:
            status = self._older(*given, ctypes.byref(failed), pointer(stream))
        else:
            status = -1
        if status:  # copies that have begun nevertheless bring the same bytes twice
            for target, source, count in copies:
                status = self._single(pointer(target), pointer(source), size(count), pointer(stream))
                if status:
                    raise DriverError(
                        f"cuMemcpyAsync of {count:,} bytes between device and host failed: error {status}"
                    )

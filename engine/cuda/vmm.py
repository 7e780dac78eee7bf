"""A range of device addresses that is reserved at once and gets memory later, from its beginning on.

What holds addresses, CUDA graphs above all, can be made before it is known how much memory is left for the range. Calls
CUDA's virtual memory management in the driver library (cuda.h, section 6.14), which torch does not offer to Python.
"""

import ctypes
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.cuda.driver import Driver, DriverError, Size

_PINNED, _DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class VirtualMemory(Protocol):
    """What a range needs of the driver. Sizes are in bytes, multiples of `granularity`; all raise `DriverError`."""

    granularity: int

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses; returns the first."""
        ...

    def map(self, address: int, nbytes: int) -> int:
        """Put memory behind addresses; returns its handle. Nothing is left behind if that fails."""
        ...

    def unmap(self, address: int, nbytes: int, handle: int) -> None:
        """Take memory away and free it."""
        ...

    def free(self, address: int, nbytes: int) -> None:
        """Give reserved addresses back."""
        ...

    def bytes(self, space: "DeviceRange") -> Tensor:
        """The range as uint8 `[space.nbytes]`, which keeps it alive. Its first granule must have memory."""
        ...


class CudaVirtualMemory:
    """`VirtualMemory` of a GPU whose context torch has made."""

    def __init__(self, device: torch.device, library: str = "libcuda.so.1") -> None:
        torch.zeros(1, device=device)
        self._call = Driver(library).call
        self._device = device
        index = torch.cuda.current_device() if device.index is None else device.index
        self._location = _Location(_DEVICE, index)
        self._properties = _Properties(_PINNED, 0, self._location, None, _Flags())
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), self._properties_pointer(), _MINIMUM)
        self.granularity = granularity.value

    def reserve(self, nbytes: int) -> int:
        """See `VirtualMemory`."""
        address = ctypes.c_uint64()
        none = ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), Size(nbytes), Size(0), none, ctypes.c_ulonglong(0))
        return address.value

    def map(self, address: int, nbytes: int) -> int:
        """See `VirtualMemory`."""
        handle, place = ctypes.c_uint64(), ctypes.c_uint64(address)
        nothing = ctypes.c_ulonglong(0)
        self._call("cuMemCreate", ctypes.byref(handle), Size(nbytes), self._properties_pointer(), nothing)
        mapped = False
        try:
            self._call("cuMemMap", place, Size(nbytes), Size(0), handle, nothing)
            mapped = True
            access = _Access(self._location, _READ_WRITE)
            self._call("cuMemSetAccess", place, Size(nbytes), ctypes.byref(access), Size(1))
        except DriverError:
            if mapped:
                self._call("cuMemUnmap", place, Size(nbytes))
            self._call("cuMemRelease", handle)
            raise
        return handle.value

    def unmap(self, address: int, nbytes: int, handle: int) -> None:
        """See `VirtualMemory`."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), Size(nbytes))
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def free(self, address: int, nbytes: int) -> None:
        """See `VirtualMemory`."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), Size(nbytes))

    def bytes(self, space: "DeviceRange") -> Tensor:
        """See `VirtualMemory`. Torch asks the driver whose address it is."""
        return torch.as_tensor(space, device=self._device)

    def _properties_pointer(self) -> Any:
        return ctypes.byref(self._properties)


class DeviceRange:
    """Reserved addresses, the first `mapped` bytes of them with memory. Close it when nothing runs that uses it."""

    def __init__(self, memory: VirtualMemory, nbytes: int) -> None:
        """Reserve at least `nbytes` bytes; none of them can be touched yet."""
        self._memory = memory
        self.nbytes = self._rounded(nbytes)
        self.address = memory.reserve(self.nbytes)
        self.mapped = 0
        self._parts: list[tuple[int, int, int]] = []

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._memory.granularity) * self._memory.granularity

    def map(self, nbytes: int) -> None:
        """Put memory behind the first `nbytes` bytes and up to the next granule; what has memory keeps it.

        The memory holds whatever it held. Raises `DriverError`; then nothing has changed.
        """
        if not 0 < nbytes <= self.nbytes:
            raise ValueError(f"{nbytes} bytes are to be mapped of a range of {self.nbytes}")
        begin, end = self.mapped, self._rounded(nbytes)
        if end > begin:
            handle = self._memory.map(self.address + begin, end - begin)
            self._parts.append((begin, end - begin, handle))
            self.mapped = end

    def close(self) -> None:
        """Free memory and addresses. May be called twice."""
        for begin, size, handle in self._parts:
            self._memory.unmap(self.address + begin, size, handle)
        self._parts = []
        self.mapped = 0
        if self.address:
            self._memory.free(self.address, self.nbytes)
            self.address = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 2}

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that begins with the range and keeps it alive. Only its mapped part may be touched.

        The first granule must have memory.
        """
        count = dtype.itemsize
        for size in shape:
            count *= size
        if not self.mapped or count > self.nbytes:
            raise ValueError(
                f"a tensor of {count} bytes does not fit {self.nbytes} bytes, {self.mapped} of them mapped"
            )
        return self._memory.bytes(self)[:count].view(dtype).view(shape)

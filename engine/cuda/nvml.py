"""What other processes have on a card, asked of the driver's management library before this process has a context."""

import ctypes
import logging
from typing import Any

log = logging.getLogger(__name__)

_BUS_ID_BYTES = 32


class _Memory(ctypes.Structure):
    """`nvmlMemory_v2_t`; bytes."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Refused(Exception):
    pass


def used_by_others(ordinal: int, driver: str = "libcuda.so.1", nvml: str = "libnvidia-ml.so.1") -> int | None:
    """Bytes in use on the CUDA device `ordinal`, all of them others' as long as this process has no context.

    None, with the reason in the log, where it cannot be known; a part of a card (MIG) is such a case.
    """
    try:
        return _used(ctypes.CDLL(nvml), _bus_id(ctypes.CDLL(driver), ordinal))
    except (OSError, AttributeError, _Refused) as error:
        log.info("other processes' memory on the GPU is unknown and counts as this lane's: %s", error)
        return None


def _bus_id(driver: Any, ordinal: int) -> Any:
    """PCI address of a CUDA device. Makes no context."""
    device, text = ctypes.c_int(), ctypes.create_string_buffer(_BUS_ID_BYTES)
    _check("cuInit", driver.cuInit(0))
    _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
    _check("cuDeviceGetPCIBusId", driver.cuDeviceGetPCIBusId(text, _BUS_ID_BYTES, device))
    return text


def _used(nvml: Any, bus_id: Any) -> int:
    _check("nvmlInit", nvml.nvmlInit_v2())
    try:
        handle = ctypes.c_void_p()
        _check("nvmlDeviceGetHandleByPciBusId", nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(handle)))
        mode, pending = ctypes.c_uint(), ctypes.c_uint()
        if nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(mode), ctypes.byref(pending)) == 0 and mode.value:
            raise _Refused("the card is divided (MIG)")
        memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
        _check("nvmlDeviceGetMemoryInfo", nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)))
        return int(memory.used)
    finally:
        nvml.nvmlShutdown()


def _check(call: str, code: int) -> None:
    if code:
        raise _Refused(f"{call} failed with {code}")

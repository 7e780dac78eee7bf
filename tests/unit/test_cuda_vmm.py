"""Bookkeeping of a range of device addresses, on a driver made of dictionaries."""

import pytest
import torch

from engine.cuda.driver import DriverError
from engine.cuda.vmm import CudaVirtualMemory, DeviceRange

GRANULE = 1 << 21


class FakeDriver:
    """Refuses what CUDA would refuse: overlaps, memory beyond what there is, freeing what has memory."""

    granularity = GRANULE

    def __init__(self, granules: int) -> None:
        self.left = granules * GRANULE
        self.parts: dict[int, tuple[int, int]] = {}
        self.reserved: dict[int, int] = {}

    def reserve(self, nbytes: int) -> int:
        assert nbytes % GRANULE == 0
        self.reserved[1 << 40] = nbytes
        return 1 << 40

    def map(self, address: int, nbytes: int) -> int:
        assert address % GRANULE == nbytes % GRANULE == 0
        assert all(address >= at + size or address + nbytes <= at for at, (size, _) in self.parts.items())
        if nbytes > self.left:
            raise DriverError("cuMemCreate failed with 2: out of memory")
        self.left -= nbytes
        self.parts[address] = nbytes, len(self.parts) + 7
        return len(self.parts) + 6

    def unmap(self, address: int, nbytes: int, handle: int) -> None:
        assert self.parts.pop(address) == (nbytes, handle)
        self.left += nbytes

    def free(self, address: int, nbytes: int) -> None:
        assert not self.parts
        assert self.reserved.pop(address) == nbytes


def test_a_range_gets_memory_from_its_beginning_in_whole_granules_and_gives_all_back() -> None:
    driver = FakeDriver(10)
    one = DeviceRange(driver, 8 * GRANULE - 5)
    address = one.address
    assert (one.nbytes, one.mapped, driver.left) == (8 * GRANULE, 0, 10 * GRANULE)
    one.map(1)
    one.map(GRANULE)
    assert (one.mapped, driver.left) == (GRANULE, 9 * GRANULE)
    one.map(3 * GRANULE + 1)
    assert (one.mapped, one.address, driver.left) == (4 * GRANULE, address, 6 * GRANULE)
    one.close()
    one.close()
    assert (driver.left, driver.reserved) == (10 * GRANULE, {})


def test_a_refused_mapping_changes_nothing() -> None:
    driver = FakeDriver(3)
    one = DeviceRange(driver, 8 * GRANULE)
    one.map(2 * GRANULE)
    with pytest.raises(DriverError, match="out of memory"):
        one.map(8 * GRANULE)
    with pytest.raises(ValueError, match=f"{8 * GRANULE + 1} bytes are to be mapped of a range of {8 * GRANULE}"):
        one.map(8 * GRANULE + 1)
    assert (one.mapped, driver.left) == (2 * GRANULE, GRANULE)
    one.map(3 * GRANULE)
    one.close()


def test_a_tensor_beyond_the_range_or_without_memory_is_refused() -> None:
    one = DeviceRange(FakeDriver(3), GRANULE)
    with pytest.raises(ValueError, match="0 of them mapped"):
        one.tensor((1,), torch.int32)
    one.map(1)
    with pytest.raises(ValueError, match="does not fit"):
        one.tensor((GRANULE, 2), torch.uint8)


def test_a_machine_without_the_driver_library_is_told_which_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    with pytest.raises(DriverError, match=r"libnone\.so\.1 cannot be loaded"):
        CudaVirtualMemory(torch.device("cuda", 0), "libnone.so.1")

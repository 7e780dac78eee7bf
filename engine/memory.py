"""Every byte a lane takes: what was planned, what the tensors measure, and whether the host has it. No torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kv.budget import KvCapacity
from kv.geometry import KvGeometry

MIB = 1 << 20
_MEMINFO = Path("/proc/meminfo")


class CgroupFiles(NamedTuple):
    """Where a version of cgroups keeps what `host_memory` reads."""

    limit: Path
    usage: Path
    stat: Path
    reclaimable: str
    """Key in `stat`: bytes of page cache that the kernel gives up before it kills, counted in `usage`."""


_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_CGROUPS = (
    CgroupFiles(_V2 / "memory.max", _V2 / "memory.current", _V2 / "memory.stat", "inactive_file"),
    CgroupFiles(
        _V1 / "memory.limit_in_bytes", _V1 / "memory.usage_in_bytes", _V1 / "memory.stat", "total_inactive_file"
    ),
)


class MemoryShortError(ValueError):
    """The host cannot hold the lane."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that each part of a lane will take."""

    weights: int
    rope_table: int
    plan_arena: int
    activations: int
    """On a GPU with logits, sampler scratch and what the sampler knows of each row: they share an arena."""
    kv_pool: int
    logits: int | None = None
    """On a CPU: logits of a slice of rows, and the sampler's scratch."""
    graphs: int | None = None
    """Captured steps."""
    workspaces: int | None = None
    """What torch holds on a GPU beside the parts above: cuBLAS's workspace, results of steps, rounding."""
    context: int | None = None
    """What the driver has taken for this process: CUDA's context, loaded kernels, streams."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part, without parts that the lane does not have or that are not known."""
        return {name: size for name in self.__slots__ if (size := getattr(self, name)) is not None}

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def check_host(self, available: int) -> None:
        """Raise `MemoryShortError` if the host offers less than the total."""
        if self.total > available:
            raise MemoryShortError(
                f"the lane needs {self.total / MIB:.0f} MiB ({', '.join(_sizes(self.parts))}), but the host offers "
                f"{available / MIB:.0f} MiB: lower kv_cache_memory, max_step_tokens or context_limit, "
                "or take a smaller model or dtype"
            )


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Planned against measured, part by part."""

    planned: MemoryPlan
    measured: MemoryPlan

    def as_dict(self) -> dict[str, int]:
        """Measured bytes by part and their `total`; parts that differ from the plan stand a second time, as planned."""
        report = {**self.measured.parts, "total": self.measured.total}
        for name, planned in self.planned.parts.items():
            if planned != self.measured.parts.get(name, 0):
                report[f"{name}_planned"] = planned
        return report

    def as_text(self) -> str:
        """A table, one part a line. What was not known beforehand has no planned size, and then neither has the sum."""
        planned: dict[str, int | None] = dict(self.planned.parts)
        rows = [(name, planned.get(name), size) for name, size in self.measured.parts.items()]
        known = all(size is not None for _, size, _ in rows)
        rows.append(("total", self.planned.total if known else None, self.measured.total))
        lines = [f"{'part':<12} {'planned MiB':>12} {'measured MiB':>13}"]
        for name, size, measured in rows:
            lines.append(f"{name:<12} {'-' if size is None else f'{size / MIB:.1f}':>12} {measured / MIB:>13.1f}")
        return "\n".join(lines)


def _sizes(parts: dict[str, int]) -> Iterator[str]:
    for name, size in parts.items():
        yield f"{name} {size / MIB:.0f}"


def load_line(capacity: KvCapacity, geometry: KvGeometry, fingerprint: str) -> str:
    """One line about the KV cache of a CPU lane; M MiB are those of the usable pages."""
    size = capacity.usable_pages * geometry.page_bytes / MIB
    return (
        f"KV cache (cpu): {capacity.usable_pages} pages of {capacity.page_size} tokens, {capacity.tokens} tokens, "
        f"{size:.1f} MiB, fingerprint {fingerprint}"
    )


def host_memory(meminfo: Path = _MEMINFO, cgroups: Iterable[CgroupFiles] = _CGROUPS) -> int | None:
    """Bytes that this process may still take: MemAvailable, or what the cgroup leaves if that is less.

    Page cache that can be dropped counts as free in both. None where neither can be read.
    """
    available = _entry(meminfo, "MemAvailable:")
    limits = [_cgroup_room(files) for files in cgroups] + [None if available is None else available * 1024]
    return min((limit for limit in limits if limit is not None), default=None)


def _entry(file: Path, key: str) -> int | None:
    """The number behind `key` in a file of lines `key number ...`, None if it is not there."""
    try:
        for line in file.read_text().splitlines():
            name, *values = line.split() or [""]
            if name == key:
                return int(values[0])
    except (OSError, ValueError, IndexError):
        return None
    return None


def _cgroup_room(files: CgroupFiles) -> int | None:
    try:
        limit, usage = int(files.limit.read_text()), int(files.usage.read_text())
    except (OSError, ValueError):
        # No such cgroup version here, or "max": no limit.
        return None
    kept = max(0, usage - (_entry(files.stat, files.reclaimable) or 0))
    return max(0, limit - kept)

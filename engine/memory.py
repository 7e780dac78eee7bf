"""Every byte a lane takes: what was planned, what the tensors measure, and whether the host has it. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kv.budget import KvCapacity
from kv.geometry import KvGeometry

MIB = 1 << 20
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
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
    logits: int
    """Logits of a slice of rows, and the sampler's scratch."""
    kv_pool: int

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {name: getattr(self, name) for name in self.__slots__}

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
            if planned != self.measured.parts[name]:
                report[f"{name}_planned"] = planned
        return report

    def as_text(self) -> str:
        """A table, one part a line."""
        rows = [(name, planned, self.measured.parts[name]) for name, planned in self.planned.parts.items()]
        rows.append(("total", self.planned.total, self.measured.total))
        lines = [f"{'part':<12} {'planned MiB':>12} {'measured MiB':>13}"]
        lines += [f"{name:<12} {planned / MIB:>12.1f} {measured / MIB:>13.1f}" for name, planned, measured in rows]
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


def host_memory(meminfo: Path = _MEMINFO, cgroups: tuple[tuple[str, str], ...] = _CGROUPS) -> int | None:
    """Bytes that this process may still take: MemAvailable, or what the cgroup leaves if that is less.

    None where neither can be read.
    """
    limits = [
        limit for limit in (_available(meminfo), *(_cgroup_room(*files) for files in cgroups)) if limit is not None
    ]
    return min(limits, default=None)


def _available(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _cgroup_room(limit_file: str, usage_file: str) -> int | None:
    try:
        return max(0, int(Path(limit_file).read_text()) - int(Path(usage_file).read_text()))
    except (OSError, ValueError):
        # No such cgroup version here, or "max": no limit.
        return None

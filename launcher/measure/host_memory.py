"""Host memory by the kernel and this process's control groups, and likely causes of a SIGKILL."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.util.sizes import gib

CGROUP, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# For v2 and v1: limit, usage, and the beginning of the lines of memory.stat for file caches, which
# are released on demand: active are those of files that were read twice, as weights are.
LIMITS = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
CACHES = ("inactive_file", "active_file")
EVENTS = ("memory.events", "memory.oom_control")


def host_bytes() -> int:
    """Return the memory of this host, or the lowest limit of its control groups."""
    return min([psutil.virtual_memory().total, *(size for size, _, _ in _limits())])


def available_host_bytes() -> int:
    """Return the host memory that is available."""
    available = psutil.virtual_memory().available
    return min([available, *(size - used + cached for size, used, cached in _limits())])


@dataclass(frozen=True, kw_only=True, slots=True)
class Kills:
    """Processes killed by the kernel's out-of-memory killer so far, in this process's control
    groups and on the whole machine."""

    group: int
    machine: int

    @classmethod
    def read(cls) -> "Kills":
        """Read the counters; 0 where the kernel has none."""
        files = [folder / name for folder in _groups() for name in EVENTS]
        return cls(group=max(map(_count, files)), machine=_count(Path("/proc/vmstat")))

    def likely_cause(self) -> str:
        """Return the likely cause of a SIGKILL since then, in parentheses."""
        now = Kills.read()
        if now.group > self.group:
            whole = psutil.virtual_memory().total
            room = f" of {gib(host_bytes())}" if host_bytes() < whole else ""
            return (
                f" (out of host memory: the kernel killed it in a control group{room}; give that "
                "more memory, or start fewer ranks)"
            )
        if now.machine > self.machine:
            return " (likely out of host memory: the kernel has killed a process meanwhile)"
        return " (by a user, or by the kernel out of host memory: see dmesg)"


def _groups() -> set[Path]:
    # Folders of this process's memory control group (v2 or v1) and its ancestors; in a container
    # the topmost is its own.
    found = {CGROUP, CGROUP / "memory"}
    with contextlib.suppress(OSError):
        for line in MINE.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = CGROUP / controllers
                group = root / path.lstrip("/")
                found |= {f for f in (group, *group.parents) if f.is_relative_to(root)}
    return found


def _limits() -> Iterator[tuple[int, int, int]]:
    # (limit, used, released on demand) in bytes
    for folder in _groups():
        for limit, used, of_all in LIMITS:
            # gVisor has no memory.stat, and a group can end between two files
            size, now = (_words(folder / name) or ["none"] for name in (limit, used))
            if size[0].isdecimal():
                in_use = int(now[0]) if now[0].isdecimal() else 0
                cached = (_count(folder / "memory.stat", of_all + name) for name in CACHES)
                yield int(size[0]), in_use, sum(cached)


def _count(file: Path, name: str = "oom_kill") -> int:
    words = _words(file)  # names and values alternate
    return int(words[words.index(name) + 1]) if name in words else 0


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []

"""Host memory that there is, by the kernel and by this process's control groups; and whether their
want explains a SIGKILL."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.util.sizes import gib

CGROUP, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of v2 and of v1: the limit, what is in use, and the line of memory.stat for file caches, which
# are given back on demand.
LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
EVENTS = ("memory.events", "memory.oom_control")


def host_bytes() -> int:
    """Memory of this host, or of a control group that leaves less of it."""
    return min([psutil.virtual_memory().total, *(size for size, _, _ in _limits())])


def available_host_bytes() -> int:
    """What of it can still be had."""
    available = psutil.virtual_memory().available
    return min([available, *(size - used + cached for size, used, cached in _limits())])


@dataclass(frozen=True, kw_only=True, slots=True)
class Kills:
    """How many the kernel's out-of-memory killer has killed by now, in this process's control
    groups and on the whole machine."""

    group: int
    machine: int

    @classmethod
    def read(cls) -> "Kills":
        """0 for what the kernel does not say."""
        files = [folder / name for folder in _groups() for name in EVENTS]
        return cls(group=max(map(_count, files)), machine=_count(Path("/proc/vmstat")))

    def likely_cause(self) -> str:
        """Of a SIGKILL since then."""
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
        return " (by somebody, or by the kernel for want of host memory: dmesg would tell)"


def _groups() -> set[Path]:
    """The folders of this process's control group for memory (v2, or v1), and of those that it is
    in; in a container the topmost is its own."""
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
    """Bytes of each limit, of it in use, and of these given back on demand."""
    for folder in _groups():
        for limit, used, cached in LIMITS:
            size = _words(folder / limit)
            if size and size[0].isdecimal():
                statistics = _words(folder / "memory.stat")
                given_back = int(statistics[statistics.index(cached) + 1])
                yield int(size[0]), int(_words(folder / used)[0]), given_back


def _count(file: Path) -> int:
    """Its line `oom_kill N`."""
    words = _words(file)
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []

"""Whether the kernel's out-of-memory killer explains a SIGKILL: it counts whom it kills."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.sizes import gib

CGROUP = Path("/sys/fs/cgroup")
EVENTS = ("memory.events", "memory.oom_control")  # of v2, and of v1
UNLIMITED = 1 << 60  # v1 writes a number for it


@dataclass(frozen=True, kw_only=True, slots=True)
class Kills:
    """The kernel's counts, by now, in this process's control group and on the whole machine."""

    group: int
    machine: int

    @classmethod
    def read(cls) -> "Kills":
        """0 for what it does not say."""
        files = [folder / name for folder in _groups() for name in EVENTS]
        return cls(
            group=max((_count(file) for file in files), default=0),
            machine=_count(Path("/proc/vmstat")),
        )

    def likely_cause(self) -> str:
        """Of a SIGKILL since then."""
        now = Kills.read()
        if now.group > self.group:
            limits = [size for folder in _groups() if (size := _limit(folder)) is not None]
            room = f" of {gib(min(limits))}" if limits else ""
            return (
                f" (out of host memory: the kernel killed it in a control group{room}; give that "
                "more memory, or start fewer ranks)"
            )
        if now.machine > self.machine:
            return " (likely out of host memory: the kernel has killed a process meanwhile)"
        return " (by somebody, or by the kernel for want of host memory: dmesg would tell)"


def _groups() -> Iterator[Path]:
    """This process's control group for memory (v2, or v1), and those that it is in."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUP / controllers
            group = root / path.lstrip("/")
            yield from (f for f in (group, *group.parents) if f.is_relative_to(root))


def _count(file: Path) -> int:
    """Its line `oom_kill N`."""
    try:
        words = file.read_text(encoding="utf-8").split()
        return int(words[words.index("oom_kill") + 1])
    except (OSError, ValueError):
        return 0


def _limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            text = (folder / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < UNLIMITED:
            return int(text)
    return None

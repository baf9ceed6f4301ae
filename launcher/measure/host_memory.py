"""Host memory that there is: by the kernel, and by the limit of a control group."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int:
    """Host memory that can still be had, by the kernel and by this control group's limit."""
    available = psutil.virtual_memory().available
    for folder, limit, used in (
        (CGROUP, "memory.max", "memory.current"),
        (CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        words = _words(folder / limit)
        if words and words[0].isdecimal():
            statistics = _words(folder / "memory.stat")
            cached = int(statistics[statistics.index("inactive_file") + 1])  # given back on demand
            available = min(available, int(words[0]) - int(_words(folder / used)[0]) + cached)
    return available


def host_limit_bytes() -> int:
    """All that processes here could ever have: the host's or the control group's, and swap."""
    memory = psutil.virtual_memory().total
    for limit in (CGROUP / "memory.max", CGROUP / "memory" / "memory.limit_in_bytes"):
        words = _words(limit)
        if words and words[0].isdecimal():
            memory = min(memory, int(words[0]))
    return memory + psutil.swap_memory().total


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []

"""Folders for swap files: one of its own per rank, gone when the rank ends.

What a killed run leaves behind is removed by the next run that uses the same path. A folder is
in use as long as a process holds the lock on its owner file; the kernel lets go of that lock
however a process ends.
"""

import fcntl
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

import psutil

from launcher.parallel.world import before_leaving
from launcher.util.errors import UserError

PREFIX = "shardscale-swap-"
OWNER = "owner.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def swap_folder(parent: Path) -> Path:
    """Make an empty folder in `parent` that belongs to this process until it leaves."""
    # Under its final name a folder always has its lock, so a new one is never taken for stale.
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    owner = (made / OWNER).open("w", encoding="utf-8")
    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    json.dump(_this_machine() | {"pid": os.getpid()}, owner)
    owner.flush()
    path = made.rename(made.with_name(made.name.removeprefix(".")))

    def remove() -> None:
        shutil.rmtree(path, ignore_errors=True)
        owner.close()

    before_leaving(remove)
    return path


def check_folder(path: Path, flag: str) -> None:
    """Make the folder for swap files, and see that it takes what NVMe offload does to it.

    Raises:
        UserError: it cannot be made or written, or its file system refuses direct I/O.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".shardscale-", dir=path) as probe:
            os.close(os.open(probe.name, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        why = f"cannot be written to ({error.strerror})"
        if path.is_dir() and error.errno == 22:  # EINVAL
            why = "is on a file system without direct I/O (memory or an overlay)"
        raise UserError(f"{flag} {path}: {why}; give a folder on a local disk") from None


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the folders of runs that were killed; which ones those were."""
    removed = []
    for folder in sorted(parent.glob(f"{PREFIX}*")):
        try:
            with (folder / OWNER).open("r+", encoding="utf-8") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_of_this_machine(owner.read()):
                    shutil.rmtree(folder)
                    removed.append(folder)
        except OSError:  # in use, or no folder of ours: it has no owner file
            continue
    return removed


def file_system(folder: Path) -> str:
    """Return the type of the file system of `folder`, `unknown file system` when not listed."""
    place = folder.resolve()
    mounts = {
        Path(p.mountpoint): p.fstype
        for p in psutil.disk_partitions(all=True)
        if place.is_relative_to(p.mountpoint)
    }
    return mounts[max(mounts, key=lambda m: len(m.parts))] if mounts else "unknown file system"


def _this_machine() -> dict[str, object]:
    boot = BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else ""
    return {"host": socket.gethostname(), "boot": boot}


def _is_of_this_machine(owner: str) -> bool:
    """Return whether a folder is this machine's: on a disk that several machines share, locks may
    not reach from one to the other."""
    try:
        written = json.loads(owner)
    except ValueError:
        return False
    here = _this_machine()
    return any(bool(here[key]) and written.get(key) == here[key] for key in here)

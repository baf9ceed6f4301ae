"""Checks of this machine: cores, memory, limits, name resolution, Slurm, disks."""

import ipaddress
import os
import resource
import shutil
import socket
import subprocess
from pathlib import Path

import psutil

from launcher.forecast.disk import disk_rates
from launcher.measure.host_memory import available_host_bytes, host_bytes
from launcher.strategies.zero.nvme_folder import file_system
from launcher.tools.doctor.finding import Finding, fail, not_applicable, ok, warn
from launcher.tools.doctor.gpu import device_files
from launcher.util.files import default_cache_dir, nearest_existing
from launcher.util.processes import usable_cores
from launcher.util.sizes import GIB, MIB, gib

LITTLE_RAM_BYTES = 4 * GIB
LITTLE_SHM_BYTES = 1 * GIB
LITTLE_LOCKED_BYTES = 64 * MIB
OFFLOADED_BYTES_PER_PARAMETER = 12  # fp32 master weight and Adam's two moments
SLURM_S = 4.0
LITTLE_DISK_BYTES = 5 * GIB
LITTLE_NVME_BYTES = 20 * GIB
TEST_BYTES = 256 * MIB
SLOW_BYTES_PER_S = 1e9


def cores() -> Finding:
    """Compare the usable cores with OMP_NUM_THREADS."""
    usable = usable_cores()
    total = os.cpu_count() or usable
    found = f"{usable} usable" + (f" of {total}" if usable != total else "")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > usable:
        return warn(
            f"{found}, but OMP_NUM_THREADS={threads}",
            "every rank starts that many threads, which then compete for cores",
            "unset OMP_NUM_THREADS: torchrun then divides the cores among the ranks",
        )
    setting = f"OMP_NUM_THREADS={threads}" if threads else "divided among the ranks by torchrun"
    return ok(f"{found}; threads: {setting}")


def memory() -> Finding:
    """Check host memory, which offload, data and CPU ranks use."""
    total, available = host_bytes(), available_host_bytes()
    limited = total < psutil.virtual_memory().total
    whose = " (cgroup limit)" if limited else ""
    room = available // OFFLOADED_BYTES_PER_PARAMETER
    found = f"{gib(available)} of {gib(total)} free{whose}"
    if available < LITTLE_RAM_BYTES:
        return warn(
            found,
            "the kernel may kill offloading or CPU ranks without a message",
            "close other programs, or use fewer ranks and a smaller model",
        )
    return ok(f"{found}: optimizer offload for up to about {room / 1e9:.1f} billion parameters")


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Check /dev/shm, through which NCCL exchanges data between the GPUs of one machine."""
    if not path.is_dir():
        return not_applicable(f"no {path} on this system")
    free = shutil.disk_usage(path).free
    if free < LITTLE_SHM_BYTES and device_files():
        return warn(
            f"{gib(free)} free",
            "NCCL may end with `Bus error` or `No space left on device`",
            "in a container: --shm-size=8g or --ipc=host; else remount it with a larger size",
        )
    return ok(f"{gib(free)} free")


def locked_memory() -> Finding:
    """Check RLIMIT_MEMLOCK, for pinned buffers of InfiniBand and asynchronous disk I/O."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return ok("unlimited")
    needed = Path("/sys/class/infiniband").is_dir()
    if limit < LITTLE_LOCKED_BYTES and needed:
        return warn(
            f"{limit // 1024} KiB",
            "NCCL over InfiniBand cannot register its buffers",
            "ulimit -l unlimited (in a container: --ulimit memlock=-1)",
        )
    return ok(f"{limit // 1024} KiB; matters only for InfiniBand and NVMe offload")


def hostname() -> Finding:
    """Resolve this machine's name, the rendezvous of ranks on several nodes."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        return warn(
            f"{name} has no address ({error.strerror or error})",
            "multi-node runs cannot rendezvous (single-node runs use the loopback)",
            f"add the address of {name} to /etc/hosts or to the name server",
        )
    own = ipaddress.ip_address(address)
    several = f"at {address}"
    if own.is_loopback:  # Debian's /etc/hosts does this; other nodes cannot reach it
        several = "on all interfaces, because this name is the loopback here"
    return ok(f"{name} is {address}; runs listen on the loopback, multi-node runs {several}")


def slurm() -> Finding:
    """Check whether jobs can be submitted from here."""
    if shutil.which("sbatch") is None:
        return not_applicable("sbatch is not on PATH: no Slurm here")
    try:
        version = _output_of("sbatch", "--version")
    except (OSError, subprocess.SubprocessError) as error:
        # Without a slurm.conf, it cannot even print its version.
        words = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        why = (words.strip().splitlines() or [str(error)])[-1]
        return warn(
            f"sbatch is installed but does not work: {why}",
            "jobs cannot be submitted from here",
            "point SLURM_CONF at the cluster's slurm.conf, if this machine belongs to one",
        )
    job = os.environ.get("SLURM_JOB_ID")
    inside = f"; inside job {job}" if job else ""
    try:
        partitions = _output_of("sinfo", "--noheader", "--format=%P %D nodes %G")
    except (OSError, subprocess.SubprocessError) as error:
        return fail(
            f"{version}, but the controller does not answer ({error})",
            "jobs cannot be submitted",
            "run `scontrol ping`; slurm.conf may name a controller that is down",
        )
    return ok(f"{version}{inside}; partitions: {', '.join(partitions.splitlines())}")


def disk_space() -> Finding:
    """Check free space for runs and tokenized corpora."""
    places = {"here": Path.cwd(), "corpus cache": nearest_existing(default_cache_dir())}
    free = {name: shutil.disk_usage(path).free for name, path in places.items()}
    found = ", ".join(f"{gib(size)} free ({name})" for name, size in free.items())
    if min(free.values()) < LITTLE_DISK_BYTES:
        return warn(
            found,
            "a checkpoint takes 12 bytes per parameter, so saving may fail",
            "free some space, or give --out and SHARDSCALE_CACHE on another disk",
        )
    return ok(found)


def nvme(folder: Path | None) -> Finding:
    """Measure a folder for NVMe offload, with direct I/O if the file system allows it."""
    if folder is None:
        return not_applicable("not tested; give --nvme-path FOLDER to measure a disk for offload")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return fail(
            f"{folder} is not a writable folder",
            "offload to it fails",
            f"mkdir -p {folder}, or choose another --nvme-path",
        )
    free, kind = shutil.disk_usage(folder).free, file_system(folder)
    if free < 2 * TEST_BYTES:
        return fail(
            f"{folder}: {gib(free)} free", "no room for offload", "choose another --nvme-path"
        )
    write, read, direct = disk_rates(folder, TEST_BYTES)
    found = (
        f"{folder} ({kind}): {gib(free)} free, writes {write / 1e9:.2f} GB/s, reads "
        f"{read / 1e9:.2f} GB/s" + ("" if direct else " (through the page cache)")
    )
    problems = []
    if kind in ("tmpfs", "ramfs"):
        problems.append("this is memory, not a disk: offload would save nothing")
    elif kind.startswith(("nfs", "lustre", "cifs", "fuse")):
        problems.append("this is a network file system, which every step waits for")
    elif min(write, read) < SLOW_BYTES_PER_S:
        problems.append("each step reads and writes about 12 bytes per offloaded parameter")
    if free < LITTLE_NVME_BYTES:
        problems.append(
            f"space for only about {free / 16e9:.1f} billion parameters with Adam states"
        )
    if problems:
        return warn(found, "; ".join(problems), "choose a folder on a local NVMe disk")
    return ok(found)


def _output_of(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SLURM_S, check=True)
    return done.stdout.strip()

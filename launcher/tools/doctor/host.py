"""Cores, memory, limits, name resolution and Slurm of this machine."""

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from launcher.measure.host_memory import available_host_bytes, host_bytes
from launcher.tools.doctor.finding import Finding, fail, not_applicable, ok, warn
from launcher.tools.doctor.gpu import device_files
from launcher.util.cores import usable_cores
from launcher.util.sizes import GIB, MIB, gib

LITTLE_RAM_BYTES = 4 * GIB
LITTLE_SHM_BYTES = 1 * GIB
LITTLE_LOCKED_BYTES = 64 * MIB
OFFLOADED_BYTES_PER_PARAMETER = 12  # fp32 master weight and Adam's two moments
SLURM_S = 4.0


def cores() -> Finding:
    """Cores that this process may use, and what the environment says about threads."""
    usable = usable_cores()
    total = os.cpu_count() or usable
    found = f"{usable} usable" + (f" of {total}" if usable != total else "")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > usable:
        return warn(
            f"{found}, but OMP_NUM_THREADS={threads}",
            "threads wait for each other, and every rank starts that many",
            "unset OMP_NUM_THREADS: torchrun here gives each rank its share of the cores",
        )
    said = f"OMP_NUM_THREADS={threads}" if threads else "shared out among the ranks by torchrun"
    return ok(f"{found}; threads: {said}")


def memory() -> Finding:
    """Host memory: what offload, data and every CPU rank live in."""
    total, available = host_bytes(), available_host_bytes()
    limited = total < psutil.virtual_memory().total
    whose = " (limit of this control group)" if limited else ""
    room = available // OFFLOADED_BYTES_PER_PARAMETER
    found = f"{gib(available)} of {gib(total)} free{whose}"
    if available < LITTLE_RAM_BYTES:
        return warn(
            found,
            "offload and several CPU ranks may be killed by the kernel without a message",
            "close other programs, or use fewer ranks and a smaller model",
        )
    return ok(f"{found}: optimizer offload for up to about {room / 1e9:.1f} billion parameters")


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """NCCL passes data between the GPUs of one machine through it."""
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
    """RLIMIT_MEMLOCK: pinned buffers for InfiniBand and asynchronous disk I/O."""
    if sys.platform == "win32":
        return not_applicable("no such limit on Windows")
    import resource

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
    return ok(f"{limit // 1024} KiB; matters for InfiniBand and NVMe offload, not for what is here")


def hostname() -> Finding:
    """Ranks of one node meet on the loopback; of several, at the address of this one's own name."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        return warn(
            f"{name} has no address ({error.strerror or error})",
            "runs on several nodes fail to meet (those on this one use the loopback)",
            f"add the address of {name} to /etc/hosts or to the name server",
        )
    own = ipaddress.ip_address(address)
    several = f"at {address}"
    if own.is_loopback:  # as Debian's /etc/hosts has it: of no use to others
        several = "on all interfaces, as this name is the loopback here"
    return ok(f"{name} is {address}; runs listen on the loopback, those on several nodes {several}")


def slurm() -> Finding:
    """Whether jobs can be submitted from here, or this is one."""
    if shutil.which("sbatch") is None:
        return not_applicable("sbatch is not on PATH: no Slurm here")
    try:
        version = _say("sbatch", "--version")
    except subprocess.CalledProcessError as error:
        # Installed without a slurm.conf, it cannot even tell its version.
        why = (error.stderr.strip().splitlines() or [str(error)])[-1]
        return warn(
            f"sbatch is here but does not work: {why}",
            "jobs cannot be submitted from here",
            "point SLURM_CONF at the cluster's slurm.conf, if this belongs to one",
        )
    job = os.environ.get("SLURM_JOB_ID")
    inside = f"; inside job {job}" if job else ""
    try:
        partitions = _say("sinfo", "--noheader", "--format=%P %D nodes %G")
    except (OSError, subprocess.SubprocessError) as error:
        return fail(
            f"{version}, but the controller does not answer ({error})",
            "sbatch does not take jobs",
            "ask with `scontrol ping`; slurm.conf may name a controller that is away",
        )
    return ok(f"{version}{inside}; partitions: {', '.join(partitions.splitlines())}")


def _say(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SLURM_S, check=True)
    return done.stdout.strip()

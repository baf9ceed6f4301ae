"""DeepSpeed's asynchronous I/O, compiled once per machine, before ranks start.

Left to DeepSpeed, every rank would compile or wait in silence for minutes, and wait for ever for
the lock of a build that was killed.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import torch

from launcher.strategies.zero.nvme_folder import file_system
from launcher.util.errors import UserError, tell
from launcher.util.packages import version_of
from launcher.util.processes import for_children

OPS = ("pin_memory", "async_io")
STAMP = "shardscale-built"
LOG = "shardscale-build.log"
NEEDS_LIBAIO = "#include <libaio.h>\nint main() { io_context_t c = 0; return io_setup(1, &c); }\n"
INSTALL = "apt install g++ libaio-dev, or dnf install gcc-c++ libaio-devel"
ABANDONED_S = 600.0  # a build writes something every minute or two, however slow the machine
NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "cifs", "fuse", "beegfs", "gpfs")

# DeepSpeed prints while it is imported, and fixes its accelerator then.
# `import launcher` makes the build end with its parent.
BUILD = """
import launcher
from deepspeed.ops.op_builder import AsyncIOBuilder
AsyncIOBuilder().load(verbose=True)
"""


def ensure_built(device_type: str) -> None:
    """Compile DeepSpeed's async_io unless that was done, showing progress on stderr.

    Raises:
        UserError: a compiler or libaio is missing, or compiling fails.
    """
    use_own_ninja()
    if is_built():
        return
    import filelock

    folder = build_folder("async_io")
    folder.mkdir(parents=True, exist_ok=True)
    # Ranks whose agent could not know their number prepare for themselves, all at once.
    with filelock.FileLock(folder / ".shardscale-build.lock"):
        if is_built():
            return
        missing = what_is_missing()
        if missing is not None:
            raise UserError(f"offload to NVMe needs {missing}: {INSTALL}")
        for op in OPS:
            remove_stale_lock(build_folder(op) / "lock")
        _build(device_type, folder)
        (folder / STAMP).write_text(_versions(), encoding="utf-8")


def is_built() -> bool:
    """Return whether the op is compiled here with these versions, or installed with DeepSpeed."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return False
    if any(Path(spec.origin).parent.glob("ops/aio/async_io_op*.so")):  # DS_BUILD_AIO=1
        return True
    stamp = build_folder("async_io") / STAMP
    return (
        all((build_folder(op) / f"{op}.so").exists() for op in OPS)
        and stamp.exists()
        and stamp.read_text(encoding="utf-8") == _versions()
    )


def what_is_missing() -> str | None:
    """Return `a C++ compiler`, `ninja` or `libaio`, whichever is not here; None where all are."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"a C++ compiler ({compiler!r} is no program on PATH)"
    if shutil.which("ninja") is None:
        return "ninja (pip install ninja)"
    flags = [*os.environ.get("CFLAGS", "").split(), *os.environ.get("LDFLAGS", "").split()]
    tried = subprocess.run(
        [compiler, "-x", "c++", "-", "-o", os.devnull, *flags, "-laio"],
        input=NEEDS_LIBAIO,
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else "libaio and its headers"


def use_own_ninja() -> None:
    """Put this environment's scripts on PATH if ninja is only there: DeepSpeed looks on PATH."""
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts) is not None:
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), scripts))


def extensions_folder() -> Path:
    """$TORCH_EXTENSIONS_DIR, where torch builds extensions, else torch_extensions in the cache."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torch_extensions"


def build_folder(op: str) -> Path:
    """Return the folder of an op's build: by Python and CUDA version, unless a root was chosen."""
    root = extensions_folder()
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        cuda = "cpu" if torch.version.cuda is None else "cu" + torch.version.cuda.replace(".", "")
        root /= f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_{cuda}"
    return root / op


def remove_stale_lock(lock: Path) -> None:
    """Remove the lock of a build that was killed; one in use stays, and is waited for.

    torch holds its lock open while it builds. On a network disk another machine may hold it:
    there, only a lock beside which nothing has been written for a while is stale.
    """
    if not lock.exists() or str(lock.resolve()) in held_files():
        return
    if file_system(lock).startswith(NETWORK_FILE_SYSTEMS):
        newest = max(path.stat().st_mtime for path in lock.parent.iterdir())
        if time.time() - newest < ABANDONED_S:
            tell(f"another machine may be building: waiting for {lock}")
            return
    lock.unlink(missing_ok=True)
    tell(f"removed {lock}, left by a build that was killed")


def held_files() -> set[str]:
    """Return the files that processes of this user hold open."""
    held: set[str] = set()
    for process in psutil.process_iter():
        # Another user's, or gone by now.
        with contextlib.suppress(psutil.Error, OSError):
            held |= {file.path for file in process.open_files()}
    return held


def _versions() -> str:
    found = f"torch {torch.__version__}, deepspeed {version_of('deepspeed')}"
    return f"{found}, python {sys.version}"


def _build(device_type: str, folder: Path) -> None:
    tell(f"building DeepSpeed's asynchronous I/O in {folder}, once: takes minutes")
    environment = os.environ | for_children()
    if device_type == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    started_s = time.monotonic()
    log = folder / LOG
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            [sys.executable, "-u", "-c", BUILD],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as build,
    ):
        assert build.stdout is not None
        for line in build.stdout:
            file.write(line)
            # ninja's lines, one per object file.
            if progress := re.match(r"\[(\d+)/(\d+)\] .*-DTORCH_EXTENSION_NAME=(\w+)", line):
                done, total, op = progress.groups()
                tell(f"building {op}: {done} of {total}")
    if build.returncode != 0:
        lines = log.read_text(encoding="utf-8").splitlines()
        errors = [line for line in lines if "error" in line.lower()] or lines[-1:]
        raise UserError(
            f"DeepSpeed's asynchronous I/O could not be built ({errors[0].strip():.200}): see {log}"
        )
    tell(f"built in {time.monotonic() - started_s:.0f} s")

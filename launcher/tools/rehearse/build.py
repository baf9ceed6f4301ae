"""Compile library/ against the torch of an interpreter, once per build of it.

Functions of CUDA's libraries that library/ does not have are generated: one of cuBLAS that computes
succeeds, every other one says its name and fails with "not supported".
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from launcher.util.errors import WHY, UserError, refused
from launcher.util.files import default_cache_dir

SOURCES = Path(__file__).parent / "library"
FLAGS = ("-std=gnu2x", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-pthread")
_LINKED = (f"-Wl,--version-script={SOURCES / 'exported.map'}", "-lm", "-ldl")
OLDEST_GCC = 11
"""The first whose C has unnamed parameters."""

# Imports nothing of torch, which takes seconds and would look for a GPU.
_ASK = """
import importlib.util, json
def place(name):
    spec = importlib.util.find_spec(name)
    return [str(p) for p in spec.submodule_search_locations or ()] if spec else []
print(json.dumps({name: place(name) for name in ("torch", "nvidia", "triton")}))
"""

# The real libraries answer these well without a device.
_LEFT_ALONE = re.compile(
    r"cudaGetError(Name|String)|cudaCreateChannelDesc|__cuda(Register|Unregister)\w*"
    r"|cublas(Lt)?(GetStatus(Name|String)|GetProperty|GetCudartVersion|Logger\w*)|cublasGetVersion\w*"
)
# Everything else of cuBLAS computes: it writes on the device, where nothing is.
_CUBLAS_ASKS = re.compile(
    r"cublas(Lt\w+|Xt\w+|(Get|Set|Create|Destroy|Alloc|Free|Init|Shutdown|Migrate|Xerbla)\w*)"
)

_CUDNN_COMPUTES = re.compile(
    r"cudnn(BatchNormalization|Normalization|Convolution|Pooling|Activation|Softmax|SpatialTf|LRN"
    r"|DivisiveNormalization|Dropout(For|Back)ward|RNN(For|Back)ward|AddTensor|OpTensor"
    r"|ReduceTensor|ScaleTensor|SetTensor$|Transform|Im2Col)\w*"
)
# It asks with a handle, which is none of cuDNN's own.
_CUDNN_ASKS = re.compile(
    r"cudnn(Get\w*(Workspace|Reserve|Space|States|Algorithm|Weight|Buffers|Reduction)\w*|Find\w+"
    r"|(Set|Restore)DropoutDescriptor|DropoutGetStatesSize|CTCLoss\w*|MultiHead\w+|FusedOps\w+"
    r"|BuildRNNDynamic|RNN[GS]etClip\w*|\w*Populate\w*|\w*UpdateCudaGraph)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """A build of torch and the CUDA packages beside it."""

    version: str
    cuda: str
    folders: tuple[Path, ...]
    """Folders of the packages that have headers and libraries."""

    def headers(self) -> list[Path]:
        """Folders of header files."""
        found = [path for folder in self.folders for path in folder.glob("**/include")]
        return [path for path in found if path.is_dir()]

    def library(self, name: str) -> Path | None:
        """The shared library of this name, or None."""
        found = sorted(path for folder in self.folders for path in folder.glob(f"*/lib/{name}.so*"))
        return found[0] if found else None


def built_for(python: str) -> Path:
    """Folder of the compiled libraries for the torch of `python`; compiles what is not there.

    Raises:
        UserError: no such interpreter, no torch in it or a CPU build, no C compiler or a failing
            one, or a cache whose path the loader cannot take.
    """
    torch, compiler = torch_of(python), _compiler()
    folder = default_cache_dir() / "null-gpu" / _key(torch, compiler)
    # ld.so splits LD_PRELOAD at both.
    if re.search(r"[\s:]", str(folder)):
        raise UserError(
            f"cache folder {str(folder)!r} has a space or a colon, which the loader of shared "
            "libraries takes as an end: set SHARDSCALE_CACHE to another"
        )
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _build(torch, compiler, folder)
    return folder


def torch_of(python: str) -> Torch:
    """The CUDA build of torch that an interpreter has.

    Raises:
        UserError: no such interpreter, no torch in it, or a build without CUDA.
    """
    with refused(OSError, f"{python}: cannot be started ({WHY}): name a Python"):
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise UserError(f"{python}: is no Python that works ({_last_line(done.stderr)})")
    places: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    if not places["torch"]:
        raise UserError(f"{python} has no torch: install torch's CUDA build there")
    text = Path(places["torch"][0], "version.py").read_text(encoding="utf-8")
    version, cuda = _assigned("__version__", text) or "unknown", _assigned("cuda", text)
    if cuda is None:
        raise UserError(
            f"torch {version} of {python} is a CPU build, and a rehearsal needs the CUDA build "
            "(a GPU it does not need): reinstall torch from Python's package index, or from "
            "torch's index for a CUDA version instead of the one for CPUs"
        )
    folders = tuple(Path(path) for path in places["nvidia"] + places["triton"])
    return Torch(version=version, cuda=cuda, folders=folders)


def _assigned(name: str, text: str) -> str | None:
    match = re.search(rf"^{name}\b[^=\n]*= *'([^']+)'", text, re.MULTILINE)
    return match[1] if match else None


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "no message"


def _compiler() -> str:
    wanted = os.environ.get("CC", "").split()[:1] or ["gcc", "cc"]
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise UserError(
        f"no C compiler ({' or '.join(wanted)}), and the null GPU is compiled at its first "
        f"use: install gcc {OLDEST_GCC} or newer, or name one in CC"
    )


def _key(torch: Torch, compiler: str) -> str:
    """Name of the folder: of these sources, torch and compiler."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    parts = [torch.version, torch.cuda, *map(str, torch.folders), compiler, version, *FLAGS]
    parts += [path.read_text(encoding="utf-8") for path in sorted(SOURCES.iterdir())]
    # the patterns in this file decide which functions are generated
    parts += [Path(__file__).read_text(encoding="utf-8")]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"torch-{torch.version}-{digest[:16]}"


def _build(torch: Torch, compiler: str, folder: Path) -> None:
    """Compile into a folder beside, which then takes the name."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        new = Path(beside, "new")
        new.mkdir()
        (new / "refused.c").write_text("\n".join(_refused(torch, compiler)), encoding="utf-8")
        headers = [word for path in torch.headers() for word in ("-isystem", str(path))]
        command = [compiler, *FLAGS, f"-I{SOURCES}", *headers]
        nvml, smi = SOURCES / "nvml.c", SOURCES / "smi.c"
        cuda = [*sorted(set(SOURCES.glob("*.c")) - {nvml, smi}), new / "refused.c", *_LINKED]
        for name, parts in (("libcuda.so.1", cuda), ("libnvidia-ml.so.1", [nvml])):
            output = ("-shared", "-o", str(new / name), f"-Wl,-soname,{name}")
            run_compiler([*command, *output, *map(str, parts)])
        program = ("-o", str(new / "nvidia-smi"), "-Wl,-rpath,$ORIGIN")
        run_compiler([*command, *program, str(smi), str(new / "libcuda.so.1")])
        (new / "libcuda.so").symlink_to("libcuda.so.1")
        new.rename(folder)


def run_compiler(command: Sequence[str]) -> None:
    """Run a command of the C compiler.

    Raises:
        UserError: it failed; with its first error.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        error = next((line for line in lines if "error" in line), _last_line(done.stderr))
        raise UserError(
            f"{command[0]} cannot compile the null GPU ({error.strip()}): it needs gcc "
            f"{OLDEST_GCC} or newer, so name one in CC"
        )


def _refused(torch: Torch, compiler: str) -> Iterator[str]:
    """A C file with a weak definition of each function of CUDA's libraries."""
    yield '#include "refuse.h"'
    names = dict.fromkeys(_driver_functions(torch), "DRIVER")
    for library, macro in (("cudart", "RUNTIME"), ("nccl", "NCCL"), ("cublas", "CUBLAS")):
        names |= dict.fromkeys(_exported(torch.library(f"lib{library}"), compiler, library), macro)
    names |= dict.fromkeys(_exported(torch.library("libcublasLt"), compiler, "cublasLt"), "CUBLAS")
    for name, macro in sorted(names.items()):
        if not _LEFT_ALONE.fullmatch(name):
            computes = macro == "CUBLAS" and not _CUBLAS_ASKS.fullmatch(name)
            yield f"COMPUTES({name})" if computes else f"REFUSES_{macro}({name})"
    for name in _exported(torch.library("libcudnn"), compiler, "cudnn"):
        if _CUDNN_ASKS.fullmatch(name):
            yield f"REFUSES_CUDNN({name})"
        elif _CUDNN_COMPUTES.fullmatch(name):
            yield f"COMPUTES({name})"


def _driver_functions(torch: Torch) -> set[str]:
    """Names that cuda.h declares, in each version: the driver itself is not here to be asked."""
    text = "".join(
        path.read_text(encoding="utf-8", errors="replace")
        for folder in torch.headers()
        for path in folder.glob("cuda.h")
    )
    return {
        *re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", text),
        *re.findall(r"\bcu[A-Z]\w*_v\d\b", text),
    }


def _exported(library: Path | None, compiler: str, prefix: str) -> list[str]:
    """Functions of a shared library whose names begin so."""
    if library is None:
        return []
    nm = subprocess.run([compiler, "-print-prog-name=nm"], capture_output=True, text=True)
    command = [nm.stdout.strip() or "nm", "-D", "--defined-only", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    start = r"_*cuda" if prefix == "cudart" else prefix
    return re.findall(rf" T ({start}\w+)", listed)

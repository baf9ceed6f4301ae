"""What figures are measured on and with, as JSON: GPU, driver, torch, packages.

    python bench/gpu/machine.py

The null GPU of launcher/tools/rehearse says so in its name, whatever GPU it stands for.
"""

import ctypes
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("triton", "deepspeed", "transformers", "accelerate", "lightning-fabric", "torchao")
NO_KERNELS = "real allocator, no kernels run"


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit(
            f"torch {torch.__version__} finds no GPU: run `nvidia-smi`, or `shardscale doctor`"
        )
    properties = torch.cuda.get_device_properties(0)
    found = {
        "name": f"null GPU as {properties.name}" if is_null_gpu() else properties.name,
        "figures": NO_KERNELS if is_null_gpu() else "measured on this GPU",
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in PACKAGES},
    }
    print(json.dumps(found))


def is_null_gpu() -> bool:
    """Return whether this is the null GPU: no other library counts launches by that name."""
    return hasattr(ctypes.CDLL(None), "device_launches")


def driver() -> str | None:
    """Version of NVIDIA's driver, None where NVML does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no package, no library, no answer: the figures are good without it
        return None


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()

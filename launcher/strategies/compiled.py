"""`--compile`: torch.compile block by block, and its requirements.

Compiling is in place (`nn.Module.compile`), so parameters keep their names in checkpoints.
"""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from launcher.model.parts import parts_of
from launcher.util.errors import UserError


def compile_blocks(model: nn.Module, *, kept_share: float) -> None:
    """Compile one graph that all blocks share. A graph of the whole model would unroll layers and
    the chunks of the loss, and take longer to compile.

    Args:
        kept_share: most that is kept for the backward, of what torch keeps by itself.
    """
    torch._functorch.config.activation_memory_budget = kept_share  # read at the first call
    # DDP would cut the graph at each 25 MiB of weights, and keep what passes from part to part. Its
    # gradients come block by block as it is, which is often enough to send them meanwhile.
    torch._dynamo.config.optimize_ddp = False
    for block in parts_of(model).blocks:
        block.compile()


def require_compilers(device_type: str) -> None:
    """Check that the compilers that torch.compile calls are on this machine.

    Raises:
        UserError: no C++ compiler (CPU), no C compiler or triton (GPU), no Python headers.
    """
    variable, default = ("CXX", "g++") if device_type == "cpu" else ("CC", "gcc")
    command = os.environ.get(variable, default)
    if shutil.which(command) is None:  # torch and triton start it as one word
        raise UserError(
            f"--compile builds kernels with {command!r}, which is no program here: install it "
            f"(apt-get install g++), name one program without options in {variable}, or leave "
            "--compile out"
        )
    if device_type == "cuda" and find_spec("triton") is None:
        raise UserError(
            "--compile builds kernels with triton, which is missing: pip install triton, or leave "
            "--compile out"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise UserError(
            f"--compile builds kernels with Python.h, which is not in {headers}: install it "
            "(apt-get install python3-dev), or leave --compile out"
        )

"""What libraries take through torch's own allocator: cuBLAS's workspaces, and tuning kernels."""

from typing import Final

import torch

from launcher.util.sizes import MIB

THREADS: Final = 2
"""That multiply, and have a workspace each as long as they live: the main one and autograd's."""


TUNING_BYTES: Final = 60 * MIB
"""Of a GPU's second cache, which torch.compile empties by writing as much before it times a kernel
(get_device_cache_size in torch 2.13.0's torch/_inductor/runtime/benchmarking.py): what torch says
of an H200; 40 MiB on an A100, 50 on an H100."""


def take_workspaces(device: torch.device) -> None:
    """Have both threads multiply now: in a first step their workspaces would look like activations
    and gradients, and lie between these."""
    matrix = torch.ones(8, 8, device=device, requires_grad=True)
    (matrix @ matrix).sum().backward()

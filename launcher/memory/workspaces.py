"""cuBLAS's workspaces, which torch takes through its own allocator."""

from typing import Final

import torch

THREADS: Final = 2
"""That multiply, and have a workspace each as long as they live: the main one and autograd's."""


def take_workspaces(device: torch.device) -> None:
    """Have both threads multiply now: in a first step their workspaces would look like activations
    and gradients, and lie between these."""
    matrix = torch.ones(8, 8, device=device, requires_grad=True)
    (matrix @ matrix).sum().backward()

"""Who computes with weights of which two of four are zero."""

import torch

_CAPABILITY = (8, 0)
"""Sparse tensor cores came with Ampere."""


def said_of_two_of_four(device: torch.device) -> str:
    """Whether a device has torch's kernels for them, and how to use those."""
    if device.type != "cuda":
        return (
            "2:4: torch's semi-structured kernels are for GPUs of compute capability 8.0 on, and "
            "this is a CPU, which gains no speed from it"
        )
    name = torch.cuda.get_device_name(device)
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return (
            f"2:4: torch's semi-structured kernels need compute capability 8.0, which {name} lacks"
        )
    return (
        f"2:4: {name} has torch's semi-structured kernels: of a weight in bf16, "
        "torch.sparse.to_sparse_semi_structured makes what they compute with"
    )

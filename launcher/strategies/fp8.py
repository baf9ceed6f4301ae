"""--precision fp8: the blocks' matmuls in 8 bits, through torchao."""

import torch
from torch import nn

from launcher.errors import UserError

NEEDED_CAPABILITY = (8, 9)


def to_fp8(module: nn.Module, device: torch.device) -> nn.Module:
    """Replace the Linears (on the meta device, too) by ones that round their operands to fp8.

    Weights stay as they are, under their names; each tensor is scaled by its own largest value at
    every use. The head keeps the type of the rest: a loss is no place for 3 bits of mantissa. On a
    CPU the arithmetic is emulated.

    Raises:
        UserError: the GPU has no fp8 matmuls.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < NEEDED_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            raise UserError(
                f"--precision fp8 needs a GPU of compute capability 8.9 or more (H100, L40S), and "
                f"{name} has {capability[0]}.{capability[1]}: use --precision bf16"
            )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    converted: nn.Module = convert_to_float8_training(
        module, config=Float8LinearConfig(emulate=device.type == "cpu")
    )
    return converted

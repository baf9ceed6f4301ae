"""Give a model built on the meta device its real, initial values."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

InitialValue = Callable[[str, torch.Size], Tensor]


def materialize_whole(
    module: nn.Module,
    initial_value: InitialValue,
    *,
    device: torch.device,
    dtype: torch.dtype,
    frozen_dtype: torch.dtype | None = None,
) -> None:
    """Replace every meta parameter by its initial value, whole, in its target type and place.

    Tied parameters stay one parameter. The peak is the model plus one fp32 tensor. What is not
    trained is of `frozen_dtype`, where one is given.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter not in replaced:
                full_name = f"{prefix}.{name}" if prefix else name
                trained = parameter.requires_grad
                own_dtype = dtype if trained or frozen_dtype is None else frozen_dtype
                if not parameter.is_floating_point():  # quantised
                    own_dtype = parameter.dtype
                value = initial_value(full_name, parameter.shape).to(device, own_dtype)
                replaced[parameter] = nn.Parameter(value, requires_grad=trained)
            setattr(owner, name, replaced[parameter])


def fill_flat_slice(local: Tensor, value: Tensor, offset: int) -> None:
    """Copy `value`'s flat range that starts at `offset` into `local`; what lies beyond is padding.

    `local` is flat, `value` the full tensor.
    """
    flat = value.flatten()
    count = max(0, min(local.numel(), flat.numel() - offset))
    local[:count].copy_(flat[offset : offset + count])
    local[count:].zero_()

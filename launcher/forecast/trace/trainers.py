"""Have a decoder of transformers allocate as other trainers have it, for the trace."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn

from launcher.forecast.trace.liger import liger_kernels
from launcher.forecast.trace.trl_loss import loss_of_trl
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import FROZEN_FP32, LIGER, TRL_LOSS, ForeignConfig
from launcher.model.linears import QuantizedLinear


@contextlib.contextmanager
def as_other_trainers(model: ModelConfig, module: nn.Module) -> Iterator[None]:
    """Have a decoder allocate as in the trainer that its document names marks of."""
    marks = model.fields if isinstance(model, ForeignConfig) else {}
    with contextlib.ExitStack() as around:
        if LIGER in marks:
            around.enter_context(liger_kernels(module))
        if TRL_LOSS in marks:
            around.enter_context(loss_of_trl())
        if FROZEN_FP32 in marks:
            for child in module.modules():
                if isinstance(child, QuantizedLinear):
                    vars(child)["forward"] = partial(_as_its_input, child.forward)
        yield


def _as_its_input(linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return what bitsandbytes' linear layers do: the type of their input, under autocast, too
    (bitsandbytes 0.50's nn/modules.py, Linear4bit.forward)."""
    return linear(x).to(x.dtype)

"""Run recurrent networks by torch's own kernels: the null GPU has none of cuDNN's.

Convolutions stay cuDNN's. What cuDNN keeps for the backward of a recurrent network is not known
here, so the report says that such a network ran (`used`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MODULE = "torch.nn.modules.rnn"
_NETWORKS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
used: set[str] = set()
"""Kinds of networks that would have been cuDNN's."""


def prepare(module: Any) -> None:
    """Keep the calls of torch's modules from cuDNN."""
    functions = module._VF
    for name in _NETWORKS:
        setattr(functions, name, _without_cudnn(module.torch, getattr(functions, name), name))
    module._rnn_impls |= {kind: getattr(functions, kind.lower()) for kind in module._rnn_impls}
    flatten = module.RNNBase.flatten_parameters
    module.RNNBase.flatten_parameters = _without_cudnn(module.torch, flatten)


def _without_cudnn(torch: Any, call: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        enabled = torch._C._get_cudnn_enabled()
        if name and enabled and getattr(args[0], "is_cuda", False):
            used.add(name.partition("_")[0].upper())
        torch._C._set_cudnn_enabled(False)
        try:
            return call(*args, **kwargs)
        finally:
            torch._C._set_cudnn_enabled(enabled)

    return called

"""Run recurrent networks and CTC loss by torch's own kernels: the null GPU has none of cuDNN's.

Convolutions stay cuDNN's. What cuDNN keeps for the backward of a recurrent network is not known
here, so the report says that such a network ran (`used`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_NETWORKS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CTC = "CTC loss"
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
    module.torch.ctc_loss = _of_known_lengths(module.torch, module.torch.ctc_loss)


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


def _of_known_lengths(torch: Any, ctc_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss for lengths that its C++ reads on the host: where only the device has them,
    inputs and padded targets are as long as they can be, and others share the targets equally."""
    loss = _without_cudnn(torch, ctc_loss)

    def lengths(given: Any, total: int, parts: int) -> list[int]:
        from shardscale_observer.held import held

        values = held(given) if getattr(given, "is_cuda", False) else given
        if values is None:
            return [total // parts + (number < total % parts) for number in range(parts)]
        return list(torch.as_tensor(values).reshape(-1).tolist())

    @functools.wraps(ctc_loss)
    def called(
        log_probs: Any,
        targets: Any,
        input_lengths: Any,
        target_lengths: Any,
        *args: Any,
        **more: Any,
    ) -> Any:
        if not log_probs.is_cuda:
            return ctc_loss(log_probs, targets, input_lengths, target_lengths, *args, **more)
        if targets.dtype is torch.int32 and torch._C._get_cudnn_enabled():
            used.add(CTC)
        batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
        labels = targets.numel() if targets.dim() == 1 else batch * targets.shape[1]
        inputs = lengths(input_lengths, batch * log_probs.shape[0], batch)
        of_targets = lengths(target_lengths, labels, batch)
        return loss(log_probs, targets, inputs, of_targets, *args, **more)

    return called

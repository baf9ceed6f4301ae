"""`--cuda-graphs`: a micro-batch's kernels are started all at once, from a recording of them.

A host starts a kernel in 5 to 50 us, which small micro-batches wait for. A CUDA graph holds the
kernels of one forward, another those of its backward, a third those of torch's fused update, each
with the addresses that they had; what changes between micro-batches and steps is copied to where
the recording reads it.
"""

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from launcher.strategies.engine import StepResult
from launcher.strategies.native import NativeEngine

EAGER_STEPS: Final = 3
"""Steps before the recording. They make optimizer states and the libraries' workspaces, and are
measured: of a replay the allocator sees nothing, so peaks by phase and the ledger are theirs."""
# Other threads may use the GPU meanwhile, an asynchronous save for one.
_MODE: Final[dict[str, Any]] = {"capture_error_mode": "thread_local"}


class GraphEngine(NativeEngine):
    """A native engine that records a micro-batch after a few steps, and replays it from then on.

    Micro-batches must be equally large. The loss comes back as a leaf: its gradient in `backward`
    is the factor that `train_step` has multiplied it with. A recording needs memory of its own;
    without it the run goes on operator by operator.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._steps, self._fits = 0, True
        self._recorded: _Recording | None = None
        self._update: torch.cuda.CUDAGraph | None = None
        # AdamW is a subclass of Adam; our optimizers in low precision are not, and run eagerly.
        self._records_update = isinstance(self._optimizer, torch.optim.Adam) and all(
            group["fused"] for group in self._optimizer.param_groups
        )

    def begin_step(self, lr: float) -> None:
        self._steps += 1
        if self._update is None:
            super().begin_step(lr)
        else:
            self._lr.fill_(lr)

    def forward(
        self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None, *, last: bool
    ) -> Tensor:
        assert starts is None
        if self._recorded is None and self._fits and self._steps > EAGER_STEPS:
            self._recorded = self._record(tokens, targets)
        if self._recorded is None:
            return super().forward(tokens, targets, last=last)
        return self._recorded.forward(tokens, targets)

    def backward(self, loss: Tensor) -> None:
        if self._recorded is None:
            super().backward(loss)
        else:
            self._recorded.backward(loss * self._scale)

    def step(self) -> StepResult:
        if self._recorded is None or not self._records_update:
            return super().step()
        if self._update is None:
            self._update = self._record_update()
        self._update.replay()
        norm, applied = self._result
        assert isinstance(norm, Tensor)
        assert isinstance(applied, Tensor)
        # They are read later, and the next replay writes over them.
        return norm.clone(), applied.clone()

    def _record_update(self) -> torch.cuda.CUDAGraph:
        """Record clipping and the update, which read the learning rate from the device."""
        groups = self._optimizer.param_groups
        self._lr = torch.tensor(groups[0]["lr"], device=self._device)
        for group in groups:
            # A float would be captured as a constant; torch's Adam is captured only if capturable.
            group["lr"], group["capturable"] = self._lr, True
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, **_MODE):
            self._result = super().step()
        return graph

    def _drop_gradients(self) -> None:
        if self._recorded is None:
            super()._drop_gradients()
        elif self._scale != 1.0:  # else the next replay writes over them
            self._optimizer.zero_grad(set_to_none=False)

    def _record(self, tokens: Tensor, targets: Tensor) -> "_Recording | None":
        try:
            if self._scale != 1.0:
                # Replays add to gradients that are there.
                for parameter in self._module.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
            # Clones, since every replay reads from their addresses.
            return _Recording(self._compute, tokens.clone(), targets.clone())
        except torch.OutOfMemoryError:
            self._fits = False
        self._optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        warnings.warn("no memory is left for CUDA graphs: going on without", stacklevel=2)
        return None


class _Recording:
    """Both graphs of a micro-batch, and the tensors that they read and write.

    Args:
        compute: the mean loss of (tokens, targets, None).
        tokens, targets: [B, T] int64 each, which every replay reads.
    """

    def __init__(self, compute: Callable[..., Tensor], tokens: Tensor, targets: Tensor) -> None:
        self._inputs = (tokens, targets)
        self._gradient = torch.ones((), device=tokens.device)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, **_MODE):
            loss = compute(tokens, targets, None)
        # The backward reads what the forward keeps in its pool. Graphs may share one where they are
        # replayed in the order of their capture.
        with torch.cuda.graph(self._backward, pool=self._forward.pool(), **_MODE):
            loss.backward(self._gradient)
        self._loss = loss.detach()
        self._leaf = self._loss

    def forward(self, *inputs: Tensor) -> Tensor:
        for recorded, tensor in zip(self._inputs, inputs, strict=True):
            recorded.copy_(tensor)
        self._forward.replay()
        self._leaf = self._loss.detach().requires_grad_()
        return self._leaf

    def backward(self, loss: Tensor) -> None:
        """Replay the backward with what `loss` makes of the recorded one."""
        (factor,) = torch.autograd.grad(loss, self._leaf)
        self._gradient.copy_(factor)
        self._backward.replay()

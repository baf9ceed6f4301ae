"""A decoder of transformers over tensor-parallel shards of its matrices.

What lies between matrices is whole on each rank, as transformers' own code computes it: Megatron's
f and g (arXiv:1909.08053) are around its Linears, without sequence parallelism.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from launcher.model.derived import as_one
from launcher.model.foreign.config import ForeignConfig
from launcher.model.foreign.conversion import PREFIX
from launcher.model.foreign.decoder import ForeignDecoder, skeleton
from launcher.model.foreign.head import ForeignHead
from launcher.model.foreign.matrices import (
    BY_ROWS,
    EXPERTS,
    GATHERED,
    SPLIT,
    SUMMED,
    matrix_styles,
)
from launcher.parallel.groups import TensorGroup, exchanged, unchanged
from launcher.parallel.mesh import ModelParallelRank
from launcher.parallel.tensor.layers import replicated
from launcher.parallel.tensor.loss import vocab_parallel_loss
from launcher.parallel.tensor.shards import bounds, shard_of


class LocalMatrixDecoder(ForeignDecoder):
    """A decoder of transformers with some of its heads, of the MLP's width and the vocabulary."""

    def __init__(self, config: ForeignConfig, tensor_group: TensorGroup) -> None:
        super().__init__(config, _local_causal(config, tensor_group))
        shared, modules = _SharedInput(tensor_group), dict(self.causal.named_modules())
        for name, style in matrix_styles(config).items():
            if style == EXPERTS:
                _sum_experts(self.causal.get_submodule(name), tensor_group)
            elif (module := modules.get(name)) is None:  # a parameter of experts
                continue
            elif style == SUMMED:
                self.causal.set_submodule(name, _SummedGradient(module, tensor_group))
            else:
                self.causal.set_submodule(name, _Matrix(module, shared, style))
        first, end = bounds(config.vocab_size, tensor_group.rank)
        _look_up_rows(self.causal.get_input_embeddings(), first, end, tensor_group)
        head = self.causal.get_output_embeddings()
        self.causal.set_output_embeddings(_VocabParallelHead(head, first, config, tensor_group))


def _local_causal(config: ForeignConfig, tensor_group: TensorGroup) -> Any:
    """Build a model with local parameters, and never whole ones: zero.Init would shard those."""
    causal = copy.deepcopy(skeleton(config.document, config.attention))  # the skeleton is cached
    rank = ModelParallelRank(tensor=tensor_group.rank)
    local = {
        parameter: _Allocated(
            shard_of(PREFIX + name, parameter.shape, config, rank).shape
        ).parameter
        for name, parameter in causal.named_parameters()
    }
    for module in causal.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = local[parameter]
    return causal


class _Allocated(nn.Module):
    """A parameter that is made in the `__init__` of a module, which zero.Init follows."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.empty(shape))


class _SharedInput:
    """The input of column-wise matrices, whose gradient is the sum over the ranks: taken once for
    all that read one tensor, and kept until a row-wise matrix follows."""

    def __init__(self, tensor_group: TensorGroup) -> None:
        self.tensor_group = tensor_group
        self._seen: Tensor | None = None
        self._taken: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """Return x, with one gradient for all who take it."""
        if self._taken is None or self._seen is not x:
            self._seen, self._taken = x, _copied(x, self.tensor_group)
        return self._taken

    def drop(self) -> None:
        """Hold no tensor any more."""
        self._seen = self._taken = None


class _Matrix(nn.Module):
    """A Linear over a shard of its matrix, with the parameters of the whole one under their names.

    With rows of it, [..., in] -> [..., out / ranks], or all of `out` if `GATHERED`. With columns,
    [..., in / ranks] -> [..., out], or from all of `in` if `SPLIT`; the bias is added once.
    """

    def __init__(self, linear: nn.Linear, shared: _SharedInput, style: str) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias: Tensor | None = linear.bias
        self.shared, self.tensor_group, self.style = shared, shared.tensor_group, style

    def forward(self, x: Tensor) -> Tensor:
        if self.style in BY_ROWS:
            y = F.linear(self.shared.take(x), self.weight, self.bias)
            return _gathered(y, self.tensor_group) if self.style == GATHERED else y
        self.shared.drop()
        if self.style == SPLIT:
            x = _split(x, self.tensor_group)
        summed: Tensor = _Summed.apply(F.linear(x, self.weight), self.tensor_group, True)
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


class _SummedGradient(nn.Module):
    """A module between column-wise and row-wise matrices, with parameters that are whole."""

    def __init__(self, module: nn.Module, tensor_group: TensorGroup) -> None:
        super().__init__()
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._computing = (module,)  # no submodule, whose parameters would have other names
        self.tensor_group = tensor_group

    def forward(self, x: Tensor) -> Tensor:
        whole = {
            n: replicated(p, self.tensor_group)
            for n, p in self._parameters.items()
            if p is not None
        }
        y: Tensor = functional_call(self._computing[0], whole, (x,))
        return y


def _sum_experts(experts: Any, tensor_group: TensorGroup) -> None:
    """Have experts sum up what each rank computes of all of them."""
    compute = experts.forward

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        hidden, weights = (_copied(x, tensor_group) for x in (hidden_states, top_k_weights))
        y: Tensor = _Summed.apply(compute(hidden, top_k_index, weights), tensor_group, False)
        return y

    experts.forward = forward


def _look_up_rows(embedding: Any, first: int, end: int, tensor_group: TensorGroup) -> None:
    """Have an embedding look up tokens [first, end) and sum up with other ranks, whatever else its
    forward does to a vector."""
    look_up, padding = embedding.forward, embedding.padding_idx
    inside = padding is not None and first <= padding < end
    # The row that gets no gradient, counted from this rank's first.
    embedding.padding_idx = padding - first if inside else None

    def forward(tokens: Tensor) -> Tensor:
        elsewhere = (tokens < first) | (tokens >= end)
        found = look_up((tokens - first).masked_fill_(elsewhere, 0))
        y: Tensor = _Summed.apply(
            found.masked_fill_(elsewhere[..., None], 0.0), tensor_group, False
        )
        return y

    embedding.forward = forward


class _VocabParallelHead(ForeignHead):
    """Rows of the head from `first` on, and the loss over all rows."""

    def __init__(
        self, head: ForeignHead, first: int, config: ForeignConfig, tensor_group: TensorGroup
    ) -> None:
        super().__init__(head, head.function, chunk_rows=head.chunk_rows)
        self.first, self.vocab_size, self.tensor_group = first, config.vocab_size, tensor_group

    def loss(self, rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Each rank has all rows."""
        return vocab_parallel_loss(
            rows,
            weight,
            targets,
            chunk_rows=self.chunk_rows,
            vocab_size=self.vocab_size,
            first=self.first,
            tensor_group=self.tensor_group,
            softcap=self.function.softcap,
        )


def _copied(x: Tensor, tensor_group: TensorGroup) -> Tensor:
    """Return x, whose gradient is the sum over the ranks."""
    # In place: products of Linears have just made it.
    return exchanged(x, unchanged, lambda grad: tensor_group.all_reduce(grad.contiguous()))


class _Summed(torch.autograd.Function):
    """The sum over the ranks, in x itself, which nothing else reads.

    A recomputation that keeps products hands them back as sums: what is a `product` is summed once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor_group: TensorGroup, product: bool) -> Tensor:
        ctx.mark_dirty(x)
        total = partial(tensor_group.all_reduce, x)
        as_one(total) if product else total()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def _gathered(x: Tensor, tensor_group: TensorGroup) -> Tensor:
    """[..., n] -> the columns of all ranks, [..., ranks * n]; each rank has the whole gradient."""
    return exchanged(x, partial(_all_columns, tensor_group), partial(_own_columns, tensor_group))


def _split(x: Tensor, tensor_group: TensorGroup) -> Tensor:
    """[..., ranks * n] -> this rank's columns, [..., n]."""
    return exchanged(
        x,
        lambda whole: _own_columns(tensor_group, whole).contiguous(),
        partial(_all_columns, tensor_group),
    )


def _own_columns(tensor_group: TensorGroup, x: Tensor) -> Tensor:
    return x.chunk(tensor_group.rank.size, -1)[tensor_group.rank.index]


def _all_columns(tensor_group: TensorGroup, x: Tensor) -> Tensor:
    of_ranks = tensor_group.all_gather(x[None].contiguous())
    return of_ranks.movedim(0, -2).flatten(-2)

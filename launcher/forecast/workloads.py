"""Workloads that a profile times: the parts of a model, forward and backward, on made-up values."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from launcher.forecast.trace.work import Product
from launcher.model.config import ModelConfig
from launcher.model.gpt import Block
from launcher.model.layers import rotate, rotation


def linears(
    shapes: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """All three matmuls of linears of (inputs, outputs) over `rows` tokens."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    operands = [(random(rows, i), random(o, i), random(rows, o)) for i, o in shapes]

    def forward_and_backward() -> None:
        for inputs, weight, gradient in operands:
            inputs @ weight.t()
            gradient @ weight
            gradient.t() @ inputs

    return forward_and_backward


def linear_products(
    shapes: Sequence[tuple[int, int]], rows: int, element_bytes: int
) -> list[Product]:
    """The products of `linears`."""
    return [
        Product(1, *sizes, element_bytes)
        for inner, outer in shapes
        for sizes in ((rows, outer, inner), (rows, inner, outer), (outer, inner, rows))
    ]


def elementwise(model: ModelConfig, rows: int, device: torch.device) -> Callable[[], None]:
    """Compute what a block has besides matmuls and attention over `rows` tokens, in fp32."""
    with torch.device("meta"):
        block = Block(model)
    norm, head_norm = (part.to_empty(device=device) for part in (block.ln_1, block.attn.q_norm))
    weights = [*norm.parameters(), *head_norm.parameters()]
    for weight in weights:
        nn.init.ones_(weight)
    turns = model.position == "rope"
    turn = rotation(model, torch.arange(rows, device=device)) if turns else None
    heads = (1, rows, model.heads + model.kv_head_count, model.head_size)
    widths = (model.d_model, model.attention_dim, model.up_dim)
    x, attended, hidden, queries_and_keys = inputs = [
        torch.randn(shape, device=device, requires_grad=True)
        for shape in (*((rows, width) for width in widths), heads)
    ]

    def forward_and_backward() -> None:
        # a block has two norms and two sums with the residual stream
        y = x + norm(x)
        y = y + norm(y)
        turned = head_norm(queries_and_keys)
        turned = turned if turn is None else rotate(turned, turn)
        outputs = (y, attended.clone(), block.mlp.activation(hidden), turned)
        torch.autograd.grad(outputs, [*inputs, *weights], outputs)

    return forward_and_backward


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """Record the kernels of `call` on a GPU; what is returned runs them again."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # where libraries make their handles and workspaces
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay

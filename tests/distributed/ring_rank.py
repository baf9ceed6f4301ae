"""One rank of the process group that runs cases of ring attention, one after the other.

    torchrun --nproc 4 ring_rank.py FOLDER CASE...

The result of a case: each rank's largest errors.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from rank_loop import of_all_ranks, rank_of_group, report
from torch import Tensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

from launcher.model.attention.dense import eager
from launcher.model.attention.kernel import dense_mask
from launcher.model.selective import AllProducts, selective_contexts
from launcher.parallel.context.ring import ring
from launcher.parallel.groups import ContextGroup
from launcher.parallel.mesh import ContextRank

WORLD_SIZE = 4
BATCH, HEAD_SIZE = 2, 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
CONTEXTS: dict[str, Any] = {
    "all": noop_context_fn,
    "all but kernels": partial(selective_contexts, partial(AllProducts, None)),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`ranks` of the world at a time form a ring; those of two are not neighbours in the world."""

    ranks: int
    heads: int
    kv_heads: int
    dtype: Literal["fp32", "bf16"]
    seq_len: int = 96
    recompute: Literal["nothing", "all", "all but kernels"] = "nothing"

    @property
    def name(self) -> str:
        recompute = "" if self.recompute == "nothing" else f", recompute {self.recompute}"
        heads = f"{self.heads} heads on {self.kv_heads}"
        return f"{self.ranks} ranks, {heads}, {self.dtype}, T={self.seq_len}{recompute}"


CASES = [
    *(
        Case(ranks=ranks, heads=heads, kv_heads=kv_heads, dtype=dtype)
        for ranks in (1, 2, 4)
        for heads, kv_heads in ((4, 4), (4, 2), (3, 1))
        for dtype in ("fp32", "bf16")
    ),
    Case(ranks=4, heads=4, kv_heads=2, dtype="fp32", seq_len=8),  # chunks of one token
    Case(ranks=4, heads=4, kv_heads=2, dtype="fp32", recompute="all"),
    Case(ranks=4, heads=4, kv_heads=2, dtype="fp32", recompute="all but kernels"),
]


def main() -> None:
    folder, *names = sys.argv[1:]
    known = {case.name: case for case in CASES}
    with rank_of_group() as world:
        groups = {
            ranks: dist.new_subgroups_by_enumeration(
                [
                    list(range(first, WORLD_SIZE, WORLD_SIZE // ranks))
                    for first in range(WORLD_SIZE // ranks)
                ]
            )[0]
            for ranks in (1, 2, 4)
        }

        def run(case: Case) -> dict[str, Any]:
            return {"errors": of_all_ranks(errors_of(case, groups[case.ranks]), world)}

        report(folder, world, (({"name": name}, partial(run, known[name])) for name in names))


def errors_of(case: Case, group: dist.ProcessGroup) -> dict[str, float]:
    """Largest error of this rank's output and gradients, as a part of the largest that is expected,
    against the textbook form over the whole sequence."""
    torch.manual_seed(dist.get_rank() % (WORLD_SIZE // case.ranks))  # another one in each ring
    # [B, T, H, e] in memory, as the model's projection leaves them.
    shapes = [(BATCH, case.seq_len, heads, HEAD_SIZE) for heads in _heads(case)]
    *qkv, direction = (torch.randn(s).to(DTYPES[case.dtype]).transpose(1, 2) for s in shapes)
    seen = partial(eager, mask=dense_mask(case.seq_len, None, torch.device("cpu")))
    expected = _with_gradients(
        partial(seen, window=None, dropout=0.0), [part.float() for part in qkv], direction.float()
    )
    rank = ContextRank(size=case.ranks, index=dist.get_rank(group), method="ring")
    held = [position for each in rank.local_ranges(case.seq_len) for position in each]
    attend: Any = partial(
        ring(ContextGroup(rank=rank, group=group)), mask=None, window=None, dropout=0.0
    )
    if case.recompute != "nothing":
        contexts = CONTEXTS[case.recompute]
        attend = partial(checkpoint, attend, use_reentrant=False, context_fn=contexts)
    got = _with_gradients(attend, [part[:, :, held] for part in qkv], direction[:, :, held])
    return {
        what: ((ours.float() - whole[:, :, held]).abs().max() / whole.abs().max()).item()
        for what, ours, whole in zip(("out", "dq", "dk", "dv"), got, expected, strict=True)
    }


def _heads(case: Case) -> tuple[int, int, int, int]:
    """Return the number of heads of q, k, v and the output."""
    return case.heads, case.kv_heads, case.kv_heads, case.heads


def _with_gradients(attend: Any, qkv: list[Tensor], direction: Tensor) -> tuple[Tensor, ...]:
    inputs = [part.detach().requires_grad_() for part in qkv]
    out = attend(*inputs)
    assert out.dtype == direction.dtype
    return (out.detach(), *torch.autograd.grad((out * direction).sum(), inputs))


if __name__ == "__main__":
    main()

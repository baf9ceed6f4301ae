"""Places of a rank's elements in whole tensors."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from launcher.parallel.tensor.shards import ParameterShard
from launcher.strategies.flat_shards import PARAM, Shard
from launcher.strategies.native_state import ModelShardState


def test_experts_that_fsdp_and_tensor_parallelism_divide_lie_where_they_belong() -> None:
    """FSDP divides columns of what tensor parallelism leaves of the rows."""
    whole = torch.arange(3 * 8 * 6, dtype=torch.float32).view(3, 8, 6)
    seen = torch.zeros(whole.numel())
    rows = ((0, 2, 4, 6), (2, 4, 6, 8))  # of gate and up, in each expert
    for a, b, c, d in rows:
        bounds = [(8 * e + low, 8 * e + high) for e in range(3) for low, high in ((a, b), (c, d))]
        cut = ParameterShard((3, 8, 6), rows=tuple(bounds))
        local = cut.take(whole)
        for fsdp_rank in range(2):
            mine = local[..., 3 * fsdp_rank : 3 * fsdp_rank + 3].flatten()
            held = Shard(name="x", kind=PARAM, start=3 * fsdp_rank, data=mine, run=3, pitch=6)
            shards = SimpleNamespace(of={"x": cut}, model_parallel=None)
            inner = SimpleNamespace(
                **{"shapes": {"x": local.shape}, "kinds": (PARAM,), "updated": None},
                **{"counters": None, "finish_load": None, "loaded": lambda held=held: iter([held])},
            )
            for shard in ModelShardState(cast(Any, inner), cast(Any, shards)).loaded():
                places = shard.places.place(torch.arange(shard.data.numel()))
                assert torch.equal(whole.flatten()[places], shard.data)
                seen[places] += 1
    assert torch.equal(seen, torch.ones_like(seen))

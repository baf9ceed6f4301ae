"""docs/checkpoint-format.md: its lines of Python, run as they are written there."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher.checkpoint import Checkpoint
from launcher.checkpoint.rank_files import write_shards
from launcher.strategies.flat_shards import MASK, PARAM, Shard

DOCS = Path(__file__).parents[3] / "docs" / "checkpoint-format.md"


def test_ten_lines_rebuild_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "demo" / "checkpoints" / "step-00000100"
    folder.mkdir(parents=True)
    shapes = {"wte.weight": (7, 3), "ln_f.bias": (3,), "large": (1500, 1000)}
    factors: dict[str, dict[str, tuple[int, ...]]] = {
        "rows": {"wte.weight": (7, 1), "large": (1500, 1)},
        MASK: {"large": (187_500,)},
    }
    expected: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
    shards: list[list[Shard]] = [[], []]
    generator = torch.Generator().manual_seed(0)
    for kind in (PARAM, "rows", MASK):
        for name, shape in factors.get(kind, shapes).items():
            whole = torch.randn(shape, generator=generator)
            if kind == MASK:
                whole = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
            expected[name, kind] = whole.numpy()
            cut = whole.numel() // 2 + 1  # inside a row
            for rank, start, data in (
                (1, 0, whole.flatten()[:cut]),
                (0, cut, whole.flatten()[cut:]),
            ):
                shard = Shard(name=name, kind=kind, start=start, data=data)
                shards[rank].append(shard)
    whole = torch.randn(40, 6, generator=generator)  # by columns; the first in two pieces, too
    shapes["columns"], expected["columns", PARAM] = (40, 6), whole.numpy()
    for rank, start, rows, run in (
        (0, 0, slice(15), 2),
        (1, 90, slice(15, 40), 2),
        (1, 2, slice(40), 4),
    ):
        data = whole[rows, start % 6 : start % 6 + run].reshape(-1)
        shards[rank].append(
            Shard(name="columns", kind=PARAM, start=start, data=data, run=run, pitch=6)
        )
    files = [
        write_shards(folder / f"rank-{n:05d}.safetensors", partial(iter, part))
        for n, part in enumerate(shards)
    ]
    checkpoint = Checkpoint(
        path=folder,
        step=100,
        world_size=2,
        shapes=shapes,
        kinds=[PARAM, "rows", MASK],
        counters={},
        extra={},
        rng=[],
        files=files,
        own_shapes=factors,
    )
    checkpoint.write()
    Checkpoint.open(folder)  # so it is one

    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert "launcher" not in code
    found: dict[str, Any] = {}
    exec(code, found)
    tensors = found["tensors"]
    assert tensors.keys() == expected.keys()
    assert all(np.array_equal(tensors[key], expected[key]) for key in expected)

"""Programs of several ranks that know nothing of shardscale."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from nullgpu.runs import environment

PROGRAMS = Path(__file__).parent / "programs"
LAYER_BYTES = 2048 * 2048 * 4  # in fp32
STATES = 3  # weights and Adam's two


def ranks(
    folder: Path,
    gpus: int,
    program: str,
    *words: str,
    nproc: int = 0,
    more: Mapping[str, str] | None = None,
) -> list[Any]:
    """Return what each rank has printed, in the order of ranks; `nproc` 0 is without torchrun."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}")
    command = [sys.executable, *(torchrun if nproc else ()), str(PROGRAMS / program), *words]
    variables = environment(folder, {"SHARDSCALE_NULL_GPU_CHECKS": "false"}, gpus=gpus)
    variables |= {"OMP_NUM_THREADS": "1", **(more or {})}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    assert len(found) == max(nproc, 1), done.stdout
    return sorted(found, key=lambda each: int(each["rank"]))


@pytest.mark.parametrize("size", [2, 4])
def test_objects_travel(size: int, tmp_path: Path) -> None:
    for rank, found in enumerate(ranks(tmp_path, size, "objects.py", nproc=size)):
        assert found["summed"] == [sum(range(1, size + 1)), 5 * size]
        assert found["broadcast"] == [{"rank": size - 1, "text": "y" * 10 * size}]
        assert found["gathered"] == ["z" * (r + 1) for r in range(size)]
        assert found["to_first"] == ([[r] * 3 for r in range(size)] if rank == 0 else None)
        assert found["scattered"] == f"to {rank}"
        large = [[300_000 + r, r] for r in range(size)]
        assert found["large"] == (large if rank == 0 else [])
        assert found.get("in a pair") == ([7, "two"] if rank < 2 else None)


# Of cuBLAS and of cuBLASLt, on compute capability 9.0.
WORKSPACES_BYTES = 2 * 32 * 2**20


@pytest.mark.parametrize(
    ("way", "size", "states_bytes", "buffers_bytes"),
    [
        ("ddp", 2, 8 * (STATES + 1) * LAYER_BYTES, 0),  # its buckets are as large as the gradients
        ("fsdp1", 2, 8 * STATES * LAYER_BYTES // 2, 0),
        ("fsdp2", 2, 8 * STATES * LAYER_BYTES // 2, 0),
        ("fsdp2", 4, 8 * STATES * LAYER_BYTES // 4, 0),
        # bf16 weights; in fp32 a rank's part of them and of Adam's states. Buckets besides.
        ("zero3", 2, 8 * (LAYER_BYTES // 2 + STATES * LAYER_BYTES) // 2, 48 * 2**20),
        ("zero2-offload", 2, 8 * LAYER_BYTES // 2, 16 * 2**20),
    ],
)
def test_each_rank_holds_its_states(
    way: str, size: int, states_bytes: int, buffers_bytes: int, tmp_path: Path
) -> None:
    for found in ranks(tmp_path, size, "sharded.py", way, nproc=size):
        least = states_bytes + WORKSPACES_BYTES
        assert least <= found["between"] <= least + buffers_bytes, found
        assert found["peak"] > found["between"]


def test_one_rank_of_64_runs_alone(tmp_path: Path) -> None:
    alone = {"SHARDSCALE_NULL_GPU_ALONE": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "64"}
    (found,) = ranks(tmp_path, 8, "sharded.py", "fsdp2", more=alone)
    assert found["between"] == 8 * STATES * LAYER_BYTES // 64 + WORKSPACES_BYTES


def test_trainer_runs_on_two_ranks(tmp_path: Path) -> None:
    for found in ranks(tmp_path, 2, "trainer.py", str(tmp_path / "out"), nproc=2):
        assert found["used"] == 1


def test_trainer_takes_all_gpus_of_one_process(tmp_path: Path) -> None:
    (found,) = ranks(tmp_path, 8, "trainer.py", str(tmp_path / "out"))
    assert found["used"] == 8

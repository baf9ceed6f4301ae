"""The null NCCL between real processes: what is small travels and is reduced for real."""

import itertools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.tools.rehearse.build import FLAGS, SOURCES

HERE = Path(__file__).parent / "null_nccl"
PARTS = ("nccl", "communicator", "rendezvous", "reduce", "kept", "timeline", "watchdog")
KEYS = itertools.count()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to build the null NCCL with")
    path = tmp_path_factory.mktemp("nccl") / "nccl.so"
    sources = [*(SOURCES / f"{name}.c" for name in PARTS), HERE / "one_device.c"]
    output = ("-o", str(path), "-lm")
    command = [compiler, *FLAGS, "-shared", "-Werror", f"-I{SOURCES}", *map(str, sources), *output]
    subprocess.run(command, check=True)
    return path


def ranks(
    library: Path, scenario: str, size: int, *, only: int | None = None, **variables: str
) -> list[tuple[dict[str, Any], str]]:
    """Run a scenario; return what each rank has found, and what it has said on stderr."""
    folder, key = library.parent, f"key{next(KEYS)}"
    environ = {"SHARDSCALE_NULL_GPU_RENDEZVOUS": str(folder), **variables}
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "rank.py"), str(library), scenario, *words, key],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in ((str(rank), str(size)) for rank in range(size) if only in (None, rank))
    ]
    ended = [process.communicate(timeout=60) for process in started]
    return [(json.loads(output or "{}"), said) for output, said in ended]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


OPERATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    **{"0": sum, "1": math.prod, "2": max, "3": min, "4": mean},
}


def reduced(size: int) -> Mapping[str, list[float]]:
    """Return [r + 1, 10 * (r + 1)] of each rank r as they are reduced, by operation."""
    columns = [[factor * (rank + 1) for rank in range(size)] for factor in (1, 10)]
    return {name: [of(column) for column in columns] for name, of in OPERATIONS.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_small_messages_travel_and_are_reduced(size: int, library: Path) -> None:
    everybody = ranks(library, "all_in_turn", size)
    assert [said for _, said in everybody] == [""] * size
    for rank, (found, _) in enumerate(everybody):
        of = found["collectives"]
        for type_ in ("int32", "int64", "half", "float"):
            for operation, values in reduced(size).items():
                if "int" in type_:
                    values = [int(value) for value in values]
                expected = values if max(values) < 65504 or type_ != "half" else of["half 1"]
                assert of[f"{type_} {operation}"] == expected, (type_, operation)
        assert of["gathered"] == [v for r in range(size) for v in (r + 1, 10 * (r + 1))]
        assert of["broadcast"] == [size, 10 * size]
        of_sum = [int(value) for value in reduced(size)["0"]]
        assert of["reduced to 1"] == (of_sum if rank == 1 else [0, 0])
        assert of["scattered"] == [sum(10 * r + rank for r in range(size))]
        assert of["exchanged"] == [10 * r + rank for r in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_not_known_stays_so(size: int, library: Path) -> None:
    for found, _ in ranks(library, "all_in_turn", size):
        assert found["unknown"]["one is unknown"] is None
        assert found["unknown"]["gathered"] == [None, *[[1]] * (size - 1)]
        assert found["unknown"]["large"] is None
        gathered = [rank + 1 for rank in range(size)]
        assert found["objects"] == {"gathered": gathered, "broadcast": [size]}


@pytest.mark.parametrize("size", [2, 4])
def test_pairs_and_parts_of_a_group(size: int, library: Path) -> None:
    for rank, (found, _) in enumerate(ranks(library, "all_in_turn", size)):
        previous = (rank - 1) % size
        assert found["pairs"]["received"] == [100 * previous + number for number in range(20)]
        member = size == 2 or rank < size - 1
        assert found["split"]["member"] == member
        if member:
            among = [r for r in range(size) if r % 2 == rank % 2 and (size == 2 or r < size - 1)]
            among.reverse()
            assert found["split"]["gathered"] == among
            assert (found["split"]["size"], found["split"]["rank"]) == (
                len(among),
                among.index(rank),
            )
    assert list(library.parent.glob("shardscale-nccl-*")) == []


def test_a_rank_that_has_ended_is_named(library: Path) -> None:
    for found, said in ranks(library, "last_ends", 3)[:2]:
        assert found["code"] == 6
        assert "waits for rank 2 of 3, which has ended\n" in said


def test_a_rank_that_never_comes_is_named(library: Path) -> None:
    late = {"SHARDSCALE_NULL_GPU_TIMEOUT_S": "0.2"}
    ((found, said),) = ranks(library, "disagree", 2, only=0, **late)
    assert found["code"] == 6
    assert said == (
        "shardscale: ncclAllReduce of rank 0 waits for rank 1 of 2, which has never joined the "
        "group\n"
    )


def test_ranks_that_call_different_things_are_told(library: Path) -> None:
    said = [said for _, said in ranks(library, "disagree", 2)]
    assert any(
        "rank 0 calls ncclAllReduce with 8 bytes where rank 1 of 2 calls ncclAllGather with 8"
        in text
        for text in said
    )


def test_one_rank_answers_for_all(library: Path) -> None:
    ((found, said),) = ranks(library, "alone", 4, only=2, SHARDSCALE_NULL_GPU_ALONE="1")
    assert said == ""
    assert found["int64 0"] == [12, 120]  # four times its own
    assert found["float 4"] == [3, 30]
    assert found["gathered"] == [2, 2, 2, 2]
    assert found["scattered"] == [4 * 22]

"""One rank on the null NCCL: `rank.py LIBRARY SCENARIO RANK SIZE ID`, results as JSON."""

import ctypes
import json
import os
import struct
import sys
from collections.abc import Sequence
from typing import Any

INT32, INT64, HALF, FLOAT, BFLOAT = 2, 4, 6, 7, 9
FORMATS = {INT32: "i", INT64: "q", HALF: "e", FLOAT: "f"}
SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE = range(5)
DEVICE = 1 << 44
TO = DEVICE + (1 << 30)
BIG = 1 << 20  # elements, more than what travels


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class Rank:
    """A communicator and a few tensors of its device."""

    def __init__(self, library: str, rank: int, size: int, key: str) -> None:
        self.nccl = ctypes.CDLL(library)
        self.rank, self.size = rank, size
        self.communicator = ctypes.c_void_p()
        unique = UniqueId(key.encode())
        assert self.nccl.ncclCommInitRank(ctypes.byref(self.communicator), size, unique, rank) == 0

    def call(self, name: str, *arguments: Any) -> int:
        """The function's code; an address or a count is 64 bits wide."""
        wide = [ctypes.c_size_t(a) if type(a) is int and a > 9 else a for a in arguments]
        code: int = getattr(self.nccl, f"nccl{name}")(*wide, self.communicator)
        return code

    def put(self, address: int, values: Sequence[float], type_: int) -> None:
        raw = struct.pack(f"{len(values)}{FORMATS[type_]}", *values)
        self.nccl.keep(ctypes.c_size_t(address), raw, ctypes.c_size_t(len(raw)))

    def get(self, address: int, count: int, type_: int) -> list[float] | None:
        """Return the values if they are known; else None."""
        raw = ctypes.create_string_buffer(struct.calcsize(f"{count}{FORMATS[type_]}"))
        known = self.nccl.recall(ctypes.c_size_t(address), raw, ctypes.c_size_t(len(raw)))
        return (
            None if known < len(raw) else list(struct.unpack(f"{count}{FORMATS[type_]}", raw.raw))
        )

    def count(self, count: int) -> ctypes.c_size_t:
        return ctypes.c_size_t(count)


def collectives(rank: Rank) -> dict[str, Any]:
    """Each rank r has [r + 1, 10 * (r + 1)]."""
    found: dict[str, Any] = {}
    own = [rank.rank + 1, 10 * (rank.rank + 1)]
    for name, type_ in (("int32", INT32), ("int64", INT64), ("half", HALF), ("float", FLOAT)):
        for operation in (SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE):
            rank.put(DEVICE, own, type_)
            assert rank.call("AllReduce", DEVICE, TO, rank.count(2), type_, operation) == 0
            found[f"{name} {operation}"] = rank.get(TO, 2, type_)
    rank.put(DEVICE, own, INT64)
    assert rank.call("AllGather", DEVICE, TO, rank.count(2), INT64) == 0
    found["gathered"] = rank.get(TO, 2 * rank.size, INT64)
    assert rank.call("Broadcast", DEVICE, TO, rank.count(2), INT64, rank.size - 1) == 0
    found["broadcast"] = rank.get(TO, 2, INT64)
    rank.put(TO, [0, 0], INT64)
    assert rank.call("Reduce", DEVICE, TO, rank.count(2), INT64, SUM, 1) == 0
    found["reduced to 1"] = rank.get(TO, 2, INT64)
    rank.put(DEVICE, [10 * rank.rank + i for i in range(rank.size)], INT32)
    assert rank.call("ReduceScatter", DEVICE, TO, rank.count(1), INT32, SUM) == 0
    found["scattered"] = rank.get(TO, 1, INT32)
    assert rank.call("AlltoAll", DEVICE, TO, rank.count(1), INT32) == 0
    found["exchanged"] = rank.get(TO, rank.size, INT32)
    return found


def unknown(rank: Rank) -> dict[str, Any]:
    """Send what a kernel has written, which is not known after it has travelled, and what is large,
    which does not travel."""
    found: dict[str, Any] = {}
    rank.put(TO, [7], INT64)
    rank.nccl.forget(ctypes.c_size_t(DEVICE), ctypes.c_size_t(1 << 16))
    if rank.rank:
        rank.put(DEVICE, [1], INT64)
    assert rank.call("AllReduce", DEVICE, TO, rank.count(1), INT64, SUM) == 0
    found["one is unknown"] = rank.get(TO, 1, INT64)
    assert rank.call("AllGather", DEVICE, TO, rank.count(1), INT64) == 0
    found["gathered"] = [rank.get(TO + 8 * r, 1, INT64) for r in range(rank.size)]
    rank.put(TO, [7], INT64)
    assert rank.call("AllReduce", DEVICE, TO, rank.count(BIG), INT64, SUM) == 0
    found["large"] = rank.get(TO, 1, INT64)
    return found


def objects(rank: Rank) -> dict[str, Any]:
    """A pickle of 320 kB of each rank, in one room for all, and then the last rank's."""
    count = 40_000
    rank.put(DEVICE, [rank.rank + 1] * count, INT64)
    assert rank.call("AllGather", DEVICE, TO, rank.count(count), INT64) == 0
    gathered = rank.get(TO, rank.size * count, INT64)
    assert rank.call("Broadcast", DEVICE, TO, rank.count(count), INT64, rank.size - 1) == 0
    broadcast = rank.get(TO, count, INT64)
    assert gathered is not None
    assert broadcast is not None
    return {"gathered": gathered[::count], "broadcast": sorted({*broadcast})}


def pairs(rank: Rank) -> dict[str, Any]:
    """A ring in one group, 20 messages each way, and the last ones to the first rank."""
    following, previous = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    rank.nccl.ncclGroupStart()
    for number in range(20):
        rank.put(DEVICE + 8 * number, [100 * rank.rank + number], INT64)
        assert rank.call("Recv", TO + 8 * number, rank.count(1), INT64, previous) == 0
        assert rank.call("Send", DEVICE + 8 * number, rank.count(1), INT64, following) == 0
    assert rank.nccl.ncclGroupEnd() == 0
    return {"received": rank.get(TO, 20, INT64)}


def split(rank: Rank) -> dict[str, Any]:
    """Even and odd ranks, in reverse order; the last rank is in no group."""
    color = -1 if rank.rank == rank.size - 1 and rank.size > 2 else rank.rank % 2
    new = ctypes.c_void_p()
    code = rank.nccl.ncclCommSplit(rank.communicator, color, -rank.rank, ctypes.byref(new), None)
    assert code == 0
    if not new:
        return {"member": False}
    whole, rank.communicator = rank.communicator, new
    size, own = ctypes.c_int(), ctypes.c_int()
    rank.nccl.ncclCommCount(new, ctypes.byref(size))
    rank.nccl.ncclCommUserRank(new, ctypes.byref(own))
    rank.put(DEVICE, [rank.rank], INT64)
    assert rank.call("AllGather", DEVICE, TO, rank.count(1), INT64) == 0
    gathered = rank.get(TO, size.value, INT64)
    rank.nccl.ncclCommDestroy(new)
    rank.communicator = whole
    return {"member": True, "size": size.value, "rank": own.value, "gathered": gathered}


def all_in_turn(rank: Rank) -> dict[str, Any]:
    found = {
        f.__name__: f(rank) for f in (collectives, unknown, objects, pairs, split, collectives)
    }
    assert rank.nccl.ncclCommDestroy(rank.communicator) == 0
    return found


def last_ends(rank: Rank) -> dict[str, Any]:
    """The last rank ends where the others gather."""
    if rank.rank == rank.size - 1:
        os._exit(0)
    return {"code": rank.call("AllGather", DEVICE, TO, rank.count(1), INT64)}


def disagree(rank: Rank) -> dict[str, Any]:
    if rank.rank:
        return {"code": rank.call("AllGather", DEVICE, TO, rank.count(1), INT64)}
    return {"code": rank.call("AllReduce", DEVICE, TO, rank.count(1), INT64, SUM)}


def alone(rank: Rank) -> dict[str, Any]:
    """The only one of its group that runs."""
    return {**collectives(rank), **split(rank)}


SCENARIOS = {f.__name__: f for f in (all_in_turn, last_ends, disagree, alone)}

if __name__ == "__main__":
    path, scenario, number, world_size, unique_id = sys.argv[1:]
    member = Rank(path, int(number), int(world_size), unique_id)
    print(json.dumps(SCENARIOS[scenario](member)))

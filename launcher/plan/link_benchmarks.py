"""Disk rates, and what measured collectives say about links."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from launcher.plan.collectives import sent_bytes
from launcher.plan.machine import Rate
from launcher.strategies.traffic import Collective

_CHUNK_BYTES = 8 * 2**20


def disk_rates(folder: Path, size_bytes: int) -> dict[str, float]:
    """Sequential bytes/s of the disk under `folder`, as fields of `Machine`, through to the device:
    read after dropping the page cache, written with fsync."""
    path = folder / f".shardscale-profile-{os.getpid()}"
    chunk = os.urandom(min(_CHUNK_BYTES, size_bytes))
    chunks = size_bytes // len(chunk)
    try:
        start = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(chunks):
                file.write(chunk)
            os.fsync(file.fileno())
        written_s = time.perf_counter() - start
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            while file.read(len(chunk)):
                pass
            read_s = time.perf_counter() - start
    finally:
        path.unlink(missing_ok=True)
    size = chunks * len(chunk)
    return {"disk_read_bytes_per_s": size / read_s, "disk_write_bytes_per_s": size / written_s}


def fit_rate(
    kind: Collective, sizes_bytes: Sequence[int], seconds: Sequence[float], *, ranks: int
) -> Rate:
    """Latency and bandwidth that fit measured times best, each point weighted by its own time.

    One number of ranks cannot tell a start from hops: the latency is spread evenly over both.
    """
    sent = [sent_bytes(kind, size, ranks) for size in sizes_bytes]
    times = torch.tensor(seconds, dtype=torch.float64)
    volumes = torch.tensor(sent, dtype=torch.float64)
    design = torch.stack([torch.ones_like(times), volumes], dim=1) / times[:, None]
    wanted = torch.ones_like(times)[:, None]
    latency_s, s_per_byte = torch.linalg.lstsq(design, wanted).solution.flatten().tolist()
    if latency_s < 0 or s_per_byte <= 0:  # noise: the largest size says most about bandwidth
        latency_s, s_per_byte = 0.0, seconds[-1] / sent[-1]
    passes = 2 if kind == "all_reduce" else 1
    part_s = latency_s / (1 + passes * (ranks - 1))
    return Rate(start_s=part_s, hop_s=part_s, bytes_per_s=1 / s_per_byte)

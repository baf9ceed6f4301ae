"""`shardscale snapshot`, on a snapshot of torch 2.13.0's CUDA build ("real allocator, no kernels
run") and on ones made by hand."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from launcher.tools.snapshot.history import MOST_POINTS, DeviceHistory, device_histories
from launcher.tools.snapshot.read import read_snapshot
from launcher.tools.snapshot.snapshot_cli import main

RECORDED = Path(__file__).with_name("snapshot.pickle")
"""Two AdamW steps of Linear(512, 2048), GELU, Linear(2048, 512), parameters before the recording.
torch said of the same process: max_memory_allocated 109,103,104 and max_memory_reserved
113,246,208 bytes; memory_allocated 92,305,408 at its end."""


def test_bytes_are_those_that_torch_counts() -> None:
    (history,) = device_histories(read_snapshot(RECORDED))
    rounding = 512 * sum(held.tensors for held in history.at_peak)  # torch counts whole blocks
    assert history.peak.allocated_bytes == pytest.approx(109_103_104, abs=rounding)
    assert history.peak_reserved_bytes == 113_246_208
    assert history.points[-1].reserved_bytes == 113_246_208
    assert sum(held.size_bytes for held in history.at_peak) == history.peak.allocated_bytes
    sizes = dict.fromkeys(("before the recording", "optimizer step"), 0)
    for held in history.at_peak:
        if held.origin.phase in sizes:
            sizes[held.origin.phase] += held.size_bytes
    parameters = 4 * (2 * 512 * 2048 + 2048 + 512)
    assert sizes["before the recording"] == parameters
    assert sizes["optimizer step"] >= 2 * parameters  # both moments


FORWARD = [
    {"filename": "/x/site-packages/torch/nn/modules/linear.py", "line": 1, "name": "forward"},
    {"filename": "/x/site-packages/torch/nn/modules/module.py", "line": 2, "name": "_call_impl"},
    {"filename": "/home/me/net.py", "line": 7, "name": "forward"},
    {"filename": "/home/me/train.py", "line": 9, "name": "<module>"},
]


def event(action: str, address: int, size: int, frames: Any = None) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "frames": frames or []}


def snapshot_of(
    trace: list[dict[str, Any]], *blocks: tuple[int, str], address: int = 1000
) -> dict[str, Any]:
    total = sum(size for size, _ in blocks)
    made = [{"size": size, "state": state} for size, state in blocks]
    segment = {"address": address, "total_size": total, "device": 0, "blocks": made}
    return {"segments": [segment], "device_traces": [trace]}


def only(snapshot: dict[str, Any]) -> DeviceHistory:
    (history,) = device_histories(snapshot)
    return history


def test_peak_knows_what_is_older_than_the_recording() -> None:
    trace = [
        event("alloc", 1000, 100, FORWARD),
        event("free_completed", 5000, 40),  # allocated before, freed within
        event("alloc", 2000, 30),
    ]
    history = only(
        snapshot_of(trace, (100, "active_allocated"), (900, "inactive"), (30, "active_allocated"))
    )
    # The block at 2000 is the trace's own, the one at 1000 too.
    assert history.peak.allocated_bytes == 140
    assert {held.origin.phase: held.size_bytes for held in history.at_peak} == {
        "forward": 100,
        "before the recording": 40,
    }
    assert history.at_peak[0].origin.label == "net.py:7 forward"
    assert history.points[-1].allocated_bytes == 130


def test_reserved_bytes_follow_segments() -> None:
    trace = [
        event("segment_alloc", 1000, 600),
        event("segment_alloc", 9000, 500),
        event("segment_free", 9000, 500),
    ]
    history = only(snapshot_of(trace, (600, "inactive")))
    assert [point.reserved_bytes for point in history.points] == [0, 600, 1100, 600]
    assert history.peak_reserved_bytes == 1100


def test_fragmentation_tells_free_bytes_that_tensors_hold() -> None:
    snapshot = snapshot_of([], (10, "active_allocated"), (70, "inactive"), (20, "inactive"))
    empty = {"address": 0, "total_size": 50, "blocks": [{"size": 50, "state": "inactive"}]}
    snapshot["segments"].append(empty)
    assert only(snapshot).fragmentation == {
        "segments": 2,
        "reserved_bytes": 150,
        "allocated_bytes": 10,
        "free_bytes": 140,
        "largest_free_bytes": 70,
        "stuck_bytes": 90,
    }


def test_a_thinned_timeline_keeps_the_peak() -> None:
    trace = []
    for number in range(5 * MOST_POINTS):
        trace.append(event("alloc", number, 7000 if number == 3333 else 1))
        trace.append(event("free_completed", number, 1))
    history = only(snapshot_of(trace, (1, "inactive")))
    assert len(history.points) <= MOST_POINTS + 1
    assert max(point.allocated_bytes for point in history.points) == 7000
    assert history.peak.event == 2 * 3333


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was-executed",)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (pickle.dumps(Hostile()), "mkdir"),
        (pickle.dumps({"segments": [Path("x")]}), "pathlib"),
        (b"\x80\x04garbage", "cannot be read as a pickle"),
        (b"", "cannot be read as a pickle"),
        (pickle.dumps([1, 2]), "no list of segments"),
        (pickle.dumps({"segments": [{"blocks": []}]}), "no valid address"),
        (pickle.dumps(snapshot_of([event("alloc", 1, "x")])), "no valid size"),  # type: ignore[arg-type]
        (pickle.dumps(snapshot_of([{"action": "free_completed", "size": 1}])), "no valid addr"),
        (pickle.dumps(snapshot_of([], (-1, "inactive"))), "no valid total_size"),
        (pickle.dumps(snapshot_of([event("oom", 0, -1)])), "no valid size"),
        (pickle.dumps({"segments": [], "device_traces": [[{"addr": 1}]]}), "no action"),
        (pickle.dumps({"segments": []}), "no event and no segment"),
    ],
)
def test_other_files_are_refused(
    content: bytes,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.pickle").write_bytes(content)
    assert main([str(tmp_path / "s.pickle")]) == 2
    refusal = capsys.readouterr().err
    assert named in refusal
    assert "s.pickle" in refusal
    assert len(refusal.splitlines()) == 1
    assert not (tmp_path / "was-executed").exists()


def test_table_page_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main([str(RECORDED), "--page", str(page)]) == 0
    told = capsys.readouterr().out
    assert "peak 104.0MiB allocated" in told
    assert "snapshot_program.py:7" in told
    assert "snapshot_program.py:7" in page.read_text(encoding="utf-8")
    assert main([str(RECORDED), "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["peak_allocated_bytes"] == max(map(sum, device["timeline"]["allocated_bytes"]))

"""The sampler never drifts, never blocks, and says what it could not read."""

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvml_stub.stub import HEALTHY, HERE, MIB, UUIDS, build_stub, environment, run_jobs, script

from launcher.measure.nvml import ERRORS
from launcher.measure.records import GpuRecord, RankSummary
from launcher.measure.sampler import Grid, Sampler, mean_power_w
from launcher.run.summary import _tokens_per_joule
from launcher.util.json_file import Record

A = UUIDS[0]
MS = 10**6
S = 10**9
# Question of the script -> the reading that stands on it.
QUESTIONS = {
    "used": "memory",
    "gpu_busy": "utilization",
    "power": "power",
    "energy": "energy",
    "temperature": "temperature",
    "pcie_tx": "pcie_tx",
    "pcie_rx": "pcie_rx",
}
FIELDS = {
    "memory": "memory_used_bytes",
    "utilization": "gpu_utilization_percent",
    "power": "power_w",
    "energy": "energy_j",
    "temperature": "temperature_c",
    "pcie_tx": "pcie_tx_bytes_per_s",
    "pcie_rx": "pcie_rx_bytes_per_s",
}


@pytest.mark.parametrize("seed", range(3))
def test_no_drift_over_ten_thousand_ticks(seed: int) -> None:
    """A sleeper that is always late, and once by 2 s, stays on the first grid to the nanosecond."""
    rng = random.Random(seed)
    start_ns, period_ns = 987_654_321, 100 * MS
    grid = Grid(start_ns, period_ns)
    now_ns, taken = start_ns, 0
    while taken < 10_000:
        now_ns = max(now_ns, grid.next_ns) + rng.randrange(30 * MS)
        if taken == 5_000:
            now_ns += 2 * S
        assert grid.take(now_ns)
        taken += 1
        late_ns = now_ns - start_ns - (taken + grid.missed - 1) * period_ns
        assert 0 <= late_ns < period_ns
        assert grid.next_ns == start_ns + (taken + grid.missed) * period_ns
        assert not grid.take(now_ns)
    assert grid.missed == 20


def test_a_tick_on_its_deadline_is_due() -> None:
    grid = Grid(7, 10)
    assert grid.take(7)
    assert not grid.take(16)
    assert grid.take(17)
    assert grid.missed == 0


def test_joules_need_two_readings() -> None:
    first = (1.0, 0.0)
    last = (3.0, 700.0)
    assert mean_power_w(first, last) == 350.0
    assert mean_power_w(None, last) is None
    assert mean_power_w(last, last) is None


def test_a_counter_that_has_not_moved_is_no_energy_per_token() -> None:
    rank = RankSummary(
        rank=0,
        peak_bytes=1,
        traced_peak_bytes=1,
        tokens_per_s=100.0,
        training_power_w=50.0,
        samples=None,
    )
    assert _tokens_per_joule(100.0, [rank]) == 2.0
    assert _tokens_per_joule(100.0, [dataclasses.replace(rank, training_power_w=0.0)]) is None


def test_without_a_gpu_the_process_is_sampled() -> None:
    records: list[Record] = []
    ticks = iter(range(0, 20 * 100 * MS, 50 * MS))
    sampler = Sampler(
        uuid=None,
        emit=records.append,
        line_every_s=0.1,
        clock_ns=lambda: next(ticks),
        wait=lambda _: len(records) >= 5,
    )
    sampler.run()
    summary = sampler.stop()
    assert [record.kind for record in records] == ["gpu"] * 5
    assert all(isinstance(record, GpuRecord) and record.host_rss_bytes for record in records)
    assert (summary.source, summary.uuid, summary.missing) == ("psutil", None, {})
    assert summary.peak_used_bytes is None
    assert summary.energy_j is None
    assert summary.peak_host_rss_bytes


def test_a_sampler_that_never_started_can_be_stopped() -> None:
    summary = Sampler(uuid=A, emit=print).stop()
    assert summary.samples == 0
    assert summary.missing == {"device": "not read"}


def simulation(**changes: Any) -> dict[str, Any]:
    job = {"mode": "simulate", "uuid": A, "script": script(), "seed": 0, "jitter_s": 0.02}
    return {**job, "stall_at_s": 500.0, "stall_s": 2.0, "until_s": 1002.0, **changes}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("simulated")
    short = {"stall_at_s": 1e9, "until_s": 65.0, "jitter_s": 0.0, "is_torn_down": False}
    return run_jobs(
        build_stub(folder / "lib"),
        folder,
        [
            simulation(name="long"),
            simulation(name="brief", **{**short, "until_s": 0.9}),
            simulation(name="spike", script=script({"used": "1000 1000 1000 9000 1000"}), **short),
            simulation(name="refused", script=script({"power": "!3 !3 350000"}), **short),
            simulation(name="passing", script=script({"power": "350000 !999 350000"}), **short),
            simulation(name="shut_down", script=script({"temperature": "61 !1 61"}), **short),
            simulation(name="no_rights", script=script({"handle": "!4 !4 0"}), **short),
            simulation(name="late_driver", script=script({"init": "!999 !999 0"}), **short),
        ],
    )


def test_sampler_keeps_to_its_grid(simulated: dict[str, Any]) -> None:
    """10,000 memory ticks with jitter and a stall of 2 s, all readings through the ABI."""
    long = simulated["long"]
    assert len(long["deadlines_ns"]) > 9_990
    off = [deadline for deadline in long["deadlines_ns"] if deadline % (100 * MS)]
    assert off == []
    summary = long["summary"]
    # The stall swallows about 20 memory ticks and 2 of the others, jitter none.
    assert 19 <= summary["missed_ticks"] <= 23
    assert summary["samples"] + summary["missed_ticks"] >= 10_018
    with_power = [r for r in long["records"] if "power_w" in r]
    assert 999 <= len(with_power) <= 1003
    assert len(long["records"]) <= 1005, "a line per second, not per reading"
    assert all(value is not None for record in long["records"] for value in record.values())
    assert summary["energy_j"] == 700.0
    assert summary["mean_power_w"] == 350.0


def test_a_peak_between_two_lines_is_in_the_second(simulated: dict[str, Any]) -> None:
    used = {round(r["t_s"]): r["memory_used_bytes"] for r in simulated["spike"]["records"]}
    assert [used[0], used[1], used[2], used[64]] == [1000, 9000, 1000, 1000]
    assert simulated["spike"]["summary"]["peak_used_bytes"] == 9000


def seconds_with(field: str, result: dict[str, Any]) -> list[int]:
    return [round(r["t_s"]) for r in result["records"] if r.get(field) is not None]


def test_energy_of_one_reading_is_unknown(simulated: dict[str, Any]) -> None:
    assert seconds_with("energy_j", simulated["brief"]) == [0]
    assert simulated["brief"]["summary"]["energy_j"] is None


def test_refused_reading_is_asked_for_again_later(simulated: dict[str, Any]) -> None:
    assert seconds_with("power_w", simulated["refused"]) == list(range(60, 65))
    assert simulated["refused"]["summary"]["faults"] == {"power": {"NOT_SUPPORTED": 2}}
    assert simulated["refused"]["summary"]["missing"] == {}
    assert events(simulated["refused"]) == [("gpu_reading_failed", "power", "NOT_SUPPORTED")]


def test_passing_fault_costs_one_reading(simulated: dict[str, Any]) -> None:
    assert seconds_with("power_w", simulated["passing"]) == [0, *range(2, 65)]


def test_nvml_shut_down_by_others_is_opened_again(simulated: dict[str, Any]) -> None:
    times = seconds_with("temperature_c", simulated["shut_down"])
    assert times[:2] == [0, 2]
    assert times[-1] == 64


def test_no_gpu_at_first(simulated: dict[str, Any]) -> None:
    """The process is sampled until the GPU can be opened."""
    for name, seconds in {"no_rights": 60, "late_driver": 2}.items():
        sources = {r["t_s"]: r["source"] for r in simulated[name]["records"] if r["kind"] == "gpu"}
        assert {source for t_s, source in sources.items() if t_s < seconds} == {"psutil"}
        assert {source for t_s, source in sources.items() if t_s >= seconds} == {"nvml"}
        assert len(events(simulated[name])) == 1


def fault_cases() -> dict[str, dict[str, str]]:
    """Case -> what its script changes: every stage with the errors NVML documents for it."""
    cases: dict[str, dict[str, str]] = {"healthy": {}}
    for code in (3, 4, 9, 12, 15, 18, 999):
        cases[f"init-{ERRORS[code][0]}"] = {"init": f"!{code}"}
    for code in (2, 4, 6, 15, 16, 17, 999):
        cases[f"handle-{ERRORS[code][0]}"] = {"handle": f"!{code}"}
    for question in QUESTIONS:
        for code in (3, 4, 999):
            cases[f"{question}-{ERRORS[code][0]}"] = {question: f"!{code}"}
        cases[f"{question}-midrun"] = {question: f"{HEALTHY[question].split()[0]} 0 !999 0"}
        cases[f"{question}-lost"] = {question: f"{HEALTHY[question].split()[0]} 0 !15"}
    cases["power-driver-unloaded"] = {"power": "350000 !9"}
    cases["shutdown-UNKNOWN"] = {"shutdown": "!999"}
    cases["power-hang"] = {"power": "hang"}
    cases["init-hang"] = {"init": "hang"}
    cases["shutdown-hang"] = {"shutdown": "hang"}
    return cases


CASES = fault_cases()
# Ways that a sampler has ended by the time that its process does: with the library open, closed,
# never opened, or inside a call. Each teardown of the interpreter takes a quarter of a second.
TORN_DOWN = (
    *("healthy", "shutdown", "power", "init-hang"),
    *(f"init-{ERRORS[3][0]}", f"init-{ERRORS[15][0]}", f"handle-{ERRORS[4][0]}"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case beside a real training loop, each in a process of its own."""
    folder = tmp_path_factory.mktemp("faults")
    jobs = [
        {
            "name": name,
            "mode": "train",
            "uuid": A,
            "script": script(changes),
            "samples": 0 if "hang" in name else 30,
            "is_torn_down": name.startswith(TORN_DOWN),
        }
        for name, changes in CASES.items()
    ]
    return run_jobs(build_stub(folder / "lib"), folder, jobs)


def events(result: dict[str, Any]) -> list[tuple[str, str, str | None]]:
    return [
        (r["name"], r["detail"]["reading"], r["detail"].get("error"))
        for r in result["records"]
        if r["kind"] == "event"
    ]


@pytest.mark.parametrize("name", CASES)
def test_training_ends_normally(trained: dict[str, Any], name: str) -> None:
    result = trained[name]
    assert result["exit_code"] == 0
    first, last = result["losses"]
    assert last < first
    assert result["stop_was_short"]
    assert result["late_records"] == 0


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("init-", "handle-"))])
def test_no_gpu_falls_back_and_says_so_once(trained: dict[str, Any], name: str) -> None:
    result, error = trained[name], name.split("-")[1]
    summary = result["summary"]
    if error == "hang":
        assert events(result) == [("sampler_stuck", "device", None)]
        assert summary["missing"] == {"device": "not read"}
        return
    lost = error in ("GPU_IS_LOST", "RESET_REQUIRED")
    assert events(result) == [("gpu_lost" if lost else "nvml_unavailable", "device", error)]
    assert summary["missing"] == {"device": error}
    assert summary["source"] == "psutil"
    assert summary["gpu_lost"] is lost
    assert (summary["peak_host_rss_bytes"] is None) is lost
    assert result["references"] == 0


@pytest.mark.parametrize("error", ["NOT_SUPPORTED", "NO_PERMISSION", "UNKNOWN"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_one_reading_fails_alone(trained: dict[str, Any], question: str, error: str) -> None:
    result, reading = trained[f"{question}-{error}"], QUESTIONS[question]
    assert result["summary"]["missing"] == {reading: error}
    assert events(result) == [("gpu_reading_failed", reading, error)]
    assert result["summary"]["source"] == "nvml"
    for other, name in FIELDS.items():
        came = any(r.get(name) is not None for r in result["records"])
        assert came is (other != reading)
    assert result["references"] == 0


@pytest.mark.parametrize("question", QUESTIONS)
def test_reading_comes_back(trained: dict[str, Any], question: str) -> None:
    result, reading = trained[f"{question}-midrun"], QUESTIONS[question]
    assert result["summary"]["missing"] == {}
    assert result["summary"]["faults"] == {reading: {"UNKNOWN": 1}}
    values = [r.get(FIELDS[reading]) for r in result["records"] if r["kind"] == "gpu"]
    assert len(values) - values.count(None) >= 3  # two came before the fault


@pytest.mark.parametrize("question", QUESTIONS)
def test_lost_gpu_ends_the_samples(trained: dict[str, Any], question: str) -> None:
    result = trained[f"{question}-lost"]
    assert result["records"][-1]["name"] == "gpu_lost"
    assert events(result) == [("gpu_lost", QUESTIONS[question], "GPU_IS_LOST")]
    assert result["summary"]["gpu_lost"]
    assert result["summary"]["peak_used_bytes"] == 1024 * MIB
    assert result["records_before_stop"] == len(result["records"])


def test_healthy_run_misses_nothing(trained: dict[str, Any]) -> None:
    result = trained["healthy"]
    summary = result["summary"]
    assert events(result) == []
    assert summary["missing"] == summary["faults"] == {}
    assert (summary["source"], summary["uuid"]) == ("nvml", A)
    assert summary["max_power_w"] == 350.0
    assert summary["mean_gpu_utilization_percent"] == 97.0
    assert result["energy"]
    assert summary["energy_j"] == 700.0
    times = [record["t_s"] for record in result["records"]]
    assert times == sorted(times)


def test_driver_unloaded_in_the_run(trained: dict[str, Any]) -> None:
    result = trained["power-driver-unloaded"]
    assert events(result) == [("nvml_unavailable", "power", "DRIVER_NOT_LOADED")]
    assert result["records"][-1]["source"] == "psutil"
    assert result["summary"]["peak_used_bytes"] == 1024 * MIB


def test_hanging_calls_are_left_behind(trained: dict[str, Any]) -> None:
    assert events(trained["power-hang"]) == [("sampler_stuck", "power", None)]
    assert events(trained["shutdown-hang"]) == [("sampler_stuck", "shutdown", None)]
    assert trained["power-hang"]["summary"]["missing"]["power"] == "not read"
    assert trained["shutdown-hang"]["summary"]["missing"] == {}


def test_shutdown_fault_is_recorded(trained: dict[str, Any]) -> None:
    assert events(trained["shutdown-UNKNOWN"]) == [("gpu_reading_failed", "shutdown", "UNKNOWN")]


def test_old_driver_says_that_used_means_more(tmp_path: Path) -> None:
    job = {"name": "old", "mode": "train", "uuid": A, "script": script()}
    library = build_stub(tmp_path / "lib", "-DWITHOUT_MEMORY_V2")
    result = run_jobs(library, tmp_path, [job])["old"]
    said = [r for r in result["records"] if r["kind"] == "event"]
    assert [r["name"] for r in said] == ["nvml_memory_v1"]
    assert result["summary"]["peak_used_bytes"] == 1536 * MIB


@pytest.mark.parametrize(
    ("content", "error"),
    [(b"", "LIBRARY_NOT_FOUND"), (b"\x7fELF" + bytes(60), "LIBRARY_NOT_FOUND")],
)
def test_no_library(tmp_path: Path, content: bytes, error: str) -> None:
    """A file that is no library hides a real one, so this holds where there is a driver too."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnvidia-ml.so.1").write_bytes(content)
    job = {"name": "none", "mode": "simulate", "uuid": A, "script": ""}
    result = run_jobs(tmp_path / "lib", tmp_path, [simulation(**job, until_s=5.0)])["none"]
    assert events(result) == [("nvml_unavailable", "device", error)]
    assert result["summary"]["source"] == "psutil"
    assert result["summary"]["samples"] > 40


def test_three_ranks_each_watch_their_own_gpu(tmp_path: Path) -> None:
    """NVML lists the GPUs in another order than the ranks use them, and loses one in the run."""
    order = [2, 0, 1]  # rank -> NVML index
    lost = 1
    lines = ["* count 3", "* gpu_busy 50", "* memory_busy 5", "* energy 0 1000", "* temperature 60"]
    for gpu, uuid in enumerate(UUIDS[:3]):
        used = str((gpu + 1) * 1000)
        lines += [
            f"{gpu} uuid {uuid}",
            f"{gpu} total 1000000",
            f"{gpu} used {used}" + (f" {used} {used} !15" if gpu == lost else ""),
            f"{gpu} power {(gpu + 1) * 100_000}",
        ]
    (tmp_path / "script").write_text("\n".join(lines) + "\n")
    library = build_stub(tmp_path / "lib")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = [str(HERE / "rank.py"), str(tmp_path), ",".join(UUIDS[gpu] for gpu in order)]
    subprocess.run(
        [*torchrun, "--nproc-per-node", "3", *ranks],
        env=environment(library, NVML_STUB_SCRIPT=str(tmp_path / "script")),
        check=True,
        timeout=300,
    )
    for rank, gpu in enumerate(order):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        summary = result["summary"]
        assert summary["uuid"] == UUIDS[gpu]
        assert summary["peak_used_bytes"] == (gpu + 1) * 1000
        assert summary["max_power_w"] == (gpu + 1) * 100.0
        assert summary["missing"] == {"pcie_tx": "NOT_SUPPORTED", "pcie_rx": "NOT_SUPPORTED"}
        assert summary["gpu_lost"] is (gpu == lost)
        assert result["losses"][-1] < result["losses"][0]
        samples = [r for r in result["records"] if r["kind"] == "gpu"]
        if gpu == lost:
            assert result["records"][-1]["name"] == "gpu_lost"
            assert len(samples) == 3
        else:
            assert len(samples) >= 18

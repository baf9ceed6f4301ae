"""NVML by its binary interface, and which GPU a CUDA device is."""

from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch
from nvml_stub.stub import HEALTHY, MIB, UUIDS, build_stub, run_jobs, script

from launcher.measure.nvml import ERRORS, NvmlFault, Outcome, resolve_uuid

A, B, C, D = UUIDS
MIG = "MIG-41255406-c9af-f94b-4ebf-9d57ad1853da"


def test_every_error_code_is_mapped() -> None:
    codes = {
        name.removeprefix("NVML_ERROR_"): value
        for name, value in vars(pynvml).items()
        if name.startswith("NVML_ERROR_") and isinstance(value, int)
    }
    assert len(codes) >= 30
    assert {name: code for code, (name, _) in ERRORS.items()}.items() >= codes.items()


def test_code_of_a_newer_driver() -> None:
    fault = NvmlFault(1234)
    assert fault.name == "ERROR_1234"
    assert fault.outcome is Outcome.TRANSIENT


def test_a_cpu_has_no_uuid() -> None:
    assert resolve_uuid(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [
        (None, 1, B),
        ("2,0", 0, A),  # a position: the CUDA runtime knows whose
        (f" {MIG} ", 0, MIG),  # whose parent the runtime names
        (f"MIG-{A}/3/0", 0, f"MIG-{A}/3/0"),
        (MIG, 1, B),
    ],
)
def test_a_gpu_is_named_by_the_runtime_and_an_instance_by_the_environment(
    visible: str | None, index: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [SimpleNamespace(uuid=uuid.removeprefix("GPU-")) for uuid in UUIDS]
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resolve_uuid(torch.device("cuda", index)) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_uuid_of_a_real_gpu() -> None:
    device = torch.device("cuda", 0)
    uuid = resolve_uuid(device)
    assert uuid is not None
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    assert total >= torch.cuda.get_device_properties(device).total_memory
    pynvml.nvmlShutdown()


def test_reads_a_gpu(tmp_path: Path) -> None:
    jobs = [{"name": "gpu", "mode": "device", "uuid": A, "script": script()}]
    found = run_jobs(build_stub(tmp_path / "lib"), tmp_path, jobs)["gpu"]
    assert found["uuid"] == A
    assert found["memory"] == [[1024 * MIB, 80 * 2**30]]
    assert found["gpu_utilization_percent"] == 97.0
    assert found["memory_utilization_percent"] == 40.0
    assert found["power_w"] == 350.0
    assert found["energy_j"] == 5000.0
    assert found["temperature_c"] == 61.0
    assert found["references"] == 0
    assert found["exit_code"] == 0


V1 = [1536 * MIB, 80 * 2**30]  # 512 MiB of them reserved
V2 = [1024 * MIB, 80 * 2**30]


@pytest.mark.parametrize(
    ("flags", "v2", "expected"),
    [
        (("-DWITHOUT_MEMORY_V2",), None, [V1, V1]),
        ((), "!3 0", [V1, V1]),  # refused once: the first version from then on
        ((), "!25", [V1, V1]),
        ((), "!999 0", ["UNKNOWN", V2]),  # passing: no peak from the other version's count
    ],
)
def test_memory_versions(
    tmp_path: Path, flags: tuple[str, ...], v2: str | None, expected: list[object]
) -> None:
    text = script(None if v2 is None else {"v2": v2})
    jobs = [{"name": "gpu", "mode": "device", "uuid": A, "script": text, "times": 2}]
    found = run_jobs(build_stub(tmp_path / "lib", *flags), tmp_path, jobs)["gpu"]
    assert found["memory"] == expected


def test_mig_instances(tmp_path: Path) -> None:
    text = script({"mig_mode": "1"}) + (
        f"20 uuid {MIG}\n20 mig_parent 0\n20 total 1000\n20 used 10\n"
        "21 uuid MIG-other\n21 mig_parent 0\n21 total 1000\n21 used 20\n"
    )
    hidden = text + "20 handle !4\n"
    bare = MIG.removeprefix("MIG-")
    found = run_jobs(
        build_stub(tmp_path / "lib"),
        tmp_path,
        [
            {"name": "named", "mode": "device", "uuid": MIG, "script": text},
            {"name": "parent", "mode": "device", "uuid": A, "script": text},
            {"name": "bare", "mode": "device", "uuid": f"GPU-{bare}", "script": text},
            {"name": "short", "mode": "device", "uuid": MIG[:8], "script": text},
            {"name": "either", "mode": "device", "uuid": "MIG-", "script": text},
            {"name": "hidden", "mode": "device", "uuid": A, "script": hidden},
            {"name": "all", "mode": "gpus", "script": text},
        ],
    )
    assert found["either"]["fault"] == "NOT_FOUND"
    for name in ("named", "parent", "bare", "short"):
        assert found[name]["uuid"] == MIG
        assert found[name]["memory"] == [[10, 1000]]
    # The board's power is not an instance's.
    assert found["named"]["power"] == "NOT_SUPPORTED"
    assert found["hidden"]["uuid"] == "MIG-other"
    assert found["all"]["gpus"] == [MIG, "MIG-other"]


def test_gpus_that_others_own_do_not_count(tmp_path: Path) -> None:
    lines = [
        "* count 4",
        *(f"{n} uuid {uuid}" for n, uuid in enumerate(UUIDS)),
        "0 handle !4",
        "2 uuid !15",
    ]
    jobs = [
        {"name": "cgroup", "mode": "gpus", "script": "\n".join(lines) + "\n"},
        {"name": "no_driver", "mode": "gpus", "script": "* init !9\n"},
    ]
    found = run_jobs(build_stub(tmp_path / "lib"), tmp_path, jobs)
    assert found["cgroup"]["gpus"] == [B, D]
    assert found["cgroup"]["references"] == 0
    assert found["no_driver"]["gpus"] == []


@pytest.mark.parametrize("question", ["handle", "uuid"])
def test_failed_open_gives_nvml_back(tmp_path: Path, question: str) -> None:
    answer = HEALTHY["uuid"] + " !4" if question == "uuid" else "!4"
    jobs = [{"name": "gpu", "mode": "device", "uuid": A, "script": script({question: answer})}]
    found = run_jobs(build_stub(tmp_path / "lib"), tmp_path, jobs)["gpu"]
    assert (found["fault"], found["outcome"]) == ("NO_PERMISSION", "unavailable")
    assert found["references"] == 0

"""What `shardscale doctor` finds, here and in environments that are broken on purpose."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from harness import verb
from nvml_stub.stub import build_stub

from launcher.strategies.zero.nvme_folder import file_system
from launcher.tools.doctor import gpu, host, software
from launcher.tools.doctor.doctor_cli import main
from launcher.tools.doctor.finding import Finding, ok, run_checks
from launcher.util.processes import usable_cores

DOCTOR = (
    "import sys; from launcher.tools.doctor.doctor_cli import main; sys.exit(main(sys.argv[1:]))"
)
STATES = ("ok", "warn", "fail", "n/a")


def doctor(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", DOCTOR, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **more},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fake_torchrun(folder: Path) -> Path:
    folder.mkdir()
    script = folder / "torchrun"
    script.write_text("#!/bin/sh\nexec python -m torch.distributed.run\n")
    script.chmod(0o755)
    return script


def test_json_of_this_machine_with_two_things_broken(tmp_path: Path) -> None:
    fake = fake_torchrun(tmp_path / "bin")
    lock = tmp_path / "extensions" / "async_io" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    done = doctor(
        "--json",
        PATH=f"{fake.parent}{os.pathsep}{os.environ['PATH']}",
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {"schema_version", "counts", "findings"}
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert len(findings) == len(report["findings"])
    for finding in report["findings"]:
        assert set(finding) == {"group", "name", "state", "found", "consequence", "fix"}
        assert finding["state"] in STATES
        assert finding["found"]
        if finding["state"] in ("warn", "fail"):
            assert finding["consequence"]
            assert finding["fix"]
        assert "the check itself failed" not in finding["found"]
    assert report["counts"] == {
        state: sum(f["state"] == state for f in report["findings"]) for state in STATES
    }
    assert findings["Python"]["state"] == "ok"
    assert findings["torch"]["found"].startswith(__import__("torch").__version__)
    assert findings["torchrun"]["state"] == "warn"
    assert str(fake) in findings["torchrun"]["found"]
    assert "-m launcher run --nproc" in findings["torchrun"]["fix"]
    assert findings["build locks"]["state"] == "fail"
    assert f"rm {lock}" in findings["build locks"]["fix"]


def test_text_is_readable_without_a_terminal(tmp_path: Path) -> None:
    done = verb("doctor", COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert all(len(line) <= 100 for line in lines)
    for heading in ("Software", "Accelerators", "Machine"):
        assert heading in lines
    rows = [line for line in lines if line[:6].strip() in STATES]
    assert len(rows) == 23
    assert len({line.index(line.split(maxsplit=1)[1]) for line in rows}) == 1  # aligned


def test_the_users_own_setting_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "PYTORCH_ALLOC_CONF"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", variable):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu.allocator().state == "ok"
    monkeypatch.setenv(variable, "expandable_segments:True")
    assert (gpu.allocator().state, variable in gpu.allocator().found) == ("ok", True)
    monkeypatch.setenv(variable, "max_split_size_mb:64")
    found = gpu.allocator()
    assert (found.state, f"unset {variable}" in str(found.fix)) == ("warn", True)


def test_bad_arguments_are_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--jason"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("shardscale: unrecognized arguments: --jason")
    assert len(said.err.splitlines()) == 1


def test_a_broken_and_a_hanging_check_leave_the_others_alone() -> None:
    def broken() -> Finding:
        raise RuntimeError("no such luck")

    def hanging() -> Finding:
        threading.Event().wait()
        return ok("never")

    found = run_checks(
        {"broken": broken, "hanging": hanging, "fine": lambda: ok("yes")}, within_s=0.5
    )
    assert list(found) == ["broken", "hanging", "fine"]
    assert found["fine"] == ok("yes")
    assert (found["broken"].state, found["hanging"].state) == ("warn", "warn")
    assert "RuntimeError: no such luck" in found["broken"].found
    assert "no answer within" in found["hanging"].found


def test_no_torchrun_on_path(tmp_path: Path) -> None:
    found = software.torchrun(str(tmp_path))
    assert (found.state, found.found) == ("warn", "not on PATH")
    assert "-m launcher run --nproc 4" in str(found.fix)


def test_our_torchrun_first_on_path(tmp_path: Path) -> None:
    scripts = str(Path(sys.executable).parent)
    assert software.torchrun(scripts).state == "ok"
    fake = fake_torchrun(tmp_path / "bin")
    shadowed = software.torchrun(f"{fake.parent}{os.pathsep}{scripts}")
    assert (shadowed.state, "torch's own" in shadowed.found) == ("warn", True)
    fake.write_text("#!/other/python\nfrom launcher.torchrun import main\nmain()\n")
    elsewhere = software.torchrun(str(fake.parent))
    assert (elsewhere.state, "another environment" in elsewhere.found) == ("warn", True)


def test_a_lock_is_stale_only_when_nobody_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert software.stale_locks().state == "ok"
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    # As torch takes it: created exclusively, and held open while it builds.
    builder = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(1, flush=True); "
    builder += "sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", builder, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout
        process.stdout.readline()
        found = software.stale_locks()
        assert (found.state, "1 being built" in found.found) == ("ok", True)
    finally:
        process.kill()
        process.communicate()
    stale = software.stale_locks()
    assert stale.state == "fail"
    assert "cpu_adam" in stale.found
    assert str(lock) in str(stale.fix)


def test_nvml_that_does_not_start(tmp_path: Path) -> None:
    library = build_stub(tmp_path / "lib")
    fixes = {"!9": "modprobe nvidia", "!18": "reboot", "!999": "nvidia-smi"}
    for init in fixes:
        (tmp_path / init).write_text(f"* init {init}\n")
    # A process for each, since the library reads its script once.
    program = (
        "import dataclasses, json, os, sys; from pathlib import Path\n"
        "from launcher.tools.doctor import gpu\n"
        "gpu.device_files = lambda: [Path('/dev/nvidia0')]\n"
        "for path in sys.argv[1:]:\n"
        "    if (child := os.fork()) == 0:\n"
        "        os.environ['NVML_STUB_SCRIPT'] = path\n"
        "        print(json.dumps(dataclasses.asdict(gpu.nvml())), flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *(str(tmp_path / init) for init in fixes)],
        env={**os.environ, "LD_LIBRARY_PATH": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = list(map(json.loads, done.stdout.splitlines()))
    assert [finding["state"] for finding in found] == ["warn"] * len(fixes), done.stderr
    for finding, says in zip(found, fixes.values(), strict=True):
        assert says in finding["fix"]


@pytest.mark.skipif(bool(gpu.device_files()), reason="this machine has GPUs")
def test_no_gpu_at_all_is_nothing_to_worry_about() -> None:
    assert gpu.nvml().state == "n/a"
    assert gpu.gpus().state == "n/a"
    assert gpu.torch_and_driver().state == "ok"
    assert gpu.communication().state == "ok"


@pytest.mark.gpu
def test_a_real_gpu_is_named() -> None:
    assert "compute capability" in gpu.gpus().found
    assert gpu.nvml().found.startswith("driver ")
    assert gpu.communication().found.startswith("NCCL ")


@pytest.mark.parametrize(
    ("capability", "built_for", "state", "says"),
    [
        ((9, 0), ["sm_80", "sm_90"], "ok", "bf16, flash attention, fp8"),
        ((8, 6), ["sm_80", "sm_90"], "ok", "no fp8"),
        ((7, 5), ["sm_75", "sm_90"], "warn", "no hardware for bf16"),
        ((12, 0), ["sm_80", "sm_90"], "fail", "built for sm_80, sm_90"),
        ((12, 0), ["sm_80", "compute_90"], "ok", "fp8"),
        ((10, 3), ["sm_100a", "sm_120"], "ok", "fp8"),
        ((6, 1), ["sm_75", "sm_80"], "fail", "6.1"),
    ],
)
def test_kernels_by_capability(
    capability: tuple[int, int], built_for: list[str], state: str, says: str
) -> None:
    found = gpu.gpu_kernels(capability, built_for)
    assert found.state == state
    assert says in found.found


def test_bf16_on_cpus() -> None:
    assert gpu.cpu_kernels({"avx2", "avx512_bf16"}).state == "ok"
    assert gpu.cpu_kernels({"avx2"}).state == "warn"
    assert gpu.cpu_kernels(set()).state == "n/a"


def test_threads_beyond_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(usable_cores()))
    assert host.cores().state == "ok"
    monkeypatch.setenv("OMP_NUM_THREADS", str(usable_cores() + 1))
    assert host.cores().state == "warn"


def test_slurm_whose_controller_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.slurm().state == "n/a"
    for name, body in (("sbatch", "echo slurm 22.05.8"), ("sinfo", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    found = host.slurm()
    assert found.state == "fail"
    assert found.found.startswith("slurm 22.05.8, but the controller does not answer")
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'gpu* 4 nodes gpu:8'\n")
    assert host.slurm() == ok("slurm 22.05.8; partitions: gpu* 4 nodes gpu:8")


def test_disk_for_offload_is_measured_and_left_clean(tmp_path: Path) -> None:
    found = host.nvme(tmp_path)
    assert found.state in ("ok", "warn")
    assert "GB/s" in found.found
    assert file_system(tmp_path) in found.found
    assert list(tmp_path.iterdir()) == []
    missing = host.nvme(tmp_path / "missing")
    assert missing.state == "fail"
    assert f"mkdir -p {tmp_path / 'missing'}" in str(missing.fix)
    assert host.nvme(None).state == "n/a"


def test_slurm_installed_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "sbatch"
    tool.write_text("#!/bin/sh\necho 'sbatch: fatal: no configuration source' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = host.slurm()
    assert found.state == "warn"
    assert "no configuration source" in found.found
    assert "SLURM_CONF" in str(found.fix)

"""What a program is told about the GPUs that are not there."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.measure.hardware import Gpu, gpu_named
from launcher.tools.rehearse.null_gpu import environment

H100, L4 = gpu_named("h100"), gpu_named("l4")


def run(gpus: Sequence[Gpu], *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    variables = {**environment(sys.executable, gpus), **more}
    variables.setdefault("HOME", str(Path.home()))
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


def lines(gpus: Sequence[Gpu], program: str, **more: str) -> list[str]:
    """Return what a program prints that has imported torch.

    It leaves at once: Python 3.11 aborts where autograd's thread still frees its objects while the
    interpreter ends, as it may after a last line that calls backward, on a real GPU, too.
    """
    whole = f"import torch\n{program}\nimport os, sys\nsys.stdout.flush()\nos._exit(0)"
    done = run(gpus, sys.executable, "-c", whole, **more)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


ASK = """
from pynvml import *
nvmlInit()
for i in range(torch.cuda.device_count()):
    its = torch.cuda.get_device_properties(i)
    handle = nvmlDeviceGetHandleByUUID(f"GPU-{its.uuid}")
    memory = nvmlDeviceGetMemoryInfo(handle)
    print(its.name, its.total_memory, memory.total, its.major, its.minor,
          its.multi_processor_count, its.L2_cache_size >> 20, nvmlDeviceGetIndex(handle), sep="|")
"""


def described(gpu: Gpu, name: str, number: int) -> str:
    fields = (name, gpu.memory_bytes, gpu.memory_bytes, *gpu.capability, gpu.multiprocessors)
    return "|".join(map(str, (*fields, gpu.l2_mib, number)))


def test_cuda_and_nvml_agree_about_different_gpus() -> None:
    assert lines([H100, L4], ASK) == [
        described(H100, "NVIDIA H100 80GB HBM3", 0),
        described(L4, "NVIDIA L4", 1),
    ]


UUID = "GPU-73686172-6473-6361-6c65-00000000000"


@pytest.mark.parametrize("chosen", ["1,0", f"{UUID}1,{UUID}0"], ids=["numbers", "UUIDs"])
def test_a_program_chooses_its_devices(chosen: str) -> None:
    assert lines([H100, L4], ASK, CUDA_VISIBLE_DEVICES=chosen) == [
        described(L4, "NVIDIA L4", 1),
        described(H100, "NVIDIA H100 80GB HBM3", 0),
    ]


def test_no_device_is_visible_where_the_list_ends_at_once() -> None:
    assert lines([H100], "print(torch.cuda.is_available())", CUDA_VISIBLE_DEVICES="7") == ["False"]


def test_each_device_has_memory_of_its_own() -> None:
    program = """
hold = torch.empty(20 << 30, dtype=torch.uint8, device="cuda:1")
other = torch.empty(70 << 30, dtype=torch.uint8, device="cuda:0")
free = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
try:
    torch.empty(4 << 30, dtype=torch.uint8, device="cuda:1")
except torch.cuda.OutOfMemoryError as error:
    print("GPU 1 has a total capacity of 21.90 GiB" in str(error))
del hold
torch.cuda.empty_cache()
print(torch.cuda.mem_get_info(1)[0] - free[1] == 20 << 30)
print(torch.tensor([1, 2, 3]).to("cuda:1").to("cuda:0").tolist())
print(torch.cuda.can_device_access_peer(0, 1))
"""
    assert lines([H100, L4], program) == ["True", "True", "[1, 2, 3]", "True"]


def test_what_nothing_stands_in_for_is_named_and_fails() -> None:
    program = "import torch\ntorch.cuda.Event(interprocess=True).ipc_handle()"
    done = run([H100], sys.executable, "-c", program)
    assert done.returncode == 1
    assert "shardscale: the null GPU has no cudaIpcGetEventHandle: it answers" in done.stderr
    assert "operation not supported" in done.stderr


def test_convolutions_run() -> None:
    program = """
layers = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.MaxPool2d(2)
model = torch.nn.Sequential(*layers).cuda()
model(torch.randn(2, 3, 32, 32, device="cuda")).sum().backward()
print(model[0].weight.grad.shape)
"""
    assert lines([H100], program) == ["torch.Size([8, 3, 3, 3])"]


def test_nvidia_smi_answers() -> None:
    asked = "--query-gpu=index,name,memory.total,compute_cap,power.draw"
    done = run([H100, L4], "nvidia-smi", asked, "--format=csv,noheader,nounits")
    assert done.stdout.splitlines() == [
        "0, NVIDIA H100 80GB HBM3, 80998, 9.0, [N/A]",
        "1, NVIDIA L4, 22425, 8.9, [N/A]",
    ]
    listed = run([H100], "nvidia-smi", "-L").stdout
    assert listed == ("GPU 0: NVIDIA H100 80GB HBM3 (UUID: " + UUID + "0)\n")
    refused = run([H100], "nvidia-smi", "topo")
    assert refused.returncode == 2
    assert "has no topo" in refused.stderr


def test_kernels_that_sort_run_on_an_architecture_without_its_own() -> None:
    """torch's wheels hold sm_86 for GPUs of capability 8.9, and cub asks for what they hold."""
    program = """
ids = torch.zeros(8, 1024, dtype=torch.long, device="cuda")
torch.nn.Embedding(100, 8, device="cuda")(ids).sum().backward()
print("ran")
"""
    assert lines([L4], program) == ["ran"]

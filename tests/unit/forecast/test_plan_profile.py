"""Profiles: a real one, tiny; how it is read back; what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.__main__ import VERBS
from launcher.forecast import profile, profile_cli
from launcher.forecast.benchmarks import Bench, Effort
from launcher.forecast.collectives import fit_rate
from launcher.forecast.machine import COLLECTIVES, Machine
from launcher.measure.hardware import GPUS, find_gpu, gpu_named
from launcher.model.config import ModelConfig
from launcher.util.errors import Failure, UserError

TINY = Effort(
    seconds=0.01,
    flops=1e7,
    copy_bytes=2**20,
    disk_bytes=2**20,
    collective_bytes=(2**14, 2**20),
    adam_parameters=80_000,
)
MODEL = ModelConfig(vocab_size=257, context=32, layers=2, heads=4, d_model=64)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, list[str]]:
    said: list[str] = []
    machine = profile.measure(
        MODEL,
        device_type="cpu",
        nproc=2,
        effort=TINY,
        disk_folder=tmp_path_factory.mktemp("disk"),
        say=said.append,
    )
    return machine, said


def test_a_real_profile_has_every_rate(measured: tuple[Machine, list[str]]) -> None:
    machine, said = measured
    assert (machine.device, machine.ranks_per_node) == ("cpu", 2)
    assert set(machine.matmul_flops_per_s) == {"fp32", "bf16"}
    assert machine.collectives is not None
    assert set(machine.collectives) == {*COLLECTIVES}
    assert machine.host_to_device_bytes_per_s is None
    assert any(line.startswith("all-reduce:") for line in said)


def test_a_profile_is_read_back_as_it_was(
    measured: tuple[Machine, list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(measured[0].as_json())
    assert Machine.load(path) == measured[0]


def test_one_process_measures_no_collectives() -> None:
    found = Bench(MODEL, torch.device("cpu"), TINY, lambda text: None).run(None)
    assert found["collectives"] is None
    assert found["operator_s"] > 0


def test_a_dead_process_ends_the_profile(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Failure, match="measuring process 0 failed"):
        profile.measure(
            MODEL,
            device_type="cpu",
            nproc=1,
            effort=TINY,
            disk_folder=tmp_path / "missing",
            say=lambda text: None,
        )
    assert "FileNotFoundError" in capfd.readouterr().err


CONTENT = json.loads(Machine.of_gpu("A100-80GB").as_json())


def changed(**changes: Any) -> str:
    return json.dumps({**CONTENT, **changes})


FAULTS = {
    "not JSON": ("{", "not valid JSON"),
    "a list": ("[]", "holds [], but must be a JSON object"),
    "another version": (changed(schema_version=7), "says schema_version is 7, but must be 1"),
    "a field too many": (changed(speed=1), "has speed, which is unknown"),
    "a field too few": (
        json.dumps({k: v for k, v in CONTENT.items() if k != "copy_bytes_per_s"}),
        "lacks copy_bytes_per_s",
    ),
    "no number": (
        changed(copy_bytes_per_s="fast"),
        "copy_bytes_per_s is 'fast', but must be a valid number",
    ),
    "zero": (changed(copy_bytes_per_s=0), "copy_bytes_per_s is 0, but must be greater than 0"),
    "infinite": (changed(operator_s=float("inf")), "operator_s is inf"),
    "beyond any float": (changed(operator_s=10**400), "operator_s is 1000000000..., of 401 digits"),
    "negative": (
        changed(operator_s=-1),
        "operator_s is -1, but must be greater than or equal to 0",
    ),
    "a flag": (changed(memory_bytes=True), "memory_bytes is True"),
    "no fp32": (changed(matmul_flops_per_s={}), "lacks matmul_flops_per_s.fp32"),
    "half a rate": (
        changed(collectives={**CONTENT["collectives"], "all_gather": {"start_s": 0}}),
        "lacks collectives.all_gather.hop_s",
    ),
    "a collective too few": (
        changed(collectives={k: v for k, v in CONTENT["collectives"].items() if k != "all_reduce"}),
        "lacks collectives.all_reduce",
    ),
    "device": (changed(device="tpu"), "device is 'tpu', but must be 'cpu' or 'cuda'"),
}


@pytest.mark.parametrize(("text", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_damaged_profile_is_refused_by_name(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        Machine.load(path)
    message = str(refused.value)
    assert message.startswith(f"--profile {path}: ")
    assert fault in message
    assert "\n" not in message


def test_a_missing_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        Machine.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--out", "here.json"], "--out here.json: already exists, and nothing is overwritten"),
        (["--out", "no/where.json"], "no/where.json: cannot be written (No such file"),
        (["--model", "huge"], "--model: model 'huge' is unknown: the nearest names are "),
        (["--nproc", "0"], "--nproc 0 must be 1 or more"),
        (["--nproc", "two"], "--nproc: invalid int value: 'two'"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--nope"], "unrecognized arguments: --nope"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(
    flags: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.json").write_text("")
    assert profile_cli.main(flags) == 2
    said = capsys.readouterr().err
    assert said.startswith("shardscale: ")
    assert sentence in said
    assert said.count("\n") == 1
    assert Path("here.json").read_text() == ""


def test_the_command_line_knows_the_verb() -> None:
    assert VERBS["profile"][0] == profile_cli.__name__


def test_latency_and_bandwidth_are_fitted() -> None:
    # 2 ranks: an all-reduce sends 2 x 1/2 of the size. 1 ms + 1 GB/s, hence 2 and 11 ms.
    rate = fit_rate("all_reduce", [10**6, 10**7], [2e-3, 11e-3], ranks=2)
    assert rate.bytes_per_s == pytest.approx(1e9)
    assert rate.start_s + 2 * rate.hop_s == pytest.approx(1e-3)
    # The larger one not slower than the smaller one: noise, so the largest decides.
    rate = fit_rate("all_gather", [10**6, 10**7], [5e-3, 5e-3], ranks=2)
    assert rate.bytes_per_s > 0
    assert rate.start_s >= 0


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe"),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA H100 64GB HBM2e", None),
        ("NVIDIA A800 40GB Active", None),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-PCIE-16GB", "V100-16GB-PCIe"),
        ("Tesla V100-PCIE-32GB", "V100-32GB-PCIe"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA A800 80GB PCIe", "A800-80GB-PCIe"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX A5000", "A5000"),
        ("NVIDIA RTX A5000 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A4000", "A4000"),
        ("NVIDIA H20", None),
        (None, None),
    ],
)
def test_a_gpu_is_known_by_what_cuda_calls_it(device_name: str | None, name: str | None) -> None:
    gpu = find_gpu(device_name)
    assert (gpu.name if gpu else None) == name


def test_each_known_gpu_is_found_by_its_own_name() -> None:
    for gpu in GPUS:
        assert gpu_named(gpu.name.lower()) is gpu
        assert Machine.of_gpu(gpu.name).memory_bytes == gpu.memory_bytes


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "RTX-4090"),
        ("rtx3090", "RTX-3090"),
        ("5090", "RTX-5090"),
        ("pro 6000", "RTX-PRO-6000"),
        ("a100", "A100-80GB"),
        ("a100-40g", "A100-40GB"),
        ("a10g-24gb", "A10G"),
        ("t4 16gb", "T4"),
        ("h100-sxm", "H100"),
        ("v100", "V100-16GB"),
        ("6000 ada", "RTX-6000-Ada"),
    ],
)
def test_a_gpu_has_a_short_name(text: str, name: str) -> None:
    assert gpu_named(text).name == name


def test_an_unknown_gpu_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(UserError, match=r"GPU 'RTX 4080' is not known: the nearest names are RTX-"):
        gpu_named("RTX 4080")


@pytest.mark.parametrize("names", ["A100,H100", "A100, H100", "A100 and H100", "h100;h100"])
def test_several_gpus_are_refused_in_one_sentence(names: str) -> None:
    with pytest.raises(UserError, match=f"GPU '{names}' names several: a plan is for one kind"):
        gpu_named(names)


@pytest.mark.parametrize("name", ["H100x8", "8x H100", "8 x A100-80GB", "RTX-4090 x2", "a100:4"])
def test_a_number_beside_a_gpu_is_not_left_out(name: str) -> None:
    with pytest.raises(UserError, match=f"GPU '{name}' has a number: .* --gpus"):
        gpu_named(name)


def test_links_are_those_of_the_board() -> None:
    # V100 over PCIe has lower clocks than the module, and no links to all of its neighbours.
    module, board = gpu_named("V100-32GB"), gpu_named("V100-32GB-PCIe")
    assert (module.tensor_flops_per_s, board.tensor_flops_per_s) == (125e12, 112e12)
    assert (module.nvlink_bytes_per_s, board.nvlink_bytes_per_s) == (150e9, None)
    assert gpu_named("A800-80GB-PCIe").nvlink_bytes_per_s is None
    assert gpu_named("GH200").host_bytes_per_s == 450e9
    assert gpu_named("H100").host_bytes_per_s == pytest.approx(63e9, rel=0.01)


def test_tensor_cores_before_ampere_have_fp16_only() -> None:
    for name, rate in (("V100-16GB", 125e12), ("T4", 65e12)):
        assert gpu_named(name).bf16_flops_per_s is None
        assert gpu_named(name).tensor_flops_per_s == rate
    assert gpu_named("A100").fp8_flops_per_s is None
    assert gpu_named("H100").fp8_flops_per_s == 2 * 989.4e12


def test_cublas_has_more_workspace_on_hopper() -> None:
    assert gpu_named("H100").cublas_workspace_bytes == 32 * 2**20
    assert gpu_named("A100").cublas_workspace_bytes == 8 * 2**20 + 128 * 2**10

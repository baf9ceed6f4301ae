"""Offload without DeepSpeed: arithmetic, refusals, folders for swap files, activations."""

import math
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import Resolved, resolve
from launcher.measure import host_memory
from launcher.model.config import ActivationCheckpointing, ModelConfig
from launcher.model.gpt import GPT
from launcher.model.sizes import NAMED
from launcher.run import capacity
from launcher.strategies.offload_sizes import (
    OffloadSizes,
    largest_slice_count,
    offload_sizes,
)
from launcher.strategies.parameters import parameters_of
from launcher.strategies.zero import nvme_build, nvme_folder
from launcher.strategies.zero.nvme_folder import check_folder, remove_abandoned, swap_folder
from launcher.util.errors import UserError

GIB = 2**30
ON_DISK = "--zero 3 --precision bf16 --offload-optimizer nvme --offload-param nvme --nvme-path {}"


def resolved(flags: str, world_size: int = 4) -> Resolved:
    return resolve(parse_run_config(flags.split()), world_size=world_size, device_type="cpu")


def sizes(flags: str, world_size: int = 4) -> OffloadSizes:
    run = resolved(flags, world_size)
    return offload_sizes(run.config, run.model, world_size)


@pytest.mark.parametrize("name", NAMED)
def test_the_largest_parameter(name: str) -> None:
    with torch.device("meta"):
        module = GPT(NAMED[name])
    assert largest_slice_count(NAMED[name], 1) == max(p.numel() for p in module.parameters())


def test_bytes_of_each_choice() -> None:
    mine = -(-NAMED["gpt2-xl"].parameter_count // 4)
    slice_ = 50257 * 1600 // 4
    model = "--model gpt2-xl "
    assert sizes(model) == OffloadSizes(host_bytes=0, locked_bytes=0, disk_bytes=0)
    # Master weight, two moments, and the gradient that the CPU updates from.
    on_cpu = sizes(model + "--zero 2 --offload-optimizer cpu")
    assert on_cpu == OffloadSizes(host_bytes=16 * mine, locked_bytes=0, disk_bytes=0)
    both = sizes(model + "--zero 3 --precision bf16 --offload-optimizer cpu --offload-param cpu")
    assert both.host_bytes == 18 * mine
    # FSDP's offloaded parameters are the master weights.
    assert sizes(model + "--strategy fsdp --offload-param cpu").host_bytes == 16 * mine
    on_disk = sizes(model + ON_DISK.format("x"))
    assert (on_disk.host_bytes, on_disk.disk_bytes) == (4 * mine, 14 * mine)
    group = 2**24 + slice_
    # Each rank's buffer for a sub-group's new parameters has room for all four ranks' slices.
    buffers = 4 * 4 * group + 2 * 4 * group + 5 * 2 * slice_
    assert on_disk.locked_bytes == pytest.approx(buffers, abs=99)


def test_each_replica_offloads_all_states() -> None:
    flags = "--model gpt2-xl --strategy fsdp --offload-param cpu"
    assert sizes(f"{flags} --replicate 2", 4) == sizes(flags, 2)


def test_page_locked_pieces_are_powers_of_two() -> None:
    def for_a_gpu(flags: str) -> int:
        config = parse_run_config(f"--model seed-134m --micro-batch 1 {flags}".split())
        run = resolve(config, world_size=1, device_type="cuda")
        return offload_sizes(run.config, run.model, 1).host_bytes

    count = NAMED["seed-134m"].parameter_count
    offloaded = "--zero 2 --offload-optimizer cpu"
    assert for_a_gpu(f"{offloaded} --no-pin-memory") == 16 * count
    # Master weights and gradients: 512.25 MiB of matrices each, and 330 KiB of vectors. Moments are
    # not page-locked.
    assert for_a_gpu(offloaded) == 8 * count + 2 * (GIB + 512 * 2**10)
    fsdp = "--strategy fsdp --offload-optimizer cpu --offload-param cpu"
    each = [4 * math.prod(p.shape) for p in parameters_of(NAMED["seed-134m"])]
    rounded = sum(2 ** math.ceil(math.log2(size)) for size in each)
    assert rounded > 1.1 * sum(each)
    assert for_a_gpu(fsdp) == 8 * count + 2 * rounded


@pytest.mark.parametrize(
    ("optimizer", "states_bytes"),
    [
        ("adamw", 8),
        ("adam", 8),
        ("sgd", 4),
        ("adafactor", pytest.approx(0.01, abs=0.01)),  # a row and a column of each matrix
        ("adamw8bit", pytest.approx(2 + 2 * 4 / 256, abs=0.01)),
        ("muon", pytest.approx(4 + 4 * 82 / 1558, abs=0.01)),  # embeddings are AdamW's
        # Per block rows of 3 + 1 + 4 + 1 times 1600, beside 12 times 1600 x 1600 elements.
        ("apollo", pytest.approx((8 * 82 + 1474.56 * 8 * 9 / 12 * 64 / 1600) / 1558, abs=0.01)),
    ],
)
def test_offloaded_states_of_each_optimizer(optimizer: str, states_bytes: float) -> None:
    offload = "--model gpt2-xl --strategy fsdp --offload-optimizer cpu --offload-param cpu"
    found = sizes(f"{offload} --optimizer {optimizer}").host_bytes
    mine = -(-NAMED["gpt2-xl"].parameter_count // 4)
    assert found / mine - 8 == states_bytes  # beside the weight and its gradient


@pytest.mark.parametrize("flags", ["--zero 3 --offload-optimizer cpu", ON_DISK])
def test_what_does_not_fit_is_refused_with_the_figures(flags: str, tmp_path: Path) -> None:
    run = resolved(
        "--layers 4 --d-model 65536 --heads 64 --vocab-size 500 " + flags.format(tmp_path)
    )
    figures = r"--offload-optimizer .*: [\d.]+GiB of host memory are needed for 4 ranks on this "
    with pytest.raises(UserError, match=figures + r"machine, but [\d.]+GiB are free: "):
        capacity.check_offload(run, ranks_per_node=4)


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path) -> None:
    run = resolved(ON_DISK.format(tmp_path))
    huge = OffloadSizes(host_bytes=0, locked_bytes=0, disk_bytes=2**60)
    with pytest.raises(UserError, match=r"1073741824\.00GiB are needed in --nvme-path .* 1 rank "):
        capacity._check_disk("--offload-optimizer nvme", tmp_path, huge, 1)
    fits = offload_sizes(run.config, run.model, 4)
    capacity._check_disk("--offload-optimizer nvme", tmp_path, fits, 4)


def test_host_memory_that_is_free() -> None:
    assert 0 < host_memory.available_host_bytes() <= psutil.virtual_memory().total


def test_a_control_group_limits_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 2}\n")
    (tmp_path / "memory.stat").write_text(
        f"anon 5\ninactive_file {GIB // 8}\nactive_file {GIB // 8}\n"
    )
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    assert host_memory.available_host_bytes() == GIB // 2 + GIB // 4
    assert host_memory.host_bytes() == GIB
    (tmp_path / "memory.stat").unlink()  # as gVisor has none
    assert host_memory.available_host_bytes() == GIB // 2
    (tmp_path / "memory.current").unlink()  # the group has just ended
    assert host_memory.host_bytes() == GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.available_host_bytes() > 0
    assert host_memory.host_bytes() == psutil.virtual_memory().total


def test_a_job_is_limited_by_the_control_groups_that_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "MINE", tmp_path / "mine")
    (tmp_path / "mine").write_text("3:cpuset:/\n2:memory:/slurm/job_7/step_0\n0::/\n")
    step = tmp_path / "memory" / "slurm" / "job_7" / "step_0"
    step.mkdir(parents=True)
    for folder, limit in ((step, 1 << 63), (step.parent, GIB)):  # the first is v1's for none
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{GIB // 2}\n")
        lines = "inactive_file 1\nactive_file 8\ntotal_inactive_file 2\ntotal_active_file 4\n"
        (folder / "memory.stat").write_text(lines)
        (folder / "memory.oom_control").write_text("oom_kill_disable 0\noom_kill 3\n")
    assert host_memory.host_bytes() == GIB
    assert host_memory.available_host_bytes() == GIB // 2 + 6
    assert host_memory.Kills.read().group == 3
    before = host_memory.Kills(group=2, machine=0)
    assert "in a control group of 1.00GiB; give that more" in before.likely_cause()


# Claims a folder in argv[1], says so, and waits to be killed.
HOLDER = """
import sys, time
from pathlib import Path
from launcher.strategies.zero.nvme_folder import swap_folder
print(swap_folder(Path(sys.argv[1])), flush=True)
time.sleep(600)
"""


def test_only_what_a_killed_process_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_acts: list[Callable[[], None]] = []
    monkeypatch.setattr(nvme_folder, "before_leaving", last_acts.append)
    mine = swap_folder(tmp_path)
    (mine / "state.swp").write_bytes(b"in use")
    (tmp_path / "shardscale-swap-without-owner").mkdir()
    (tmp_path / "shardscale-swap-elsewhere").mkdir()
    elsewhere = tmp_path / "shardscale-swap-elsewhere" / "owner.json"
    elsewhere.write_text('{"host": "another", "boot": "another", "pid": 1}')
    (tmp_path / "thesis.txt").write_text("mine")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    theirs = Path(holder.stdout.readline().strip())
    (theirs / "state.swp").write_bytes(b"in use")
    assert remove_abandoned(tmp_path) == []
    holder.kill()
    holder.communicate()
    before = set(tmp_path.iterdir())
    assert remove_abandoned(tmp_path) == [theirs]
    assert set(tmp_path.iterdir()) == before - {theirs}
    last_acts[0]()
    assert not mine.exists()


def test_a_folder_that_cannot_hold_swap_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--nvme-path .*file.*give a folder on a local disk"):
        check_folder(tmp_path / "file", "--nvme-path")
    check_folder(tmp_path / "new" / "folder", "--nvme-path")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_a_stale_build_lock_is_removed_and_a_held_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "lock"
    nvme_build.remove_stale_lock(lock)  # there is none
    descriptor = os.open(lock, os.O_CREAT | os.O_EXCL)  # as torch takes it
    nvme_build.remove_stale_lock(lock)
    assert lock.exists()
    os.close(descriptor)
    nvme_build.remove_stale_lock(lock)
    assert not lock.exists()
    assert str(lock) in capsys.readouterr().err


def test_missing_compilers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not nvme_build.is_built()
    with pytest.raises(UserError, match=r"no-such-compiler.*apt install g\+\+ libaio-dev"):
        nvme_build.ensure_built("cpu")


def test_offloaded_activations_give_the_same_gradients() -> None:
    def step(checkpointing: ActivationCheckpointing) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = GPT(config(checkpointing))
        torch.manual_seed(1)
        model(TOKENS, TOKENS).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected, got = step("none"), step("offload")
    assert len(got) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_offloaded_activations_do_not_stay_on_the_device() -> None:
    model = GPT(config("offload"))
    inputs: list[weakref.ref[torch.Tensor]] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    loss = model(TOKENS, TOKENS)
    assert len(inputs) == 3
    assert [reference() for reference in inputs] == [None] * 3
    loss.backward()


TOKENS = torch.arange(32).view(2, 16)


def config(checkpointing: ActivationCheckpointing) -> ModelConfig:
    return ModelConfig(
        vocab_size=64,
        context=16,
        layers=3,
        heads=2,
        d_model=16,
        dropout=0.1,
        activation_checkpointing=checkpointing,
    )

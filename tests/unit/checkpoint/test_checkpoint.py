"""Saving and loading in one process: what is on disk, what is refused, what survives a crash."""

import errno
import json
import os
import resource
import shutil
import signal
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher.checkpoint import Checkpoint, Checkpointer, CheckpointFolder, SaveError, staging
from launcher.checkpoint import saving as saving_module
from launcher.checkpoint.rank_files import RangeReader, write_shards
from launcher.checkpoint.rng import generator_states
from launcher.measure.live_trace import LiveTrace
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.optim.low_precision import LowPrecisionAdamW
from launcher.strategies.engine import train_step
from launcher.strategies.native import NativeEngine
from launcher.util.errors import UserError
from launcher.util.files import sync

SHAPE: dict[str, Any] = {"vocab_size": 50, "context": 8, "layers": 1, "heads": 2, "d_model": 16}


def new_engine(seed: int = 0, *, device: str = "cpu", **changes: Any) -> NativeEngine:
    torch.manual_seed(seed)
    module = GPT(ModelConfig(**{**SHAPE, **changes})).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    return NativeEngine(module, optimizer, accumulation=1, clip=0.0, device=torch.device(device))


def train(engine: NativeEngine, steps: int, *, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(50, (2, 9), generator=generator).to(engine._device)
        loss, _ = train_step(engine, [(tokens[:, :-1], tokens[:, 1:])], 1e-2)
        losses.append(float(loss))
    return losses


def values(engine: NativeEngine) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, p in engine._module.named_parameters():
        state = engine._optimizer.state[p]
        tensors = {"param": p.detach(), **state}
        found |= {f"{name}:{kind}": tensor.clone() for kind, tensor in tensors.items()}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def engine() -> NativeEngine:
    built = new_engine()
    train(built, 3)
    return built


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_a_fresh_engine_becomes_the_saved_one(engine: NativeEngine, folder: Path) -> None:
    saved = Checkpointer(folder).save(3, engine, {"position": 24})
    assert saved is not None
    assert saved.path == folder / "step-00000003"
    fresh = new_engine(seed=9)
    loaded, _ = Checkpointer(folder).load(folder, fresh)
    assert loaded.step == 3
    assert loaded.extra == {"position": 24}
    assert generator_states() == loaded.rng[0]
    assert same(values(fresh), values(engine))
    assert values(fresh)["wte.weight:step"] == 3
    assert train(fresh, 3, seed=1) == train(engine, 3, seed=1)


def test_it_gets_its_name_when_its_data_is_on_disk(
    engine: NativeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power that fails behind the rename must not leave a name without data."""
    synced: list[str] = []
    at_rename: list[str] = []
    rename = Path.rename

    def noted(path: Path) -> None:
        synced.append(path.name)
        sync(path)

    def renamed(path: Path, to: Path) -> Path:
        if to.name == "step-00000003":
            at_rename.extend(synced)
        return rename(path, to)

    monkeypatch.setattr("launcher.checkpoint.store.sync", noted)
    monkeypatch.setattr(Path, "rename", renamed)
    Checkpointer(folder).save(3, engine, {})
    files = {path.name for path in (folder / "step-00000003").iterdir()}
    assert files == {"index.json", "rank-00000.safetensors"}
    assert files < set(at_rename)


def test_before_the_first_step_there_is_nothing_lost_either(folder: Path) -> None:
    untouched, saved_first = new_engine(), new_engine()
    Checkpointer(folder).save(0, saved_first, {})
    fresh = new_engine(seed=9)
    Checkpointer(folder).load(folder, fresh)
    expected = train(untouched, 3)
    assert train(saved_first, 3) == expected
    assert train(fresh, 3) == expected


def test_the_files_are_safetensors_of_flat_fp32(engine: NativeEngine, folder: Path) -> None:
    Checkpointer(folder).save(3, engine, {})
    raw = (folder / "step-00000003" / "rank-00000.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "shardscale-checkpoint"}
    state = values(engine)
    assert len(header) == 3 * sum(1 for _ in engine._module.parameters())
    for key, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        name, kind, start = key.split(":")
        assert (entry["dtype"], start) == ("F32", "0")
        stored = np.frombuffer(raw[begin:end], dtype="<f4")
        assert np.array_equal(stored, state[f"{name}:{kind}"].flatten().numpy())


def test_twelve_bytes_per_parameter(folder: Path) -> None:
    engine = new_engine(vocab_size=20_000)
    Checkpointer(folder).save(1, engine, {})
    parameters = sum(p.numel() for p in engine._module.parameters())
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert 12 * parameters < written < 12 * parameters * 1.02


def test_an_asynchronous_save_holds_the_moment_of_the_call(
    engine: NativeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def write_when_told(*args: Any) -> Any:
        go.wait()
        return write_shards(*args)

    monkeypatch.setattr(saving_module, "write_shards", write_when_told)
    at_save = values(engine)
    checkpointer = Checkpointer(folder, asynchronous=True)
    assert checkpointer.save(3, engine, {}) is None
    train(engine, 2, seed=1)
    assert checkpointer.poll() is None
    assert CheckpointFolder(folder).list() == []
    go.set()
    saved = checkpointer.wait()
    assert saved is not None
    assert checkpointer.wait() is None
    fresh = new_engine(seed=9)
    checkpointer.load(checkpointer.folder.path, fresh)
    assert same(values(fresh), at_save)


def test_an_asynchronous_save_stages_in_bounded_blocks(
    engine: NativeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page-locked memory comes in powers of two: one buffer would take up to twice its size."""
    made: list[int] = []
    empty = torch.empty

    def noted(*size: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*size, **options)
        if "pin_memory" in options:
            made.append(tensor.numel())
        return tensor

    monkeypatch.setattr(staging, "BLOCK_ELEMENTS", 1000)
    monkeypatch.setattr(torch, "empty", noted)
    checkpointer = Checkpointer(folder, asynchronous=True)
    for step in (1, 2):  # the second save reuses the blocks of the first
        assert checkpointer.save(step, engine, {}) is None
        assert checkpointer.wait() is not None
    elements = 3 * sum(p.numel() for p in engine._module.parameters())
    assert made == [1000] * (elements // 1000) + [elements % 1000]
    fresh = new_engine(seed=9)
    Checkpointer(folder).load(folder, fresh)
    assert same(values(fresh), values(engine))


def test_a_save_without_room_to_stage_is_synchronous(engine: NativeEngine, folder: Path) -> None:
    elements = 3 * sum(p.numel() for p in engine._module.parameters())
    checkpointer = Checkpointer(folder, asynchronous=True)
    assert checkpointer.save(1, engine, {}, staging_bytes=4 * elements - 1) is not None
    assert checkpointer.save(2, engine, {}, staging_bytes=4 * elements) is None
    assert checkpointer.wait() is not None


def test_memory_stays_below_one_tensor_more(folder: Path) -> None:
    with LiveTrace() as trace:
        engine = new_engine(vocab_size=150_000)  # 9.6 MB in its largest tensor
        train(engine, 1)
        largest_bytes = max(4 * p.numel() for p in engine._module.parameters())
        held_bytes = trace.current_bytes
        trace.reset_peak()
        Checkpointer(folder).save(1, engine, {})
        assert trace.peak_bytes() - held_bytes < largest_bytes
        del engine
        fresh = new_engine(seed=9, vocab_size=150_000)
        trace.reset_peak()
        Checkpointer(folder).load(folder, fresh)
        assert trace.peak_bytes() - trace.current_bytes < largest_bytes * 1.01


@pytest.mark.parametrize("asynchronous", [False, True])
def test_states_in_low_precision_are_decoded_one_at_a_time(
    folder: Path, asynchronous: bool
) -> None:
    with LiveTrace() as trace:
        torch.manual_seed(0)
        shape: dict[str, Any] = {**SHAPE, "layers": 8, "d_model": 64}
        module = GPT(ModelConfig(**shape))
        options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}
        optimizer = LowPrecisionAdamW(
            [{"params": [*module.parameters()]}], weight_decay=0.0, moments="bf16", **options
        )
        engine = NativeEngine(
            module, optimizer, accumulation=1, clip=0.0, device=torch.device("cpu")
        )
        train(engine, 1)
        checkpointer = Checkpointer(folder, asynchronous=asynchronous)
        checkpointer.save(1, engine, {})  # makes the staging of an asynchronous one
        checkpointer.wait()
        held_bytes = trace.current_bytes
        trace.reset_peak()
        checkpointer.save(2, engine, {})
        checkpointer.wait()
        largest_bytes = max(4 * p.numel() for p in module.parameters())
        assert trace.peak_bytes() - held_bytes < 3 * largest_bytes


def test_keep_and_latest(engine: NativeEngine, folder: Path) -> None:
    checkpointer = Checkpointer(folder, keep=2)
    for step in (3, 20, 100):
        checkpointer.save(step, engine, {})
    names = sorted(entry.name for entry in folder.iterdir())
    assert names == ["latest", "step-00000020", "step-00000100"]
    assert (folder / "latest").read_text() == "step-00000100\n"
    assert checkpointer.folder.latest() == folder / "step-00000100"


def test_what_cannot_be_removed_yet_stops_no_save(
    engine: NativeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps a file that an export reads, and its folder, until that is closed."""

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    checkpointer = Checkpointer(folder, keep=1)
    for step in (1, 2, 3):
        checkpointer.save(step, engine, {})
    assert [path.name for path in CheckpointFolder(folder).list()] == ["step-00000003"]
    assert len(list(folder.glob(".deleting-*"))) == 2


def test_a_run_that_went_back_keeps_what_it_saves(engine: NativeEngine, folder: Path) -> None:
    checkpointer = Checkpointer(folder, keep=1)
    for step in (20, 3, 4):
        checkpointer.save(step, engine, {})
    assert [path.name for path in checkpointer.folder.list()] == ["step-00000004", "step-00000020"]


@pytest.mark.gpu
@pytest.mark.parametrize("asynchronous", [False, True])
def test_from_a_gpu_to_a_gpu_and_to_a_cpu(folder: Path, asynchronous: bool) -> None:
    engine = new_engine(device="cuda")
    train(engine, 3)
    at_save = values(engine)
    checkpointer = Checkpointer(folder, asynchronous=asynchronous)
    checkpointer.save(3, engine, {})
    train(engine, 5, seed=1)
    checkpointer.wait()
    for device in ("cuda", "cpu"):
        fresh = new_engine(seed=9, device=device)
        loaded, _ = checkpointer.load(checkpointer.folder.path, fresh)
        assert generator_states() == loaded.rng[0]
        assert all(torch.equal(v.cpu(), at_save[k].cpu()) for k, v in values(fresh).items())


def test_the_same_step_again_replaces_it(engine: NativeEngine, folder: Path) -> None:
    checkpointer = Checkpointer(folder)
    checkpointer.save(3, engine, {"try": 1})
    checkpointer.save(3, engine, {"try": 2})
    assert [entry.name for entry in folder.glob("*step*")] == ["step-00000003"]
    assert Checkpoint.open(folder / "step-00000003").extra == {"try": 2}


def test_the_same_step_again_is_there_at_every_moment(
    engine: NativeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a disk that fills up nor a removal that takes minutes leaves the run without it."""
    checkpointer = Checkpointer(folder)
    checkpointer.save(3, engine, {"try": 1})
    write_text, rmtree, seen = Path.write_text, shutil.rmtree, []

    def full(path: Path, *_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SaveError, match="No space left"):
        checkpointer.save(3, engine, {"try": 2})
    monkeypatch.setattr(Path, "write_text", write_text)
    assert Checkpoint.open(folder / "step-00000003").extra == {"try": 1}

    def removes(path: Path, *arguments: Any, **options: Any) -> None:
        seen.append(Checkpoint.open(folder / "step-00000003").extra)
        rmtree(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", removes)
    checkpointer.save(3, engine, {"try": 3})
    assert seen[-1] == {"try": 3}
    assert not list(folder.glob(".*"))


def test_sources(engine: NativeEngine, tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpointer = Checkpointer(run / "checkpoints")
    with pytest.raises(UserError, match="does not exist"):
        checkpointer.load(run, new_engine())
    for step in (3, 4):
        checkpointer.save(step, engine, {})
    elsewhere = Checkpointer(tmp_path / "other")
    for source, step in (
        (run, 4),
        (run / "checkpoints", 4),
        (run / "checkpoints" / "step-00000003", 3),
    ):
        loaded, _ = elsewhere.load(source, new_engine())
        assert loaded.step == step
    with pytest.raises(UserError, match="holds no checkpoint"):
        elsewhere.load(tmp_path, new_engine())
    with pytest.raises(UserError, match="nowhere: does not exist; give a checkpoint's folder"):
        elsewhere.load(tmp_path / "nowhere", new_engine())


def test_another_model_is_refused(engine: NativeEngine, folder: Path) -> None:
    checkpointer = Checkpointer(folder)
    checkpointer.save(3, engine, {})
    wanted = r"wte.weight is \[50, 16\] there and \[51, 16\] in this run's model; give the same"
    with pytest.raises(UserError, match=wanted):
        checkpointer.load(checkpointer.folder.path, new_engine(vocab_size=51))
    with pytest.raises(UserError, match=r"head.weight is absent there and \[50, 16\] in"):
        checkpointer.load(checkpointer.folder.path, new_engine(tied=False))


def test_another_optimizer_is_refused(engine: NativeEngine, folder: Path) -> None:
    Checkpointer(folder).save(3, engine, {})
    other = new_engine()
    other._optimizer = torch.optim.SGD(other._module.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(
        UserError, match=r"exp_avg_sq and this run's optimizer has mom.*or --init-from"
    ):
        Checkpointer(folder).load(folder, other)


def test_dropout_goes_on_with_the_same_masks(folder: Path) -> None:
    engine = new_engine(dropout=0.5)
    train(engine, 2)
    Checkpointer(folder).save(2, engine, {})
    expected = train(engine, 3, seed=1)
    fresh = new_engine(seed=9, dropout=0.5)
    train(fresh, 1)
    Checkpointer(folder).load(folder, fresh)
    assert train(fresh, 3, seed=1) == expected


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_room_is_loud_and_harmless(
    engine: NativeEngine,
    folder: Path,
    largest_file: Callable[[int], None],
    asynchronous: bool,
) -> None:
    checkpointer = Checkpointer(folder, asynchronous=asynchronous)
    checkpointer.save(3, engine, {})
    checkpointer.wait()
    kept = values(engine)
    train(engine, 1)
    largest_file(20_000)

    def save() -> None:
        checkpointer.save(4, engine, {})
        checkpointer.wait()

    with pytest.raises(SaveError, match="step 4 could not be saved: rank 0, File too large while"):
        save()
    largest_file(resource.RLIM_INFINITY)
    assert sorted(entry.name for entry in folder.iterdir()) == ["latest", "step-00000003"]
    fresh = new_engine(seed=9)
    checkpointer.load(checkpointer.folder.path, fresh)
    assert same(values(fresh), kept)
    save()  # and the next one works
    assert checkpointer.folder.latest() == folder / "step-00000004"


def test_a_folder_that_cannot_be_made(engine: NativeEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="Not a directory"):
        Checkpointer(tmp_path / "file" / "checkpoints").save(1, engine, {})


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


MOMENTS = {
    "before the first byte": (saving_module, "write_shards"),
    "with a file half written": (zlib, "crc32"),  # called when a chunk is written
    "before the index": (Checkpoint, "write"),
    "before it has its name": (Path, "rename"),
    "before the pointer": (Path, "replace"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_saving(engine: NativeEngine, folder: Path, moment: str) -> None:
    """A child process kills itself with SIGKILL at the worst moments."""
    checkpointer = Checkpointer(folder)
    checkpointer.save(3, engine, {})
    at_3 = values(engine)
    train(engine, 1)
    child = os.fork()
    if child == 0:
        owner, name = MOMENTS[moment]
        setattr(owner, name, die)
        checkpointer.save(4, engine, {})
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    fresh = new_engine(seed=9)
    loaded, passed_over = Checkpointer(folder).load(folder, fresh)
    assert passed_over == []
    complete = moment == "before the pointer"
    assert loaded.step == (4 if complete else 3)
    assert same(values(fresh), values(engine) if complete else at_3)
    # The next save clears away what was left.
    Checkpointer(folder).save(5, engine, {})
    assert not list(folder.glob(".*"))


def test_more_files_than_a_process_may_open(folder: Path) -> None:
    """As of a thousand ranks, read by one: none of them is damaged."""
    engine = new_engine(seed=1, layers=8)
    train(engine, 1)
    state, path = engine.training_state(), folder / "step-00000001"
    path.mkdir(parents=True)
    files = [
        write_shards(path / f"rank-{rank:05d}.safetensors", partial(list, [shard]))
        for rank, shard in enumerate(state.saved())
    ]
    Checkpoint(
        path=path,
        step=1,
        world_size=len(files),
        shapes=dict(state.shapes),
        kinds=list(state.kinds),
        counters=state.counters(),
        extra={},
        rng=(),
        files=files,
    ).write()
    used = len(os.listdir("/proc/self/fd"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert len(files) > used + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * used + 16, before[1]))
    try:
        with RangeReader(Checkpoint.open(path)) as reader:
            reader.check()
        fresh = new_engine(seed=9, layers=8)
        _, passed_over = Checkpointer(folder).load(folder, fresh)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert passed_over == []
    assert same(values(fresh), values(engine))


def test_a_longer_context_keeps_what_was_learnt(folder: Path) -> None:
    """The further positions begin as in a fresh run, without moments; a shorter one is refused."""
    short = new_engine(context=8)
    train(short, 3)
    Checkpointer(folder).save(3, short, {})
    longer, untouched = new_engine(seed=9, context=12), new_engine(seed=9, context=12)
    train(untouched, 0)
    Checkpointer(folder).load(folder, longer)
    before, after, fresh = values(short), values(longer), dict(untouched._module.named_parameters())
    rows = after["wpe.weight:param"]
    assert torch.equal(rows[:8], before["wpe.weight:param"])
    assert torch.equal(rows[8:], fresh["wpe.weight"][8:])
    for moment in ("exp_avg", "exp_avg_sq"):
        rows = after[f"wpe.weight:{moment}"]
        assert torch.equal(rows[:8], before[f"wpe.weight:{moment}"])
        assert not rows[8:].any()
    others = [key for key in before if not key.startswith("wpe")]
    assert all(torch.equal(after[key], before[key]) for key in others)
    Checkpointer(folder).save(4, longer, {})
    with pytest.raises(UserError, match=r"wpe.weight is \[12, 16\] there and \[8, 16\] in this"):
        Checkpointer(folder).load(folder, short)

"""Damaged and hostile checkpoints: refused by name, passed over by `auto`, never executed."""

import json
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.checkpoint import Checkpointer, DamagedCheckpoint
from launcher.checkpoint.document import digest
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.strategies.native import NativeEngine
from launcher.util.errors import UserError

INDEX, RANK = "index.json", "rank-00000.safetensors"


def new_engine(seed: int = 0) -> NativeEngine:
    torch.manual_seed(seed)
    module = GPT(ModelConfig(vocab_size=50, context=8, layers=1, heads=2, d_model=16))
    return NativeEngine(
        module,
        torch.optim.AdamW(module.parameters(), fused=True),
        accumulation=1,
        clip=0.0,
        device=torch.device("cpu"),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints with different values: steps 1 and 2."""
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpointer.save(step, new_engine(seed=step), {})
    return tmp_path / "checkpoints"


def flip(path: Path, position: int, bit: int = 3) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    path.write_bytes(raw)


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes((path / RANK).read_bytes()[:8], "little")


def cut(path: Path, size_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:size_bytes])


def sign(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index and give it the checksum of what it now says."""
    document = json.loads((path / INDEX).read_text())
    change(document["content"])
    document["sha256"] = digest(document["content"])
    (path / INDEX).write_text(json.dumps(document))


def change_entry(path: Path, **values: Any) -> None:
    sign(path, lambda content: content["files"][0]["ranges"][5].update(values))


def zero_a_page(path: Path) -> None:
    raw = (path / RANK).read_bytes()
    (path / RANK).write_bytes(raw[:-4096] + bytes(4096))


def put_a_folder(path: Path) -> None:
    (path / RANK).unlink()
    (path / RANK).mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit flip in the first tensor": (lambda p: flip(p / RANK, header_bytes(p) + 5), RANK),
    "bit flip in the last byte": (lambda p: flip(p / RANK, -1, bit=7), RANK),
    "bit flip in the header": (lambda p: flip(p / RANK, 40), RANK),
    "a page of zeros": (zero_a_page, RANK),
    "one byte short": (lambda p: cut(p / RANK, -1), RANK),
    "one byte more": (lambda p: (p / RANK).write_bytes((p / RANK).read_bytes() + b"\0"), RANK),
    "empty file": (lambda p: cut(p / RANK, 0), RANK),
    "missing shard": (lambda p: (p / RANK).unlink(), RANK),
    "shard is a folder": (put_a_folder, RANK),
    "shard of another step": (
        lambda p: shutil.copy(p.parent / "step-00000001" / RANK, p / RANK),
        RANK,
    ),
    "missing index": (lambda p: (p / INDEX).unlink(), INDEX),
    "half an index": (lambda p: cut(p / INDEX, 900), INDEX),
    "changed digit in the index": (
        lambda p: (p / INDEX).write_text((p / INDEX).read_text().replace('"step": 2', '"step": 3')),
        INDEX,
    ),
    "binary index": (lambda p: (p / INDEX).write_bytes(b"\x80\x04\x95\xff"), INDEX),
    "index of something else": (lambda p: (p / INDEX).write_text("{}"), INDEX),
    "deep index": (lambda p: (p / INDEX).write_text("[" * 100_000), INDEX),
    "gap": (lambda p: sign(p, lambda c: c["files"][0]["ranges"].pop(3)), INDEX),
    "no file": (lambda p: sign(p, lambda c: c["files"].clear()), INDEX),
    "overlap": (
        lambda p: sign(p, lambda c: c["files"][0]["ranges"].append(c["files"][0]["ranges"][0])),
        INDEX,
    ),
    "range outside": (lambda p: change_entry(p, offset_bytes=10**12), INDEX),
    "negative offset": (lambda p: change_entry(p, offset_bytes=-8), INDEX),
    "lost checksums": (lambda p: change_entry(p, checksums=[]), INDEX),
    "words for numbers": (lambda p: change_entry(p, start="0"), INDEX),
    "unknown field": (lambda p: change_entry(p, colour="red"), INDEX),
    "file elsewhere": (
        lambda p: sign(p, lambda c: c["files"][0].update(name=f"../step-00000001/{RANK}")),
        INDEX,
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_refused_by_name_and_passed_over(folder: Path, kind: str) -> None:
    damage, file = DAMAGES[kind]
    path = folder / "step-00000002"
    damage(path)
    checkpointer = Checkpointer(folder)
    with pytest.raises(DamagedCheckpoint) as caught:
        checkpointer.load(path, new_engine())
    message = str(caught.value)
    assert message.startswith(f"checkpoint {path} is damaged: {file} ")
    assert message.endswith("; resume from another checkpoint")
    assert "\n" not in message
    engine = new_engine()
    loaded, passed_over = checkpointer.load(folder, engine)
    assert loaded.step == 1
    assert passed_over == [message]
    expected = new_engine(seed=1)._module.state_dict()
    got = engine._module.state_dict()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_nothing_intact_is_not_a_fresh_start(folder: Path) -> None:
    for path in folder.glob("step-*"):
        flip(path / RANK, -1)
    with pytest.raises(DamagedCheckpoint, match="step-00000002 is damaged"):
        Checkpointer(folder).load(folder, new_engine())


def test_another_version_is_not_damage(folder: Path) -> None:
    path = folder / "step-00000002"
    (path / INDEX).write_text((path / INDEX).read_text().replace('"version": 2', '"version": 3'))
    said = "format version 3, and this version of shardscale reads 1 and 2; use the one that wrote"
    with pytest.raises(UserError, match=said):
        Checkpointer(folder).load(folder, new_engine())


class Bomb:
    """Unpickling creates a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return open, (str(self.trace), "w")


def test_a_planted_pickle_never_runs(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(trace))
    pickle.loads(bomb).close()
    assert trace.exists()  # so it works
    trace.unlink()

    path = folder / "step-00000002"
    for name in (".metadata", "__0_0.distcp", "state.pt", "rank-00001.safetensors", INDEX + ".pkl"):
        (path / name).write_bytes(bomb)
    (folder / "latest").write_bytes(bomb)
    loaded, _ = Checkpointer(folder).load(folder, new_engine())
    assert loaded.step == 2

    # With all checksums made to match, its bytes are numbers, and nothing but numbers.
    size_bytes = (path / RANK).stat().st_size
    planted = bomb + bytes(size_bytes - len(bomb))
    (path / RANK).write_bytes(planted)

    def make_it_match(content: dict[str, Any]) -> None:
        file = content["files"][0]
        file["header_checksum"] = zlib.crc32(planted[: file["header_bytes"]])
        for entry in file["ranges"]:
            begin = entry["offset_bytes"]
            entry["checksums"] = [zlib.crc32(planted[begin : begin + 4 * entry["numel"]])]

    sign(path, make_it_match)
    loaded, _ = Checkpointer(folder).load(folder, new_engine())
    assert loaded.step == 2

    (path / INDEX).write_bytes(bomb)
    loaded, _ = Checkpointer(folder).load(folder, new_engine())
    assert loaded.step == 1
    assert not trace.exists()

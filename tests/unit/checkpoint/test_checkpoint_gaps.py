"""Pieces with gaps, as a matrix cut by columns has them: written, covered, and read back as any
other pieces."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from launcher.checkpoint import Checkpoint, Checkpointer, DamagedCheckpoint, staging
from launcher.checkpoint.document import digest
from launcher.checkpoint.geometry import Range
from launcher.checkpoint.index import RankFile
from launcher.checkpoint.pretrained.source import TransformersWeights
from launcher.checkpoint.pretrained.stored import open_stored
from launcher.checkpoint.rank_files import RangeReader, write_shards
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.strategies.engine import train_step
from launcher.strategies.flat_shards import PARAM, Shard
from launcher.strategies.native import NativeEngine
from launcher.tools.exchange import export_cli

Shapes = dict[str, tuple[int, ...]]
KINDS = (PARAM, "exp_avg")


def columns_of(whole: Tensor, left: int, right: int) -> Tensor:
    """Return what a rank holds of a matrix: its columns, dense."""
    return whole[:, left:right].contiguous().view(-1)


def cuts(draw: random.Random, count: int, most: int) -> list[tuple[int, int]]:
    """[0, count) in up to `most` pieces."""
    places = {draw.randint(1, count - 1) for _ in range(draw.randint(0, most - 1)) if count > 1}
    edges = [0, *sorted(places), count]
    return list(pairwise(edges))


def local_range(
    name: str, kind: str, local: Tensor, begin: int, end: int, *, left: int, width: int
) -> Iterator[Shard]:
    """Elements [begin, end) of a rank's dense [rows, columns], whose columns begin at `left` in
    rows of `width`: the rest of a row, whole rows, the beginning of one."""
    run = local.shape[1]

    def shard(first: int, last: int) -> Shard:
        start = first // run * width + left + first % run
        more = {"run": run, "pitch": width} if first % run == 0 == last % run else {}
        return Shard(name=name, kind=kind, start=start, data=local.view(-1)[first:last], **more)

    edges = sorted({begin, min(end, -(-begin // run) * run), max(begin, end // run * run), end})
    yield from (shard(*pair) for pair in pairwise(edges))


def random_layout(draw: random.Random, name: str, kind: str, whole: Tensor) -> list[Shard]:
    """All of a tensor, cut in some way."""
    rows = whole.view(len(whole), -1)
    width = rows.shape[1]
    if draw.random() < 0.3:  # anywhere, by rows too
        pieces = cuts(draw, whole.numel(), 5)
        flat = whole.view(-1)
        return [Shard(name=name, kind=kind, start=a, data=flat[a:b]) for a, b in pieces]
    found: list[Shard] = []
    parts = draw.randint(1, 4)
    if width % parts == 0 and draw.random() < 0.7:
        edges = [(i * width // parts, (i + 1) * width // parts) for i in range(parts)]
    else:
        edges = cuts(draw, width, 4)
    for left, right in edges:
        local = columns_of(rows, left, right).view(len(rows), -1)
        for begin, end in cuts(draw, local.numel(), 4):
            found += local_range(name, kind, local, begin, end, left=left, width=width)
    return found


def save(folder: Path, shapes: Shapes, ranks: Sequence[Sequence[Shard]], **more: Any) -> Checkpoint:
    folder.mkdir()
    parts = [p for p in ranks if p]
    files = [
        write_shards(folder / f"rank-{i:05d}.safetensors", partial(iter, part))
        for i, part in enumerate(parts)
    ]
    checkpoint = Checkpoint(
        path=folder,
        step=1,
        world_size=len(ranks),
        shapes=shapes,
        kinds=list(dict.fromkeys(shard.kind for part in parts for shard in part)),
        counters={},
        extra={},
        rng=[],
        files=files,
        **more,
    )
    checkpoint.check_coverage()
    checkpoint.write()
    return Checkpoint.open(folder)


def small_chunks(patch: pytest.MonkeyPatch, elements: int) -> None:
    """So that small tensors have many chunks."""
    for module in ("rank_files", "index"):
        patch.setattr(f"launcher.checkpoint.{module}.CHUNK_ELEMENTS", elements)


@pytest.mark.parametrize("seed", range(60))
def test_any_layout_is_read_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    if seed % 3:
        small_chunks(monkeypatch, draw.choice([1, 3, 7, 16, 64]))
    shapes: Shapes = {f"m{i}": (draw.randint(1, 12), draw.randint(1, 24)) for i in range(3)}
    shapes |= {"vector": (draw.randint(1, 40),), "cube": (3, 4, 5)}
    wholes = {(name, kind): torch.randn(shape) for name, shape in shapes.items() for kind in KINDS}
    ranks: list[list[Shard]] = [[] for _ in range(draw.randint(1, 5))]
    for (name, kind), whole in wholes.items():
        for shard in random_layout(draw, name, kind, whole):
            draw.choice(ranks).append(shard)
    checkpoint = save(tmp_path / "saved", shapes, ranks)
    with RangeReader(checkpoint) as reader:
        reader.check()
        for (name, kind), whole in wholes.items():
            for shard in random_layout(draw, name, kind, whole):
                dtype = draw.choice([torch.float32, torch.bfloat16])
                around = torch.full((len(shard.data) + 2,), 7.0, dtype=dtype)
                reader.read_into(replace(shard, data=around[1:-1]))
                assert torch.equal(around[1:-1], shard.data.to(dtype))
                assert around[0] == around[-1] == 7.0


@pytest.mark.parametrize("seed", range(40))
def test_runs_of_any_length_and_distance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Also such as no matrix of these rows has, and across the ends of rows."""
    draw = random.Random(seed)
    small_chunks(monkeypatch, draw.choice([5, 32, 2**20]))
    whole = torch.randn(13, 17)
    layout = random_layout(draw, "m", PARAM, whole)
    if seed % 2:  # all of it as two pieces whose runs go across the ends of rows
        flat, (run, pitch) = whole.view(-1)[:204], (5, 12)
        parts = [flat.view(-1, pitch)[:, :run], flat.view(-1, pitch)[:, run:]]
        first, second = (part.contiguous().view(-1) for part in parts)
        layout = [
            Shard(name="m", kind=PARAM, start=0, data=first, run=run, pitch=pitch),
            # In other words: its last run, and what follows, is a range.
            Shard(name="m", kind=PARAM, start=run, data=second[:-7], run=7, pitch=pitch),
            Shard(name="m", kind=PARAM, start=197, data=whole.view(-1)[197:]),
        ]
    checkpoint = save(tmp_path / "saved", {"m": (13, 17)}, [layout])
    with RangeReader(checkpoint) as reader:
        for _ in range(20):
            pitch = draw.choice([draw.randint(1, 60), 17, 12])
            run, start = draw.randint(1, min(pitch, 30)), draw.randint(0, 60)
            rows = draw.randint(1, (221 - run - start) // pitch + 1)
            expected = whole.view(-1)[start : start + (rows - 1) * pitch + run]
            expected = expected.unfold(0, run, pitch).reshape(-1)
            data = torch.empty(rows * run)
            shard = Shard(name="m", kind=PARAM, start=start, data=data, run=run, pitch=pitch)
            assert shard.stop == start + (rows - 1) * pitch + run
            reader.read_into(shard)
            assert torch.equal(data, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_to_and_from_a_gpu(tmp_path: Path) -> None:
    whole = torch.randn(600, 4000, device="cuda")
    shards = [
        Shard(name="m", kind=PARAM, start=left, data=columns_of(whole, left, right), **more)
        for left, right in ((0, 1000), (1000, 4000))
        for more in ({"run": right - left, "pitch": 4000},)
    ]
    checkpoint = save(tmp_path / "saved", {"m": (600, 4000)}, [shards])
    with RangeReader(checkpoint) as reader:
        for dtype in (torch.float32, torch.bfloat16):
            data = torch.empty(600 * 2000, device="cuda", dtype=dtype)
            for pitch in (4000, 3000):
                shard = Shard(name="m", kind=PARAM, start=500, data=data, run=2000, pitch=pitch)
                reader.read_into(shard)
                expected = whole.view(-1)[500:].unfold(0, 2000, pitch)[:600].reshape(-1)
                assert torch.equal(data, expected.to(dtype))


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    """A matrix [6, 8] in two columns of 3 and 5; of the second, rank 1 has 2 1/5 rows first."""
    whole = torch.arange(48.0).view(6, 8)
    local = columns_of(whole, 3, 8).view(6, 5)
    ranks: list[list[Shard]] = [
        [Shard(name="m", kind=PARAM, start=0, data=columns_of(whole, 0, 3), run=3, pitch=8)],
        list(local_range("m", PARAM, local, 0, 11, left=3, width=8)),
        list(local_range("m", PARAM, local, 11, 30, left=3, width=8)),
    ]
    return save(tmp_path / "saved", {"m": (6, 8)}, ranks)


def entries_of(path: Path) -> list[dict[str, Any]]:
    files = json.loads((path / "index.json").read_text())["content"]["files"]
    return [entry for file in files for entry in file["ranges"]]


def sign(path: Path, change: Callable[[dict[str, Any]], object], version: int = 2) -> None:
    document = json.loads((path / "index.json").read_text())
    change(document["content"])
    document |= {"sha256": digest(document["content"]), "version": version}
    (path / "index.json").write_text(json.dumps(document))


def test_what_the_index_says(saved: Checkpoint) -> None:
    found = [
        (entry["start"], entry["numel"], entry.get("run", "-"), entry.get("pitch", "-"))
        for entry in entries_of(saved.path)
    ]
    assert found == [
        (0, 18, 3, 8),
        (3, 10, 5, 8),
        (19, 1, "-", "-"),
        (20, 4, "-", "-"),
        (27, 15, 5, 8),
    ]


def test_a_piece_without_elements_is_nothing(saved: Checkpoint) -> None:
    """As of a rank whose partition ends before a parameter."""
    empty = Shard(name="m", kind=PARAM, start=11, data=torch.empty(0), run=3, pitch=8)
    assert empty.stop == 11
    with RangeReader(saved) as reader:
        reader.read_into(empty)


def test_pieces_whose_runs_touch_are_ranges(tmp_path: Path) -> None:
    data = torch.arange(12.0)
    shards = [
        Shard(name="m", kind=PARAM, start=0, data=data[:8], run=4, pitch=4),
        Shard(name="m", kind=PARAM, start=8, data=data[8:], run=4, pitch=9),
    ]
    checkpoint = save(tmp_path / "saved", {"m": (3, 4)}, [shards])
    assert all({"run", "pitch"}.isdisjoint(entry) for entry in entries_of(checkpoint.path))


def entry(content: dict[str, Any], number: int) -> dict[str, Any]:
    found: dict[str, Any] = [r for file in content["files"] for r in file["ranges"]][number]
    return found


def drop(content: dict[str, Any], file: int, number: int) -> None:
    del content["files"][file]["ranges"][number]


def fewer(content: dict[str, Any], number: int, *, after: int) -> None:
    """Without its last run, or its first."""
    wrong = entry(content, number)
    wrong["numel"] -= wrong["run"]
    wrong["start"] += after


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "missing piece": (lambda c: drop(c, 0, 0), "has missing elements of m"),
    "missing part of a row": (lambda c: drop(c, 1, 1), "has missing elements of m"),
    "missing first run": (lambda c: fewer(c, 0, after=8), "has missing elements of m"),
    "missing last run": (lambda c: fewer(c, 0, after=0), "has missing elements of m"),
    "a piece twice": (
        lambda c: c["files"][0]["ranges"].append(entry(c, 4)),
        "has overlapping elements of m",
    ),
    "overlapping runs": (lambda c: entry(c, 0).update(start=1), "has overlapping elements of m"),
    "a row too late": (lambda c: entry(c, 1).update(start=11), "has overlapping elements of m"),
    "a range in a run": (lambda c: entry(c, 2).update(start=18), "has overlapping elements of m"),
    "a range over rows": (
        lambda c: entry(c, 2).update(numel=12),
        "has overlapping elements of m",
    ),
    "wrong pitch": (lambda c: entry(c, 1).update(pitch=9), "has differently spaced elements of m"),
    "wrong pitch of all": (
        lambda c: [entry(c, n).update(pitch=7) for n in (0, 1, 4)],
        "has overlapping elements of m",
    ),
    "beyond the end": (lambda c: entry(c, 4).update(start=35), "has too many elements of m"),
    "far beyond the end": (
        lambda c: [entry(c, n).update(pitch=2**53) for n in (0, 1, 4)],
        "has too many elements of m",
    ),
    "of nobody": (lambda c: entry(c, 0).update(name="n"), "elements of"),
    "of no kind": (lambda c: entry(c, 0).update(kind="k"), "elements of"),
    "no whole runs": (lambda c: entry(c, 0).update(run=4), "numel a multiple of run"),
    "runs upon each other": (lambda c: entry(c, 0).update(pitch=2), "pitch must be at least run"),
    "run alone": (lambda c: entry(c, 0).pop("pitch"), "run and pitch go together"),
    "pitch alone": (lambda c: entry(c, 0).pop("run"), "run and pitch go together"),
    "run of 0": (lambda c: entry(c, 0).update(run=0), "run is 0, but must be greater"),
    "negative pitch": (lambda c: entry(c, 0).update(pitch=-8), "pitch is -8, but must be"),
    "run of another type": (lambda c: entry(c, 0).update(run="3"), "run is '3', but must be"),
    "pitch that is no whole number": (lambda c: entry(c, 0).update(pitch=8.5), "pitch is 8.5"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_not_there_once_is_refused(saved: Checkpoint, kind: str) -> None:
    sign(saved.path, lambda _: None)
    Checkpoint.open(saved.path)  # so far it is one
    damage, said = DAMAGES[kind]
    sign(saved.path, damage)
    with pytest.raises(DamagedCheckpoint) as caught:
        Checkpoint.open(saved.path)
    assert " is damaged: index.json " in str(caught.value)
    assert said in str(caught.value)


def piece(
    name: str, kind: str, start: int, numel: int, run: int | None, pitch: int | None
) -> Range:
    """Return what an index says of a piece, wherever in a file that is."""
    place: dict[str, Any] = {"offset_bytes": 0, "checksums": []}
    return Range(name=name, kind=kind, start=start, numel=numel, run=run, pitch=pitch, **place)


def described(shapes: Shapes, entries: Sequence[Range], kinds: Sequence[str]) -> Checkpoint:
    """A checkpoint without files."""
    sizes = {"size_bytes": 1, "header_bytes": 1, "header_checksum": 0}
    return Checkpoint(
        path=Path(),
        step=1,
        world_size=1,
        shapes=shapes,
        kinds=kinds,
        counters={},
        extra={},
        rng=[],
        files=[RankFile(name="f", ranges=entries, **sizes)],
    )


@pytest.mark.parametrize("seed", range(200))
def test_a_layout_with_one_piece_moved_grown_or_lost_is_refused(seed: int) -> None:
    """Against counting the elements one by one."""
    draw = random.Random(seed)
    shape = (draw.randint(2, 8), draw.randint(2, 12))
    shards = random_layout(draw, "m", PARAM, torch.empty(shape))
    entries = [piece("m", PARAM, s.start, len(s.data), s.run, s.pitch) for s in shards]
    for _ in range(draw.randint(0, 2)):
        at = draw.randrange(len(entries))
        old = entries[at]
        changes: list[dict[str, Any]] = [
            {"start": max(0, old.start + draw.randint(-3, 3))},
            {"numel": max(1, old.numel // (old.run or 1) + draw.randint(-1, 1)) * (old.run or 1)},
        ]
        entries[at] = replace(old, **draw.choice(changes))
    counts = torch.zeros(4000, dtype=torch.int64)
    for found in entries:
        number = torch.arange(found.numel)
        run, pitch = found.run or found.numel, found.pitch or 0
        counts[found.start + number // run * pitch + number % run] += 1
    size = shape[0] * shape[1]
    once = bool((counts[:size] == 1).all()) and not counts[size:].any()
    checkpoint = described({"m": shape}, entries, [PARAM])
    if once:
        checkpoint.check_coverage()
    else:
        with pytest.raises(DamagedCheckpoint):
            checkpoint.check_coverage()


def test_a_flipped_byte_of_a_piece_with_gaps_is_found(saved: Checkpoint) -> None:
    file = saved.files[2]
    path = saved.path / file.name
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)
    for data, start, more in (
        (torch.empty(48), 0, {}),
        (torch.empty(4), 37, {"run": 1, "pitch": 3}),
        (torch.empty(6), 7, {"run": 1, "pitch": 8}),
    ):
        with RangeReader(saved) as reader, pytest.raises(DamagedCheckpoint, match="other bytes"):
            reader.read_into(Shard(name="m", kind=PARAM, start=start, data=data, **more))
    with RangeReader(saved) as reader:  # what does not need it is there
        data = torch.empty(18)
        reader.read_into(Shard(name="m", kind=PARAM, start=0, data=data, run=3, pitch=8))
        assert torch.equal(data, torch.arange(48.0).view(6, 8)[:, :3].reshape(-1))


def test_chunks_without_a_wanted_element_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, 100)
    whole = torch.randn(40, 50)
    shards = [
        Shard(name="m", kind=PARAM, start=left, data=columns_of(whole, left, left + 25), **more)
        for more in ({"run": 25, "pitch": 50},)
        for left in (0, 25)
    ]
    checkpoint = save(tmp_path / "saved", {"m": (40, 50)}, [shards])
    reads: list[int] = []
    read = RangeReader._read

    def counting(self: RangeReader, file: Any, found: Range, number: int, buffer: Tensor) -> Tensor:
        reads.append(found.start + number * 100)
        return read(self, file, found, number, buffer)

    monkeypatch.setattr(RangeReader, "_read", counting)
    with RangeReader(checkpoint) as reader:
        # Rows 8 to 15 of columns 30 to 49: the other piece has nothing of them.
        data = torch.empty(160)
        reader.read_into(Shard(name="m", kind=PARAM, start=430, data=data, run=20, pitch=50))
    assert torch.equal(data.view(8, 20), whole[8:16, 30:])
    assert reads == [225, 325]


def test_version_1_is_read(tmp_path: Path) -> None:
    """As it was written: every piece a range, and no word of gaps."""
    whole = torch.randn(4, 6)
    flat = whole.view(-1)
    shards = [Shard(name="m", kind=PARAM, start=a, data=flat[a:b]) for a, b in ((0, 9), (9, 24))]
    files = []
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    for rank, shard in enumerate(shards):
        file = write_shards(folder / f"rank-{rank:05d}.safetensors", partial(iter, [shard]))
        files.append(
            {
                "name": file.name,
                "size_bytes": file.size_bytes,
                "header_bytes": file.header_bytes,
                "header_checksum": file.header_checksum,
                "ranges": [
                    {
                        "name": "m",
                        "kind": "param",
                        "start": shard.start,
                        "numel": len(shard.data),
                        "offset_bytes": file.header_bytes,
                        "checksums": list(file.ranges[0].checksums),
                    }
                ],
            }
        )
    content = {
        "step": 1,
        "world_size": 2,
        "shapes": {"m": [4, 6]},
        "kinds": ["param"],
        "counters": {},
        "extra": {},
        "rng": [],
        "files": files,
        "own_shapes": {},
    }
    document = {"format": "shardscale-checkpoint", "version": 1, "sha256": digest(content)}
    (folder / "index.json").write_text(json.dumps({**document, "content": content}))
    with RangeReader(Checkpoint.open(folder)) as reader:
        reader.check()
        for left, right in ((0, 6), (0, 2), (2, 6)):
            data = torch.empty(4 * (right - left))
            run = right - left
            reader.read_into(Shard(name="m", kind=PARAM, start=left, data=data, run=run, pitch=6))
            assert torch.equal(data.view(4, -1), whole[:, left:right])


def test_coverage_does_not_look_at_rows() -> None:
    """Matrices with so many of them that it would never end: tensor 4 x shard 16, each rank with
    the end of a row, whole rows, and the beginning of one."""
    rows, width, run = 10**12, 6400, 1600
    entries = []
    for kind, column, part in product(KINDS, range(4), range(16)):
        begin = rows * run * part // 16 + 7 * (part > 0)
        end = rows * run * (part + 1) // 16 + 7 * (part < 15)
        inner = (-(-begin // run) * run, end // run * run)
        for first, last in ((begin, inner[0]), inner, (inner[1], end)):
            start = first // run * width + column * run + first % run
            gaps = (run, width) if (first, last) == inner else (None, None)
            if first < last:
                entries.append(piece("m", kind, start, last - first, *gaps))
    checkpoint = described({"m": (rows, width)}, entries, KINDS)
    checkpoint.check_coverage()
    for at in (0, 1, len(entries) // 2, -1):
        lost = [entry for entry in entries if entry is not entries[at]]
        with pytest.raises(DamagedCheckpoint, match="has missing elements"):
            described({"m": (rows, width)}, lost, KINDS).check_coverage()
        moved = replace(entries[at], start=entries[at].start + (2 if at == 0 else -2))
        with pytest.raises(DamagedCheckpoint, match="has overlapping elements"):
            described({"m": (rows, width)}, [*lost, moved], KINDS).check_coverage()


class ByColumns(NativeEngine):
    """Holds its matrices whole, and saves and fills them in columns."""

    def training_state(self) -> Any:
        state: Any = super().training_state()
        saved, loaded = state.saved, state.loaded

        def pieces(shard: Shard) -> Iterator[tuple[Shard, Tensor]]:
            shape = state.shapes[shard.name]
            rows = shard.data.view(shape[0], -1)
            run = rows.shape[1] // 2 or 1
            for left in range(0, rows.shape[1], run):
                part = rows[:, left : left + run]
                gaps = (run, rows.shape[1]) if len(shape) > 1 else (None, None)
                data = part.reshape(-1)
                yield replace(shard, start=left, data=data, run=gaps[0], pitch=gaps[1]), part

        def fill() -> Iterator[Shard]:
            for whole in loaded():
                for shard, part in pieces(whole):
                    yield shard
                    part.copy_(shard.data.view(part.shape))

        state.saved = lambda: (shard for whole in saved() for shard, _ in pieces(whole))
        state.loaded = fill
        return state


@pytest.mark.parametrize("block_elements", [None, 2**26, 100])  # of an asynchronous save
@pytest.mark.parametrize(
    ("saver", "loader"), [(ByColumns, NativeEngine), (NativeEngine, ByColumns)]
)
def test_an_engine_goes_on_from_columns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saver: type[NativeEngine],
    loader: type[NativeEngine],
    block_elements: int | None,
) -> None:
    monkeypatch.setattr(staging, "BLOCK_ELEMENTS", block_elements)
    engines = []
    for seed, kind in enumerate((saver, loader)):
        torch.manual_seed(seed)
        module = GPT(ModelConfig(vocab_size=50, context=8, layers=1, heads=2, d_model=16))
        optimizer = torch.optim.AdamW(module.parameters())
        device = torch.device("cpu")
        engines.append(kind(module, optimizer, accumulation=1, clip=0.0, device=device))
    saving, loading = engines
    tokens = torch.randint(50, (2, 9))
    train_step(saving, [(tokens[:, :-1], tokens[:, 1:])], 1e-2)
    checkpointer = Checkpointer(tmp_path, asynchronous=block_elements is not None)
    saved = checkpointer.save(1, saving, {}) or checkpointer.wait()
    assert saved is not None
    with_gaps = any("run" in entry for entry in entries_of(saved.path))
    assert with_gaps == (saver is ByColumns)  # also where blocks end inside runs
    checkpointer.load(checkpointer.folder.path, loading)
    wholes = [NativeEngine.training_state(engine).saved() for engine in engines]
    for mine, other in zip(*wholes, strict=True):
        assert torch.equal(mine.data, other.data), (mine.name, mine.kind)


@pytest.mark.parametrize("family", ["gpt2", "llama"])  # stored the other way round, and ours
def test_a_folder_of_transformers_is_read_with_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 61, "context": 24, "layers": 1, "heads": 2}
    if family == "llama":
        shape |= {"position": "rope", "norm": "rms", "activation": "swiglu", "tied": False}
        shape |= {"bias": "none"}
    config = ModelConfig(**shape, d_model=16)
    module = GPT(config)
    optimizer = torch.optim.AdamW(module.parameters())
    engine = NativeEngine(module, optimizer, accumulation=1, clip=0.0, device=torch.device("cpu"))
    extra = {"config": {"tokenizer": "byte"}, "model": config}
    Checkpointer(tmp_path / "run" / "checkpoints").save(1, engine, extra)
    out = tmp_path / "hf"
    assert export_cli.main([str(tmp_path / "run"), "--out", str(out), "--tokenizer=none"]) == 0
    monkeypatch.setattr(
        "launcher.checkpoint.pretrained.folder_weights.CHUNK_ELEMENTS", 100
    )  # a few rows each
    draw = random.Random(0)
    for folder in (out, tmp_path / "run"):
        with open_stored(folder) as weights:
            for name, parameter in module.named_parameters():
                for shard in random_layout(draw, name, PARAM, parameter.detach()):
                    data = torch.empty(len(shard.data), dtype=torch.bfloat16)
                    weights.read_into(replace(shard, data=data))
                    assert torch.equal(data, shard.data.bfloat16())


def test_only_the_rows_that_are_needed_are_read(tmp_path: Path) -> None:
    whole, asked = torch.randn(100, 8), []

    class Source:
        def read_range(self, name: str, start: int, stop: int) -> Tensor:
            asked.append((start, stop))
            return whole.view(-1)[start:stop].clone()

    data = torch.empty(20, 3)
    shard = Shard(name="m", kind=PARAM, start=83, data=data.view(-1), run=3, pitch=8)
    TransformersWeights.read_into(cast(Any, Source()), shard)
    assert torch.equal(data, whole[10:30, 3:6])
    assert asked == [(83, 83 + 19 * 8 + 3)]

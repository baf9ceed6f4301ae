"""Every field of `index.json`, given every kind of wrong value: one sentence, nothing made."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train

from launcher.checkpoint import Checkpoint, Checkpointer, DamagedCheckpoint
from launcher.checkpoint.document import VERSION, digest, read_document
from launcher.checkpoint.index import Contents
from launcher.model.gpt import GPT
from launcher.optim.registry import build_optimizer
from launcher.run.prepare import prepare
from launcher.run.saves import run_entries
from launcher.strategies.engine import LossScale
from launcher.strategies.native import NativeEngine

INDEX = "index.json"
FLAGS = ["--device=cpu", "--tokenizer=byte", "--vocab-size=257", "--layers=1", "--d-model=16"]
FLAGS += ["--heads=2", "--context=16", "--steps=4", "--micro-batch=2", "--optimizer=adafactor"]
INFINITE = json.loads("1e400")
Path_ = tuple[str | int, ...]

ANY: list[Any] = [None, True, [], {}, [[]], {"a": {}}]
WRONG = {
    type(None): [True, [], {}, [[]], {"a": {}}],
    int: [*ANY, "", "4", "½", 4.5, 4.0, -1, 2**63, 2**400, float("nan"), INFINITE, -INFINITE],
    float: [*ANY, "", "4", -1.0, -1, float("nan"), INFINITE, -INFINITE, 1e300],
    str: [*ANY, 4, 4.5, -1, float("nan"), ""],
    bool: [None, [], {}, "", "yes", 2, 0.5, float("nan")],
    list: [None, True, {}, "", "ab", 3, 4.5, [None], [True], ["\x1b\n"], [[]], [{}], [-1.5]],
    dict: [None, True, [], "", "ab", 3, 4.5, [[]], {"": 1}, {"a": None}, {"\n": [1]}],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint with something in every field; only its index may be changed."""
    folder = tmp_path_factory.mktemp("saved")
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"Paragraph {number} says little." for number in range(200)))
    patch = pytest.MonkeyPatch()
    patch.setenv("SHARDSCALE_CACHE", str(folder / "cache"))
    prepared = prepare([*FLAGS, f"--data={text}"], world_size=1, ranks_per_node=1)
    module = GPT(prepared.resolved.model)
    engine = NativeEngine(
        module,
        build_optimizer(module, prepared.resolved.config.optim),
        accumulation=1,
        clip=0.0,
        device=torch.device("cpu"),
    )
    extra = {
        **run_entries(prepared.resolved, prepared.corpus),
        "skipped_steps": 0,
        "loss_scale": LossScale(scale=2.0, good_steps=1),
    }
    Checkpointer(folder / "run" / "checkpoints").save(3, engine, extra)
    yield folder / "run" / "checkpoints" / "step-00000003"
    patch.undo()


@pytest.fixture(autouse=True)
def untouched(saved: Path) -> Iterator[None]:
    before = (saved / INDEX).read_bytes()
    yield
    (saved / INDEX).unlink()
    (saved / INDEX).write_bytes(before)


def content_of(checkpoint: Path) -> Any:
    return json.loads((checkpoint / INDEX).read_text())["content"]


def write(checkpoint: Path, content: Any) -> None:
    document = {"format": "shardscale-checkpoint", "version": VERSION, "content": content}
    document["sha256"] = digest(content)
    (checkpoint / INDEX).write_text(json.dumps(document))


def places(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """All values inside; of a list the first stands for all, of shapes one parameter's."""
    if at:
        yield at
    if isinstance(value, dict):
        few = at in (("shapes",), ("own_shapes", "exp_avg_sq_rows"))
        for key in list(value)[: 1 if few else None]:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*at, 0))


def with_change(content: Any, at: Path_, change: Any) -> Any:
    """A copy where `change(parent, key)` was done."""
    copy = json.loads(json.dumps(content))
    parent = copy
    for key in at[:-1]:
        parent = parent[key]
    change(parent, at[-1])
    return copy


def is_open(at: Path_) -> bool:
    """Extra entries and their absence are nothing wrong here."""
    return at[:1] == ("extra",) and at[1:2] not in (("model",), ("loss_scale",))


def wrong_values(at: Path_, value: Any) -> Iterator[Any]:
    for wrong in WRONG[type(value)]:
        harmless = json.dumps(wrong) == json.dumps(value)
        if at[:2] == ("extra", "config"):
            # Numbers of a configuration are only shown, and most of it may be left open.
            harmless |= wrong is None or wrong == "" or type(wrong) is int
            harmless |= type(wrong) is float and type(value) is float and math.isfinite(wrong)
        harmless |= is_open(at) and isinstance(value, dict) and isinstance(wrong, dict)
        harmless |= at == ("extra", "loss_scale") and wrong is None  # no fp16
        harmless |= at == ("rng",) and wrong in ([], [{}])
        harmless |= at == ("counters", "step") and wrong == 0
        if not harmless:
            yield wrong


def refusal(checkpoint: Path) -> str | None:
    try:
        Checkpoint.open(checkpoint)
    except DamagedCheckpoint as error:
        said = str(error)
        # A long path is shortened where the sentence would be.
        assert said.startswith("checkpoint ")
        assert f" is damaged: {INDEX} " in said
        assert said.isprintable(), said
        assert len(said.replace(str(checkpoint), "")) < 300, said
        return said
    return None


def test_the_index_as_it_was_saved_is_accepted(saved: Path) -> None:
    content = content_of(saved)
    write(saved, content)
    assert Checkpoint.open(saved).step == 3
    everything = {at[0] for at in places(content)}
    assert everything == set(content)
    assert {"config", "model", "tokenizer", "corpus", "steps"} < set(content["extra"])
    assert content["own_shapes"]
    assert content["rng"]


def test_every_field_of_a_wrong_type_or_range_is_refused(saved: Path) -> None:
    content = content_of(saved)
    accepted, tried = [], 0
    for at in places(content):
        value = content
        for key in at:
            value = value[key]
        for wrong in wrong_values(at, value):
            write(
                saved,
                with_change(
                    content,
                    at,
                    lambda o, k, wrong=wrong: (
                        o.update({k: wrong}) if isinstance(o, dict) else o.__setitem__(k, wrong)
                    ),
                ),
            )
            tried += 1
            if refusal(saved) is None:
                accepted.append((at, wrong))
    assert accepted == []
    assert tried > 700


def test_every_missing_or_additional_field_is_refused(saved: Path) -> None:
    content = content_of(saved)
    accepted = []
    for at in places(content):
        newer = ("extra", "loss_scale", "overflowed")  # than checkpoints that are read
        optional = at in (("own_shapes",), ("rng", 0, "cpu"), newer) or at[:2] == ("extra", "model")
        if isinstance(at[-1], str) and not is_open(at) and not optional:
            write(saved, with_change(content, at, lambda o, k: o.pop(k)))
            if refusal(saved) is None:
                accepted.append(("missing", at))
        write(
            saved,
            with_change(
                content, at, lambda o, k: isinstance(o[k], dict) and o[k].update(colour="red")
            ),
        )
        is_object = isinstance(at[-1], str) and content_at_is_object(content, at)
        if is_object and not is_open(at) and refusal(saved) is None:
            accepted.append(("additional", at))
    assert accepted == [("missing", ("extra", "loss_scale"))]


@pytest.mark.parametrize(("qkv", "bias"), [(True, "qkv,mlp"), (None, "mlp")])
def test_the_three_fields_of_biases_are_read_as_one(
    saved: Path, qkv: bool | None, bias: str
) -> None:
    content = content_of(saved)
    model = content["extra"]["model"]
    del model["bias"]
    model |= {"attention_bias": False, "qkv_bias": qkv, "mlp_bias": True}
    write(saved, content)
    assert read_document(saved, Contents).extra["model"].bias == bias


def content_at_is_object(content: Any, at: Path_) -> bool:
    for key in at:
        content = content[key]
    return isinstance(content, dict)


@pytest.mark.parametrize(
    "raw",
    [
        "[" * 100_000,
        '{"a":' * 50_000,
        '{"format": "shardscale-checkpoint", "version": 1, "content": '
        + "[" * 900
        + "]" * 900
        + ', "sha256": ""}',
        '{"format": "shardscale-checkpoint", "version": true}',
        '{"format": "shardscale-checkpoint", "version": 1.0}',
        '{"format": "shardscale-checkpoint", "version": "1"}',
        '{"format": ["shardscale-checkpoint"], "version": 1}',
        '{"format": "shardscale-checkpoint", "version": ' + "9" * 5000 + "}",
        "1e400",
        "null",
        "",
        "\x00",
    ],
)
def test_an_envelope_that_is_none(saved: Path, raw: str) -> None:
    (saved / INDEX).write_text(raw)
    assert refusal(saved) is not None


def test_long_lists_and_deep_values(saved: Path) -> None:
    content = content_of(saved)
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    for at, wrong in (
        (("kinds",), ["param"] * 100_000),
        (("files",), [{}] * 20_000),
        (("files", 0, "ranges", 0, "checksums"), [0] * 20_000),
        (("rng",), [{}] * 20_000),
        (("extra", "deep"), deep),
        (("shapes", "wte.weight"), [1] * 100_000),
        (("extra", "model", "d_model"), 2**50),
        (("extra", "model", "layers"), 2**50),
    ):
        write(saved, with_change(content, at, lambda o, k, wrong=wrong: o.update({k: wrong})))
        assert refusal(saved) is not None, at


def test_neither_a_pipe_nor_a_folder_is_waited_for(saved: Path) -> None:
    raw = (saved / INDEX).read_bytes()
    (saved / INDEX).unlink()
    os.mkfifo(saved / INDEX)
    said = refusal(saved)
    (saved / INDEX).unlink()
    (saved / INDEX).write_bytes(raw)
    assert said is not None
    assert "index.json is not a file" in said


def test_names_that_cannot_be_shown(saved: Path) -> None:
    content = content_of(saved)
    for name in ("a\nb", "\x1b[2J", "x" * 5000, "\ud800"):
        write(saved, with_change(content, ("shapes", name), lambda o, k: o.update({k: [1]})))
        assert refusal(saved) is not None
        write(saved, with_change(content, (name,), lambda o, k: o.update({k: [1]})))
        assert refusal(saved) is not None


def test_every_field_is_looked_at_before_anything_is_made(saved: Path, tmp_path: Path) -> None:
    content = content_of(saved)
    for name in content:
        write(saved, with_change(content, (name,), lambda o, k: o.update({k: None})))
        flags = [*FLAGS, f"--resume={saved.parents[1]}", f"--out={tmp_path / 'out'}"]
        with pytest.raises(DamagedCheckpoint, match=f"index.json says {name} is None"):
            prepare(flags, world_size=1, ranks_per_node=1)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resume", ["checkpoint", "run"])
def test_the_command_refuses_before_it_makes_anything(
    saved: Path, tmp_path: Path, resume: str
) -> None:
    write(saved, with_change(content_of(saved), ("step",), lambda o, k: o.update({k: "4"})))
    source = saved if resume == "checkpoint" else saved.parents[1]
    done = train(1, *FLAGS, f"--out={tmp_path / 'out'}", f"--resume={source}")
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"shardscale: checkpoint {saved} is damaged: index.json says step"
    )
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

"""YAML as people mean it, and one short sentence for everything else."""

import os
import time
from pathlib import Path

import pytest
import yaml

from launcher.compare.sweep.grid_source import read_grid_file
from launcher.config.arguments import parse_run_config
from launcher.config.yaml_file import read_yaml
from launcher.util.errors import UserError

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(12)
)
HOSTILE = {
    "no date": ("steps: 2001-99-99", "steps is '2001-99-99', but must be a whole number"),
    "5,000 digits": ("steps: " + "9" * 5000, "not valid YAML"),
    "5,000 digits in quotes": (f"steps: '{'9' * 5000}'", "a whole number"),
    "nested lists": ("steps: " + "[" * 100_000, "nested too deep"),
    "nested mappings": ("steps: " + "{a: " * 50_000, "nested too deep"),
    "nested lines": ("\n".join("  " * n + "a:" for n in range(300)), "unknown key 'a'"),
    "NUL": ("steps: \0", "not valid YAML"),
    "alias bomb": (BOMB, "write the value out"),
    "alias": ("lr: &x 1\nclip: *x", "*x: write the value out"),
    "a key twice": ("steps: 3\nlr: 1.0\nsteps: 5", "'steps' is given twice"),
    "base 60": ("steps: 1:30", "steps is '1:30'"),
    "base 60 with a fraction": ("max_minutes: 1:30.5", "max_minutes is '1:30.5'"),
    "a Python object": ("steps: !!python/object/apply:os.system [ls]", "not valid YAML"),
    "a list as key": ("? [a, b]\n: 3", "not valid YAML"),
    "binary": ("steps: !!binary '%'", "steps is b''"),
    "a long text": ("steps: " + "x" * 100_000, "steps is 'xxx"),
    "a long key": ("x" * 100_000 + ": 3", "not valid YAML"),
    "a long list": (f"steps: [{'1, ' * 20_000}]", "steps is [1, 1"),
    "control characters": ('data: "a\\e[31m\\nb"', "control character"),
    "a path of 5,000": ("out: " + "x/" * 2500, "too long"),
    "two documents": ("steps: 3\n---\nsteps: 4", "not valid YAML"),
    "larger than anybody writes": ("# " + "x" * 300_000, "is larger than"),
}


def sentence_of(path: Path) -> str:
    started_s = time.process_time()
    with pytest.raises(UserError) as caught:
        parse_run_config(["--config", str(path)])
    assert time.process_time() - started_s < 5
    message = str(caught.value)
    assert message.startswith("--config ")
    assert len(message) < 290
    assert message.isprintable()
    return message


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_yaml_is_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    text, says = HOSTILE[kind]
    (tmp_path / "c.yaml").write_text(text)
    assert says in sentence_of(tmp_path / "c.yaml")


@pytest.mark.parametrize("kind", ["pipe", "device", "loop", "folder"])
def test_what_is_no_file_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.mkdir()
    sentence_of(path)
    with pytest.raises(UserError, match="--grid-file"):
        read_grid_file(str(path))


def test_a_grid_file_is_read_by_the_same_rules(tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text(BOMB)
    with pytest.raises(UserError, match="write the value out"):
        read_grid_file(str(tmp_path / "g.yaml"))


def test_plain_values_are_what_they_look_like(tmp_path: Path) -> None:
    text = "a: 010\nb: 1_000\nc: -3\nd: 0.5\ne: 1.0e-3\nf: yes\ng: null\nh: [1, .inf]\ni: 1e-3\n"
    (tmp_path / "c.yaml").write_text(text)
    read = read_yaml(tmp_path / "c.yaml")
    assert read == {
        **{"a": "010", "b": "1_000", "c": -3, "d": 0.5, "e": 0.001, "f": True, "g": None},
        **{"h": [1, float("inf")], "i": "1e-3"},
    }
    # What is not octal, not base 60 and no date reads as with any other reader.
    other = yaml.safe_load(text)
    assert {key for key in read if read[key] != other[key]} == {"a", "b"}

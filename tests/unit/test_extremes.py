"""Every flag, given what no flag expects: each is accepted for a good reason or refused.

The cases are made from the config itself, so that a new flag is covered without being named here.
A case is the real `launcher.train`, forked from one process, up to where ranks would meet.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from launcher.config import field_types
from launcher.flags import flag

ACCEPTED, REFUSED = 0, 2
LONGEST_SENTENCE = 300
LIMIT_S = 60  # tens of milliseconds on an idle machine
TORCHRUN = Path(sys.executable).parent / "torchrun"

FORK_PER_CASE = f"""
import json, os, resource, signal, sys, traceback
import launcher.train

launcher.train.start = lambda *_, **__: os._exit({ACCEPTED})
for case in json.load(sys.stdin):
    if (child := os.fork()) == 0:
        signal.alarm({LIMIT_S})
        os.chdir(case["folder"])
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(case[name], os.O_WRONLY | os.O_CREAT), number)
        try:
            launcher.train.main(case["argv"])
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(99)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

NUMBERS = (
    *("-1", "0", "1", "2147483648", "9223372036854775808", "9" * 4000, "9" * 5000),
    *("1e30", "1e400", "1e-400", "nan", "-inf", "\u0663", "\uff11\uff12"),
)
"""From nothing to more than Python reads, and other scripts' digits."""

PATHS = (
    *("x/" * 2500, "x" * 256, "nowhere/" + "x" * 256, "~nouser/x", "loop", "loop/x", "dangling"),
    *("pipe", "pipe.txt", "/dev/full", "zero.jsonl", "file/x", "a\nb", "a\x1b[31mb", "a\x9bb", "."),
)
TEXTS = ("", "x" * 5000, "a\nb\x1b[31m", "None", "\u202etxt")
SIZES = (
    "1",
    "0",
    "-1GiB",
    "9" * 4000,
    "9" * 5000 + "GiB",
    "inf",
    "\u0663GiB",
    "1e9GiB",
    "9999999TiB",
)

BASE = [
    *("--device", "cpu", "--tokenizer", "byte", "--vocab-size", "257", "--layers", "2"),
    *("--d-model", "32", "--heads", "2", "--context", "32", "--data", "text.txt"),
    *("--micro-batch", "2", "--steps", "2"),
]
ALSO = {
    # What a flag needs beside it to mean something.
    "nvme_path": ["--strategy", "single"],
}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    value: str
    argv: list[str]

    def __str__(self) -> str:
        return f"{self.name}={ascii(self.value)[1:-1]:.24}-{len(self.value)}"


def plain(annotation: Any) -> Any:
    return next((a for a in get_args(annotation) if a is not type(None)), annotation)


def values_for(name: str, annotation: Any) -> list[tuple[str, ...]]:
    kind = annotation if get_origin(annotation) is Literal else plain(annotation)
    if get_origin(annotation) is tuple:
        return [("0.5", value) for value in NUMBERS]
    if kind in (int, float):
        return [(value,) for value in NUMBERS]
    if kind is bool:
        return []
    if kind is Path or name in ("data", "tokenizer"):
        return [(value,) for value in (*PATHS, *TEXTS)]
    if name == "memory_limit" or name.startswith("nvme_"):
        return [(value,) for value in (*SIZES, *TEXTS)]
    return [(value,) for value in TEXTS]


def cases() -> list[Case]:
    made = []
    for name, annotation in field_types().items():
        for values in values_for(name, annotation):
            kept = list(BASE)
            if flag(name) in kept:
                at = kept.index(flag(name))
                del kept[at : at + 2]
            if name == "epochs":
                kept = kept[:-2]
            argv = [f"{flag(name)}={values[0]}"] if len(values) == 1 else [flag(name), *values]
            made.append(
                Case(name=name, value=" ".join(values), argv=[*kept, *ALSO.get(name, []), *argv])
            )
    return made


CASES = cases()


def lay_out(folder: Path) -> None:
    folder.mkdir()
    text = "\n\n".join(f"Paragraph {number} says very little." for number in range(300))
    (folder / "text.txt").write_text(text)
    (folder / "file").write_text("a file")
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("gone/away")
    (folder / "zero.jsonl").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / "pipe.txt")


def outcome_of(folder: Path, argvs: list[list[str]], root: Path) -> list[tuple[int, str, str]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SHARDSCALE")}
    jobs = [
        {
            "argv": argv,
            "folder": str(folder),
            "stdout": str(root / f"{number}.out"),
            "stderr": str(root / f"{number}.err"),
        }
        for number, argv in enumerate(argvs)
    ]
    done = subprocess.run(
        [sys.executable, "-c", FORK_PER_CASE],
        input=json.dumps(jobs),
        env={**environment, "SHARDSCALE_CACHE": str(root / "cache")},
        capture_output=True,
        text=True,
        timeout=1200,
        check=True,
    )
    codes = map(int, done.stdout.split())
    return [
        (code, Path(str(job["stdout"])).read_text(), Path(str(job["stderr"])).read_text())
        for job, code in zip(jobs, codes, strict=True)
    ]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    root = tmp_path_factory.mktemp("extremes")
    lay_out(root / "here")
    before = sorted(os.listdir(root / "here"))
    found = outcome_of(root / "here", [case.argv for case in CASES], root)
    assert sorted(os.listdir(root / "here")) == before
    return dict(zip(map(str, CASES), found, strict=True))


def test_every_flag_is_covered() -> None:
    kinds = {name for name, annotation in field_types().items() if plain(annotation) is not bool}
    assert kinds == {case.name for case in CASES}
    assert len({str(case) for case in CASES}) == len(CASES)
    assert len(CASES) > 700


@pytest.mark.parametrize("case", CASES, ids=str)
def test_accepted_or_refused_in_one_sentence(
    case: Case, outcomes: dict[str, tuple[int, str, str]]
) -> None:
    code, stdout, stderr = outcomes[str(case)]
    assert code in (ACCEPTED, REFUSED), stderr[-2000:]
    assert stdout == ""
    sentences = [line for line in stderr.splitlines() if not line.startswith("data: ")]
    if code == ACCEPTED:
        assert sentences == []
        return
    (sentence,) = sentences
    assert sentence.startswith("shardscale: ")
    assert len(sentence) < LONGEST_SENTENCE
    assert sentence.isprintable()

"""Every flag, given what no flag expects: each is accepted for a good reason or refused.

The cases are made from the config itself, so that a new flag is covered without being named here.
A case is the real `launcher.train`, forked from one process, up to the rendezvous of the ranks.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from launcher.config.schema import field_types
from launcher.util.flags import flag

ACCEPTED, REFUSED = 0, 2
LONGEST_SENTENCE = 300
LIMIT_S = 60  # tens of milliseconds on an idle machine

FORK_PER_CASE = f"""
import gc, json, os, resource, signal, sys, traceback
import launcher.torchrun
import launcher.train
import torch.distributed.run

gc.freeze()
for case in json.load(sys.stdin):
    if (child := os.fork()) == 0:
        signal.alarm({LIMIT_S})
        os.chdir(case["folder"])
        os.environ.update(case["environment"])
        if not case["environment"]:
            launcher.train.start = lambda *_, **__: os._exit({ACCEPTED})
        if case["gone"]:
            os.rmdir(case["folder"])
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(case[name], os.O_WRONLY | os.O_CREAT), number)
        try:
            if case["argv"][0] == "torchrun":
                sys.argv = case["argv"]
                launcher.torchrun.command()
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

BOUNDS = ("-1", "0", "1", "2147483648", "9223372036854775808", "1e30", "nan")
"""What a flag's own rule answers; the other numbers are the parser's, once for each type."""

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


def values_for(name: str, annotation: Any, *, first: bool) -> list[tuple[str, ...]]:
    """Values of one flag, which is the first of its type or not."""
    kind = annotation if get_origin(annotation) is Literal else plain(annotation)
    numbers = NUMBERS if first else BOUNDS
    if get_origin(annotation) is tuple:
        return [("0.5", value) for value in numbers]
    if kind in (int, float):
        return [(value,) for value in numbers]
    if kind is bool:
        return []
    if kind is Path or name in ("data", "tokenizer"):
        return [(value,) for value in (*PATHS, *TEXTS)]
    if name == "memory_limit" or name.startswith("nvme_"):
        return [(value,) for value in (*SIZES, *TEXTS)]
    return [(value,) for value in TEXTS]


def cases() -> list[Case]:
    made = []
    types: set[Any] = set()
    for name, annotation in field_types().items():
        first = plain(annotation) not in types
        types.add(plain(annotation))
        for values in values_for(name, annotation, first=first):
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


def outcome_of(
    folder: Path,
    argvs: list[list[str]],
    root: Path,
    environments: dict[int, dict[str, str]] | None = None,
    gone: str = "",
) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each; where there is an environment, up to what it says."""
    jobs = [
        {
            "argv": argv,
            "folder": gone or str(folder),
            "stdout": str(root / f"{number}.out"),
            "stderr": str(root / f"{number}.err"),
            "environment": (environments or {}).get(number, {}),
            "gone": bool(gone),
        }
        for number, argv in enumerate(argvs)
    ]
    done = subprocess.run(
        [sys.executable, "-c", FORK_PER_CASE],
        input=json.dumps(jobs),
        env={**os.environ, "SHARDSCALE_CACHE": str(root / "cache")},
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
    assert len(CASES) > 450


@pytest.mark.parametrize("case", CASES, ids=str)
def test_accepted_or_refused_in_one_sentence(
    case: Case, outcomes: dict[str, tuple[int, str, str]]
) -> None:
    check(*outcomes[str(case)])


def check(code: int, stdout: str, stderr: str) -> str:
    """The sentence, if it was refused."""
    assert code in (ACCEPTED, REFUSED), stderr[-2000:]
    assert stdout == ""
    sentences = [line for line in stderr.splitlines() if not line.startswith("data: ")]
    if code == ACCEPTED:
        assert sentences == []
        return ""
    (sentence,) = sentences
    assert sentence.startswith("shardscale: ")
    assert len(sentence) < LONGEST_SENTENCE
    assert sentence.isprintable()
    return sentence


# Far too large, each by itself: the sentence names the value and what it would need.
TOO_LARGE = {
    "--steps": ("1000000001", "must be at most 1,000,000,000"),
    "--micro-batch": ("1000000000", "its embeddings", "and this host has"),
    "--global-batch": ("2147483640", "its tokens", "need at least"),
    "--layers": ("100000 --d-model 4096 --heads 4", "the states of 20,1", "need at least"),
    "--vocab-size": ("2147483647", "the states of", "need at least"),
    "--context": ("2147483647 --seq-len 16", "the states of", "need at least"),
    "--d-model": ("1000000", "the states of", "need at least 715266"),
    "--d-ff": ("2147483647", "the states of", "need at least"),
    "--collective-timeout-s": ("1e300", "must be at most 31,536,000"),
    "--max-minutes": ("1e30", "must be at most 525,600"),
    "--save-minutes": ("1e9", "must be at most 525,600"),
    "--memory-limit": ("1B", "give 1MiB or more"),
}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ENVIRONMENTS: list[tuple[dict[str, str], str]] = [
    *(({"WORLD_SIZE": bad}, "WORLD_SIZE=") for bad in ("0", "abc", "", "-1", "1.5", "\u0663")),
    *(({"WORLD_SIZE": bad}, "WORLD_SIZE=") for bad in ("9" * 30, "9" * 5000)),
    *(({"RANK": bad, "WORLD_SIZE": "2", **MEETING}, "RANK=") for bad in ("abc", "", "2", "-1")),
    *(({"LOCAL_RANK": bad}, "LOCAL_RANK=") for bad in ("abc", "", "1", "-1")),
    *(({"LOCAL_WORLD_SIZE": bad}, "LOCAL_WORLD_SIZE=") for bad in ("abc", "", "0", "2")),
    *(({**MEETING, "MASTER_PORT": bad}, "MASTER_PORT=") for bad in ("abc", "", "99999", "-1")),
    *(({"TORCHELASTIC_RESTART_COUNT": bad}, "RESTART_COUNT=") for bad in ("abc", "", "-1")),
    ({"SLURM_STEP_NUM_TASKS": "4"}, "srun has started 4 tasks"),
    ({"WORLD_SIZE": "2"}, "has no RANK"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, "has no MASTER_ADDR"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}, "has no MASTER_PORT"),
]


def test_what_could_never_be_is_refused_with_what_it_would_need(tmp_path: Path) -> None:
    lay_out(tmp_path / "here")
    base = ["--device", "cpu", "--tokenizer", "byte", "--vocab-size", "257", "--data", "text.txt"]
    argvs = []
    for name, (value, *_) in TOO_LARGE.items():
        kept = base[:4] + base[6:] if name == "--vocab-size" else base
        argvs.append([*kept, f"{name}={value.split()[0]}", *value.split()[1:]])
    for (name, (_, *says)), found in zip(
        TOO_LARGE.items(), outcome_of(tmp_path / "here", argvs, tmp_path), strict=True
    ):
        sentence = check(*found)
        assert f"{name} " in sentence
        assert [words for words in says if words not in sentence] == [], sentence


def test_what_the_environment_says_of_ranks_is_checked(tmp_path: Path) -> None:
    lay_out(tmp_path / "here")
    environments = {number: each for number, (each, _) in enumerate(ENVIRONMENTS)}
    found = outcome_of(tmp_path / "here", [BASE] * len(ENVIRONMENTS), tmp_path, environments)
    for (_, says), outcome in zip(ENVIRONMENTS, found, strict=True):
        assert says in check(*outcome)


def test_places_where_nothing_can_be_made(tmp_path: Path) -> None:
    lay_out(tmp_path / "here")
    cases = {
        "--resume auto --out file": "is not a folder",
        "--resume auto --out file/x": "is a file, not a folder",
        "--resume auto --out dangling": "already exists",
        "--out /proc/x/y": "/proc cannot be written to",
        "--out pipe": "already exists",
        "--resume pipe": "pipe",
        "--resume empty": "empty",
        "--deepspeed pipe": "is a pipe or a device",
        "--deepspeed empty": "Is a directory",
        "--tokenizer pipe": "no tokenizer",
    }
    argvs = [[*BASE, *options.split()] for options in cases]
    found = outcome_of(tmp_path / "here", argvs, tmp_path)
    for (options, says), outcome in zip(cases.items(), found, strict=True):
        assert says in check(*outcome), options


def test_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    lay_out(tmp_path / "here")
    argv = [*BASE[:-2], "--out", "x"]
    (outcome,) = outcome_of(tmp_path / "here", [argv], tmp_path, gone=str(tmp_path / "gone"))
    assert "the working folder no longer exists" in check(*outcome)


def test_through_torchrun(tmp_path: Path) -> None:
    lay_out(tmp_path / "here")
    before = sorted(os.listdir(tmp_path / "here"))
    cases = {
        "--nproc 2 -m launcher.train --d-model 9223372036854775808": "more than any model has",
        "--nproc 2 -m launcher.train --data pipe.txt --tokenizer byte --vocab-size 257": "a pipe",
        "--nproc abc -m launcher.train": "--nproc abc",
    }
    argvs = [["torchrun", *options.split()] for options in cases]
    found = outcome_of(tmp_path / "here", argvs, tmp_path)
    for (options, says), outcome in zip(cases.items(), found, strict=True):
        assert says in check(*outcome), options
    assert sorted(os.listdir(tmp_path / "here")) == before

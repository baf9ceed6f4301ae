"""The command line itself: versions, help, completion, messages."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from launcher.__main__ import VERBS, _run, usage
from launcher.run.console import LEVELS, RunConsole
from launcher.tools import completion
from launcher.torchrun import main as torchrun
from launcher.util.startup import libraries_say

ROOT = Path(__file__).parents[3]


def test_version_says_what_is_installed_and_imports_none_of_it() -> None:
    code = (
        "import sys; from launcher import __main__ as door\n"
        "door._run('--version', [])\n"
        "print('loaded:', *sorted(set(sys.modules) & {'torch', 'deepspeed', 'numpy'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    others = r"torch \d\S+, deepspeed \d\S+, Python 3\S+"
    assert re.fullmatch(rf"shardscale {re.escape(version)} \({others}\)\nloaded:\n", done.stdout)


@pytest.mark.parametrize(
    ("verb", "meant"), [("launch", "train"), ("finetune", "train"), ("pln", "plan")]
)
def test_an_unknown_verb_names_the_one_meant(
    verb: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(verb, []) == 2
    assert capsys.readouterr().err == f"shardscale: unknown verb {verb!r}: did you mean {meant}?\n"


def test_the_verbs_fit_a_terminal() -> None:
    lines = usage().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_help_of_run_lists_nproc(capsys: pytest.CaptureFixture[str]) -> None:
    torchrun(["--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: torchrun ")
    # Before Python 3.13 argparse repeats the value.
    assert re.search(r"--nproc( NPROC_PER_NODE)?, --nproc-per-node", shown)
    assert "shardscale train --help" in shown


@pytest.fixture(scope="module")
def flags() -> dict[str, completion.Flags]:
    return completion.all_flags()


def test_every_verb_completes_its_own_flags(flags: dict[str, completion.Flags]) -> None:
    from launcher.config.schema import field_types
    from launcher.util.flags import flag

    assert set(flags["train"]) > {flag(name) for name in field_types()}
    assert flags["train"]["--help"][:2] == ["model", "data"]
    assert flags["train"]["--schedule"] == ["cosine", "linear", "constant", "wsd"]
    assert flags["train"]["--zero"] == ["0", "1", "2", "3"]
    assert flags["plan"]["--goal"] == ["fastest", "least-memory", "largest-batch", "largest-model"]
    assert flags["plan"]["--gpus"] == []
    for verb in set(VERBS) - {"completion"}:
        assert "--help" in flags[verb], verb


COMPLETE = """
source {script}
COMP_WORDS=({words})
COMP_CWORD={number}
_shardscale
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("pla", "plan"),
        ("train --sched", "--schedule"),
        ("train --schedule w", "wsd"),
        ("sweep --precision bf16-", "bf16-pure"),
        ("plan --goal least", "least-memory"),
        ("run --npro", "--nproc --nproc-per-node --nproc_per_node"),
        ("completion f", "fish"),
        ("torchrun --npro", "--nproc --nproc-per-node --nproc_per_node"),
        ("/venv/bin/torchrun --nproc 2 -m launcher.train --sched", "--schedule"),
        ("torchrun --nproc 2 -m launcher.train --zero 2 --precision bf16-", "bf16-pure"),
        ("train --data x", ""),
        ("train --help mem", "memory"),
    ],
)
def test_bash_completes(
    words: str, found: str, flags: dict[str, completion.Flags], tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text(completion._bash(flags, zsh=False))
    if "torchrun" not in words:
        words = f"shardscale {words}"
    code = COMPLETE.format(script=script, words=words, number=len(words.split()) - 1)
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (found, "")


def test_zsh_reads_the_same_script(flags: dict[str, completion.Flags]) -> None:
    text = completion._bash(flags, zsh=True)
    first, _, rest = text.partition("\n")
    assert "bashcompinit" in first
    assert rest == completion._bash(flags, zsh=False)
    if shutil.which("zsh"):
        done = subprocess.run(["zsh", "-n"], input=text, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_fish_gets_a_line_for_each_verb_and_flag(flags: dict[str, completion.Flags]) -> None:
    lines = completion._fish(flags).splitlines()
    assert sum("__fish_use_subcommand" in line for line in lines) == len(VERBS)
    assert (
        "complete -c shardscale -n '__fish_seen_subcommand_from train' -l schedule "
        "-xa 'cosine linear constant wsd'" in lines
    )
    assert any(line.startswith("complete -c torchrun -n ") for line in lines)
    assert all(shlex.split(line)[0] == "complete" for line in lines)  # every quote is closed
    if shutil.which("fish"):
        text = "\n".join([*lines, "complete -C 'shardscale train --schedule w'"])
        done = subprocess.run(["fish", "-c", text], capture_output=True, text=True, timeout=60)
        assert (done.stdout.strip(), done.stderr) == ("wsd", "")
        text = "\n".join([*lines, "complete -C 'shardscale swe'"])
        done = subprocess.run(["fish", "-c", text], capture_output=True, text=True, timeout=60)
        assert (done.stdout.split()[0], done.stderr) == ("sweep", "")


@pytest.mark.parametrize("argv", [[], ["tcsh"], ["bash", "zsh"]])
def test_other_shells_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("shardscale: completion ")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("says", LEVELS)
def test_only_so_much_is_said_until_the_end(says: str, capsys: pytest.CaptureFixture[str]) -> None:
    console = RunConsole(enabled=True, log_level=says)
    for level in LEVELS:
        console.line(level, level)
    console.at_the_end()
    console.line("done")
    assert capsys.readouterr().out.split() == [*LEVELS[LEVELS.index(says) :], "done"]


def test_libraries_say_what_was_asked_for() -> None:
    code = (
        "import logging, sys; from launcher.util.startup import libraries_say\n"
        "libraries_say(sys.argv[1])\n"
        "for level in ('debug', 'info', 'warning', 'error'):\n"
        "    getattr(logging.getLogger('torch.x'), level)(level)"
    )
    for level, said in (("debug", 4), ("info", 2), ("warning", 2), ("error", 1)):
        done = subprocess.run(
            [sys.executable, "-c", code, level],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert len(done.stderr.splitlines()) == said, done.stderr


def test_a_quiet_run_says_how_it_ended(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A few words that say nothing of much interest to anyone. " * 400)
    flags = "--device cpu --tokenizer byte --vocab-size 257 --layers 1 --d-model 32 --context 32"
    flags += (
        f" --steps 3 --micro-batch 2 --data {text} --out {tmp_path / 'run'} --log-level warning"
    )
    done = subprocess.run(
        [sys.executable, "-m", "launcher.train", *flags.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert [line.split(": ")[0].split(" (")[0] for line in said] == ["done", "peak memory"]


def test_a_users_own_choice_for_a_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASETS_VERBOSITY", "info")
    libraries_say("warning")
    assert os.environ["DATASETS_VERBOSITY"] == "info"

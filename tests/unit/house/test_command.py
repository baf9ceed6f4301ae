"""The first seconds of every command: Ctrl-C is one line and exit code 130, whenever it comes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.__main__ import VERBS

ROOT = Path(__file__).parents[3]
SHARDSCALE = [sys.executable, "-m", "launcher"]
STOPPED = "shardscale: stopped by SIGINT\n"
INTERRUPTED = 130
REFUSED = 2
TRAIN = ["--model=nano", "--device=cpu", "--tokenizer=byte", "--steps=100000", "--report-to=none"]
COMMANDS = {
    **{verb: [*SHARDSCALE, verb] for verb in VERBS},
    "plan": [*SHARDSCALE, "plan", "--model=gpt2-xl", "--gpus=8", "--gpu=A100"],
    **{verb: [*SHARDSCALE, verb, "nowhere"] for verb in ("generate", "infer-bench")},
    **{verb: [*SHARDSCALE, verb, "nowhere", "--out=out"] for verb in ("export", "import", "prune")},
    "a rank": [sys.executable, "-m", "launcher.train", *TRAIN],
    "torchrun": [sys.executable, "-m", "launcher.torchrun", "-m", "launcher.train", *TRAIN],
}
"""What each does is of no importance: it imports for seconds."""
QUICK = {"rehearse", "snapshot", "watch", "completion", "recipe", "run", "site", "submit", "report"}


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate()


STARTED: list["subprocess.Popen[str]"] = []


def start(command: list[str], folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


def is_ours_by_now(process: psutil.Process) -> bool:
    """Return whether our package has begun: NumPy comes after it, and long before the end of
    imports."""
    return "_multiarray_umath" in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - QUICK))
def test_ctrl_c_while_modules_are_imported(name: str, tmp_path: Path) -> None:
    process = start(COMMANDS[name], tmp_path)
    while process.poll() is None and not is_ours_by_now(psutil.Process(process.pid)):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (INTERRUPTED, STOPPED), said


def test_a_package_that_hides_ours_from_trials_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text("raise SystemExit('the launcher of the user')\n")
    (tmp_path / "text.txt").write_text("To be, or not to be: that is the question. " * 200)
    # -P: as the script `shardscale` does, which does not look into the working folder
    command = [sys.executable, "-P", *SHARDSCALE[1:], "train", *TRAIN, "--data=text.txt"]
    process = start([*command, "--micro-batch=auto"], tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == REFUSED, errors
    said = f"shardscale: {tmp_path / 'launcher.py'} hides shardscale's own package"
    assert errors.splitlines()[-1].startswith(said)


def test_ctrl_c_while_the_plan_is_searched_leaves_no_process(tmp_path: Path) -> None:
    """To all of them, as a terminal sends it."""
    process = start(COMMANDS["plan"], tmp_path)
    workers: list[psutil.Process] = []
    while not workers:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        # Not the one that tries what a fork can do, and has ended by then.
        workers = [one for one in children if time.time() - one.create_time() > 0.3]
    for one in [*workers, psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # under load, the one that tries
            one.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (INTERRUPTED, STOPPED)
    assert not psutil.wait_procs(workers, timeout=60)[1]


TIDIES_UP = """
import sys; sys.argv = ["shardscale"]
import launcher
from launcher.util.startup import interruptible
import signal, subprocess, time
with interruptible():
    try:
        child = subprocess.Popen(["sleep", "600"])
        print(child.pid, flush=True)
        time.sleep(600)
    finally:
        if sys.orig_argv[-1] == "slowly":
            print("tidies up", flush=True)
            time.sleep(600)
        child.kill()
"""


def test_a_second_ctrl_c_does_not_wait_for_what_is_tidied_up(tmp_path: Path) -> None:
    process = start([sys.executable, "-c", TIDIES_UP, "slowly"], tmp_path)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "tidies up\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (INTERRUPTED, STOPPED)
    assert not psutil.wait_procs([child], timeout=60)[1]


def test_a_command_in_the_background_of_a_script_hears_no_ctrl_c(tmp_path: Path) -> None:
    program = TIDIES_UP.replace("time.sleep(600)", "time.sleep(1)")
    command = ["bash", "-c", f"trap '' INT; exec {sys.executable} -c \"$1\" _", "_", program]
    process = start(command, tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")


PRINTS = """
import sys; sys.argv = ["shardscale"]
import launcher
from launcher.util.startup import reader_may_leave
from launcher.util.tables import say
with reader_may_leave():
    say("a sentence " * int(sys.orig_argv[-1]))
"""


@pytest.mark.parametrize(
    "command",
    [[*SHARDSCALE, "--help"], [sys.executable, "-c", f"'{PRINTS}'", "100000"]],
    ids=["--help", "by rich"],
)
def test_a_reader_that_leaves_is_no_failure(command: list[str], tmp_path: Path) -> None:
    piped = f"{' '.join(command)} | true; echo ${{PIPESTATUS[0]}}"
    process = start(["bash", "-c", piped], tmp_path)
    assert process.communicate(timeout=300) == ("0\n", "")


def test_a_terminal_of_no_width_is_one_of_unknown_width(tmp_path: Path) -> None:
    process = start(["env", "COLUMNS=0", sys.executable, "-c", PRINTS, "1"], tmp_path)
    assert process.communicate(timeout=120) == ("a sentence \n", "")


@pytest.mark.parametrize("name", ["a rank", "torchrun", "doctor"])
def test_a_deleted_working_folder_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    program = f'cd {gone} && rmdir {gone} && exec "$@"'
    process = start(["bash", "-c", program, "_", *COMMANDS[name]], tmp_path)
    assert process.communicate(timeout=120) == (
        "",
        "shardscale: the working folder is deleted: cd to another one\n",
    )
    assert process.returncode == 2


def test_a_command_leaves_as_python_does() -> None:
    """Threads are waited for, what atexit knows is done, and what is printed arrives."""
    program = (
        "import atexit, sys, threading, time; from launcher.util.startup import leave_with\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('a thread'))).start()\n"
        "print('said')\n"
        "leave_with(3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (3, "said\na thread\nat exit\n"), done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_command_ends_with_its_code_whatever_is_closed(closed: str) -> None:
    command = f'"{sys.executable}" -m launcher --version {closed}'
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")

"""A run's processes: they end together, however and whenever, and nobody else can reach them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from harness import MODEL_FLAGS, TORCHRUN, environment, forked_apart, python, torchrun, write_text

from launcher.util import files

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux only")

ENDS_WITHIN_S = 120.0  # on a busy machine
REFUSED, FAILED, PREEMPTED, INTERRUPTED = 2, 4, 5, 130
TAG = "SHARDSCALE_TEST_RUN"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@dataclass(kw_only=True)
class Run:
    """A training of two ranks that ends only when it is told to."""

    text: Path
    out: Path
    more: tuple[str, ...] = ()
    agent: "subprocess.Popen[bytes]" = field(init=False)
    tag: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        with self.log.open("wb") as log:
            self.agent = subprocess.Popen(
                [
                    *(TORCHRUN, "--nproc", "2", "--max-restarts=2", "-m", "launcher.train"),
                    *(*MODEL_FLAGS, f"--data={self.text}", "--steps=1000000", "--log-every=1"),
                    *("--report-to=none", f"--out={self.out}", *self.more),
                ],
                env=environment(TMPDIR=str(self.out.parent), **{TAG: self.tag}),
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> Path:
        return self.out.with_suffix(".log")

    def ranks(self) -> list[psutil.Process]:
        """By number; none yet, or none any more."""
        ranks = (one for one in self.processes().items() if "RANK" in one[1])
        return [process for process, _ in sorted(ranks, key=lambda one: one[1]["RANK"])]

    def processes(self) -> dict[psutil.Process, dict[str, str]]:
        """Those that still run, with their environments (a process may end at any moment)."""
        found = {}
        for process in psutil.process_iter():
            try:
                running = process.status() != psutil.STATUS_ZOMBIE
                environ = process.environ()
            except psutil.Error:
                continue
            if running and environ.get(TAG) == self.tag:
                found[process] = environ
        return found

    def status(self) -> str | None:
        path = self.out / "status.json"
        return json.loads(path.read_text())["state"] if path.exists() else None

    def ends(self) -> int:
        """Its exit code, when nothing of it is left."""
        code = self.agent.wait(ENDS_WITHIN_S)
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while self.processes():
            assert time.monotonic() < deadline_s, [one.cmdline() for one in self.processes()]
            time.sleep(0.1)
        return code


def ranks_are_there(run: Run) -> bool:
    return len(run.ranks()) == 2


def ranks_import(run: Run) -> bool:
    return any("libtorch" in Path(f"/proc/{one.pid}/maps").read_text() for one in run.ranks())


def has_folder(run: Run) -> bool:
    return (run.out / "config.yaml").exists()


def trains(run: Run) -> bool:
    path = run.out / "rank0.jsonl"
    return path.exists() and '"kind": "step"' in path.read_text(encoding="utf-8")


Moment = Callable[[Run], bool]
MOMENTS: dict[str, Moment] = {
    "at once": lambda run: True,
    "ranks are there": ranks_are_there,
    "ranks import": ranks_import,
    "the folder is there": has_folder,
    "a step is done": trains,
}


def at_their_moments(
    text: Path, folder: Path, act: Callable[[str, Run], None], *more: str
) -> dict[str, Run]:
    """A run for each moment, all at once; `act` on each when its moment has come."""
    runs = {
        name: Run(text=text, out=folder / name.replace(" ", "-"), more=more) for name in MOMENTS
    }
    waiting = dict(runs)
    try:
        while waiting:
            for name, run in list(waiting.items()):
                assert run.agent.poll() is None, run.log.read_text()
                try:
                    if not MOMENTS[name](run):
                        continue
                except (OSError, psutil.Error):  # a process that is just beginning or ending
                    continue
                act(name, run)
                del waiting[name]
            time.sleep(0.05)
        for run in runs.values():
            run.ends()
    finally:
        for run in runs.values():
            for process in run.processes():
                process.kill()
            run.agent.wait()
    return runs


def test_nothing_outlives_a_killed_agent_and_the_next_run_tidies_up(
    text: Path, tmp_path: Path
) -> None:
    def kill(name: str, run: Run) -> None:
        if name == "a step is done":
            found = [process.net_connections("inet") for process in run.processes()]
            listening = [
                c.laddr.ip for each in found for c in each if c.status == psutil.CONN_LISTEN
            ]
            assert len(listening) >= 3  # the agent, the ranks' store, gloo
            assert set(listening) == {"127.0.0.1"}
        run.agent.kill()

    at_their_moments(text, tmp_path, kill, "--strategy=fsdp")
    assert list(tmp_path.glob("shardscale-agent-*"))
    alive = tmp_path / "shardscale-agent-of-somebody-alive"
    alive.mkdir()
    lock = files.FolderLock(alive, files._SCRATCH)
    assert lock.take()
    flags = (*MODEL_FLAGS, f"--data={text}", "--steps=1", f"--out={tmp_path / 'next'}")
    done = torchrun(1, "-m", "launcher.train", *flags, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("shardscale-*")) == [alive]
    assert not list(tmp_path.glob("torchelastic_*"))


def test_a_signal_to_the_agent_ends_a_run_in_order_at_any_moment(
    text: Path, tmp_path: Path
) -> None:
    """Nothing to save before the first step; then the second signal changes nothing."""
    numbers = {"ranks are there": signal.SIGINT, "ranks import": signal.SIGUSR1}

    def ask(name: str, run: Run) -> None:
        run.agent.send_signal(numbers.get(name, signal.SIGTERM))
        time.sleep(0.1)  # two that are pending together may reach two threads, in either order
        run.agent.send_signal(signal.SIGTERM)

    runs = at_their_moments(text, tmp_path, ask)
    assert runs.pop("at once").agent.returncode in (-signal.SIGTERM, PREEMPTED)
    for name, run in runs.items():
        said = run.log.read_text()
        code = INTERRUPTED if numbers.get(name) == signal.SIGINT else PREEMPTED
        assert run.agent.returncode == code, f"{name}: {said}"
        assert "Traceback" not in said
        assert run.status() in ("preempted", None), name
        assert run.out.exists() == (run.status() is not None)
    saved = runs["a step is done"]
    assert saved.status() == "preempted"
    assert list((saved.out / "checkpoints").glob("step-*"))
    assert not runs["ranks import"].out.exists()


def test_a_stopped_rank_is_named_and_the_time_out_is_the_reason(text: Path, tmp_path: Path) -> None:
    run = Run(text=text, out=tmp_path / "run", more=("--zero=3", "--collective-timeout-s=5"))
    try:
        while not trains(run):
            assert run.agent.poll() is None, run.log.read_text()
            time.sleep(0.1)
        run.ranks()[0].send_signal(signal.SIGSTOP)
        while '"exit_code": 4' not in (run.out / "status.json").read_text():
            assert run.agent.poll() is None, run.log.read_text()
            time.sleep(0.1)
        run.agent.send_signal(signal.SIGINT)  # no restart
        run.ends()
    finally:
        for process in run.processes():
            process.kill()
        run.agent.wait()
    said = run.log.read_text()
    assert "rank 1 waited longer than --collective-timeout-s allows" in said
    assert "rank 0 was in a stop (SIGSTOP), inside " in said
    assert "SIGKILL" not in said
    assert '  File "' in (run.out / "stack-rank0.txt").read_text()


def test_a_port_in_use_is_refused_in_one_sentence(text: Path, tmp_path: Path) -> None:
    flags = (*MODEL_FLAGS, f"--data={text}", f"--out={tmp_path / 'run'}", "--strategy=ddp")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        endpoint = f"--rdzv-endpoint=localhost:{port}"
        by_hand = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        refused = [
            torchrun(2, f"--master-port={port}", "-m", "launcher.train", *flags),
            torchrun(2, "--rdzv-backend=c10d", endpoint, "-m", "launcher.train", *flags),
            python("-m", "launcher.train", *flags, **by_hand, MASTER_PORT=port),
        ]
    for done in refused:
        assert done.returncode == REFUSED
        assert done.stderr.startswith(f"shardscale: port {port} of 127.0.0.1")
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("theirs", ["launcher.py", "launcher/__init__.py"])
def test_a_package_that_hides_ours_is_refused(theirs: str, text: Path, tmp_path: Path) -> None:
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).write_text("raise SystemExit('the launcher of the user')\n")
    done = subprocess.run(
        [TORCHRUN, "--nproc=2", "-m", "launcher.train", *MODEL_FLAGS, f"--data={text}"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == REFUSED
    assert f"{tmp_path / theirs} hides shardscale's own package" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("second", "difference"),
    [
        (("--seed=1",), "has --seed 1 and rank 0 "),
        (("--data=other.txt",), "by --data other.txt, and rank 0 "),
        (("--lora-rank=2", "--random-base"), "has --lora-rank 2 and rank 0 "),
    ],
)
def test_nodes_that_are_started_differently_are_rejected(
    second: tuple[str, ...], difference: str, text: Path, tmp_path: Path
) -> None:
    """Each would compute its own gradients correctly, and train on their mean."""
    other = text.read_text(encoding="utf-8").swapcase()
    (tmp_path / "other.txt").write_text(other, encoding="utf-8")
    for said in refused_on_two_nodes(text, (tmp_path, tmp_path), second):
        assert said.count("shardscale: rank 1 (") == 1
        assert difference in said
    assert not (tmp_path / "run").exists()


def test_a_folder_that_another_node_does_not_see_is_rejected(text: Path, tmp_path: Path) -> None:
    """As on a disk of each node's own: rank 1 could save nothing."""
    nodes = (tmp_path / "node0", tmp_path / "node1")
    for said in refused_on_two_nodes(text, nodes):
        assert said.startswith("shardscale: --out run: rank 1 (")
        assert said.endswith("give a place on a file system that all nodes share\n")
    assert [path.name for path in nodes[1].iterdir()] == []


def test_a_rank_whose_others_do_not_join_ends_with_one_sentence(text: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = (*MODEL_FLAGS, f"--data={text}", "--strategy=ddp", "--collective-timeout-s=2")
    done = subprocess.run(
        [sys.executable, "-m", "launcher.train", *flags, f"--out={tmp_path / 'run'}"],
        env=environment(
            **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == FAILED
    assert "shardscale: rank 0: not all of 2 ranks have joined within " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def refused_on_two_nodes(
    text: Path, folders: tuple[Path, Path], second: tuple[str, ...] = ()
) -> list[str]:
    """Start a rank in each folder; return what they say, which must end with exit code 2.

    Args:
        second: flags of rank 1 alone.
    """
    flags = [*MODEL_FLAGS, f"--data={text}", "--strategy=ddp", "--report-to=none", "--steps=2"]
    flags.append("--out=run")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = []
    for rank, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        errors = text.with_name(f"errors-{rank}")
        errors.unlink(missing_ok=True)
        nodes.append((str(folder), [*flags, *(second if rank else ())], str(errors)))
    done = forked_apart(2, "node_rank", json.dumps([nodes, port]))
    said = [Path(errors).read_text(encoding="utf-8") for *_, errors in nodes]
    assert done.returncode == REFUSED, said
    return said

"""Our torchrun: `--nproc`, and everything else as torch's own."""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.run import other_nodes
from launcher.torchrun import _arrange_rendezvous, split_command
from launcher.torchrun_options import is_ours, read_options
from launcher.util.errors import UserError

TORCHRUN = Path(sys.executable).parent / "torchrun"


@pytest.mark.parametrize(
    ("command", "own", "program", "arguments"),
    [
        # the two spellings of --nproc, and torch's own
        ("--nproc 4 train.py", "--nproc-per-node 4", "train.py", ""),
        ("--nproc=4 train.py", "--nproc-per-node=4", "train.py", ""),
        ("--nproc-per-node 4 train.py", "--nproc-per-node 4", "train.py", ""),
        ("--nproc_per_node=gpu train.py", "--nproc_per_node=gpu", "train.py", ""),
        # what comes after the program is the program's
        ("--nproc 2 train.py --nproc 3", "--nproc-per-node 2", "train.py", "--nproc 3"),
        ("train.py --nproc=3 -m x", "", "train.py", "--nproc=3 -m x"),
        ("--nproc 2 -m pkg.mod --zero 2", "--nproc-per-node 2", "-m pkg.mod", "--zero 2"),
        ("--module pkg.mod --start 3", "", "--module pkg.mod", "--start 3"),
        ("--nproc 2 --no-python ls -l", "--nproc-per-node 2", "--no-python ls", "-l"),
        ("--no_python ls", "", "--no_python ls", ""),
        ("--run-path train.py a", "", "--run-path train.py", "a"),
        # torchrun's options with and without values
        ("--standalone --nproc 2 a.py", "--standalone --nproc-per-node 2", "a.py", ""),
        ("--nnodes 2 --node-rank=1 a.py x", "--nnodes 2 --node-rank=1", "a.py", "x"),
        ("--virtual-local-rank a.py", "--virtual-local-rank", "a.py", ""),
        ("--max-restarts 3 -m pkg.mod", "--max-restarts 3", "-m pkg.mod", ""),
        ("-r 3 -t 2 a.py", "-r 3 -t 2", "a.py", ""),
        # nothing to run: torchrun says so itself
        ("--nproc 2", "--nproc-per-node 2", "", ""),
        ("", "", "", ""),
    ],
)
def test_split_command(command: str, own: str, program: str, arguments: str) -> None:
    assert split_command(command.split()) == (own.split(), program.split(), arguments.split())


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--nproc-per-node=0", "--nproc 0 must be a number from 1"),
        ("--nproc-per-node=-1", "--nproc -1 must be a number from 1"),
        ("--nproc-per-node=abc", "--nproc abc: Unsupported nproc_per_node value"),
        ("--nproc-per-node=gpu", "--nproc gpu: Cuda is not available"),
        ("--nproc-per-node=" + "9" * 5000, "--nproc 999"),
        ("--nnodes=0", "--nnodes 0 must be N or MIN:MAX"),
        ("--nnodes=abc", "--nnodes abc must be N or MIN:MAX"),
        ("--nnodes=2:1", "--nnodes 2:1 must be N or MIN:MAX"),
        ("--nnodes=1:2:3", "--nnodes 1:2:3"),
        ("--nnodes=٣", "--nnodes ٣"),
        ("--standalone --nnodes=2", "--standalone is for one node"),
        ("--node-rank=1", "--node-rank 1 must be below --nnodes 1"),
        ("--node-rank=abc", "--node-rank: invalid int value: 'abc'"),
        ("--max-restarts=-1", "--max-restarts -1 must be 0 or more"),
        ("--max-restarts=abc", "--max-restarts: invalid int value: 'abc'"),
        ("--monitor-interval=-1", "--monitor-interval -1.0 must be more than 0"),
        ("--monitor-interval=nan", "--monitor-interval nan"),
        ("--rdzv-backend=banana", "--rdzv-backend banana must be one of"),
        ("--rdzv-endpoint=host:abc", "--rdzv-endpoint host:abc: The port number"),
        ("--rdzv-conf=garbage", "torchrun: "),
        ("--master-port=abc", "--master-port: invalid int value: 'abc'"),
        ("--master-port=99999", "--master-port 99999 must be from 0 to 65535"),
        ("--log-dir=/proc/x", "--log-dir /proc/x: /proc cannot be written to"),
        ("--log-dir=/dev/null/x", "--log-dir /dev/null/x: /dev/null is a file"),
        ("--log-dir=/dev/full", "--log-dir /dev/full: is a file"),
        ("--log-dir=~nouser/x", "--log-dir ~nouser/x: there is no such user"),
        ("--redirects=9", "torchrun: "),
        ("--tee=banana", "torchrun: "),
        ("--local-ranks-filter=a", "torchrun: --local_ranks_filter must be"),
        ("--logs-specs=banana", "torchrun: "),
        ("--start-method=banana", "--start-method: invalid choice: 'banana'"),
        ("--numa-binding=banana", "--numa-binding: invalid choice: 'banana'"),
        ("--signals-to-handle=banana", "--signals-to-handle banana must be"),
        ("--nprocs-per-box=2", "unrecognized arguments: --nprocs-per-box"),
        ("--role", "torchrun "),
    ],
)
def test_a_bad_option_before_our_own_module_is_refused_in_one_sentence(
    option: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(UserError) as caught:
        print(read_options([*option.split(), "-m", "launcher.train"]))
    sentence = str(caught.value)
    assert says in sentence
    assert len(sentence) < 290
    assert "\n" not in sentence
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["launcher.trian", "launcher.train.x"])
def test_a_misspelt_module_is_refused(name: str) -> None:
    assert is_ours(["-m", "launcher.train"])
    assert not is_ours(["-m", "launcher.probe"])
    assert not is_ours(["launcher.train"])
    with pytest.raises(UserError, match=f"-m {name}: there is no such module; did you mean"):
        is_ours(["-m", name])


def test_a_package_of_the_users_own_may_have_our_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "__init__.py").touch()
    with pytest.raises(UserError, match=r"-m launcher: its verbs start no ranks; give -m launcher"):
        is_ours(["-m", "launcher"])
    monkeypatch.chdir(tmp_path)
    assert not is_ours(["-m", "launcher"])
    assert not is_ours(["-m", "launcher.main"])


def test_good_options_are_read_as_by_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = "--nnodes 1:4 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d"
    options += f" --rdzv-endpoint [::1]:29500 --tee 3 --log-dir {tmp_path}/logs"
    argv = [*options.split(), "-m", "launcher.train"]
    run = importlib.import_module("torch.distributed.run")
    assert read_options(argv) == run.parse_args(argv)
    assert os.listdir(tmp_path) == []


def test_a_node_alone_has_a_free_port_with_any_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "launcher.parallel.rendezvous.offer_rendezvous", lambda: None, raising=False
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # torch 2.11 and 2.12 have a default for --master-port.
        args = read_options(["--standalone", "-m", "launcher.train"])
        args.master_port = taken.getsockname()[1]
        _arrange_rendezvous(args, nodes=1)
    assert args.rdzv_endpoint == "127.0.0.1:0"


# torchrun ends the other ranks when one fails, so the one that fails waits for their reports.
REPORT = """
import json, os, pathlib, sys, time
rank = os.environ["RANK"]
told = {name: os.environ.get(name) for name in ("WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_PORT")}
pathlib.Path(f"{rank}.part").write_text(json.dumps({**told, "argv": sys.argv[1:]}))
os.replace(f"{rank}.part", f"rank{rank}.json")
if "--fail" in sys.argv and rank == "1":
    while not os.path.exists("rank0.json"):
        time.sleep(0.01)
    sys.exit(7)
"""


def run(folder: Path, *command: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    (folder / "report.py").write_text(REPORT)
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return subprocess.run(
        [TORCHRUN, *command],
        cwd=folder,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def reports(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def test_runs_anybodys_script(tmp_path: Path) -> None:
    # --start is an ambiguous prefix of torchrun's --start-method, and torch's own refuses it.
    done = run(tmp_path, "--nproc", "2", "report.py", "--nproc", "9", "--start", "3")
    assert done.returncode == 0, done.stderr
    first, second = reports(tmp_path)
    assert first["WORLD_SIZE"] == second["WORLD_SIZE"] == "2"
    assert first["argv"] == second["argv"] == ["--nproc", "9", "--start", "3"]
    # Cores are shared out, where torch would give each rank one thread and print a warning.
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    assert first["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert "OMP_NUM_THREADS" not in done.stderr


def test_fails_as_torchs_own(tmp_path: Path) -> None:
    done = run(tmp_path, "--nproc=2", "-m", "report", "--fail", OMP_NUM_THREADS="3")
    assert done.returncode == 1
    assert "exitcode  : 7" in done.stderr
    assert len(reports(tmp_path)) == 2
    assert {report["OMP_NUM_THREADS"] for report in reports(tmp_path)} == {"3"}


def test_a_bad_option_of_torchruns_own_is_refused_by_torchrun(tmp_path: Path) -> None:
    done = run(tmp_path, "--nprocs-per-box", "2", "report.py")
    assert done.returncode == 2
    assert "usage: torchrun" in done.stderr
    assert reports(tmp_path) == []


def test_help_of_the_trainer_is_shown_once(tmp_path: Path) -> None:
    done = run(tmp_path, "--nproc", "2", "-m", "launcher.train", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("--micro-batch") == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            "--node-rank 1 --master-addr 127.0.0.1 --master-port {port} --rdzv-conf timeout=4",
            "node 1 did not join the other nodes of --nnodes 2 at 127.0.0.1:{port}, which is this "
            "node alone: give --master-addr an address that all nodes reach",
        ),
        (
            "--rdzv-backend c10d --rdzv-conf read_timeout=3 --rdzv-endpoint 0.0.0.0:{port}",
            "this node did not join the other nodes of --nnodes 2 at 0.0.0.0:{port}: start each "
            "with the same --rdzv-endpoint and --rdzv-id, and let them reach that port",
        ),
    ],
)
def test_nodes_that_do_not_join_are_one_sentence(tmp_path: Path, options: str, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    options, says = options.replace("{port}", port), says.replace("{port}", port)
    training = ("-m", "launcher.train", "--device=cpu", f"--out={tmp_path / 'run'}")
    done = run(tmp_path, "--nnodes", "2", *options.split(), *training, OMP_NUM_THREADS="1")
    assert done.returncode == 4
    assert f"shardscale: {says}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_node_says_that_it_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(other_nodes, "REPORT_AFTER_S", 0.1)
    monkeypatch.setattr(other_nodes, "CHECK_EVERY_S", 0.05)
    options = "--nnodes 2 --node-rank 1 --master-addr node0 --master-port 29500"
    args = read_options([*options.split(), "-m", "launcher.train"])
    other_nodes.run_agent(SimpleNamespace(run=lambda _: time.sleep(0.5)), args)
    says = "shardscale: node 1 waits for the other nodes of --nnodes 2 at node0:29500: start each "
    assert capsys.readouterr().err.count(says) == 1


def agent_of_job(tmp_path: Path, nodes: str, port: int, *flags: str) -> "subprocess.Popen[str]":
    """Start an agent that joins others of its job on this machine."""
    rendezvous = [f"--nnodes={nodes}", "--nproc=1", "--rdzv-backend=c10d", "--rdzv-id=job"]
    rendezvous += [
        "--rdzv-conf=last_call_timeout=1"
    ]  # s, in which more than the least nodes may join
    command = [
        str(TORCHRUN),
        *rendezvous,
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "-m",
        "launcher.train",
    ]
    (tmp_path / "text.txt").write_text("A text to train on. " * 500)
    command += ["--device=cpu", "--data=text.txt", "--tokenizer=byte", "--vocab-size=257"]
    command += ["--layers=1", "--d-model=16", "--heads=1", "--context=16", "--out=run", *flags]
    return subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def test_two_agents_of_one_job_join_on_one_machine(tmp_path: Path) -> None:
    """The second finds the port in use, and joins the first, as with torch's own rendezvous."""
    port = free_port()
    agents = [agent_of_job(tmp_path, "2", port, "--steps=1") for _ in range(2)]
    require_completed(agents, tmp_path / "run")


def test_a_run_goes_on_with_a_node_that_joins_it(tmp_path: Path) -> None:
    port = free_port()
    flags = ["--resume=auto", "--save-every=20", "--keep=1", "--global-batch=8", "--micro-batch=4"]
    flags += ["--report-to=none", "--log-every=20", "--steps=1000000"]

    records, agents = tmp_path / "run" / "rank0.jsonl", []
    until_s = time.monotonic() + 120
    try:
        for last in ("saved", "resumed"):
            agents.append(agent_of_job(tmp_path, "1:2", port, *flags))
            while time.monotonic() < until_s:
                if records.exists() and f'"name": "{last}"' in records.read_text():
                    break
                time.sleep(0.1)
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    found = [json.loads(line) for line in records.read_text().splitlines() if line[-1:] == "}"]
    assert [one["world_size"] for one in found if one["kind"] == "run"] == [1, 2]
    (step,) = [one["step"] for one in found if one.get("name") == "resumed"]
    assert step >= 20


def require_completed(agents: "list[subprocess.Popen[str]]", run: Path) -> None:
    try:
        said = [agent.communicate(timeout=120)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0] * len(agents), said
    assert json.loads((run / "status.json").read_text())["state"] == "completed"

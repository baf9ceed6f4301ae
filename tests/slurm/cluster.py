"""A real Slurm cluster on one machine, for the tests: each node is a set of Linux namespaces.

Every node has a host name, an IP address and processes of its own, so that the same ports are used
on each, and killing a node's PID 1 is a node's death. All of it lives inside one more set of
namespaces; when its PID 1 goes - and it goes with the process that started it - nothing is left.
"""

import os
import shutil
import stat
import string
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

HERE = Path(__file__).parent
CONTROL_IP = "10.77.0.1"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv")
NAMESPACES = ("--mount", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
TIMEOUT_S = 600.0  # only ends what hangs
CPUS, GPUS = 4, 2  # of each node, as far as Slurm is concerned
GPU_TYPE = "a100"


def why_not() -> str | None:
    """Return what keeps this machine from having such a cluster; None when nothing does."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (tests/slurm/install.sh installs them)"
    if os.geteuid() != 0:
        return "only root may create namespaces with a network"
    # What control.sh and node.sh will do.
    needed = (
        "ip link add bridge type bridge && ip link add veth1 type veth peer name veth2 && "
        "mount -t tmpfs tmpfs /run && mknod /run/device c 1 3"
    )
    tried = subprocess.run(
        ["unshare", "--net", *NAMESPACES, "sh", "-c", needed],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        return f"namespaces, networks or devices are forbidden here: {tried.stderr.strip()}"
    return None


class Cluster:
    """`with Cluster(["n1", "n2"]) as cluster: cluster.run("sbatch", ...)`."""

    def __init__(self, names: Sequence[str]) -> None:
        # Not under pytest's folder: munged refuses a folder whose parents others cannot enter.
        self.folder = Path(tempfile.mkdtemp(prefix="shardscale-slurm-"))
        self.folder.chmod(0o755)
        self._ips = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=11)}
        self._control: psutil.Popen | None = None
        self._nsenter: dict[str, psutil.Popen] = {}
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }

    def __enter__(self) -> Self:
        try:
            self._write_files()
            nodes = [f"{name}={ip}" for name, ip in self._ips.items()]
            self._control = self._start(
                *("control", "setpriv", "--pdeathsig=KILL", "unshare", "--net", *NAMESPACES),
                *("bash", str(HERE / "control.sh"), str(self.folder), CONTROL_IP, *nodes),
            )
            wait_for("the network", self._network_is_up)
            for name in self._ips:
                self.start_node(name)
            wait_for("all nodes to be idle", lambda: set(self.node_states().values()) == {"idle"})
        except BaseException as error:
            error.add_note(self.logs())
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def run(self, *command: str | Path, cwd: Path | None = None, **more: str) -> str:
        """Run a command on the cluster's login node and return what it printed.

        Raises:
            subprocess.CalledProcessError: it did not end with 0.
        """
        done = self.try_run(*command, cwd=cwd, **more)
        done.check_returncode()
        return done.stdout.strip()

    def try_run(
        self, *command: str | Path, cwd: Path | None = None, **more: str
    ) -> "subprocess.CompletedProcess[str]":
        """The same, whatever it ends with; `more` are environment variables."""
        return subprocess.run(
            [*self._enter(cwd or self.folder), *map(str, command)],
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def node_states(self) -> dict[str, str]:
        """Slurm's word for each node: idle, allocated, down."""
        shown = self.try_run("sinfo", "--noheader", "--Node", "--format=%N %T").stdout
        return dict(line.split() for line in shown.splitlines())

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of `scontrol show job`: JobState, ExitCode, Restarts, NodeList, ..."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job_id)
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def wait_for_job(self, job_id: str, *states: str) -> str:
        """Wait until the job is in one of the states; the state."""
        wait_for(
            f"job {job_id} to be {' or '.join(states)}",
            lambda: self.job(job_id)["JobState"] in states,
            every_s=0.5,  # a process each time
        )
        return self.job(job_id)["JobState"]

    def processes(self, name: str) -> list[str]:
        """The command lines of a node's processes, without its daemon's."""
        lines = []
        for process in self._pid_1(name).children(recursive=True):
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.name() != "slurmd":
                    lines.append(" ".join(process.cmdline()))
            except psutil.NoSuchProcess:
                continue
        return lines

    def start_node(self, name: str) -> None:
        """Start a node, or start a dead one again."""
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        self._nsenter[name] = self._start(
            *(name, *self._enter(self.folder), "ip", "netns", "exec", name),
            *("unshare", *NAMESPACES, "bash", str(HERE / "node.sh"), name),
        )

    def kill_node(self, name: str) -> None:
        """All of the node's processes die at once, as if somebody pulled its plug."""
        self._pid_1(name).kill()
        self._nsenter.pop(name).wait(TIMEOUT_S)

    def logs(self) -> str:
        """The ends of all daemons' logs, for when something has failed."""
        files = sorted((self.folder / "log").iterdir())
        return "\n".join(f"== {f.name}\n{f.read_text(errors='replace')[-2000:]}" for f in files)

    def _enter(self, cwd: Path) -> list[str]:
        assert self._control is not None
        (pid_1,) = self._control.children()
        return ["nsenter", f"--target={pid_1.pid}", "-m", "-n", "-u", "-p", f"--wd={cwd}", "--"]

    def _network_is_up(self) -> bool:
        assert self._control is not None
        if self._control.poll() is not None:
            raise RuntimeError("the cluster's PID 1 has ended")
        return (self.folder / "network-is-up").exists()

    def _pid_1(self, name: str) -> psutil.Process:
        (unshare,) = self._nsenter[name].children()
        (pid_1,) = unshare.children()
        return pid_1

    def _start(self, name: str, *command: str) -> psutil.Popen:
        with open(self.folder / "log" / f"{name}.out", "ab") as log:
            return psutil.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )

    def _write_files(self) -> None:
        folder = self.folder
        for name in ("state", "munge", "log", "dev"):
            (folder / name).mkdir()
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        hosts = {"localhost": "127.0.0.1", "control": CONTROL_IP, **self._ips}
        (folder / "hosts").write_text("".join(f"{ip} {name}\n" for name, ip in hosts.items()))
        for number in range(GPUS):
            # Slurm wants character devices: these are /dev/null by another name.
            device = folder / "dev" / f"nvidia{number}"
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (folder / "gres.conf").write_text(
            f"AutoDetect=off\nName=gpu Type={GPU_TYPE} File={folder}/dev/nvidia[0-{GPUS - 1}]\n"
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        nodes = "".join(
            f"NodeName={name} NodeAddr={ip} CPUs={CPUS} Boards=1 SocketsPerBoard=1 "
            f"CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory=4000 Gres=gpu:{GPU_TYPE}:{GPUS}\n"
            for name, ip in self._ips.items()
        )
        template = string.Template((HERE / "slurm.conf.template").read_text())
        (folder / "slurm.conf").write_text(
            template.substitute(folder=folder, control_ip=CONTROL_IP, nodes=nodes)
        )

    def _stop(self) -> None:
        if self._control is not None:
            # With PID 1 of the outer namespaces, which goes with `unshare`, goes all inside them.
            self._control.kill()
            self._control.wait(TIMEOUT_S)
        for nsenter in self._nsenter.values():
            nsenter.wait(TIMEOUT_S)
        shutil.rmtree(self.folder)


def wait_for(what: str, condition: Callable[[], bool], *, every_s: float = 0.1) -> None:
    """Poll until `condition` holds; raises TimeoutError after ten minutes."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {TIMEOUT_S:.0f} s for {what}")
        time.sleep(every_s)

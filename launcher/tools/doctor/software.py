"""Checks of software: Python, torchrun, DeepSpeed, compilers and optional packages."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from launcher.strategies.zero import nvme_build
from launcher.tools.doctor.finding import Finding, fail, not_applicable, ok, warn
from launcher.util.packages import SOURCE, version_of
from launcher.util.processes import for_children

OURS = "launcher.torchrun"
# below doctor_cli.WITHIN_S, so that this check still answers itself
DEEPSPEED_S = 12.0

# In a process of its own: importing DeepSpeed prints, and fixes its accelerator.
DEEPSPEED_PROBE = """
import launcher, json, sys, torch, deepspeed
from deepspeed.accelerator import get_accelerator
able = {}
for op in ("CPUAdamBuilder", "AsyncIOBuilder"):
    builder = get_accelerator().create_op_builder(op)
    able[builder.NAME] = bool(builder.is_compatible(verbose=False))
print("\\nprobe " + json.dumps({"version": deepspeed.__version__, "able": able}))
"""


def python() -> Finding:
    """Report the interpreter."""
    return ok(f"{platform.python_version()} in {sys.prefix}")


def torchrun(search_path: str | None = None) -> Finding:
    """Check which `torchrun` the shell finds first."""
    scripts = Path(sysconfig.get_path("scripts"))
    instead = f"{sys.executable} -m launcher run --nproc 4 ..."
    activate = f"source {scripts / 'activate'}"
    if not (scripts / "activate").exists():
        activate = f"export PATH={scripts}:$PATH"
    found = shutil.which("torchrun", path=search_path)
    if found is None:
        return warn("not on PATH", "`torchrun` does not start", f"{activate}, or {instead}")
    if Path(found).parent.resolve() != scripts.resolve():
        whose = "of another environment" if _is_ours(Path(found)) else "torch's own"
        return warn(
            f"{found} comes first, {whose}",
            "`torchrun --nproc` is refused as ambiguous or runs in another environment",
            f"{activate}, or {instead}",
        )
    if not _is_ours(Path(found)):
        return warn(
            f"{found} is torch's own: torch was installed after shardscale",
            "`torchrun --nproc` is refused as ambiguous",
            f"pip install --force-reinstall --no-deps {SOURCE}, or {instead}",
        )
    return ok(f"{found} (takes --nproc)")


def deepspeed() -> Finding:
    """Import DeepSpeed, and ask which of its compiled ops can be built."""
    installed = version_of("deepspeed")
    if installed is None:
        return fail("not installed", "--zero 0 to 3 fail", "pip install 'deepspeed>=0.19'")
    try:
        done = subprocess.run(
            [sys.executable, "-c", DEEPSPEED_PROBE],
            env=os.environ | for_children(),
            capture_output=True,
            text=True,
            timeout=DEEPSPEED_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return warn(
            f"{installed}, but its import takes more than {DEEPSPEED_S:.0f} s",
            "runs with --zero start slowly",
            "try again on an idle machine; an environment on a network disk is slow every time",
        )
    answer = re.search(r"^probe (.*)$", done.stdout, re.MULTILINE)
    if answer is None:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return fail(
            f"{installed} cannot be imported: {last}",
            "--zero 0 to 3 fail",
            "reinstall DeepSpeed against this torch, or use --strategy fsdp",
        )
    able: dict[str, bool] = json.loads(answer[1])["able"]
    words = [f"{op} {'can' if can else 'cannot'} be built" for op, can in able.items()]
    return ok(f"{installed}; {', '.join(words)} (ZeRO and CPU offload need neither)")


def compilers() -> Finding:
    """Check the compilers for DeepSpeed's ops, flash-attn and torch.compile."""
    compiler = os.environ.get("CXX", "c++")
    missing = [name for name in (compiler, "ninja") if shutil.which(name) is None]
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append("Python.h")
    if missing:
        return warn(
            "missing: " + ", ".join(missing),
            "DeepSpeed's ops (NVMe offload) and packages such as flash-attn cannot be built; "
            "training without them works",
            "install a C++ compiler, ninja and Python's headers, for example "
            "apt install g++ ninja-build python3-dev",
        )
    from torch.utils.cpp_extension import CUDA_HOME

    words = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=5)
    nvcc = f"; CUDA toolkit in {CUDA_HOME}" if CUDA_HOME else ""
    return ok(f"{words.stdout.splitlines()[0]}; ninja, Python.h{nvcc}")


def async_io() -> Finding:
    """Check that DeepSpeed's asynchronous I/O, which NVMe offload uses, is or can be built."""
    nvme_build.use_own_ninja()
    if nvme_build.is_built():
        return ok("DeepSpeed's async_io is built, for --offload-optimizer nvme")
    missing = nvme_build.what_is_missing()
    if missing is not None:
        return not_applicable(
            f"DeepSpeed's async_io cannot be built without {missing}",
            "no --offload-optimizer nvme and --offload-param nvme",
            nvme_build.INSTALL,
        )
    return ok("DeepSpeed's async_io can be built; the first NVMe run builds it, in minutes")


def stale_locks() -> Finding:
    """Find locks of killed builds, on which the next build of the op waits for ever."""
    root = nvme_build.extensions_folder()
    locks = [p for depth in ("*/lock", "*/*/lock") for p in root.glob(depth)]
    held = nvme_build.held_files() if locks else set()
    stale = [path for path in locks if str(path.resolve()) not in held]
    if stale:
        return fail(
            f"{len(stale)} stale in {root}: " + ", ".join(p.parent.name for p in stale),
            "a run that needs one of these ops hangs silently at startup",
            "unless another machine is building there: rm " + " ".join(str(path) for path in stale),
        )
    return ok(f"none stale in {root}" + (f", {len(locks)} being built" if locks else ""))


def extras(packages: Mapping[str, str], fix: str) -> Finding:
    """Report optional packages (name -> feature); `fix` is the command that installs them."""
    versions = {name: version_of(name) for name in packages}
    there = [f"{name} {version}" for name, version in versions.items() if version]
    absent = [name for name, version in versions.items() if version is None]
    found = ", ".join(there) if there else "none installed"
    if not absent:
        return ok(found)
    needs = "; ".join(f"without {name}: {packages[name]}" for name in absent)
    return Finding("ok" if there else "n/a", found, needs, fix)


def _is_ours(script: Path) -> bool:
    return OURS in script.read_text(encoding="utf-8", errors="replace")

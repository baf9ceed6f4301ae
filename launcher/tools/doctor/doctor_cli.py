"""`shardscale doctor`: run the checks and show their findings."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.tools.doctor.finding import Check, Finding, run_checks
from launcher.util.errors import ExitCode, refusing
from launcher.util.flags import OptionParser
from launcher.util.packages import INSTALL_FLASH_ATTENTION, how_to_install
from launcher.util.startup import loading

SCHEMA_VERSION = 1
WITHIN_S = 14.0
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "n/a": "dim"}
HUGGING_FACE = {
    "transformers": "no --tokenizer hf:NAME",
    "datasets": "no --data hf:NAME",
    "pyarrow": "no parquet files",
}
GPU_PACKAGES = {"torchao": "no fp8"}
FLASH_ATTENTION = {"flash-attn": "torch's own flash kernels are used"}


def checks(nvme_path: Path | None) -> dict[str, dict[str, Check]]:
    """Return group -> name -> check."""
    with loading():
        from launcher.tools.doctor import gpu, host, software

    return {
        "Software": {
            "Python": software.python,
            "torchrun": software.torchrun,
            "torch": gpu.torch_and_driver,
            "DeepSpeed": software.deepspeed,
            "compilers": software.compilers,
            "async I/O": software.async_io,
            "build locks": software.stale_locks,
            "Hugging Face": partial(software.extras, HUGGING_FACE, how_to_install("hf")),
            "GPU packages": partial(software.extras, GPU_PACKAGES, how_to_install("gpu")),
            "FlashAttention": partial(software.extras, FLASH_ATTENTION, INSTALL_FLASH_ATTENTION),
        },
        "Accelerators": {
            "GPUs": gpu.gpus,
            "NVML": gpu.nvml,
            "communication": gpu.communication,
            "kernels": gpu.kernels,
            "allocator": gpu.allocator,
        },
        "Machine": {
            "cores": host.cores,
            "memory": host.memory,
            "/dev/shm": host.shared_memory,
            "locked memory": host.locked_memory,
            "host name": host.hostname,
            "disk": host.disk_space,
            "NVMe offload": partial(host.nvme, nvme_path),
            "Slurm": host.slurm,
        },
    }


@refusing
def main(argv: Sequence[str]) -> int:
    """Examine this machine; exit code 0 whatever the findings, 2 for bad arguments."""
    parser = OptionParser(
        prog="shardscale doctor",
        description="Check this machine: what works, what will not, and how to fix it.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--nvme-path",
        type=Path,
        metavar="FOLDER",
        help="measure this folder's disk for NVMe offload",
    )
    options = parser.parse_args(argv)
    groups = checks(options.nvme_path)
    every = {name: check for group in groups.values() for name, check in group.items()}
    findings = run_checks(every, within_s=WITHIN_S)
    if options.json:
        print(as_json(groups, findings))
    else:
        show(groups, findings, Console(highlight=False))
    return ExitCode.DONE


def as_json(groups: dict[str, dict[str, Check]], findings: dict[str, Finding]) -> str:
    """Return JSON: `{"schema_version", "counts": {state: n}, "findings": [{"group", ...}]}`."""
    counts = Counter(finding.state for finding in findings.values())
    listed = [
        {"group": group, "name": name, **dataclasses.asdict(findings[name])}
        for group, names in groups.items()
        for name in names
    ]
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "counts": {state: counts[state] for state in ("ok", "warn", "fail", "n/a")},
            "findings": listed,
        },
        indent=2,
    )


def show(
    groups: dict[str, dict[str, Check]], findings: dict[str, Finding], console: Console
) -> None:
    """Print three aligned columns, with consequence and fix below each finding."""
    width = max(map(len, findings))
    for group, names in groups.items():
        console.print(Text(group, style="bold"))
        table = Table.grid(padding=(0, 2))
        table.add_column(width=6, justify="right")
        table.add_column(width=width, no_wrap=True)
        table.add_column(overflow="fold")
        for name in names:
            finding = findings[name]
            style = STYLES[finding.state]
            quiet = "dim" if finding.state == "n/a" else ""
            table.add_row(
                Text(finding.state, style=style), Text(name), Text(finding.found, style=quiet)
            )
            concerns = finding.state in ("warn", "fail")
            if finding.consequence:
                table.add_row("", "", Text(finding.consequence, style="" if concerns else "dim"))
            if finding.fix and concerns:
                table.add_row("", "", Text(f"fix: {finding.fix}", style="cyan"))
            elif finding.fix:
                table.add_row("", "", Text(f"to install: {finding.fix}", style="dim"))
        console.print(table)
        console.print()
    console.print(Text(_verdict(findings)))


def _verdict(findings: dict[str, Finding]) -> str:
    parts = []
    for state, what in (("fail", "will not work"), ("warn", "warnings")):
        names = [name for name, finding in findings.items() if finding.state == state]
        if names:
            parts.append(f"{what}: {', '.join(names)}")
    return "; ".join(parts) or "no problems found"

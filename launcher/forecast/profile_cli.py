"""`shardscale profile`: measure this machine for the planner, into a file.

python -m launcher profile --out machine.json --model gpt2 --nproc 2
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from launcher.util.errors import refusing
from launcher.util.flags import MOST_RANKS, OptionParser, require_range
from launcher.util.startup import loading


@refusing
def main(argv: Sequence[str]) -> int:
    """Measure and write the file; 0, 2 when refused, 4 when a measuring process failed."""
    options = _parse(argv)
    with loading():
        from launcher.forecast.profile import write_profile

    return write_profile(options)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = OptionParser(
        prog="shardscale profile",
        description="Measure this machine (arithmetic, memory, links, disk) for the planner. "
        "Takes less than a minute, all cores or GPUs at full load.",
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("machine.json"), help="file to write (machine.json)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what to measure")
    add("--model", default="gpt2", help="named size whose matmul shapes are used (gpt2)")
    add("--nproc", type=int, help="processes (one per GPU; on a CPU 2, or 1 on a single core)")
    options = parser.parse_args(argv)
    require_range("--nproc", options.nproc, 1, MOST_RANKS)
    return options

"""`shardscale rehearse --gpu H100 -- python train.py ...`: will this program fit on that GPU?"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from launcher.tools.watch.watch_cli import parse_before
from launcher.util.errors import UserError, refusing
from launcher.util.flags import OptionParser, require_range

USAGE = "shardscale rehearse --gpu H100 [options] -- COMMAND ..."
MOST_STEPS = 1000
MOST_GPUS = 64
MOST_RANKS = 1 << 20


@refusing
def main(argv: Sequence[str]) -> int:
    """Rehearse a program; exit code 0 fits, 1 does not, 3 too close to call, 2 for bad input, 4
    where the program ended with an error of its own."""
    options, command = parse(argv)
    from launcher.tools.rehearse.rehearsal import rehearse
    from launcher.tools.rehearse.report import as_json, lines

    result = rehearse(options, command)
    if options.json:
        print(json.dumps(as_json(result), indent=2))
    else:
        for line in lines(result):
            print(line)
    return result.exit_code


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the program's command.

    Raises:
        UserError: an invalid option, or no command.
    """
    parser = OptionParser(
        prog="shardscale rehearse",
        usage=USAGE,
        description="Run any PyTorch program, unchanged, on GPUs that are not there, for a few "
        "optimizer steps: torch's real allocator, no kernels run. Prints whether it fits, what "
        "needed the memory, and on which GPUs of the table it would fit. Needs torch's CUDA build. "
        "Exit codes: 0 fits, 1 does not, 3 too close to call, 2 bad input, 4 the program failed.",
    )
    _add_options(parser)
    options, command = parse_before(parser, argv)
    if options.gpu is None:
        raise UserError(f"no --gpu: name the GPU to rehearse on, as in {USAGE}")
    require_range("--steps", options.steps, 1, MOST_STEPS)
    require_range("--gpus", options.gpus, 1, MOST_GPUS)
    require_range("--world-size", options.world_size, 1, MOST_RANKS)
    return options, command


def _add_options(parser: OptionParser) -> None:
    add = parser.add_argument
    add("--gpu", metavar="NAME", help="GPU to rehearse on: H100, A100-40GB, RTX-4090, ...")
    add(
        *("--gpus", "--gpus-per-node"),
        type=int,
        metavar="N",
        help="GPUs of the node (default: as many as the command starts ranks, else 1)",
    )
    add(
        "--steps",
        type=int,
        default=3,
        metavar="N",
        help="optimizer steps (default: 3; 1 takes 2, as the first makes the optimizer's states)",
    )
    add(
        "--only-rank",
        type=int,
        metavar="0",
        help="run rank 0 alone; the others, which do not run, answer as it does",
    )
    add(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks beside --only-rank, where the command has no launcher that starts them",
    )
    add(
        "--topology",
        type=Path,
        metavar="FILE",
        help="YAML file of the nodes that seconds are for: gpus_per_node, "
        "network_gbytes_per_s, ...",
    )
    add(
        "--snapshot",
        type=Path,
        metavar="FILE",
        help="write torch's memory snapshot of the worst rank, for shardscale snapshot",
    )
    add(
        "--answer",
        action="append",
        default=[],
        metavar="FILE:LINE=VALUE",
        help="what a value reads as that the program reads from the device in this line",
    )
    add("--out", type=Path, metavar="FOLDER", help="run folder (default: runs/...)")
    add("--json", action="store_true", help="print JSON")

"""`shardscale plan`: which configurations fit and how fast they are, before anything runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from launcher.config.families import read_hf_config
from launcher.config.init_from import in_words
from launcher.forecast import GOALS
from launcher.measure.hardware import GPUS_PER_NODE, KNOWN_GPUS
from launcher.util.errors import UserError, naming, refusing
from launcher.util.files import check_new_file
from launcher.util.flags import OptionParser, as_words, split_options
from launcher.util.sizes import parse_bytes
from launcher.util.startup import loading


@refusing
def main(argv: Sequence[str]) -> int:
    """Plan what was asked for; returns an exit code of `ExitCode`."""
    options, training = parse_options(argv)
    with loading():
        from launcher.forecast.plan_answer import print_plan

    return print_plan(options, training)


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="shardscale plan",
        description="Predict memory and throughput of every sharding, offload, precision and "
        "checkpointing choice, without a GPU, and print the command for the best.",
        epilog="MODEL is --model MODEL. All flags of launcher.train apply as well: "
        "--global-batch 128. Explicit flags stay fixed: --precision bf16 --zero 3. See "
        "`shardscale train --help`. --from FILE (the config of another trainer), --check and "
        "--rent have a help of their own: `shardscale plan --from --help`.",
    )
    add = parser.add_argument
    parser.usage = "shardscale plan [MODEL] [options] [flags of launcher.train]"
    shape = "plan for the model of this transformers config.json, without its weights"
    add("--hf-config", type=Path, metavar="FILE", help=shape)
    add("--gpus", type=int, default=1, metavar="N", help="GPUs in total (default: 1)")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs per node (default: up to 8)")
    add("--gpu", metavar="NAME", help=f"one of {KNOWN_GPUS}")
    add(
        "--gpu-memory",
        metavar="SIZE",
        help="memory per GPU in GiB, or as 24GiB (default: the GPU's)",
    )
    add("--profile", type=Path, metavar="FILE", help="rates measured by `shardscale profile`")
    add("--goal", choices=GOALS, default=GOALS[0], help="ranking criterion (default: fastest)")
    add("--price-per-gpu-hour", type=float, metavar="PRICE", help="adds the price per M tokens")
    add("--quiet", action="store_true", help="no progress line")
    add("--all", action="store_true", help="show every candidate, not only the best per sharding")
    every = "write every prediction to FILE; without FILE, print them instead of the table"
    add("--json", type=Path, nargs="?", const=Path("-"), metavar="FILE", help=every)
    add("--page", type=Path, metavar="FILE.html", help="write a page with bars of bytes")
    add("--apply", type=Path, metavar="FILE.yaml", help="write the config of the best candidate")
    without = "ignore constants learnt from runs on this machine"
    add("--no-calibration", action="store_true", help=without)
    return parser


def parse_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into the plan's own options and the flags of `launcher.train`.

    Raises:
        UserError: an option's value is invalid.
    """
    options, training = split_options(_parser(), argv)
    if training and not training[0].startswith("-"):
        if any(flag.partition("=")[0] == "--model" for flag in training):
            what = "give one of them; a config of another trainer follows --from"
            raise UserError(f"{training[0]} and --model: {what}")
        training = ["--model", *training]
    for name, value in (("--gpus", options.gpus), ("--gpus-per-node", options.gpus_per_node)):
        if value is not None and not 1 <= value <= 2**20:
            raise UserError(f"{name} {value} must be at least 1 and at most {2**20}")
    per_node = min(options.gpus, options.gpus_per_node or GPUS_PER_NODE)
    if options.gpus % per_node:
        raise UserError(
            f"--gpus {options.gpus} is no multiple of {per_node} GPUs per node, and torchrun "
            f"starts as many on each: give --gpus {options.gpus // per_node * per_node} or "
            "--gpus-per-node N that divides it"
        )
    if options.price_per_gpu_hour is not None and not 0 <= options.price_per_gpu_hour < 1e9:
        raise UserError(f"--price-per-gpu-hour {options.price_per_gpu_hour} must be 0 or more")
    if options.gpu is not None and options.profile is not None:
        raise UserError(f"--gpu {options.gpu} and --profile {options.profile}: give one of them")
    if options.gpu_memory is not None:
        parse_bytes(options.gpu_memory, "--gpu-memory")
    options.shape = []
    if options.hf_config is not None:  # before the flags, which may change it
        with naming("--hf-config"):
            model = in_words(read_hf_config(options.hf_config))
        options.shape = as_words(model)
        training = [*options.shape, *training]
    for path in (options.json, options.page, options.apply):
        if path is not None and str(path) != "-":
            check_new_file(path)
    return options, training

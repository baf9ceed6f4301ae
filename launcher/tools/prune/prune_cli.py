"""`shardscale prune`: read a trained model, remove weights, report the cost, write a run."""

from collections.abc import Sequence

from launcher.tools.prune.choice import PruneOptions
from launcher.util.errors import ExitCode, refusing
from launcher.util.flags import options_of
from launcher.util.startup import loading


@refusing
def main(argv: Sequence[str]) -> int:
    """Prune one model; 0 on success, 2 when refused."""
    options = options_of(PruneOptions, argv, "shardscale prune")
    with loading():
        from launcher.tools.prune.prune import prune

    prune(options)
    return ExitCode.DONE

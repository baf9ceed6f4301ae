"""`shardscale sweep`: one training run per cell of a grid, in sequence; failures become rows.

python -m launcher sweep --nproc 4 --model gpt2 --grid strategy=ddp,fsdp,zero3+cpu micro_batch=8,16

Or prepare it here and run the cells on other machines in parallel, one task per cell:

python -m launcher sweep --prepare --nproc 4 --out sweeps/first --grid strategy=ddp,zero3
python -m launcher sweep --out sweeps/first --cell 1
"""

from collections.abc import Sequence

from launcher.compare.sweep.grid_source import parse_options
from launcher.util.errors import refusing
from launcher.util.startup import loading


@refusing
def main(argv: Sequence[str]) -> int:
    """Run or continue a sweep; 0 when every cell has a result, failed ones included.

    Exit codes: 2 refused, 4 when cells failed and none completed, 5 stopped, 130 after Ctrl-C (the
    same command continues).
    """
    options, training = parse_options(argv)
    with loading():
        from launcher.compare.sweep import sweep

    if options.prepare:
        return sweep.write_prepared(argv)
    if options.cell is not None:
        return sweep.run_task(options, argv)
    return sweep.sweep_here(options, training, argv)

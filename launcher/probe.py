"""The worker of `--micro-batch auto`: two training steps in a temporary folder. Exit code 0: they
ran; 3: out of memory.

    python -m launcher.probe FOLDER [launcher.train's flags]
"""

import dataclasses
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from launcher.measure.limit import is_out_of_memory
from launcher.parallel.world import leave, ranks_from_environment
from launcher.run.capacity import TooLarge
from launcher.run.prepare import Prepared, prepare
from launcher.run.resume import Resume
from launcher.run.session import Session
from launcher.train import join, load_forecast, take_steps
from launcher.util.errors import ExitCode, UserError

STEPS = 2  # the optimizer's states are made in the first, and stay in the second


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank; ends the process with an exit code of `ExitCode`."""
    folder, *flags = sys.argv[1:] if argv is None else argv
    try:
        world_size, ranks_per_node = ranks_from_environment()
        prepared = prepare(
            flags,
            world_size=world_size,
            ranks_per_node=ranks_per_node,
            load_forecast=load_forecast,
        )
        prepared = short(prepared, Path(folder))
        world = join(prepared)
        with Session(prepared, world) as session:
            take_steps(prepared, world, session)
    # A UserError, too, but one that a smaller micro-batch can avoid: the search goes on.
    except TooLarge:
        leave(ExitCode.OUT_OF_MEMORY, together=False)
    except UserError as error:
        print(error, file=sys.stderr)  # the search quotes the last line
        leave(ExitCode.REFUSED, together=False)
    except Exception as error:
        traceback.print_exception(error)
        out = is_out_of_memory(error)
        leave(ExitCode.OUT_OF_MEMORY if out else ExitCode.FAILED, together=False)
    leave(ExitCode.DONE, together=True)


def short(prepared: Prepared, out: Path) -> Prepared:
    """Return the same run from fresh weights for two steps, without checkpoints and evaluations."""
    config = prepared.resolved.config.replace(
        **{"out": out, "resume": None, "steps": STEPS, "stop_after": None, "max_minutes": None},
        **{"sample_every": 0, "eval_every": 0, "save_every": 0, "save_minutes": 0.0},
    )
    return dataclasses.replace(
        prepared,
        resolved=dataclasses.replace(prepared.resolved, config=config),
        resume=Resume(source=None, reopens=False),
    )


if __name__ == "__main__":
    main()

"""Refusal of ranks that were started differently, as nodes with a command line each can be.

Each rank would compute its own gradients correctly, and their mean would be no loss's gradient.
"""

import socket
from typing import Any

from launcher.model.foreign.config import ForeignConfig
from launcher.parallel.world import World
from launcher.run.prepare import Prepared
from launcher.util.errors import UserError
from launcher.util.flags import as_flags, flag

MAY_DIFFER = (
    # Places, which nodes may have by other names.
    *("model", "data", "tokenizer", "init_from", "deepspeed", "nvme_path", "out", "resume"),
    # Output.
    *("log_level", "report_to"),
)


def check_same_start(prepared: Prepared, world: World) -> None:
    """Refuse to train unless all ranks have the same settings, decoder and tokens; all call this.

    Raises:
        UserError: on all ranks, naming the first rank that differs from rank 0, and by what.
    """
    starts = world.gathered(_start_of(prepared))
    for rank, start in enumerate(starts):
        for what in ("flags", "decoder", "tokens"):
            if start[what] != starts[0][what]:
                raise UserError(_difference(what, (rank, start), (0, starts[0])))


def _start_of(prepared: Prepared) -> dict[str, Any]:
    flags, model = prepared.resolved.config.flat(), prepared.resolved.model
    decoder = model.computes() | (model.fields if isinstance(model, ForeignConfig) else {})
    return {
        "node": socket.gethostname(),
        "flags": {name: value for name, value in flags.items() if name not in MAY_DIFFER},
        "decoder": {name: str(value) for name, value in decoder.items()},
        "tokens": {"tokens": prepared.corpus.fingerprint[:12]},
        "data": flags["data"],
        "model": flags["model"],
    }


def _difference(what: str, *ranks: tuple[int, dict[str, Any]]) -> str:
    """Describe how the first of two ranks differs from the other."""
    (values, others) = (start[what] for _, start in ranks)
    name = next(n for n in (*values, *others) if values.get(n) != others.get(n))
    there, here = (f"rank {rank} ({start['node']})" for rank, start in ranks)
    value, other = values.get(name), others.get(name)
    if what == "flags":
        value, other = (
            f"no {flag(name)}" if v is None else as_flags({name: v}) for v in (value, other)
        )
        return f"{there} has {value} and {here} has {other}: start all ranks with the same flags"
    place = "data" if what == "tokens" else "model"
    return (
        f"{there} has {name} {value} by --{place} {ranks[0][1][place]}, and {here} has {other}: "
        f"give all ranks the same --{place}"
    )

"""What the page asks: arguments of `shardscale plan` in, its answers out, a choice at a time."""

from functools import lru_cache
from typing import Any

from launcher.config.arguments import parse_run_config
from launcher.forecast.assess import Assessment, assess, tokens_per_s
from launcher.forecast.candidates import PRECISIONS, Choice, choices, given_fields
from launcher.forecast.place import Place, find_place
from launcher.forecast.plan_cli import command_of, parse_options, with_weights
from launcher.forecast.plan_records import page_row
from launcher.util.errors import UserError

UNCUT = frozenset({"context_parallel", "tensor_parallel"})
"""Left at 1: traces of parts of sequences and matrices are not stored."""
KEPT = 8
"""Questions whose choices are remembered."""


def choices_of(argv: tuple[str, ...]) -> dict[str, Any]:
    """The place and every choice that the planner would assess; or why it refuses."""
    try:
        place, found, _ = _asked(argv)
    except UserError as error:
        return {"refused": str(error)}
    run = found[0].runs[0]
    return {
        "parameters": run.model.parameter_count,
        "trained": run.model.trained_parameter_count,
        "seq_len": run.seq_len,
        "memory_bytes": place.memory_bytes,
        "choices": [
            {
                "sharding": choice.label,
                "precision": choice.precision,
                "activation_checkpointing": choice.checkpointing,
                "most_tokens_per_s": max(tokens_per_s(run, place) for run in choice.runs),
            }
            for choice in found
        ],
    }


def assessed(argv: tuple[str, ...], number: int) -> dict[str, Any]:
    """One of the choices as `plan --page` shows it, with its command."""
    place, found, training = _asked(argv)
    try:
        best: Assessment = assess(found[number], place)
        return page_row(best, place) | {
            "global_batch": best.run.global_batch,
            "command": command_of(best, training, place),
        }
    except UserError as error:
        return {"refused": str(error)}


@lru_cache(KEPT)
def _asked(argv: tuple[str, ...]) -> tuple[Place, list[Choice], list[str]]:
    options, training = parse_options([*argv, "--no-calibration"])
    place, _ = find_place(options)
    config = with_weights(parse_run_config(training, place.world_size), options)
    found = choices(
        config,
        given_fields(training, config) | {"model"} | UNCUT,
        world_size=place.world_size,
        ranks_per_node=place.ranks_per_node,
        device_type=place.machine.device,
        precisions=[name for name in PRECISIONS if name in place.machine.matmul_flops_per_s],
    )
    return place, found, training

"""Functions that the page calls: arguments of `shardscale plan` as JSON in, JSON out.

The page asks for one candidate after the other, so that it can show results as they come.
"""

import json
from functools import lru_cache

from launcher.config.arguments import parse_run_config
from launcher.config.sharding import MODEL_PARALLEL
from launcher.forecast.assess import assess, tokens_per_s
from launcher.forecast.candidates import Choice, given_fields
from launcher.forecast.cluster import Cluster, choices_on, find_cluster
from launcher.forecast.plan_answer import command_of, with_weights
from launcher.forecast.plan_cli import parse_options
from launcher.forecast.plan_records import page_row
from launcher.util.errors import UserError

UNCUT = frozenset(MODEL_PARALLEL)
"""Stay at 1: traces under context and tensor parallelism are not stored."""
CACHED = 8
"""Questions whose candidates are kept."""


def choices_of(argv: str) -> str:
    """Return the machine and all candidates, or the reason of a refusal."""
    try:
        cluster, candidates, _ = _asked(argv)
    except UserError as error:
        return json.dumps({"refused": str(error)})
    run = candidates[0].runs[0]
    answer = {
        "parameters": run.model.parameter_count,
        "trained": run.model.trained_parameter_count,
        "seq_len": run.seq_len,
        "memory_bytes": cluster.memory_bytes,
        "choices": [
            {
                "sharding": choice.label,
                "precision": choice.precision,
                "activation_checkpointing": choice.checkpointing,
                "most_tokens_per_s": max(tokens_per_s(run, cluster) for run in choice.runs),
            }
            for choice in candidates
        ],
    }
    return json.dumps(answer)


def assessed(argv: str, number: int) -> str:
    """Return one candidate as `plan --page` shows it, with its command."""
    cluster, candidates, training = _asked(argv)
    try:
        best = assess(candidates[number], cluster)
    except UserError as error:
        return json.dumps({"refused": str(error)})
    more = {"global_batch": best.run.global_batch, "command": command_of(best, training, cluster)}
    return json.dumps(page_row(best, cluster) | more)


@lru_cache(CACHED)
def _asked(argv: str) -> tuple[Cluster, list[Choice], list[str]]:
    options, training = parse_options([*json.loads(argv), "--no-calibration"])
    cluster, _ = find_cluster(options)
    config = with_weights(parse_run_config(training, cluster.world_size), options)
    fixed = given_fields(training, config) | {"model"} | UNCUT
    return cluster, choices_on(cluster, config, fixed), training

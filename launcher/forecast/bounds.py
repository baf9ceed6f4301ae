"""Bound the speed and the memory of a candidate without a trace."""

import math
from collections.abc import Sequence

from launcher.forecast.assess import tokens_per_s
from launcher.forecast.candidates import CHECKPOINTING, Choice
from launcher.forecast.cluster import Cluster
from launcher.forecast.efficiency import FP8_GAIN
from launcher.forecast.predict import least_bytes
from launcher.forecast.timing import rated_type
from launcher.strategies import strategy_of


def may_fit(choice: Choice, cluster: Cluster) -> bool:
    """Return whether parameters, optimizer states and the inputs of blocks leave any memory."""
    run = choice.runs[0]
    try:
        size_bytes = least_bytes(run)
    except Exception:  # as `assess` will, which keeps the reason
        return True
    return cluster.fixed_bytes + size_bytes <= cluster.memory_bytes


def activations_key(choice: Choice) -> tuple[int, ...]:
    """Return what activations grow with: of two candidates with the same recomputation one that is
    in no place above the other has no more."""
    config = choice.runs[0].config
    types = strategy_of(config).dtypes(config)
    ranks = config.sharding.model_parallel.values()
    return (*(-count for count in ranks), types.computed.itemsize, types.autocast is not None)


def most_tokens_per_s(choice: Choice, cluster: Cluster) -> float:
    """Return the bound by products alone, for which nothing is recorded; the micro-batch cancels
    out."""
    run = choice.runs[0]
    model, machine = run.own_model, cluster.machine.shared_by(cluster.ranks_per_node)
    rate = machine.matmul_flops_per_s[rated_type(run, machine)]
    if run.config.optim.arithmetic.fp8_linears:
        rate *= FP8_GAIN
    # 2 forward, 2 for the input's gradient, 2 for the weight's, which adapters leave out
    flops_per_token = (6 if model.lora is None else 4) * model.matmul_parameter_count
    local_tokens = run.accumulation * run.config.data.micro_batch * run.local_seq_len
    bound = run.global_batch * run.seq_len * rate / (local_tokens * flops_per_token)
    return bound / cluster.learnt_ratio(run)


def traced_tokens_per_s(choice: Choice, cluster: Cluster) -> float:
    """Return the predicted speed of its fastest micro-batch, whether that fits or not."""
    try:
        return max(tokens_per_s(run, cluster) for run in choice.runs)
    except Exception:  # as `assess` will, which keeps the reason
        return math.inf


def most_recomputed(candidates: Sequence[Choice]) -> str:
    """Return the checkpointing mode of these that needs least memory."""
    modes = {choice.checkpointing for choice in candidates}
    return max(modes, key=(*CHECKPOINTING, *modes).index)

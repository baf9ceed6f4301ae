"""The record of a training by this launcher, which knows every figure of it."""

from dataclasses import dataclass

from launcher.measure.records import RunRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRecord(RunRecord):
    """A run's record in which nothing is unknown."""

    matmul_parameters: int
    flops_per_token: int
    micro_batch: int
    accumulation: int
    global_batch: int
    seq_len: int
    steps: int

"""The schema of everything that is written, shown, planned or compared.

`rank<N>.jsonl` has one JSON object per line, distinguished by `kind`. Names carry units; unmeasured
values are None, never 0. A field whose default is None is omitted when it has no value, so readers
take a missing field as None.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

from launcher.util.json_file import Record

SCHEMA_VERSION = 1
WARMUP_STEPS = 2  # compile, allocator and communication start-up: reported, not averaged


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord(Record):
    """First line of every file: the description of the run. A watched program (`shardscale watch`)
    has `strategy` by its wrappers' names, and None for what cannot be read off it."""

    kind: ClassVar[str] = "run"
    schema_version: int = SCHEMA_VERSION
    run: str
    rank: int
    world_size: int
    hostname: str
    device: str
    device_name: str | None
    strategy: str
    strategy_also_called: str
    context_parallel: int = 1
    tensor_parallel: int = 1
    precision: str
    model: str
    attention: str | None = None
    activation_checkpointing: str | None = None
    """As run: with a budget, the result per block."""
    parameters: int
    matmul_parameters: int | None
    flops_per_token: int | None
    micro_batch: int | None
    accumulation: int | None
    global_batch: int | None
    seq_len: int | None
    steps: int | None
    started_unix_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord(Record):
    """One optimizer step. Losses, norms and experts' tokens (over an equal share, entropy over its
    maximum) are global; times and bytes are this rank's."""

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens: int | None
    duration_s: float
    applied: bool
    data_s: float
    forward_s: float
    backward_s: float
    step_s: float
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    device_used_bytes: int | None = None
    expert_load_min: float | None = None
    expert_load_max: float | None = None
    expert_entropy: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecord(Record):
    """Loss over a split that is not trained on."""

    kind: ClassVar[str] = "eval"
    step: int
    split: str
    loss: float
    perplexity: float
    tokens: int
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord(Record):
    """A text that the model generated after a step (`--sample-every`), 0 before the first one."""

    kind: ClassVar[str] = "sample"
    step: int
    prompt: str
    text: str
    tokens: int
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecord(Record):
    """A single occurrence."""

    kind: ClassVar[str] = "event"
    name: str
    step: int | None = None
    unix_s: float
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRecord(Record):
    """One phase over one period of the run: `init`, `resume`, `first_step`, `steady`, `save`,
    `evaluation`.

    Late out-of-memory errors occur in particular periods, hence the separation. `peak_bytes` is the
    highest allocated (GPU) or live (`--memory-trace`) figure within the phase.
    """

    kind: ClassVar[str] = "phase"
    period: str
    phase: str
    steps: int
    mean_s: float | None = None
    peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRecord(Record):
    """Readings of a rank's device since the last sample, or of its process without NVML.

    `t_s` counts from the sampler's start on the monotonic clock. `memory_used_bytes` is the maximum
    of the whole device (NVML); without NVML there is only `host_rss_bytes`, the maximum of the
    process. Other readings are the newest. `energy_j` counts from the first reading.
    """

    kind: ClassVar[str] = "gpu"
    t_s: float
    source: str
    uuid: str | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    gpu_utilization_percent: float | None = None
    memory_utilization_percent: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    pcie_rx_bytes_per_s: float | None = None
    host_rss_bytes: int | None = None


State = Literal["running", "completed", "oom", "preempted", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """`status.json`: the state of a run; torchrun's exit code does not show it.

    `failure.json` is that of the rank that failed first, with its `traceback` as lines.
    """

    state: State
    phase: str
    reason: str | None = None
    rank: int | None = None
    exit_code: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    updated_unix_s: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerSummary:
    """Summary of one rank's samples; unmeasured values are None.

    `missing` maps readings that never succeeded (`device`: the whole GPU) to their last error;
    `faults` counts the errors of every reading. `missed_ticks` are deadlines that passed while the
    machine was busy.
    """

    source: Literal["nvml", "psutil"]
    uuid: str | None
    samples: int
    missed_ticks: int
    peak_used_bytes: int | None
    peak_host_rss_bytes: int | None
    mean_gpu_utilization_percent: float | None
    mean_power_w: float | None
    max_power_w: float | None
    max_temperature_c: float | None
    energy_j: float | None
    gpu_lost: bool
    missing: dict[str, str]
    faults: dict[str, dict[str, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary:
    """Result of one rank. The summary names the kind of its `peak_bytes`."""

    rank: int
    peak_bytes: int
    traced_peak_bytes: int | None
    tokens_per_s: float | None
    training_power_w: float | None
    samples: SamplerSummary | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """`summary.json`: results of a run. Memory is that of the worst rank.

    None means unmeasured, and in a file also that an older version did not write it.
    """

    strategy: str | None = None
    model: str | None = None
    world_size: int | None = None
    steps: int | None = None
    """In this attempt, from `resumed_step` on."""
    resumed_step: int | None = None
    train_tokens: int | None = None
    """In all attempts, as `epochs`."""
    epochs: float | None = None
    skipped_steps: int | None = None
    stopped_by: str | None = None
    test_loss: float | None = None
    perplexity: float | None = None
    test_tokens: int | None = None
    test_split_tokens: int | None = None
    test_cut_short: bool | None = None
    tokens_per_s: float | None = None
    first_step_s: float | None = None
    peak_bytes: int | None = None
    peak_kind: str | None = None
    peak_rank: int | None = None
    tokens_per_joule: float | None = None
    duration_s: float | None = None
    ranks: list[RankSummary] = field(default_factory=list)
    plan: dict[str, Any] | None = None
    """Predicted beside measured values; omitted without a prediction."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Read the values of a file of any version."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


SweepState = State | Literal["timeout", "refused", "unavailable", "pending", "interrupted"]


@dataclass(kw_only=True, slots=True)
class SweepRow:
    """One cell of a sweep and its state, in `sweep.json` and `rows/NAME.json`.

    `flags` are the differences from RunConfig's defaults by flat name; `figures` come from
    `summary.json` of the run. A `refused` cell has incompatible flags; an `unavailable` one cannot
    run according to its grid file.
    """

    name: str
    flags: dict[str, Any]
    state: SweepState = "pending"
    reason: str | None = None
    duration_s: float | None = None
    folder: str = field(init=False)
    log: str = field(init=False)
    figures: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.folder, self.log = f"cells/{self.name}", f"logs/{self.name}.txt"

    @property
    def done(self) -> bool:
        """Return whether a rerun of the sweep skips this cell."""
        return self.state in ("completed", "oom", "refused", "unavailable")


@dataclass(kw_only=True, slots=True)
class Sweep:
    """`sweep.json`: the request of a sweep, and the state of each cell."""

    schema_version: int = SCHEMA_VERSION
    nproc: int
    arguments: list[str]
    updated_unix_s: float = 0.0
    cells: list[SweepRow]

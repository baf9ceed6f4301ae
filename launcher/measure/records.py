"""The schema: everything that is written, shown, planned or compared is one of these records.

One JSON object per line in `rank<N>.jsonl`, told apart by `kind`. Units are in the names; what
could not be measured is `None`, never 0.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

SCHEMA_VERSION = 1
WARMUP_STEPS = 2  # compile, allocator and communication start-up: reported, not averaged


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Base of all records; `kind` names the subclass in the file."""

    kind: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, `kind` first; NaN and infinity, which JSON lacks, become None."""
        values = dataclasses.asdict(self)
        return {"kind": self.kind} | {name: _finite(value) for name, value in values.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord(Record):
    """First line of every file: what this run is."""

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
    precision: str
    model: str
    attention: str | None = None
    parameters: int
    matmul_parameters: int
    flops_per_token: int
    micro_batch: int
    accumulation: int
    global_batch: int
    seq_len: int
    steps: int
    started_unix_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord(Record):
    """One optimizer step. Losses and norms are global; times and bytes are this rank's."""

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    duration_s: float
    applied: bool
    data_s: float
    forward_s: float
    backward_s: float
    step_s: float
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    device_used_bytes: int | None


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
class EventRecord(Record):
    """Something that happened once."""

    kind: ClassVar[str] = "event"
    name: str
    step: int | None = None
    unix_s: float
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRecord(Record):
    """One phase over one period of the run: `init`, `resume`, `first_step`, `steady`, `save`,
    `evaluation`.

    `period` keeps apart what late out-of-memory errors hide in. `peak_bytes` is the highest
    allocated (GPU) or tracked live (`--memory-trace`) figure inside the phase.
    """

    kind: ClassVar[str] = "phase"
    period: str
    phase: str
    steps: int
    mean_s: float | None
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRecord(Record):
    """One sample of the device a rank uses, or of the process where there is no NVML.

    `t_s` counts from the sampler's start on the monotonic clock. `memory_used_bytes` is what the
    whole device uses (NVML); without NVML it is None and `host_rss_bytes` is what there is.
    `energy_j` counts from the first reading.
    """

    kind: ClassVar[str] = "gpu"
    t_s: float
    source: str
    uuid: str | None
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLines:
    """Bytes in one place (device, host or disk), each storage counted once.

    `master_bytes` are fp32 master weights where an engine keeps them beside the parameters it
    computes with (DeepSpeed does, in fp32 too); `buffers_bytes` are communication buffers that
    stay. Lines that nobody measured are None.
    """

    params_bytes: int = 0
    master_bytes: int = 0
    grads_bytes: int = 0
    optimizer_bytes: int = 0
    buffers_bytes: int = 0
    activations_bytes: int | None = None
    temporary_bytes: int | None = None
    allocator_slack_bytes: int | None = None
    context_bytes: int | None = None
    unexplained_bytes: int | None = None
    used_bytes: int | None = None

    @property
    def states_bytes(self) -> int:
        """What can live between steps: weights, gradients, optimizer states, buffers."""
        weights = self.params_bytes + self.master_bytes
        return weights + self.grads_bytes + self.optimizer_bytes + self.buffers_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger(Record):
    """Where one rank's bytes are at one moment.

    `held` (between steps), `peak` (of `step`, reached in `phase`), `oom` or `predicted`.
    """

    kind: ClassVar[str] = "ledger"
    moment: str
    step: int | None = None
    phase: str | None = None
    device: LedgerLines
    host: LedgerLines
    disk: LedgerLines


@functools.lru_cache
def _types_of(kind: str) -> dict[str, Any]:
    """Field name -> type of the record of that kind, or of the lines of a ledger."""
    known = {each.kind: each for each in Record.__subclasses__()}
    owner: Any = LedgerLines if kind == LedgerLines.__name__ else known.get(kind, Record)
    hints = get_type_hints(owner)
    return {each.name: hints[each.name] for each in dataclasses.fields(owner)}


def well_formed(record: Any) -> bool:
    """Whether what was read is one of these records, as far as it goes: fields may be missing."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return False
    return _all_fit(record, _types_of(record["kind"]))


def _all_fit(values: Mapping[str, Any], types_of: Mapping[str, Any]) -> bool:
    return all(_fits(values[name], kind) for name, kind in types_of.items() if name in values)


def _fits(value: Any, hint: Any) -> bool:
    kinds = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
    if value is None:
        return types.NoneType in kinds or float in kinds  # which NaN is written as
    kind: Any = kinds[0]
    if kind is LedgerLines:
        return isinstance(value, dict) and _all_fit(value, _types_of(kind.__name__))
    if kind in (int, float):
        number = isinstance(value, int if kind is int else int | float)
        return number and not isinstance(value, bool) and -(2**63) < value < 2**63
    return isinstance(value, get_origin(kind) or kind)

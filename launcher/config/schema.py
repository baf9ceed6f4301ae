"""RunConfig: one tree of frozen dataclasses, filled from defaults, a YAML file and flags.

Every field has one name, used everywhere: `micro_batch` in the file and in a sweep's grid is
`--micro-batch` on the command line. Flags beat the file, the file beats the defaults.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

from launcher.config.model import ModelChoice
from launcher.config.sharding import ShardingChoice
from launcher.optim.choice import OptimChoice as OptimChoice
from launcher.util.errors import UserError
from launcher.util.flags import (
    MOST_ITEMS,
    MOST_STEPS,
    YEAR_S,
    require_positive,
    require_range,
)
from launcher.util.sizes import parse_bytes

LogLevel = Literal["debug", "info", "warning", "error"]

LOGGER_NAMES = ("tensorboard", "wandb", "mlflow")
SHORTEST_TIMEOUT_S = 0.1
SAVE_MINUTES = 10.0


class AutoMicroBatch(int):
    """`--micro-batch auto`, until the search. It counts as 1, the smallest size, so that everything
    else is checked before the search."""

    def __new__(cls) -> Self:
        return super().__new__(cls, 1)

    def __str__(self) -> str:
        return "auto"

    __repr__ = __str__

    # for `dataclasses.asdict`: int's own copy passes a number to `__new__`
    def __deepcopy__(self, memo: object) -> Self:
        return self


class DefaultMicroBatch(int):
    """A micro-batch that nothing has set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataChoice:
    """Training text and batch sizes."""

    data: str = "stdlib"
    """stdlib (the interpreter's own source text), a .txt/.jsonl/.parquet file or a folder of them,
    or hf:NAME[:CONFIG][@SPLIT], with [:2GB] behind it to download and read only that much text.
    Lines of .jsonl hold a text, prompt and completion, or messages. Files named train, validation
    or test are those splits."""
    data_field: str = "text"
    """Field of .jsonl lines, or column of .parquet files and hf: datasets, that holds the text."""
    mask_prompt: bool | None = None
    """Exclude prompts from the loss (when not given: if the data has any)."""
    document_attention: bool = False
    """Restrict attention to one document; sequences pack several."""
    tokenizer: str = "bpe"
    """bpe (trained on the corpus once, vocab_size entries), byte, a tokenizer.json, or hf:NAME."""
    seq_len: int | None = None
    """Tokens per sequence (the model's context, but at most 4096, when not given)."""
    micro_batch: int = DefaultMicroBatch(8)
    """Sequences per rank in one forward and backward. When not given beside a global batch: on a
    GPU as much of a rank's share as will fit by the plan, else at most 8. auto: the largest that
    fits in memory, found with a few real steps before training (one node)."""
    global_batch: int | None = None
    """Sequences per optimizer step over all ranks (micro_batch x ranks when not given), by gradient
    accumulation where it is larger."""

    def __post_init__(self) -> None:
        require_positive(self, "micro_batch", "global_batch", "seq_len", most=MOST_ITEMS)

    @property
    def leaves_micro_batch_open(self) -> bool:
        """Return whether any divisor of a rank's share will do: the global batch is set alone."""
        return isinstance(self.micro_batch, DefaultMicroBatch) and self.global_batch is not None

    def micro_batch_for(self, data_ranks: int) -> int:
        """Return the micro-batch; where it is open, the largest up to it with which so many ranks
        make the global batch."""
        if self.global_batch is None or not self.leaves_micro_batch_open:
            return self.micro_batch
        # a fraction where ranks do not divide the batch, which then is rejected with micro-batch 1
        share = self.global_batch / data_ranks
        return next((n for n in range(self.micro_batch, 0, -1) if share % n == 0), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopChoice:
    """Length of the training, checkpoints, evaluation and output."""

    steps: int | None = None
    """Optimizer steps; the schedule's length (300 when neither steps nor epochs is given)."""
    epochs: float | None = None
    """The schedule's length in passes over the training split, instead of --steps."""
    max_minutes: float | None = None
    """Stop training after this long; the last checkpoint and the test split may take another tenth
    of it."""
    eval_every: int | None = None
    """Validation loss every N steps, over the same 256 sequences on any number of ranks (when not
    given: before and after a fine-tune, over 64); 0: never."""
    sample_every: int | None = None
    """Generate texts every N steps (when not given: before and after a fine-tune on prompts), of 64
    tokens, or as many as --seq-len has room for: the likeliest answers to the first two prompts of
    the validation split, or without prompts a text drawn at temperature 0.8 with --seed; 0: none.
    """
    test_batches: int | Literal["all"] = 50
    """Batches of the test split at the end, of 8 sequences with any micro-batch, so that runs can
    be compared: a number, all, or 0 for no test loss."""
    save_every: int | None = None
    """Write a checkpoint every N steps, and of the last step, before the test split is read (only
    of the last step when not given); 0: none."""
    save_minutes: float | None = None
    """Write a checkpoint this long after the last one (10 minutes when not given, never with
    --save-every 0); 0: never. The next checkpoint replaces such a checkpoint."""
    keep: int | None = None
    """Number of checkpoints to keep, those of --save-minutes included (when not given: all others,
    and the newest of those)."""
    stop_after: int | None = None
    """Stop after this step; --steps remains the schedule's length."""
    resume: Path | None = None
    """Resume from a checkpoint, or from a run folder's newest intact one, with any strategy and
    world size. auto: resume in the run folder --out, or start there if it does not exist."""
    seed: int = 0
    """Seed of initial weights, data order and dropout."""
    out: Path | None = None
    """Run folder (runs/TIME-MODEL-STRATEGY when not given); must not exist yet, or be empty, except
    with --resume auto."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type; auto uses GPUs if there are any."""
    log_level: LogLevel = "info"
    """Console output: debug adds the logs of torch, DeepSpeed and the Hugging Face libraries;
    warning keeps warnings, errors and the summary; error keeps errors and the summary."""
    compile: bool | None = None
    """Compile each block with torch.compile: on, off, or auto: on a GPU, in runs that are long
    enough for it and of which the combination of flags was tested."""
    cuda_graphs: bool | None = None
    """Record a micro-batch's kernels once and start them all at once: on, off, or auto: on a GPU,
    with one rank, where a micro-batch is too small to keep the GPU busy while the host starts them.
    """
    collective_timeout_s: float = 600.0
    """End the run when a collective takes longer than this."""

    @property
    def compiles(self) -> bool:
        """Blocks are compiled; none is until `auto` is resolved."""
        return bool(self.compile)

    @property
    def saves_last(self) -> bool:
        """The last step has a checkpoint."""
        return self.save_every != 0

    @property
    def saves_after_s(self) -> float:
        """Seconds between checkpoints by the clock; infinite without them."""
        minutes = self.save_minutes
        if minutes is None:
            minutes = SAVE_MINUTES if self.saves_last else 0
        return 60 * minutes or math.inf

    def __post_init__(self) -> None:
        require_positive(self, "steps", "keep", most=MOST_STEPS)
        require_range("--eval-every", self.eval_every, 0, MOST_STEPS)
        require_range("--sample-every", self.sample_every, 0, MOST_STEPS)
        require_positive(self, "stop_after", "epochs", most=MOST_STEPS)
        require_positive(self, "max_minutes", most=YEAR_S // 60)
        require_range("--save-every", self.save_every, 0, MOST_STEPS)
        require_range("--save-minutes", self.save_minutes, 0, YEAR_S // 60)
        require_positive(self, "collective_timeout_s", most=YEAR_S)
        if self.collective_timeout_s < SHORTEST_TIMEOUT_S:
            raise UserError(
                f"--collective-timeout-s {self.collective_timeout_s} is shorter than a collective "
                f"takes: give at least {SHORTEST_TIMEOUT_S}"
            )
        if self.steps is not None and self.epochs is not None:
            raise UserError(
                f"--steps {self.steps} and --epochs {self.epochs} both set the schedule: give one"
            )
        if self.test_batches != "all" and self.test_batches < 0:
            raise UserError(
                f"--test-batches {self.test_batches} must be 0 or more, or all (the whole split)"
            )
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed} must be between 0 and 2^63 - 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureChoice:
    """Measurements and logging beside training."""

    log_every: int = 10
    """Steps between console lines; records hold every step."""
    report_to: str = "tensorboard"
    """Loggers of metrics: tensorboard (in the run folder), wandb and mlflow, several with commas
    between them, or none. $WANDB_MODE and $MLFLOW_TRACKING_URI configure the last two."""
    memory_trace: bool = False
    """CPU: follow every live tensor, for exact peaks and ledgers; costs about a tenth of the
    speed. GPU: keep the allocator's history for torch's memory viewer."""
    memory_limit: str | None = None
    """Limit memory, for example to 24GiB: of the GPU's allocator, or of the process on a CPU."""

    def __post_init__(self) -> None:
        require_positive(self, "log_every", most=MOST_STEPS)
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit, "--memory-limit")
        unknown = [name for name in self.loggers if name not in LOGGER_NAMES]
        if unknown:
            raise UserError(
                f"--report-to {unknown[0]!r:.40} must be one of {', '.join(LOGGER_NAMES)}, "
                "several with commas between them, or none"
            )

    @property
    def loggers(self) -> tuple[str, ...]:
        """Names of the loggers, without duplicates."""
        names = dict.fromkeys(name.strip() for name in self.report_to.split(","))
        return () if self.report_to == "none" else tuple(names)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Settings of a run."""

    model: ModelChoice = field(default_factory=ModelChoice)
    data: DataChoice = field(default_factory=DataChoice)
    sharding: ShardingChoice = field(default_factory=ShardingChoice)
    optim: OptimChoice = field(default_factory=OptimChoice)
    loop: LoopChoice = field(default_factory=LoopChoice)
    measure: MeasureChoice = field(default_factory=MeasureChoice)

    def flat(self) -> dict[str, Any]:
        """Return the tree as one level of plain values, ready for YAML; None is left out."""
        values: dict[str, Any] = {}
        for section in dataclasses.fields(self):
            for key, value in dataclasses.asdict(getattr(self, section.name)).items():
                if isinstance(value, Path | AutoMicroBatch):
                    value = str(value)
                elif isinstance(value, DefaultMicroBatch):
                    value = int(value)
                if value is not None:
                    values[key] = list(value) if isinstance(value, tuple) else value
        return values

    def get(self, name: str) -> Any:
        """Return a field by its (unique) flat name."""
        return getattr(getattr(self, _section_of()[name]), name)

    def replace(self, **changes: Any) -> "RunConfig":
        """Return a copy with fields changed by their (unique) flat names.

        Raises:
            TypeError: there is no such field.
        """
        if unknown := sorted(changes.keys() - field_types().keys()):
            raise TypeError(f"RunConfig has no field {', '.join(unknown)}")
        # A plan has thousands of configs that differ in one section.
        changed: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            changed.setdefault(_section_of()[name], {})[name] = value
        sections = {
            section: dataclasses.replace(getattr(self, section), **values)
            for section, values in changed.items()
        }
        return dataclasses.replace(self, **sections)


@functools.cache
def field_types() -> Mapping[str, Any]:
    """Return flat field name -> annotated type."""
    sections = get_type_hints(RunConfig).values()
    return {f.name: f.type for section in sections for f in dataclasses.fields(section)}


@functools.cache
def _section_of() -> Mapping[str, str]:
    """Return flat field name -> name of its section."""
    return {
        field.name: name
        for name, section in get_type_hints(RunConfig).items()
        for field in dataclasses.fields(section)
    }

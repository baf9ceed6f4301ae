"""What a run does every so many steps, crossed with itself, under every way of sharding."""

from collections.abc import Mapping
from dataclasses import dataclass

STEPS = 6  # of each run; the schedule is longer, so that an evaluation is never left out at its end
UNDISTURBED = STEPS + 2
STOP_SIGNAL_AT = 3
MODEL_FLAGS = (
    "--layers=2",
    "--d-model=64",  # so that a rank's part of a matrix is large enough to be kept in 8 bits
    "--heads=2",
    "--context=16",
    "--vocab-size=261",  # does not divide by the ranks
    "--tokenizer=byte",
    "--device=cpu",
    "--dropout=0.1",  # its generator goes on, too
)
FIELDS = {
    "save": "save_every",
    "evaluate": "eval_every",
    "log": "log_every",
    "sample": "sample_every",
}
NEVER = 1000
PREEMPTED = "preempted while evaluating"
SAMPLED = "evaluate-log-save"

# Each action with each other one: always together, and the one or the other more often.
PERIODS: Mapping[str, Mapping[str, int]] = {
    "equal": {"save": 2, "evaluate": 2, "log": 2},
    "log-save-evaluate": {"save": 2, "evaluate": 3, "log": 1},
    SAMPLED: {"save": 3, "evaluate": 1, "log": 2, "sample": 3},
    "evaluation is the last act": {"save": NEVER, "evaluate": STEPS, "log": NEVER},
    PREEMPTED: {"save": 2, "evaluate": 1, "log": 1},
}

FSDP = ("--strategy=fsdp",)
GRAD_OP = (*FSDP, "--no-reshard-after-forward")
IN_BACKWARD = ("--optimizer-in-backward", "--clip=0")
IN_8_BITS, IN_BF16 = "--optimizer=adamw8bit", "--precision=bf16-pure"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way of sharding on `ranks` processes, and which schedules it goes through."""

    name: str
    flags: tuple[str, ...]
    ranks: int = 2
    schedules: tuple[str, ...] = tuple(PERIODS)

    def arguments(self, text: str) -> list[str]:
        """The command line, less the schedule."""
        return [
            *MODEL_FLAGS,
            *self.flags,
            f"--data={text}",
            f"--steps={2 * STEPS}",
            f"--micro-batch={8 // self.ranks}",
            "--lr=3e-3",
            "--seed=7",
            "--report-to=none",
        ]


# The other schedules are held by another strategy with the same engine.
SOME = ("equal", SAMPLED, PREEMPTED)
STRATEGIES = [
    Variant(name="single", flags=("--strategy=single",), ranks=1),
    Variant(name="ddp", flags=("--strategy=ddp",)),
    Variant(name="fsdp", flags=FSDP),
    Variant(name="fsdp-grad-op", flags=GRAD_OP, schedules=SOME),
    Variant(name="fsdp-hybrid", flags=(*FSDP, "--replicate=2"), schedules=SOME),
    Variant(name="zero0", flags=("--zero=0",), schedules=SOME),
    Variant(name="zero1", flags=("--zero=1",)),
    Variant(name="zero2", flags=("--zero=2",), schedules=SOME),
    Variant(name="zero3", flags=("--zero=3",)),
]
# What FSDP keeps of its own between steps is another with each of these.
OF_FSDP = [
    Variant(name=name, flags=flags, schedules=("equal",))
    for name, flags in {
        "fsdp-untied": (*FSDP, "--tied=False"),
        "fsdp-offload": (*FSDP, "--offload-param=cpu"),
        "fsdp-accumulate": (*FSDP, "--global-batch=16"),
        "fsdp-in-backward": (*FSDP, *IN_BACKWARD),
        "fsdp-grad-op-in-backward": (*GRAD_OP, *IN_BACKWARD),
        "fsdp-hybrid-grad-op": (*GRAD_OP, "--replicate=2"),
        "fsdp-bf16": (*FSDP, "--precision=bf16"),
        "fsdp-grad-op-bf16": (*GRAD_OP, "--precision=bf16"),
        "fsdp-fp16": (*FSDP, "--precision=fp16"),
        "fsdp-bf16-pure": (*FSDP, IN_BF16),
        "fsdp-hybrid-bf16-pure": (*FSDP, "--replicate=2", IN_BF16),
        "fsdp-adamw8bit": (*FSDP, IN_8_BITS),
        "fsdp-grad-op-adamw8bit": (*GRAD_OP, IN_8_BITS),
    }.items()
]
# These hold numbers in fewer bits than a checkpoint does.
LOW = [
    Variant(
        name=f"{other.name}-{name}",
        flags=(*other.flags, flag),
        ranks=other.ranks,
        schedules=("equal",),
    )
    for name, flag in (("adamw8bit", IN_8_BITS), ("bf16-pure", IN_BF16))
    for other in STRATEGIES
    if "fsdp" not in other.name and (name, other.name) != ("bf16-pure", "zero0")  # refused
]
# Only their losses: dropout is the same under all strategies on the same number of ranks.
ALONE = [
    Variant(name=f"{name}-alone", flags=flags, ranks=1, schedules=())
    for name, flags in (
        ("fsdp", FSDP),
        *((f"zero{stage}", (f"--zero={stage}",)) for stage in range(4)),
    )
]
VARIANTS = [*STRATEGIES, *OF_FSDP, *LOW, *ALONE]
BY_NAME = {variant.name: variant for variant in VARIANTS}

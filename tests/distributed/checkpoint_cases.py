"""Which runs save, which runs load, and on how many ranks."""

from dataclasses import dataclass

BEFORE, AFTER = 3, 2  # steps until the save, and from there on
GLOBAL_BATCH = 8

# 30 and 261 rows do not divide by 4: FSDP's and ZeRO-3's last slices are short.
MODEL_FLAGS = (
    "--layers=1",
    "--d-model=30",
    "--heads=2",
    "--context=16",
    "--vocab-size=261",
    "--tokenizer=byte",
    "--device=cpu",
)
FSDP = ("--strategy=fsdp",)
OFFLOAD_OPTIMIZER = "--offload-optimizer=cpu"
OFFLOAD_PARAM = "--offload-param=cpu"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One strategy on `ranks` processes. It loads what others of its `family` saved."""

    name: str
    ranks: int
    family: str
    flags: tuple[str, ...]

    @property
    def asynchronous(self) -> bool:
        """Some save in the background, some while everybody waits."""
        return self.ranks == 2

    def arguments(self, data: str) -> list[str]:
        return [
            *MODEL_FLAGS,
            *self.flags,
            f"--data={data}",
            f"--steps={BEFORE + AFTER}",
            f"--micro-batch={GLOBAL_BATCH // self.ranks}",
            f"--global-batch={GLOBAL_BATCH}",
            "--lr=3e-3",
            *("--schedule=cosine", "--min-lr-ratio=0.1", "--weight-decay=0.1"),
            "--clip=0.5",
            "--seed=7",
        ]


def _cases(
    family: str, *, ranks: int, more: tuple[str, ...] = (), **flags: tuple[str, ...]
) -> list[Case]:
    return [
        Case(
            name=f"{family}-{name.replace('_', '-')}-x{ranks}",
            ranks=ranks,
            family=family,
            flags=(*flag, *more),
        )
        for name, flag in flags.items()
    ]


DDP = ("--strategy=ddp",)
ZERO1, ZERO2, ZERO3 = (("--zero=1",), ("--zero=2",), ("--zero=3",))
ZERO3_OFFLOAD = (*ZERO3, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)
SEQUENCE, RING = "--context-parallel=2", "--context-parallel-method=ring"
TENSOR = "--tensor-parallel=2"
UNTIED, BF16 = ("--tied=False",), ("--precision=bf16",)
# The options of Llama, Qwen 2 and Qwen 3 in one model.
ROPE = (
    *("--heads=4", "--kv-heads=2", "--head-dim=10", "--position=rope", "--norm=rms"),
    *("--qk-norm=True", "--activation=swiglu", "--d-ff=46", "--tied=False"),
    "--bias=qkv",
)

LORA = (*ROPE, "--lora-rank=3", "--random-base", "--lora-targets=all", "--lora-alpha=60")

CASES: list[Case] = [
    *_cases("fp32", ranks=1, single=("--strategy=single",), zero2=ZERO2),
    *_cases(
        "fp32",
        ranks=2,
        ddp=DDP,
        fsdp=FSDP,
        fsdp_offload=(*FSDP, OFFLOAD_PARAM),
        zero0=("--zero=0",),
        zero1=ZERO1,
        zero2=ZERO2,
        zero3=ZERO3,
        zero2_offload=(*ZERO2, OFFLOAD_OPTIMIZER),
        zero3_offload=ZERO3_OFFLOAD,
        zero3_half=(*ZERO3, OFFLOAD_OPTIMIZER, "--offload-fraction=0.5"),
    ),
    *_cases(
        "fp32",
        ranks=4,
        fsdp=(*FSDP, "--no-reshard-after-forward"),
        hybrid=(*FSDP, "--replicate=2"),
        zero3=ZERO3,
    ),
    *_cases("untied", ranks=2, more=UNTIED, ddp=DDP, fsdp=FSDP, zero2=ZERO2, zero3=ZERO3),
    *_cases("untied", ranks=2, more=UNTIED, ddp_sequence=(*DDP, SEQUENCE)),
    *_cases("untied", ranks=2, more=UNTIED, tensor=("--strategy=single", TENSOR)),
    *_cases(
        "untied",
        ranks=4,
        more=UNTIED,
        zero3_ring=(*ZERO3, SEQUENCE, RING),
        fsdp_tensor=(*FSDP, TENSOR),
        zero1_tensor=(*ZERO1, TENSOR),
        zero2_tensor=(*ZERO2, TENSOR),
        zero3_tensor=(*ZERO3, TENSOR),
        tensor_sequence=("--strategy=ddp", TENSOR, SEQUENCE),
    ),
    *_cases("bf16", ranks=1, more=BF16, single=("--strategy=single",)),
    *_cases(
        "bf16",
        ranks=2,
        more=BF16,
        fsdp=FSDP,
        zero0=("--zero=0",),
        zero1=ZERO1,
        zero1_accum=(*ZERO1, "--grad-accum-dtype=bf16"),
        zero2=ZERO2,
        zero3=ZERO3,
        zero3_offload=ZERO3_OFFLOAD,
    ),
    *_cases("rope", ranks=1, more=ROPE, single=("--strategy=single",)),
    *_cases("rope", ranks=2, more=ROPE, fsdp=FSDP, zero2=ZERO2, zero3=ZERO3),
    *_cases("rope", ranks=2, more=ROPE, tensor=("--strategy=single", TENSOR)),
    *_cases("rope", ranks=4, more=ROPE, hybrid=(*FSDP, "--replicate=2"), zero3=ZERO3),
    *_cases("lora", ranks=1, more=LORA, single=("--strategy=single",)),
    *_cases(
        "lora",
        ranks=2,
        more=LORA,
        ddp=DDP,
        fsdp=FSDP,
        zero1=ZERO1,
        zero2=ZERO2,
        zero3=ZERO3,
        zero3_offload=ZERO3_OFFLOAD,
    ),
    *_cases("lora", ranks=4, more=LORA, hybrid=(*FSDP, "--replicate=2"), zero3=ZERO3),
]
BY_NAME = {case.name: case for case in CASES}


def _pairs() -> list[tuple[Case, Case]]:
    """Savers and loaders: each case with itself, and with one half a family away, which has another
    strategy or number of ranks. One format lies between them, so what a saver writes wrongly shows
    under any other loader, and the reverse."""
    families = {case.family: [c for c in CASES if c.family == case.family] for case in CASES}
    return [
        (saver, members[(number + step) % len(members)])
        for members in families.values()
        for number, saver in enumerate(members)
        for step in (0, len(members) // 2)
    ]


PAIRS = _pairs()

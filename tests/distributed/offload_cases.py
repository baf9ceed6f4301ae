"""Runs whose states are on a disk, and the runs they must equal and exchange checkpoints with."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from checkpoint_cases import GLOBAL_BATCH

BEFORE, AFTER = 10, 3  # steps until the save, and from there on
RANKS = 2

# DeepSpeed swaps nothing below 1 MiB: the two wide matrices of each block are above it, as bf16
# slices of two ranks, and all else is below. Nothing is a multiple of a disk's block.
MODEL_FLAGS = (
    "--layers=2",
    "--d-model=30",
    "--d-ff=34960",
    "--heads=2",
    "--context=16",
    "--vocab-size=261",
)
# Decoders of transformers with as wide matrices: experts that are one parameter, and more matrices
# of a block than DeepSpeed has buffers for.
FOREIGN = {
    name: ("--model", str(Path(__file__).with_name(f"{name}-wide.json")), "--seq-len=16")
    for name in ("mixtral", "gemma2")
}
OPTIMIZER, PARAM = "--offload-optimizer=nvme", "--offload-param=nvme"
BUFFER = f"--deepspeed={Path(__file__).with_name('buffer.json')}"  # two slices
PIPELINE = f"--deepspeed={Path(__file__).with_name('pipeline.json')}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One strategy on two processes; it loads what others of its `family` saved."""

    name: str
    family: str
    flags: tuple[str, ...]
    nvme_path: str = ""

    def arguments(self, data: str) -> list[str]:
        return [
            *FOREIGN.get(self.family, MODEL_FLAGS),
            *("--tokenizer=byte", "--device=cpu"),
            *self.flags,
            *([f"--nvme-path={self.nvme_path}"] if self.on_disk else []),
            f"--precision={self.precision}",
            f"--data={data}",
            f"--steps={BEFORE + AFTER}",
            f"--micro-batch={GLOBAL_BATCH // (2 * RANKS)}",
            f"--global-batch={GLOBAL_BATCH}",  # two micro-batches accumulated
            "--lr=3e-3",
            "--clip=0.5",
            "--seed=7",
        ]

    @property
    def precision(self) -> str:
        return "bf16" if self.family in FOREIGN else self.family

    @property
    def on_disk(self) -> bool:
        return OPTIMIZER in self.flags or PARAM in self.flags


_IN_MEMORY = {
    "ddp": ("--strategy=ddp",),
    "fsdp": ("--strategy=fsdp",),
    "zero3": ("--zero=3",),
}
_ON_DISK = {
    "optimizer": ("--zero=3", OPTIMIZER, BUFFER),
    "both": ("--zero=3", OPTIMIZER, PARAM, BUFFER),
    "overlapped": ("--zero=3", OPTIMIZER, PARAM, PIPELINE),
    "optimizer-cpu-param": ("--zero=3", OPTIMIZER, "--offload-param=cpu", BUFFER),
    "param-cpu-optimizer": ("--zero=3", "--offload-optimizer=cpu", PARAM, BUFFER),
    "param": ("--zero=3", PARAM, BUFFER),
}
CASES = [
    Case(name=f"{family}-{name}", family=family, flags=flags)
    for family in ("bf16", "fp32")
    for name, flags in (_IN_MEMORY | _ON_DISK).items()
    if family == "bf16" or PARAM not in flags
]
CASES += [
    Case(name=f"{family}-{name}", family=family, flags=(_IN_MEMORY | _ON_DISK)[name])
    for family in FOREIGN
    for name in ("zero3", "both", "overlapped")
]
BY_NAME = {case.name: case for case in CASES}
# Everybody with the one that has most on the disk, and everybody on a disk with itself.
PAIRS = [
    (saver, loader)
    for saver, loader in product(CASES, CASES)
    if saver.family == loader.family
    and ({"bf16-both", "fp32-optimizer"} & {saver.name, loader.name} or saver == loader)
    and (saver.on_disk or loader.on_disk)
]

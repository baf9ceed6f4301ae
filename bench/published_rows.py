"""Runs that others have measured and published, as commands of shardscale.

`published/llm_foundry.csv` is the table of mosaicml/llm-foundry, `published/frameworks.csv` what
other frameworks print, `published/not_usable.csv` what cannot be compared, with the reason.
"""

import csv
import hashlib
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).with_name("published")
GIB: Final = 2**30
LLM_FOUNDRY: Final = "mosaicml/llm-foundry 8c8dd48 scripts/train/benchmarking/README.md"
# Layers, width, heads of scripts/train/yamls/pretrain/mpt-*.yaml.
_MPT: Final = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
_FIXED: Final = {
    "--offload-optimizer": "none",
    "--offload-param": "none",
    "--context-parallel": "1",
    "--tensor-parallel": "1",
    "--replicate": "1",
    "--compile": "off",
}
_GPU: Final = {"h100_80gb": "H100", "a100_80gb": "A100-80GB", "a100_40gb": "A100-40GB"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published run."""

    key: str
    source: str
    gpu: str
    gpus: int
    gpus_per_node: int
    flags: str
    """Of `shardscale plan` and `launcher.train`, for the same run as far as there is one."""
    differs: str
    """What is not the same."""
    allocated_bytes: int | None = None
    """Peak of what tensors take."""
    reserved_bytes: int | None = None
    """Peak of what the caching allocator holds."""
    step_s: float | None = None
    unlike_bytes: str = ""
    """Why its bytes are another program's, which no flag of shardscale can ask for."""
    unlike_seconds: str = ""
    """The same of its seconds."""
    runs: bool | None = None
    """Whether it is said to run on this GPU; None: nothing is said beyond the figures."""

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self) | {"to": "fit" if self.fits_constants else "check"}

    @property
    def fits_constants(self) -> bool:
        """Return True where constants may be fitted to it; the others check them."""
        return to_fit(self.key)

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of `shardscale plan`: those of the row, and fixed values for what
        it would vary."""
        place = f"--gpus {self.gpus} --gpus-per-node {self.gpus_per_node} --gpu {self.gpu}"
        words = [
            *place.split(),
            "--no-calibration",
            *shlex.split(self.flags.replace("FOLDER", str(FOLDER))),
        ]
        for name, value in _FIXED.items():
            words += [] if name in words else [name, value]
        if "fsdp" in words:
            for flag in ("reshard-after-forward", "reduce-each-micro-batch"):
                kept = flag == "reshard-after-forward"
                said = {f"--{flag}", f"--no-{flag}"} & set(words)
                words += [] if said else [f"--{flag}" if kept else f"--no-{flag}"]
        return words


def to_fit(key: str) -> bool:
    """Return True for a name whose hash gives it to the fit: no person chooses."""
    return hashlib.sha256(key.encode()).digest()[0] % 2 == 0


def published_rows() -> list[Row]:
    """All that can be compared."""
    return [*_frameworks(), *_llm_foundry()]


def not_usable() -> list[tuple[str, str]]:
    """(rows, reason)."""
    with (FOLDER / "not_usable.csv").open(encoding="utf-8", newline="") as file:
        return [(row["rows"], row["reason"]) for row in csv.DictReader(file)]


def _frameworks() -> list[Row]:
    rows = []
    with (FOLDER / "frameworks.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            gpus, step_s = int(line["gpus"]), _number(line["step_s"])
            if rate := _number(line["tokens_per_s_per_gpu"]):
                step_s = _tokens(line["flags"]) / (rate * gpus)
            rows.append(
                Row(
                    key=line["key"],
                    source=line["source"],
                    gpu=line["gpu"],
                    gpus=gpus,
                    gpus_per_node=int(line["gpus_per_node"]),
                    flags=line["flags"],
                    differs=line["differs"],
                    allocated_bytes=_bytes(line["allocated_gib"]),
                    reserved_bytes=_bytes(line["reserved_gib"]),
                    step_s=step_s,
                    unlike_bytes=line["unlike_bytes"],
                    unlike_seconds=line["unlike_seconds"],
                    runs={"yes": True, "no": False, "": None}[line["runs"]],
                )
            )
    return rows


def _llm_foundry() -> list[Row]:
    """MPT is GPT-2's decoder with 50,368 tokens; what ran has fitted. FSDP1, PyTorch 1.13 to 2.1,
    attention in Triton before FlashAttention-2, gradients reduced in each micro-batch."""
    rows = []
    with (FOLDER / "llm_foundry.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            gpus, seq_len = int(line["gpus"]), int(line["seq_len"])
            fp8 = line["precision"] == "amp_fp8"
            layers, width, heads = _MPT[line["model"]]
            flags = [
                f"--model gpt2 --layers {layers} --d-model {width} --heads {heads}",
                f"--vocab-size 50368 --context {seq_len} --seq-len {seq_len} --strategy fsdp",
                "--precision fp8 --compile" if fp8 else "--precision bf16",
                f"--micro-batch {line['micro_batch']} --global-batch {line['global_batch']}",
                # Half the rate of FlashAttention-2, as that of the kernel they had.
                "--attention sdpa-efficient --reduce-each-micro-batch",
                "--activation-checkpointing",
                "full" if line["checkpointing"] == "True" else "none",
            ]
            if line["sharding"] == "SHARD_GRAD_OP":
                flags.append("--no-reshard-after-forward")
            named = ("model", "gpu", "precision", "sharding")
            sizes = f"x{gpus}-T{seq_len}-b{line['micro_batch']}x{line['accumulation']}"
            tokens = int(line["global_batch"]) * seq_len
            rows.append(
                Row(
                    key="-".join(["mpt", *(line[name] for name in named), sizes]).lower(),
                    source=LLM_FOUNDRY,
                    gpu=_GPU[line["gpu"]],
                    gpus=gpus,
                    gpus_per_node=8,
                    flags=" ".join(flags),
                    differs="FSDP1, PyTorch 1.13 to 2.1, attention in Triton, for which the "
                    "memory-efficient kernel stands"
                    + ("; Transformer Engine, whose fused casts are compiled here" if fp8 else ""),
                    step_s=tokens / (int(line["tokens_per_s_per_gpu"]) * gpus),
                    runs=True,
                )
            )
    return rows


def _tokens(flags: str) -> int:
    """Return the tokens of a global batch."""
    words = flags.split()
    sequences, seq_len = (
        int(words[words.index(name) + 1]) for name in ("--global-batch", "--seq-len")
    )
    return sequences * seq_len


def _number(text: str) -> float | None:
    return float(text) if text else None


def _bytes(text: str) -> int | None:
    return int(float(text) * GIB) if text else None

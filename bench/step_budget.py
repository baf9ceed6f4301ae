"""What one training step asks of a GPU, operator by operator, and what that takes at ideal rates.

    python bench/step_budget.py [--gpu H200 A100-80GB ...] [--cases "seed-134m bf16" ...]
        [--top 12] [--keep OLD.json] [--output bench/results/step_budget]

Every operator that a step dispatches is written down with its types, the bytes of the tensors it
reads and writes, and its FLOP; it is charged the longer of the two, at 90% of the bandwidth and 80%
of the matmul rate on a GPU's data sheet, by the type that is multiplied. The compiler's kernels are
written down with its own estimate of their bytes. Sums are what no kernel
can beat, and say which operators are worth another kernel; they are not a measurement of speed.
Needs torch's CUDA build and a GPU or the null GPU (launcher/tools/rehearse): with the latter
allocator, streams, choice of kernels, launches and the host's time are real, and no kernel runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import runs

from launcher.measure.hardware import gpu_named

RANK = Path(__file__).with_name("step_budget_rank.py")
# Of data sheets: 4.3 of an H200's 4.8 TB/s and 790 of its 989 TFLOP/s are what large copies and
# products come to.
MEMORY_SHARE, MATMUL_SHARE = 0.9, 0.8
GIB = 2**30
GPUS = ("H200", "H100", "A100-80GB", "B200", "RTX-4090", "MI300X")
SEED = ("--model=seed-134m", "--micro-batch=125")
# As large as seed-134m, with RoPE, RMSNorm and SwiGLU.
LLAMA = (
    *("--model=llama-3.2-1b", "--layers=12", "--d-model=768", "--heads=12", "--kv-heads=12"),
    *("--d-ff=2048", "--vocab-size=32000", "--context=256", "--micro-batch=125"),
)
SMALL = ("--model=seed-134m", "--micro-batch=8", "--cuda-graphs=off")
BF16, COMPILED = "--precision=bf16", "--compile=on"
PURE8 = ("--precision=bf16-pure", "--optimizer=adamw8bit")
IN_BACKWARD = ("--optimizer-in-backward", "--clip=0")
# On a node of its own. Where no kernels run, a rank can run alone.
FIRST_OF_TWO = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "SHARDSCALE_NULL_GPU_ALONE": "1"},
}
CASES: dict[str, tuple[str, ...]] = {
    "seed-134m fp32": (*SEED, "--precision=fp32"),
    "seed-134m bf16": (*SEED, BF16),
    "seed-134m bf16, selective": (*SEED, BF16, "--activation-checkpointing=selective"),
    "seed-134m bf16, full": (*SEED, BF16, "--activation-checkpointing=full"),
    "seed-134m bf16, FSDP": (*SEED, BF16, "--strategy=fsdp"),
    "seed-134m bf16, FSDP, one of two": (*SEED, BF16, "--strategy=fsdp"),
    "seed-134m bf16, DDP": (*SEED, BF16, "--strategy=ddp"),
    "seed-134m bf16, compiled": (*SEED, BF16, COMPILED),
    "seed-134m bf16, FSDP, compiled": (*SEED, BF16, COMPILED, "--strategy=fsdp"),
    "seed-134m bf16, FSDP, compiled, one of two": (*SEED, BF16, COMPILED, "--strategy=fsdp"),
    "seed-134m bf16, DDP, compiled": (*SEED, BF16, COMPILED, "--strategy=ddp"),
    "seed-134m bf16-pure": (*SEED, "--precision=bf16-pure", "--betas", "0.9", "0.99"),
    "seed-134m bf16-pure, 8-bit, full": (*SEED, *PURE8, "--activation-checkpointing=full"),
    "seed-134m bf16-pure, 8-bit, full, in backward": (
        *(*SEED, *PURE8, *IN_BACKWARD, "--activation-checkpointing=full"),
    ),
    "seed-134m bf16-pure, 8-bit, offload, in backward": (
        *(*SEED, *PURE8, *IN_BACKWARD, "--activation-checkpointing=offload"),
    ),
    "seed-134m fp8": (*SEED, "--precision=fp8", "--compile=off"),
    "seed-134m fp8, compiled": (*SEED, "--precision=fp8", COMPILED),
    "seed-134m bf16, micro-batch 8": (*SMALL, BF16),
    "seed-134m bf16, micro-batch 8, CUDA graphs": (*SMALL, BF16, "--cuda-graphs=on"),
    "seed-134m bf16, micro-batch 8, compiled": (*SMALL, BF16, COMPILED),
    "Llama-shaped bf16": (*LLAMA, BF16),
    "Llama-shaped bf16, compiled": (*LLAMA, BF16, COMPILED),
    "Llama-shaped bf16, full": (*LLAMA, BF16, "--activation-checkpointing=full"),
}


class Rates(NamedTuple):
    """Bytes and FLOP per second that a GPU comes to."""

    memory: float
    matmul: dict[str, float]
    """Keyed by the narrowest type among the operands."""


# Of the data sheet of AMD's Instinct MI300X, which no run or plan of ours knows.
MI300X = Rates(
    memory=5.3e12,
    matmul={"float32": 163e12, "bfloat16": 1307e12, "float16": 1307e12, "float8": 2615e12},
)


def rates_of(name: str) -> Rates:
    """Read a data sheet; a type that the GPU does not multiply in takes the rate of fp32."""
    found = MI300X
    if name != "MI300X":
        gpu = gpu_named(name)
        if gpu is None:
            raise SystemExit(f"--gpu {name}: unknown")
        low = gpu.bf16_flops_per_s or gpu.fp32_flops_per_s
        rates = {"float32": gpu.fp32_flops_per_s, "bfloat16": low}
        rates |= {"float16": gpu.tensor_flops_per_s, "float8": gpu.fp8_flops_per_s or low}
        found = Rates(gpu.memory_bytes_per_s, rates)
    matmul = {type_: MATMUL_SHARE * rate for type_, rate in found.matmul.items()}
    return Rates(MEMORY_SHARE * found.memory, matmul)


def ideal_ms(row: dict[str, Any], rates: Rates) -> float:
    """Return the least time of one row of operators."""
    types = row["types"].split("/")
    known = [each for each in ("float8", "bfloat16", "float16") if any(each in t for t in types)]
    flop_per_s = rates.matmul[known[0] if known else "float32"]
    return float(1e3 * max(row["bytes"] / rates.memory, row["flop"] / flop_per_s))


def in_a_process(name: str) -> dict[str, Any]:
    """Its own, since what engines register with autograd and groups outlives them."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "case.json"
        # What was compiled before would hide how long compiling takes.
        more = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [str(RANK), str(found), *CASES[name]]
        if name.endswith("one of two"):
            variables = {**runs.environment(), **more, **FIRST_OF_TWO}
            subprocess.run([sys.executable, *command], cwd=runs.ROOT, env=variables, check=True)
        else:
            runs.run_ranks(command, ranks=1, more=more)
        content: dict[str, Any] = json.loads(found.read_text())
    return content


def total(case: dict[str, Any], key: str) -> float:
    return float(sum(row[key] for row in case["rows"]))


def summary(cases: dict[str, dict[str, Any]], gpus: list[str]) -> str:
    """One line per case: what is asked for, and the ideal time on each GPU, of it products."""
    titles = ["one step of 256 tokens a row", "operators", "launches", "host ms", "GB", "TFLOP"]
    titles += ["allocated GiB", "first step s", *(f"{gpu} ms (products)" for gpu in gpus)]
    rates = [rates_of(gpu) for gpu in gpus]
    rows = [
        [
            name,
            f"{total(case, 'calls'):.0f}",
            str(case["launches"] or "n/a"),
            f"{case['host_ms']:.1f}" if case["host_ms"] else "n/a",
            f"{total(case, 'bytes') / 1e9:.1f}",
            f"{total(case, 'flop') / 1e12:.1f}",
            f"{case['allocated_peak_bytes'] / GIB:.2f}",
            f"{case['first_step_s']:.1f}" if "first_step_s" in case else "n/a",
            *(ideal(case, each) for each in rates),
        ]
        for name, case in cases.items()
    ]
    return runs.table(titles, rows)


def ideal(case: dict[str, Any], rates: Rates) -> str:
    each = [(ideal_ms(row, rates), row["flop"] > 0) for row in case["rows"]]
    return f"{sum(ms for ms, _ in each):.1f} ({sum(ms for ms, product in each if product):.1f})"


def most(case: dict[str, Any], count: int, rates: Rates) -> str:
    """The operators that take longest."""
    longest = sorted(case["rows"], key=lambda row: -ideal_ms(row, rates))[:count]
    rows = [
        [
            f"{row['operator']} ({row['types']})",
            row["phase"],
            str(row["calls"]),
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['flop'] / 1e12:.2f}",
            f"{ideal_ms(row, rates):.2f}",
        ]
        for row in longest
    ]
    return runs.table(["operator", "phase", "calls", "GB", "TFLOP", "ideal ms"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--gpu", nargs="+", default=list(GPUS))
    parser.add_argument("--top", type=int, default=12)
    keep = "a former --output: its cases that are not run anew"
    parser.add_argument("--keep", type=Path, default=None, metavar="OLD.json", help=keep)
    parser.add_argument("--output", type=Path, default=None, help="without its .json and .md")
    options = parser.parse_args()
    if options.output is not None:
        runs.refuse_existing(options.output.with_suffix(".json"))
    found = {} if options.keep is None else json.loads(options.keep.read_text())["cases"]
    for name in options.cases:
        found[name] = in_a_process(name)
        print(name, file=sys.stderr, flush=True)
        write({name: found[name] for name in CASES if name in found}, options)


def write(cases: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the cases, or write them after each, since all take minutes."""
    ran = "no kernels run" if "SHARDSCALE_NULL_GPUS" in os.environ else "a GPU"
    first = options.gpu[0]
    text = (
        f"Real allocator, {ran}. Ideal time of the operators that were recorded, at "
        f"{MEMORY_SHARE:.0%} of the bandwidth and {MATMUL_SHARE:.0%} of the matmul rate on each "
        f"data sheet: not a measurement.\n\n{summary(cases, options.gpu)}\n"
    )
    if options.output is None:
        print(text)
        return
    content = json.dumps({"ran": ran, "cases": cases}, indent=1)
    options.output.with_suffix(".json").write_text(content + "\n")
    longest = "\n\n".join(
        f"{name}, on {first}:\n\n{most(case, options.top, rates_of(first))}"
        for name, case in cases.items()
    )
    options.output.with_suffix(".md").write_text(f"{text}\n{longest}\n")


if __name__ == "__main__":
    main()

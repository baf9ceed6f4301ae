"""The launcher against transformers under accelerate, Lightning Fabric and bare DeepSpeed.

    python bench/peers.py --output FOLDER [--size small|full|gemma|mixtral] [--processes 1 2]
        [--cases ddp zero2] [--precisions fp32 bf16] [--flags defaults chunked-loss]
        [--peers fabric] [--steps 25]

Same shape, precision, batch, optimizer and clipping on both sides. In one process (or several under
torchrun) every step of `launcher.train.train`, records and console and sampler included, comes
after one step of each peer; tokens/s are compared as the median ratio of neighbouring steps. Before
that each side runs alone for its memory: on a CPU every live tensor is followed (as
`--memory-trace` does), on a GPU it is the caching allocator's peak; steady steps, worst rank.

`small`: nano (2.6M parameters), 2,048 tokens a rank and step; `full`: gpt2 (124M), 32,768 tokens;
`gemma`, `mixtral`: small decoders of transformers with the proportions of Gemma 2 and Mixtral.
FOLDER gets peers.json and peers.md. A peer that is not installed is a row that says so.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peer_loops import PEERS
from runs import environment, refuse_existing, table, write_stdlib

MIB = 2**20
DID_NOT_END = "ended with exit code"
SIZES = {
    # As in gpt2, logits weigh as much as the blocks beside them (V / layers / d is 5.3, there 5.5).
    # Activations weigh less against parameters than they do there and in the study: tokens / d is
    # 10.7, there 42, which makes memory harder to save.
    "small": ("--model", "nano", "--micro-batch", "16", "--dropout", "0"),
    "full": ("--model", "gpt2", "--micro-batch", "32", "--dropout", "0"),
    **{name: ("--model", f"{name}.json", "--micro-batch", "16") for name in ("gemma", "mixtral")},
}
_COMMON = {
    **{"vocab_size": 4096, "num_hidden_layers": 4, "max_position_embeddings": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gemma.json": {
        **{**_COMMON, "model_type": "gemma2", "hidden_size": 192, "intermediate_size": 768},
        **{"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64},
    },
    "mixtral.json": {
        **{**_COMMON, "model_type": "mixtral", "hidden_size": 128, "intermediate_size": 448},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    },
}
"""config.json of each model that is no name."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way of sharding: the launcher's flags, and who else does the same."""

    flags: tuple[str, ...]
    peers: tuple[str, ...]
    bf16_flags: tuple[str, ...] = ()


_REPLICATED = ("accelerate", "accelerate-fused-gelu", "fabric")
# DeepSpeed accumulates bf16 gradients in bf16 unless told otherwise; here both do.
_IN_BF16 = ("--grad-accum-dtype", "bf16")
CASES = {
    "single": Case(flags=("--strategy", "single"), peers=_REPLICATED),
    "ddp": Case(flags=("--strategy", "ddp"), peers=_REPLICATED),
    "zero2": Case(flags=("--zero", "2"), peers=("deepspeed-zero2",), bf16_flags=_IN_BF16),
    "zero3": Case(flags=("--zero", "3"), peers=("deepspeed-zero3",), bf16_flags=_IN_BF16),
}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags that the launcher's user adds, and whether the peers compile too."""

    extra: tuple[str, ...]
    peers_compile: bool = False


_CHUNKED = ("--loss-chunk", "512")
_SELECTIVE = ("--activation-checkpointing", "selective")
FLAGS = {
    "defaults": Flags(extra=()),
    "chunked-loss": Flags(extra=_CHUNKED),
    "selective": Flags(extra=_SELECTIVE),
    "chunked-loss+selective": Flags(extra=(*_CHUNKED, *_SELECTIVE)),
    "compile": Flags(extra=("--compile",)),
    "both-compile": Flags(extra=("--compile",), peers_compile=True),
}
USUAL_FLAGS = {
    "cpu": ["defaults", "chunked-loss", "chunked-loss+selective"],
    "cuda": ["defaults", "selective", "compile", "both-compile"],
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of processes, which compare the launcher with all peers of a case."""

    processes: int
    case: str
    precision: str
    flags: tuple[str, ...]
    peers_compile: bool

    def train_flags(self, options: argparse.Namespace) -> list[str]:
        case = CASES[self.case]
        flags = [
            "--tokenizer",
            "byte",
            *SIZES[options.size],
            *case.flags,
            "--precision",
            self.precision,
        ]
        return [*flags, *case.bf16_flags] if self.precision == "bf16" else flags


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    for name in ("peers.json", "peers.md"):
        refuse_existing(options.output / name)
    rows: list[dict[str, Any]] = []
    about = {"size": options.size, "steps": options.steps, "machine": machine()}
    for launch in launches(options):
        found = run(launch, options)
        print(table(HEADER, [shown(row) for row in found]), flush=True)
        rows += found
        # Each time, so that what is measured stays when the next does not end.
        result = json.dumps({**about, "rows": rows}, indent=2)
        (options.output / "peers.json").write_text(result + "\n")
        lines = table(HEADER, [shown(row) for row in rows])
        (options.output / "peers.md").write_text(lines + "\n")
    if any(DID_NOT_END in row.get("error", "") for row in rows):
        sys.exit(1)


def parse() -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--size", choices=list(SIZES), default="full" if gpus else "small")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--processes", type=int, nargs="+", default=None)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--flags", nargs="+", choices=list(FLAGS), default=None)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if gpus else "cpu"
    if options.processes is None:
        options.processes = sorted({1, gpus}) if options.device == "cuda" else [1, 2]
    if options.flags is None:
        options.flags = USUAL_FLAGS[options.device]
    if options.device == "cpu" and {"compile", "both-compile"} & set(options.flags):
        parser.error("--flags compile: on a CPU, memory is followed through eager operators only")
    return options


def launches(options: argparse.Namespace) -> Iterator[Launch]:
    for processes in options.processes:
        for case in (case for case in options.cases if runs_on(case, processes, options.device)):
            for precision in options.precisions:
                for compiled in (False, True):
                    flags = tuple(f for f in options.flags if FLAGS[f].peers_compile == compiled)
                    if flags:
                        yield Launch(
                            processes=processes,
                            case=case,
                            precision=precision,
                            flags=flags,
                            peers_compile=compiled,
                        )


def runs_on(case: str, processes: int, device: str) -> bool:
    """In one process ZeRO shards nothing: it runs there only where one GPU may be all there is."""
    if case.startswith("zero"):
        return processes > 1 or device == "cuda"
    return case == ("single" if processes == 1 else "ddp")


def run(launch: Launch, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each choice of flags and each peer."""
    peers = [peer for peer in CASES[launch.case].peers if peer in options.peers]
    installed = [peer for peer in peers if PEERS[peer].missing() is None]
    train = launch.train_flags(options)
    found = measured(launch, installed, train, options) if installed else {}
    rows = []
    for flags in launch.flags:
        ours = {} if "error" in found else found.get(flags, {})
        about = {
            "processes": launch.processes,
            "case": launch.case,
            "precision": launch.precision,
            "flags": flags,
            "command": " ".join([*train, *FLAGS[flags].extra]),
            "threads": found.get("threads"),
            "launcher": ours.get("launcher"),
        }
        for peer in peers:
            install = PEERS[peer].missing()
            error = f"not installed: {install}" if install else found.get("error")
            rows.append({**about, "peer": peer, **({"error": error} if error else ours[peer])})
    return rows


def measured(
    launch: Launch, peers: list[str], train: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Run the ranks and return what they have found, or the error if they failed."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_stdlib(Path(folder) / "corpus.txt", 2**20)
        for name, fields in CONFIGS.items():
            (Path(folder) / name).write_text(json.dumps(fields))
        named = [f"{folder}/{flag}" if flag in CONFIGS else flag for flag in train]
        task = {
            "folder": folder,
            "device": options.device,
            "case": launch.case,
            "train": [*named, "--device", options.device, "--data", str(corpus)],
            "flags": {name: FLAGS[name].extra for name in launch.flags},
            "peers": peers,
            "peers_compile": launch.peers_compile,
            "steps": options.steps,
        }
        command = [sys.executable]
        if launch.processes > 1:
            command += ["-m", "launcher.torchrun", "--nproc", str(launch.processes)]
        command += [str(Path(__file__).with_name("peers_rank.py")), json.dumps(task)]
        done = subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            return {"error": f"{DID_NOT_END} {done.returncode}"}
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


HEADER = (
    "peer",
    "processes",
    "launcher",
    "precision",
    "flags",
    "tokens/s over the peer's",
    "(quartiles)",
    "peak memory of the peer's",
    "launcher MiB",
    "peer MiB",
)


def shown(row: dict[str, Any]) -> list[str]:
    about = [PEERS[row["peer"]].title, str(row["processes"])]
    about += [row[name] for name in ("case", "precision", "flags")]
    if "error" in row:
        return [*about, row["error"], *["n/a"] * 4]
    speed = row["tokens_per_s_ratio"]
    ours, theirs = row["launcher"]["peak_bytes"], row["peak_bytes"]
    return [
        *about,
        f"{speed['median']:.2f}",
        f"{speed['lower_quartile']:.2f} to {speed['upper_quartile']:.2f}",
        f"{ours / theirs:.2f}",
        f"{ours / MIB:,.1f}",
        f"{theirs / MIB:,.1f}",
    ]


def machine() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    names = {package for peer in PEERS.values() for package in peer.packages}
    found = {"torch": str(torch.__version__)}
    for name in sorted(names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


if __name__ == "__main__":
    main()

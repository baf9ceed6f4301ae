"""Which runs must give the losses and gradient norms of one process in plain fp32.

Every technique of docs/matrix.md under every strategy that it runs with on a CPU, and every two
techniques together, by pairs (`pairwise.py`); the config's own refusals say which do not go.
`_kept` has combinations of three and more, and sizes, that showed a mistake once.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pairwise import Choice, all_pairs

from launcher.compare.sweep.grid import expand_strategy
from launcher.compare.sweep.matrix import ROPE_DECODER, TECHNIQUES
from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.strategies import VARIANTS
from launcher.util.errors import NotInstalled, UserError

STEPS = 3
LONG = 20
"""Steps of the plain strategies: what drifts shows there."""
GLOBAL_BATCH = 8
BASE: Mapping[str, Any] = {
    **{"layers": 2, "d_model": 64, "heads": 4, "context": 32},
    "vocab_size": 261,  # does not divide by the ranks
    **{"tokenizer": "byte", "device": "cpu", "seed": 7, "steps": LONG, "lr": 3e-3},
    **{"schedule": "cosine", "min_lr_ratio": 0.1, "weight_decay": 0.1, "warmup_steps": 0},
    "clip": 0.5,  # below the norms of this model, so that a wrong norm spoils the losses
}
TWO_BLOCKS = 450_000  # bytes that two blocks have, and three have not
LR = {"sgd": 0.1, "adafactor": 0.3}  # what lowers the loss in so few steps
_LLAMA = {"kv_heads": 2, "position": "rope", "norm": "rms", "activation": "swiglu", "bias": "none"}
_ADAPTERS = {"random_base": True, "lora_targets": "all", "lora_alpha": 64.0}
# Adapters beside weights that nobody has trained: alpha so large that they matter.
OURS: Mapping[str, Mapping[str, Any]] = {
    "untied": {"tied": False},
    "llama": {**_LLAMA, "d_ff": 96, "tied": False},
    "lora-gpt2": {"lora_rank": 8, "random_base": True, "lora_alpha": 64.0, "rslora": True},
    "lora-qwen3": {**ROPE_DECODER, "lora_rank": 4, **_ADAPTERS, "lora_dropout": 0.0},
    "lora-nf4": {**_LLAMA, "d_ff": 128, "lora_rank": 4, **_ADAPTERS, "quantize_base": "nf4"},
    "odd": {"d_model": 15, "heads": 3},  # an odd number of parameters in a block
    "masked": {"data": "examples.jsonl"},
    "unclipped": {"clip": 0.0},
    "tensor 2, context 2": {"tensor_parallel": 2, "context_parallel": 2},
    "keep=qkv,mlp-up": {"activation_checkpointing": "keep=qkv,mlp-up"},
    # What does not divide a micro-batch of 32 tokens or a block.
    "--mlp-tile N": {"mlp_tile": 13},
    "--activation-checkpointing budget=SIZE": {"activation_checkpointing": "budget=300KiB"},
    "--document-attention": {"document_attention": True, "data": "examples.jsonl"},
}
SETTINGS = {**TECHNIQUES, **OURS}


def _named(prefix: str, *but: str) -> tuple[str, ...]:
    """Techniques of the matrix."""
    return tuple(name for name in TECHNIQUES if name.startswith(prefix) and name not in but)


DEFAULT, BUDGET = "default", "--activation-checkpointing budget=SIZE"
ODD_BUCKET = Path(__file__).with_name("bucket-101.json")
DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "strategy": tuple(VARIANTS),
    "decoder": (
        DEFAULT,
        "untied",
        "--position rope",
        "llama",
        "lora-gpt2",
        "lora-qwen3",
        "lora-nf4",
    ),
    "optimizer": (
        *(DEFAULT, *_named("--optimizer ", "--optimizer adamw")),
        *("--moments-dtype bf16", "--optimizer-in-backward"),
    ),
    "precision": (
        *(DEFAULT, *_named("--precision ", "--precision fp32")),
        *("--no-compensation", "--grad-accum-dtype bf16", "--attention flash"),
    ),
    "attention": (
        *(DEFAULT, *_named("--attention ", "--attention flash")),
        *("--window W", "--document-attention"),
    ),
    "recomputation": (DEFAULT, *_named("--activation-checkpointing ", BUDGET)),
    "parallel": (
        *(DEFAULT, *_named("--context-parallel"), "--tensor-parallel N", "tensor 2, context 2"),
    ),
    "accumulation": (DEFAULT, "--global-batch (accumulation)", "--reduce-each-micro-batch"),
    "offload": (
        *(DEFAULT, "--offload-optimizer cpu", "--offload-fraction F", "--offload-param cpu"),
    ),
    "loss": (DEFAULT, *_named("--loss-chunk")),
    "tile": (DEFAULT, "--mlp-tile N"),
    "clip": (DEFAULT, "unclipped"),
    "data": (DEFAULT, "masked"),
}
APART = {
    *("--compile", "--memory-trace", BUDGET),  # with every strategy, in `_kept`: they take long
    *("--offload-optimizer nvme", "--offload-param nvme"),  # test_offload_nvme
    *("--precision fp32", "--optimizer adamw", "--clip C"),  # what is done anyway
    *("--norm rms", "--activation swiglu", "--kv-heads N", "--head-dim N", "--qk-norm"),
    "--bias",  # with --position rope, all at once
}
# bf16 has 8 bits of mantissa. Muon orthogonalises in bf16, whose rounding depends on what else a
# rank's call holds; blocks of 8 bits begin where a rank's range begins.
WEAK = frozenset({*DIMENSIONS["precision"][2:], "--optimizer muon", "--optimizer adamw8bit"})
# What changes the run's mathematics, so that its reference has it too.
MATHEMATICS = (
    *("layers", "d_model", "heads", "context", "vocab_size", "data", "optimizer", "clip", "window"),
    *("document_attention", *ROPE_DECODER, "lora_rank", "lora_targets", "lora_alpha"),
    *("lora_dropout", "rslora", "random_base", "quantize_base"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run on `ranks` processes: what differs from `BASE`, by flat name."""

    name: str
    ranks: int
    changes: Mapping[str, Any]
    strategy: str = "single"
    techniques: tuple[str, ...] = ()
    steps: int = STEPS
    shared_bytes: int = 0
    """Most bytes of blocks that FSDP gathers together, as on a GPU."""

    @property
    def weak(self) -> bool:
        """Return whether its precision allows only a coarse comparison."""
        return not WEAK.isdisjoint(self.techniques)

    @property
    def alone(self) -> bool:
        """Return whether it needs no process group."""
        return self.ranks == 1 and self.strategy == "single"

    @property
    def reference(self) -> "Case":
        """One process in fp32: the textbook's attention and loss, the whole batch at once."""
        kept = {name: self.changes[name] for name in MATHEMATICS if name in self.changes}
        if kept.get("optimizer") == "adamw8bit":
            del kept["optimizer"]
        settings = [f"{name}={value}" for name, value in sorted(kept.items())]
        return Case(
            name=f"reference {' '.join(settings)}".strip(),
            ranks=1,
            changes={"strategy": "single", "attention": "eager", "loss_chunk": 0, **kept},
            steps=max(STEPS, LONG * (not kept)),
        )

    def config(self) -> RunConfig:
        """The run; its data is a file in the working folder."""
        changes = {**BASE, "data": "text.txt", **self.changes}
        if "optimizer" in self.changes:
            changes["lr"] = LR.get(self.changes["optimizer"], BASE["lr"])
        accumulation = changes.pop("accumulation", 1)
        shared = changes.get("tensor_parallel", 1) * changes.get("context_parallel", 1)
        changes["micro_batch"] = GLOBAL_BATCH * shared // (self.ranks * accumulation)
        return RunConfig().replace(**{**changes, "global_batch": GLOBAL_BATCH})

    def runs(self) -> bool:
        """Return whether no rule of the config refuses it."""
        try:
            resolve(self.config(), world_size=self.ranks, device_type="cpu")
        except NotInstalled:
            return False
        except UserError:
            return False
        return True


def case(strategy: str, *techniques: str, ranks: int, name: str = "", **changes: Any) -> Case:
    """Techniques under a strategy.

    Raises:
        ValueError: two of them set the same field to different values.
    """
    merged: dict[str, Any] = {}
    for technique in techniques:
        for field, value in SETTINGS[technique].items():
            if field in ("micro_batch", "global_batch"):  # how the matrix spells accumulation
                field, value = "accumulation", 2
            if merged.setdefault(field, value) != value:
                raise ValueError(f"{strategy} with {techniques}: {field} is {value} and another")
    return Case(
        name=name or ", ".join((strategy, *techniques)),
        ranks=ranks,
        changes={**expand_strategy(strategy, {}), **merged, **changes},
        strategy=strategy,
        techniques=techniques,
    )


@cache
def _smallest(choice: tuple[tuple[str, str], ...]) -> Case | None:
    """The run on as few ranks as it can have, or None if it is refused."""
    chosen = dict(choice)
    strategy = chosen.pop("strategy")
    techniques = [value for value in chosen.values() if value != DEFAULT]
    for ranks in (1, 2, 4) if strategy == "single" else (2, 4):
        try:
            found = case(strategy, *techniques, ranks=ranks)
        except ValueError:
            return None
        if found.runs():
            return found
    return None


def _allowed(choice: Choice) -> bool:
    return _smallest(tuple(choice.items())) is not None


def _paired() -> list[Case]:
    choices = all_pairs(DIMENSIONS, allowed=_allowed, weak=WEAK)
    return [found for choice in choices if (found := _smallest(tuple(choice.items())))]


def _kept() -> Iterator[Case]:
    """Combinations of three and more, sizes, and what takes long."""
    two = "--global-batch (accumulation)"
    selective = "--activation-checkpointing selective"
    for strategy in VARIANTS:
        ranks = 1 if strategy == "single" else 2
        yield replace(case(strategy, ranks=ranks, name=f"{strategy}, long"), steps=LONG)
        if strategy not in ("single", "zero0") and "grad-op" not in strategy:
            yield case(strategy, two, "untied", selective, ranks=4, name=f"{strategy} on 4")
        if strategy not in ("single", "ddp") and "hybrid" not in strategy:
            yield case(strategy, two, ranks=1, name=f"{strategy} on 1")
        # Shapes of one process, so that what is compiled serves all.
        alone = (two,) if strategy == "single" else ()
        for technique in ("--compile", "--memory-trace", BUDGET):
            more = alone if technique == "--compile" else ()
            if (found := case(strategy, technique, *more, ranks=ranks)).runs():
                yield found
    for strategy in ("zero1", "zero2", "zero3"):  # an odd number of elements in a block, a bucket
        yield case(strategy, "odd", ranks=2)
        yield case(strategy, ranks=2, deepspeed=ODD_BUCKET, name=f"{strategy}, odd bucket")
    for strategy in ("ddp", "zero1", "zero3"):  # micro-batches of a single sequence, or target
        yield case(strategy, "masked", ranks=2, accumulation=4, name=f"{strategy}, masked, by 4")
    for strategy, ranks in (("single", 2), ("zero2", 4)):  # nor does the context divide
        odd = case(strategy, "--tensor-parallel N", ranks=ranks, context=33)
        yield replace(odd, name=f"{strategy}, tensor, odd context")
    ring = "--context-parallel-method ring"
    yield case("ddp", ring, "untied", ranks=4, context_parallel=4, name="ddp, ring of 4")
    yield case("ddp", ring, ranks=2, activation_checkpointing="keep=mlp-up", name="ddp, ring kept")
    # Tensor parallelism is rejected there under torch 2.11.
    sharded = ("--tensor-parallel N",) if torch.__version__ >= "2.12" else ()
    for beside in ("--context-parallel N", *sharded, "lora-gpt2", "keep=qkv,mlp-up"):
        yield case("fsdp", "--compile", beside, ranks=2)
    full = "--activation-checkpointing full"
    for techniques in ((), (two, selective), ("lora-gpt2", full)):
        for strategy in ("fsdp", "fsdp-grad-op", "fsdp-hybrid"):
            ranks = 4 if "hybrid" in strategy else 2
            found = case(strategy, *techniques, ranks=ranks, layers=3)
            yield replace(found, name=f"{found.name}, two blocks together", shared_bytes=TWO_BLOCKS)
    together = case("fsdp", "--compile", ranks=2, layers=3)
    yield replace(together, name="fsdp, compiled, together", shared_bytes=TWO_BLOCKS)
    # Gradients accumulate in other buffers where half of the master weights stay on the device.
    half = ("--offload-fraction F", "--grad-accum-dtype bf16", "--position rope")
    yield case("zero3", *half, ranks=2)


def drawn(count: int) -> list[Case]:
    """Many techniques at once, at random; the same ones each time."""
    draw = random.Random(count)
    found: dict[str, Case] = {}
    while len(found) < count:
        strategy, ranks = draw.choice(DIMENSIONS["strategy"]), draw.choice((1, 2, 4))
        techniques = [
            draw.choice(exact)
            for name, values in DIMENSIONS.items()
            if name != "strategy" and draw.random() < 0.5
            if (exact := [v for v in values if v != DEFAULT and v not in WEAK])
        ]
        shape = {"layers": draw.choice((1, 2, 3)), "context": draw.choice((16, 32, 33))}
        name = f"drawn {len(found)}: {strategy} on {ranks}, {', '.join(techniques)}, {shape}"
        with contextlib.suppress(ValueError):
            one = case(strategy, *techniques, ranks=ranks, name=name, **shape)
            if one.runs():
                found[name] = replace(one, shared_bytes=draw.choice((0, TWO_BLOCKS)))
    return list(found.values())


def cases() -> list[Case]:
    """All of them; making the pairs takes seconds, so that ranks are handed theirs."""
    return [*_paired(), *_kept()]

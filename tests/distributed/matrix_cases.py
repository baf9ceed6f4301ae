"""Each pair of technique and strategy that docs/matrix.md marks as running on a CPU.

The list is not kept here: it is asked of the function that the table there comes from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from launcher.compare.sweep.grid import expand_strategy
from launcher.compare.sweep.matrix import ROPE_DECODER, TECHNIQUES, cell
from launcher.config.schema import RunConfig
from launcher.strategies import VARIANTS

STEPS = 4
GLOBAL_BATCH = 8
SMALL = {
    "layers": 1,
    "d_model": 64,  # so that a rank's part of a matrix is large enough to be kept in 8 bits
    "heads": 2,
    "context": 16,
    "vocab_size": 261,  # does not divide by the ranks
    "tokenizer": "byte",
    "device": "cpu",
    "steps": STEPS,
    "lr": 1e-2,
    "seed": 7,
    "global_batch": GLOBAL_BATCH,
}
LR = {"sgd": 0.3, "adafactor": 0.3}  # what lowers the loss in so few steps
# What changes the run's mathematics, so that its reference has it too.
KEPT = ("layers", "optimizer", "clip", "window", "document_attention", *ROPE_DECODER)
# Muon orthogonalises in bf16, whose rounding depends on what else a rank's call holds.
LOW = {"bf16", "bf16-pure", "fp16", "adamw8bit", "muon"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A technique under a strategy. `changes` is what differs from a default run, by flat name."""

    technique: str
    strategy: str
    changes: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.technique} under {self.strategy}"

    @property
    def run(self) -> str:
        """The same for cases that are the same run: some techniques are the default."""
        settings = [f"{name}={value}" for name, value in self.changes.items()]
        return f"{' '.join(settings) or 'default'} under {self.strategy}"

    @property
    def alone(self) -> bool:
        return self.strategy == "single" and "tensor_parallel" not in self.changes

    @property
    def tolerance(self) -> float:
        """Relative, of a loss; in low precision a norm is not compared."""
        return 2e-2 if LOW & set(self.changes.values()) else 2e-5

    @property
    def reference(self) -> "Case":
        """One process in fp32: the textbook's attention and loss, the whole batch at once."""
        kept = {name: self.changes[name] for name in KEPT if name in self.changes}
        if kept.get("optimizer") == "adamw8bit":
            del kept["optimizer"]
        plain = {"attention": "eager", "loss_chunk": 0, **kept}
        return Case(technique="reference", strategy="single", changes=plain)

    def config(self, data: str, nvme_path: str) -> RunConfig:
        # What is compiled for one process serves two, where both see the same shapes.
        ranks = 1 if self.alone and "compile" not in self.changes else 2
        changes = {"micro_batch": GLOBAL_BATCH // ranks, **SMALL, "data": data, **self.changes}
        if "optimizer" in self.changes:
            changes["lr"] = LR.get(self.changes["optimizer"], SMALL["lr"])
        if "nvme_path" in changes:
            changes["nvme_path"] = Path(nvme_path)
        return RunConfig().replace(**expand_strategy(self.strategy, {}), **changes)


DEFAULT = RunConfig().flat()


def _case(technique: str, strategy: str, more: dict[str, Any], with_what: str = "") -> Case:
    changes = {**more, **TECHNIQUES[technique]}
    if changes.get("activation_checkpointing") == "every=2":
        changes["layers"] = 2
    return Case(
        technique=technique + with_what,
        strategy=strategy,
        changes={k: v for k, v in changes.items() if DEFAULT.get(k) != v},
    )


def _with_rope() -> Iterator[Case]:
    """Every technique once with the other decoder, under one strategy after the other."""
    turn = cycle(VARIANTS)
    others = {name: changes for name, changes in TECHNIQUES.items() if changes != ROPE_DECODER}
    for technique, changes in others.items():
        runs = {s for s in VARIANTS if cell(technique, s).cpu is None}
        if runs and "compile" not in changes:  # which takes longest, and has a test of its own
            strategy = next(s for s in turn if s in runs)
            yield _case(technique, strategy, ROPE_DECODER, " and --position rope")


CASES = [
    *(_case(t, s, {}) for t in TECHNIQUES for s in VARIANTS if cell(t, s).cpu is None),
    *_with_rope(),
]
BY_RUN = {case.run: case for case in (*(case.reference for case in CASES), *CASES)}

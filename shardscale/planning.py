"""`plan()`: which configurations fit and how fast they are, as records."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launcher.forecast.plan_answer import answer, best_command
from launcher.forecast.plan_cli import parse_options
from launcher.forecast.plan_records import as_records, failed_records
from launcher.forecast.table import best_of_each
from launcher.util.flags import as_words
from shardscale.tables import Table

COLUMNS = (
    *("sharding", "micro_batch", "precision", "activation_checkpointing", "used_bytes", "verdict"),
    "tokens_per_s",
)
"""Fields that a plan shows of its records, which have more."""


class Plan(Table):
    """Configurations, best first, in the records of `shardscale plan --json`."""

    def __init__(
        self, records: Iterable[Mapping[str, Any]], command: str, notes: Iterable[str]
    ) -> None:
        """Keep the records, the command of the best, and what was assumed."""
        super().__init__(records, COLUMNS)
        self.command = command
        """The torchrun line of the best configuration."""
        self.notes = list(notes)
        """Notes on what was assumed or left out."""

    @property
    def best(self) -> dict[str, Any]:
        """The first record; its `verdict` says whether it fits."""
        return self.records[0]

    @property
    def fits(self) -> bool:
        """True where any configuration fits, if tightly."""
        return bool(self.best["verdict"] != "does not fit")


def plan(
    model: str | None = None,
    *,
    gpus: int = 1,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    gpus_per_node: int | None = None,
    hf_config: str | Path | None = None,
    goal: str = "fastest",
    every: bool = False,
    **flags: Any,
) -> Plan:
    """Predict memory and speed of every way of sharding, without a GPU.

    Args:
        model: a name, as `--model` takes it.
        gpus: GPUs in total.
        gpu: their kind, such as `"A100-80GB"`.
        gpu_memory: the memory of each, such as `"24GiB"`, instead of its kind.
        gpus_per_node: GPUs of a node, up to 8 by default.
        hf_config: a `config.json` of transformers instead of a model's name.
        goal: `"fastest"`, `"least-memory"`, `"largest-batch"` or `"largest-model"`.
        every: all configurations, and not only the best of each way of sharding.
        flags: flags of a training, which stay fixed: `precision="bf16"`, `global_batch=128`.

    Raises:
        UserError: a value that the command line would refuse, in the same words.
    """
    own: dict[str, Any] = {
        "gpus": gpus,
        "gpu": gpu,
        "gpu_memory": gpu_memory,
        "gpus_per_node": gpus_per_node,
    }
    own |= {"hf_config": hf_config, "goal": goal, "all": every or None, "model": model}
    given = {name: value for name, value in (own | flags).items() if value is not None}
    options, training = parse_options(as_words(given))
    result, cluster, notes = answer(options, training)
    found = result.best_first if every else best_of_each(result.best_first)
    failed = result.failed if every else best_of_each(result.failed)
    return Plan(
        [*as_records(found, cluster), *failed_records(failed)],
        best_command(result, options, training, cluster),
        notes,
    )

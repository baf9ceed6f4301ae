"""`load()` and `load_model()`: what a run has recorded, and its weights."""

import html
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.compare.report.find import find_runs
from launcher.compare.report.records import sound_record
from launcher.compare.report.runs import Run, load_run
from launcher.measure.records import Summary
from launcher.util.errors import UserError
from shardscale.tables import Table

if TYPE_CHECKING:
    from launcher.model.foreign.decoder import ForeignDecoder
    from launcher.model.gpt import GPT

_PLACES = ("device", "host", "disk")


class Results:
    """A run's records as tables; docs/run-folder.md lists the fields."""

    def __init__(self, run: Run | None = None) -> None:
        """Take a run as the report reads it; None while it is measured."""
        self._run = run

    def complete(self, run: Run) -> None:
        """Take the run that `measure()` has measured, and read its steps before its folder goes."""
        self._run = run
        self.__dict__["steps"] = Table(_records(run.path, "step") if run.path is not None else ())

    @property
    def run(self) -> Run:
        """The run, as the report reads it.

        Raises:
            RuntimeError: the block of `measure()` has not ended.
        """
        if self._run is None:
            raise RuntimeError("measure() has results once its block has ended")
        return self._run

    @property
    def state(self) -> str:
        """`completed`, `oom`, `failed`, `preempted` or `running`."""
        return self.run.state

    @property
    def reason(self) -> str | None:
        """Why it has not completed."""
        return self.run.reason

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved config; empty for a program of your own."""
        return self.run.config

    @property
    def summary(self) -> Summary:
        """Perplexity, tokens per second, peak memory; None for what was not measured."""
        return self.run.summary

    @cached_property
    def steps(self) -> Table:
        """A record per step of rank 0: loss, seconds by phase, peaks."""
        return Table(_records(self.run.path, "step") if self.run.path is not None else ())

    @cached_property
    def evaluations(self) -> Table:
        """A record per evaluation: step, split, loss, perplexity."""
        return Table(_records(self.run.path, "eval") if self.run.path is not None else ())

    @cached_property
    def phases(self) -> Table:
        """Seconds and peak bytes of each phase, in each period and on each rank."""
        return Table({"rank": rank, **_plain(record)} for rank, record in self.run.phases)

    @cached_property
    def ledger(self) -> Table:
        """Bytes by rank, moment, place and line: what the memory holds."""
        rows = (row for rank, record in self.run.ledgers for row in _ledger_rows(rank, record))
        return Table(rows)

    def __repr__(self) -> str:
        if self._run is None:
            return "Results: not measured yet"
        return "\n".join([f"{self.run.name}: {self.state}", repr(self.phases), repr(self.ledger)])

    def _repr_html_(self) -> str:
        if self._run is None:
            return html.escape(repr(self))
        title = f"<p><b>{html.escape(self.run.name)}</b>: {html.escape(self.state)}</p>"
        return title + self.phases._repr_html_() + self.ledger._repr_html_()


def load(run: str | Path) -> Results:
    """Read what a run has recorded, of this launcher or of `shardscale watch`.

    Raises:
        UserError: the folder holds no run, or several.
    """
    found = find_runs([str(run)])
    if len(found) > 1:
        names = ", ".join(list(found)[:5])
        raise UserError(f"{run} holds {len(found)} runs: load one of them ({names})")
    ((name, one),) = found.items()
    return Results(load_run(name, one))


def load_model(
    source: str | Path,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
) -> "GPT | ForeignDecoder":
    """Build the decoder of a run, a checkpoint or a folder of transformers, with its weights.

    It is in evaluation mode, and its parameters need no gradients. `model(tokens)` returns logits.

    Raises:
        UserError: the folder holds no model that is known, or is damaged.
    """
    import torch

    from launcher.checkpoint.pretrained.loading import build_any, chosen_device, open_source

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype not in dtypes:
        raise UserError(f"dtype {dtype!r} is unknown: give fp32, bf16 or fp16")
    if device not in ("auto", "cpu", "cuda"):  # else `cuda:1` would mean `auto`
        raise UserError(f"device {device!r} is unknown: give auto, cpu or cuda")
    with open_source(Path(source)) as opened:
        return build_any(opened, device=chosen_device(device), dtype=dtypes[dtype])


def _records(folder: Path, kind: Literal["step", "eval"]) -> Iterator[dict[str, Any]]:
    """Yield rank 0's records of a kind; of one repeated after a restart, the later."""
    path = folder / "rank0.jsonl"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ()
    records = ({} if f'"{kind}"' not in line else sound_record(line) or {} for line in lines)
    of_kind = (record for record in records if record.get("kind") == kind)
    last = {(record["step"], record.get("split")): _plain(record) for record in of_kind}
    yield from last.values()


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "kind"}


def _ledger_rows(rank: int, record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row per line of a ledger that is not empty."""
    about = {"rank": rank, **{name: record.get(name) for name in ("moment", "step", "phase")}}
    for place in _PLACES:
        for name, size in record[place].items():
            if size and name != "used_bytes":
                yield {
                    **about,
                    "place": place,
                    "line": name.removesuffix("_bytes"),
                    "size_bytes": size,
                }

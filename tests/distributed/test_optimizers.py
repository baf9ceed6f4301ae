"""Every optimizer trains under every strategy as in one process, and goes on from any checkpoint.

One process group runs all pairs; each test then looks up its own.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Results as Reported
from harness import run_ranks, train, write_text
from optimizer_cases import AFTER, BEFORE, KINDS, MODEL_FLAGS, PAIRS, Kind
from optimizer_rank import begun, build, prepared_run
from rank_loop import steps

from launcher.checkpoint import Checkpointer
from launcher.checkpoint.extra import Extra
from launcher.model.gpt import GPT
from launcher.optim.registry import OPTIMIZERS
from launcher.parallel.world import World
from launcher.run.prepare import Prepared
from launcher.util.errors import UserError

SINGLE = ("--strategy=single",)
ALONE = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results that the process group reported, and the losses and norms of one process."""

    folder: Path
    text: str
    single: dict[str, tuple[list[float], list[float]]]
    reported: Reported

    def of(self, kind: Kind, strategy: str) -> dict[str, Any]:
        return self.reported.get(kind=kind.name, strategy=strategy)


@cache
def single_run(name: str, text: str) -> Prepared:
    return prepared_run(KINDS[name], SINGLE, text, ALONE)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("optimizers")
    text = str(write_text(folder / "text.txt"))
    single = {}
    for kind in KINDS.values():
        prepared = single_run(kind.name, text)
        engine = build(prepared, ALONE)
        losses, norms = steps(
            prepared.resolved, prepared.corpus, ALONE, engine, range(1, BEFORE + 1)
        )
        extra: Extra = {"model": prepared.resolved.model}
        Checkpointer(folder / f"{kind.name}-single").save(BEFORE, engine, extra)
        more = steps(
            prepared.resolved, prepared.corpus, ALONE, engine, range(BEFORE + 1, BEFORE + AFTER + 1)
        )
        single[kind.name] = (losses + more[0], norms + more[1])
    done = run_ranks((2, "optimizer_rank", text, folder, *KINDS))
    return Results(folder=folder, text=text, single=single, reported=Reported.of(folder, done))


def ids(value: object) -> str:
    return value.name if isinstance(value, Kind) else str(value)


@pytest.mark.parametrize(("kind", "strategy"), PAIRS, ids=ids)
def test_like_one_process(kind: Kind, strategy: str, results: Results) -> None:
    got, (losses, norms) = results.of(kind, strategy), results.single[kind.name]
    assert got["losses"] == pytest.approx(losses, rel=kind.parity)
    assert got["norms"] == pytest.approx(norms, rel=max(1e-3, 20 * kind.parity))


@pytest.mark.parametrize(("kind", "strategy"), PAIRS, ids=ids)
def test_goes_on_from_one_process(kind: Kind, strategy: str, results: Results) -> None:
    expected = results.single[kind.name][0][BEFORE:]
    assert results.of(kind, strategy)["resumed"] == pytest.approx(expected, rel=kind.resumed)


@pytest.mark.parametrize(("kind", "strategy"), [pair for pair in PAIRS if pair[0].given], ids=ids)
def test_begins_with_given_weights(kind: Kind, strategy: str, results: Results) -> None:
    prepared = single_run(kind.name, results.text)
    expected = begun(kind, prepared, results.folder, ALONE)
    assert results.of(kind, strategy)["begun"] == pytest.approx(expected, rel=kind.parity)


@pytest.mark.parametrize(("kind", "strategy"), PAIRS, ids=ids)
def test_one_process_goes_on_from_it(kind: Kind, strategy: str, results: Results) -> None:
    expected = results.of(kind, strategy)["losses"][BEFORE:]
    prepared = single_run(kind.name, results.text)
    engine = build(prepared, ALONE)
    Checkpointer(results.folder / "unused").load(results.folder / f"{kind.name}-{strategy}", engine)
    losses, _ = steps(
        prepared.resolved, prepared.corpus, ALONE, engine, range(BEFORE + 1, BEFORE + AFTER + 1)
    )
    assert losses == pytest.approx(expected, rel=kind.resumed)


def states_bytes(kind: Kind, ranks: int, text: str) -> int:
    """Return the bytes of states that the table says FSDP's first rank holds, or with one rank
    every rank of what is not sharded."""
    prepared = single_run(kind.name, text)
    choice = prepared.resolved.config.optim
    entry = OPTIMIZERS[choice.optimizer]
    with torch.device("meta"):
        named = GPT(prepared.resolved.model).named_parameters()
        shapes = [(name, tuple(p.shape)) for name, p in named]
    return sum(
        entry.costs(name, (-(-rows // ranks), *rest), choice, "cpu").state_bytes
        for name, (rows, *rest) in shapes
    )


@pytest.mark.parametrize(("kind", "strategy"), PAIRS, ids=ids)
def test_states_take_what_the_table_says(kind: Kind, strategy: str, results: Results) -> None:
    got = results.of(kind, strategy)["states_bytes"]
    sharded = strategy in ("fsdp", "zero1", "zero2", "zero3", "tensor")
    expected = states_bytes(kind, 2 if sharded else 1, results.text)
    if strategy in ("ddp", "fsdp", "zero0"):
        assert got == expected
    elif "8bit" not in kind.name or strategy == "tensor":
        # Flat partitions: fewer counters, less padding. With cut matrices norms are whole.
        assert got == pytest.approx(expected, rel=3e-2)
    else:
        # In a flat partition all matrices are one tensor, none too small for 8 bits.
        assert 0.5 * expected < got < expected


@pytest.mark.parametrize("name", KINDS)
def test_the_reference_learns(name: str, results: Results) -> None:
    losses, _ = results.single[name]
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize(
    ("saver", "strategy", "loader"),
    [
        ("bf16-pure", "zero2", "adamw8bit"),
        ("adamw8bit", "fsdp", "bf16-moments"),
        ("bf16-moments", "zero2", "bf16-pure"),
        ("fp16", "ddp", "bf16-pure"),
        ("bf16-pure", "fsdp", "fp16"),
        ("bf16-pure", "ddp", "bf16-pure-bare"),
        ("bf16-pure-bare", "zero2", "bf16-pure"),
    ],
)
def test_precisions_of_adamw_go_on_from_each_other(
    saver: str, strategy: str, loader: str, results: Results
) -> None:
    expected = results.of(KINDS[saver], strategy)["losses"][BEFORE:]
    prepared = single_run(loader, results.text)
    engine = build(prepared, ALONE)
    Checkpointer(results.folder / "unused").load(results.folder / f"{saver}-{strategy}", engine)
    losses, _ = steps(
        prepared.resolved, prepared.corpus, ALONE, engine, range(BEFORE + 1, BEFORE + AFTER + 1)
    )
    assert losses == pytest.approx(expected, rel=5e-3)


def test_another_rank_of_apollo_is_refused(results: Results) -> None:
    other = replace(KINDS["apollo"], flags=("--optimizer=apollo", "--apollo-rank=4"))
    engine = build(prepared_run(other, SINGLE, results.text, ALONE), ALONE)
    said = r"projected_exp_avg of blocks.* is \[192, 8\] there and \[192, 4\] in this run"
    with pytest.raises(UserError, match=said):
        Checkpointer(results.folder / "unused").load(results.folder / "apollo-fsdp", engine)


@pytest.mark.parametrize("saver", ["sgd", "adafactor", "apollo"])
def test_another_optimizers_states_are_refused(saver: str, results: Results) -> None:
    engine = build(single_run("adam", results.text), ALONE)
    with pytest.raises(UserError, match="optimizer states"):
        Checkpointer(results.folder / "unused").load(results.folder / f"{saver}-ddp", engine)


@pytest.mark.parametrize(
    ("optimizer", "rows", "ranks"),
    [("muon", 1, 2), ("adafactor", 2, 3)],  # which does not factor a single row
)
def test_matrices_with_fewer_rows_than_ranks_are_updated(
    optimizer: str, rows: int, ranks: int, tmp_path: Path
) -> None:
    """As those of adapters and routers are: FSDP leaves ranks without rows of them."""
    text = write_text(tmp_path / "text.txt")
    flags = [*MODEL_FLAGS, f"--data={text}", "--steps=3", f"--global-batch={2 * ranks}"]
    flags += [f"--optimizer={optimizer}", f"--lora-rank={rows}", "--random-base", "--save-every=0"]
    flags += ["--micro-batch=2", "--test-batches=1", "--report-to=none"]
    losses = {}
    for strategy in ("single", "fsdp"):
        out = tmp_path / strategy
        alone = strategy == "single"
        done = train(1 if alone else ranks, *flags, f"--strategy={strategy}", f"--out={out}")
        assert done.returncode == 0, done.stderr
        records = map(json.loads, (out / "rank0.jsonl").read_text(encoding="utf-8").splitlines())
        losses[strategy] = [record["loss"] for record in records if record["kind"] == "step"]
    assert losses["fsdp"] == pytest.approx(losses["single"], rel=1e-3)

"""Whatever a run does every so many steps, and however that falls together, training and the
checkpoints are those of a run that does nothing else.

One process group per number of ranks runs all variants; each test then looks up its own.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Results as Reported
from harness import run_ranks, selected, write_text
from periodic_cases import (
    ALONE,
    PERIODS,
    PREEMPTED,
    SAMPLED,
    STEPS,
    STOP_SIGNAL_AT,
    STRATEGIES,
    UNDISTURBED,
    VARIANTS,
    Variant,
)

from launcher.checkpoint import Checkpoint, CheckpointFolder
from launcher.checkpoint.pretrained.loading import build, open_source
from launcher.data.tokenizer import ByteEncoder
from launcher.model.decode import continuation
from launcher.optim.choice import OptimChoice
from launcher.optim.registry import checkpointed
from launcher.run.sampling import FREE, token_sampler
from launcher.strategies.flat_shards import PARAM

RUNS = [(variant, schedule) for variant in VARIANTS for schedule in variant.schedules]


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results that the process groups reported of each variant."""

    folder: Path
    reported: Reported

    def of(self, variant: Variant) -> dict[str, Any]:
        return self.reported.get(variant=variant.name)

    def checkpoints(self, variant: Variant, schedule: str) -> list[Path]:
        return CheckpointFolder(self.folder / variant.name / schedule / "checkpoints").list()

    def records(self, variant: Variant, schedule: str, kind: str) -> Iterator[dict[str, Any]]:
        path = self.folder / variant.name / schedule / "rank0.jsonl"
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if record["kind"] == kind:
                yield record


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Runs all variants, or the one that selected tests are of."""
    folder = tmp_path_factory.mktemp("periodic")
    asked = selected(request)
    wanted = {params["variant"].name for params in asked if "variant" in params}
    if not wanted or any("variant" not in params for params in asked):
        wanted = {variant.name for variant in VARIANTS}
    text = write_text(folder / "text.txt")
    text.write_text(text.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    groups = [
        (ranks, "periodic_rank", text, folder, *names)
        for ranks in (1, 2)
        if (names := [v.name for v in VARIANTS if v.ranks == ranks and v.name in wanted])
    ]
    return Results(folder=folder, reported=Reported.of(folder, run_ranks(*groups)))


def ids(value: object) -> str:
    return value.name if isinstance(value, Variant) else str(value).replace(" ", "-")


@pytest.mark.parametrize(("variant", "schedule"), RUNS, ids=ids)
def test_every_checkpoint_is_whole(variant: Variant, schedule: str, results: Results) -> None:
    results.of(variant)
    checkpoints = list(map(Checkpoint.open, results.checkpoints(variant, schedule)))
    found = [checkpoint.step for checkpoint in checkpoints]
    if schedule == PREEMPTED:
        assert found == [STOP_SIGNAL_AT + 1]  # agreed at the end of a step, all others pruned
    else:
        every = PERIODS[schedule]["save"]
        assert found == [step for step in range(1, STEPS + 1) if step % every == 0 or step == STEPS]
    for checkpoint in checkpoints:
        config, skipped = checkpoint.extra["config"], checkpoint.extra["skipped_steps"]
        states, _ = checkpointed(OptimChoice(optimizer=config["optimizer"]), checkpoint.shapes)
        assert sorted(checkpoint.kinds) == sorted((PARAM, *states))
        assert checkpoint.own_shapes == {}
        assert checkpoint.counters == {"step": checkpoint.step - skipped}


@pytest.mark.parametrize(("variant", "schedule"), RUNS, ids=ids)
def test_it_goes_on_to_the_same_bits(variant: Variant, schedule: str, results: Results) -> None:
    result = results.of(variant)
    losses, norms = result["undisturbed"]
    assert len(losses) == UNDISTURBED
    for path in results.checkpoints(variant, schedule):
        step = int(path.name.removeprefix("step-"))
        expected = [losses[step : step + 2], norms[step : step + 2]]
        assert result["resumed"][f"{schedule}/{path.name}"] == expected


@pytest.mark.parametrize(("variant", "schedule"), RUNS, ids=ids)
def test_training_does_not_notice(variant: Variant, schedule: str, results: Results) -> None:
    losses, _ = results.of(variant)["undisturbed"]
    found = [record["loss"] for record in results.records(variant, schedule, "step")]
    assert found == losses[: len(found)]
    stopped = STOP_SIGNAL_AT + 1 if schedule == PREEMPTED else STEPS
    assert len(found) == stopped
    every = PERIODS[schedule]["evaluate"]
    evaluated = [record["step"] for record in results.records(variant, schedule, "eval")]
    assert evaluated == list(range(every, stopped + 1, every))


@pytest.mark.parametrize("variant", STRATEGIES, ids=ids)
def test_a_sample_is_what_its_checkpoint_generates(variant: Variant, results: Results) -> None:
    results.of(variant)
    checkpoints = results.checkpoints(variant, SAMPLED)
    samples = list(results.records(variant, SAMPLED, "sample"))
    assert [sample["step"] for sample in samples] == [3, 6]
    for path, sample in zip(checkpoints, samples, strict=True):
        with open_source(path) as source:
            model = build(source, device=torch.device("cpu"), dtype=torch.float32)
        end, most = 256, model.config.context - 1
        drawn = list(continuation(model, [end], token_sampler(FREE, seed=7), most=most))
        text = drawn[: drawn.index(end)] if end in drawn else drawn
        assert (sample["prompt"], sample["tokens"]) == ("", len(text))
        assert sample["text"] == ByteEncoder().decode(text)
    assert len(samples[0]["text"]) > 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_dropout_is_the_same_under_every_strategy(ranks: int, results: Results) -> None:
    first, *others = (v for v in (*STRATEGIES, *ALONE) if v.ranks == ranks)
    assert len(others) >= 5
    losses, norms = results.of(first)["undisturbed"]
    for other in others:
        got_losses, got_norms = results.of(other)["undisturbed"]
        assert got_losses == pytest.approx(losses, rel=2e-5), other.name
        assert got_norms == pytest.approx(norms, rel=1e-3), other.name


def test_every_strategy_reads_the_same_to_validate(results: Results) -> None:
    """On one rank as on two, whose validation losses differ only by their dropout's masks."""
    read = {
        record["tokens"]
        for variant in STRATEGIES
        for record in results.records(variant, "equal", "eval")
    }
    assert len(read) == 1

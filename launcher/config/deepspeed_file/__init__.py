"""A user's DeepSpeed file as a source of values, between `--config` and the defaults.

Its values are adopted where neither flag nor `--config` gives one, and refused where one of them
gives another; all conflicts of a file are reported at once.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from launcher.config.deepspeed_file.reading import DeepSpeedFile, read_file
from launcher.config.schema import AutoMicroBatch, RunConfig
from launcher.optim.choice import PRECISIONS
from launcher.util.errors import MOST_CHARACTERS, UserError, naming, one_line
from launcher.util.flags import flag
from launcher.util.json_file import JsonObject
from launcher.util.sizes import counted

LONGEST_LINE = 1000


def adopt(config: RunConfig, given: Collection[str], world_size: int | None) -> RunConfig:
    """Return the config, which has a DeepSpeed file, with that file's values.

    Args:
        given: the fields that flags or `--config` have set.
        world_size: None where it is not known: batch sizes that follow from it stay open.

    Raises:
        UserError: the file asks for what is not possible, or contradicts what was given.
    """
    path = config.sharding.deepspeed
    assert path is not None
    file = read_file(path)
    problems = file.problems
    changes: dict[str, Any] = {}
    for name, said in file.fields.items():
        ours = config.get(name)
        if name == "steps" and "epochs" in given:
            problems.append(f"{said.key} is {said.shown}, but --epochs is {config.loop.epochs}")
        elif name not in given or ours == "auto":
            changes[name] = said.value
        elif isinstance(ours, AutoMicroBatch) or ours not in (said.value, *said.also):
            problems.append(f"{said.key} is {said.shown}, but {flag(name)} is {_shown(ours)}")
    problems += _strategy_problems(config, file, given)
    reduced = file.values.get("communication_data_type")
    # `auto` could become bf16, which such a file rules out
    not_low = file.values.get("bf16.enabled") is False or reduced is not None
    if config.optim.precision == "auto" and not_low:
        changes.setdefault("precision", "fp32")
    precision = changes.get("precision", config.optim.precision)
    if reduced is not None and reduced != PRECISIONS[precision].computed:
        # Gradients travel in the type they are computed in: nothing else is proven.
        problems.append(
            f"communication_data_type is {reduced}, but here it follows --precision {precision}"
        )
    if world_size is not None:
        given_micro = config.data.micro_batch if "micro_batch" in given else None
        micro = changes.get("micro_batch", given_micro)
        total = changes.get("global_batch", config.data.global_batch)
        data_ranks = config.sharding.data_ranks(world_size)
        changes |= _batch(file, micro, total, config.data.micro_batch, data_ranks)
    if precision != "auto" and not PRECISIONS[precision].keeps_fp32:
        changes.pop("grad_accum_dtype", None)  # the precision says it
    if problems:
        raise UserError(_one_sentence(path, problems))
    with naming(f"--deepspeed {path}:"):
        return config.replace(**changes)


def adopted_fields(path: Path | None) -> set[str]:
    """Return the fields that a file sets."""
    if path is None:
        return set()
    file = read_file(path)
    batch = {"global_batch", "micro_batch"}  # with an accumulation, one follows from the other
    return {*file.fields} | (batch if "gradient_accumulation_steps" in file.values else set())


def passed_on(path: Path | None) -> JsonObject:
    """Return the part of a file that DeepSpeed gets unchanged."""
    return {} if path is None else read_file(path).passed


def startup_lines(path: Path) -> list[str]:
    """Describe, for the start of a run, the values that a file sets and those without effect."""
    file = read_file(path)
    sets = ", ".join(f"{flag(name)} {_shown(said.value)}" for name, said in file.fields.items())
    lines = [f"DeepSpeed file {path}: {sets or 'no flags'}"]
    renamed = [
        f"{old} is {place}".replace("zero_optimization.", "")
        for place, old in file.spelled.items()
        if old != place
    ]
    if renamed:
        lines.append(f"... older names, read as today's: {', '.join(renamed)}")
    if file.idle:
        lines.append(f"... without effect here: {', '.join(file.idle)}")
    return [one_line(line, LONGEST_LINE) for line in lines]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _strategy_problems(config: RunConfig, file: DeepSpeedFile, given: Collection[str]) -> list[str]:
    problems = []
    sharding, precision = config.sharding, config.optim.precision
    if sharding.strategy not in (None, "zero"):
        problems.append(f"needs --strategy zero, not {sharding.strategy}")
    elif "zero" not in file.fields and sharding.zero is None:
        problems.append("has no zero_optimization.stage: give --zero too")
    for name in ("bf16", "fp16"):
        off = file.values.get(f"{name}.enabled") is False
        if off and "precision" in given and config.optim.arithmetic.computed == name:
            problems.append(f"{name}.enabled is false, but --precision is {precision}")
    return problems


def _batch(
    file: DeepSpeedFile, micro: int | None, total: int | None, default: int, data_ranks: int
) -> dict[str, int]:
    """Derive our two batch sizes from DeepSpeed's three; `micro` and `total` may be None."""
    accumulation = file.values.get("gradient_accumulation_steps")
    if accumulation is None and "global_batch" not in file.fields:
        return {}
    accumulated = int(accumulation or 1)
    ranks = counted(data_ranks, "rank")
    if micro is None and total is not None:
        micro, rest = divmod(total, accumulated * data_ranks)
        if rest:
            file.problems.append(
                f"the global batch of {total} is no multiple of {accumulated} accumulated x {ranks}"
            )
        return {"micro_batch": micro}
    micro = micro or default
    whole = micro * accumulated * data_ranks
    if total is None:
        return {"global_batch": whole}
    if accumulation is None and total % whole:
        file.problems.append(
            f"the global batch of {total} is no multiple of micro-batch {micro} x {ranks}"
        )
    elif accumulation is not None and total != whole:
        file.problems.append(
            f"micro-batch {micro} x {accumulated} accumulated x {ranks} = {whole}, but the global "
            f"batch is {total}"
        )
    return {}


def _one_sentence(path: Path, problems: list[str]) -> str:
    """Join as many problems as a sentence holds, and count the others."""
    name = str(path) if len(str(path)) <= 60 else f"...{str(path)[-57:]}"
    text, left = f"--deepspeed {name}: {problems[0][:200]}", len(problems) - 1
    for problem in problems[1:]:
        if len(text) + len(problem) > MOST_CHARACTERS - len("; ; and 99 more"):
            break
        text, left = f"{text}; {problem}", left - 1
    return f"{text}; and {left} more" if left else text

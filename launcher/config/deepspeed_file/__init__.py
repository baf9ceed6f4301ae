"""A user's DeepSpeed file as a source of values, between `--config` and the defaults.

What it says is adopted where nobody else says something, and refused where somebody says
something else; all conflicts of a file are told at once.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from launcher.config.deepspeed_file.reading import DeepSpeedFile, Said, read_file
from launcher.config.deepspeed_file.text import JsonObject, called, printable
from launcher.config.schema import AutoMicroBatch, RunConfig
from launcher.errors import UserError
from launcher.flags import flag

MOST_CHARACTERS = 285  # with `shardscale: ` less than 300


def adopt(config: RunConfig, given: Collection[str], world_size: int | None) -> RunConfig:
    """The config with what its DeepSpeed file says.

    Args:
        given: the fields that flags or `--config` have set.
        world_size: None where it is not known: batch sizes that follow from it stay open.

    Raises:
        UserError: the file asks for what is not possible, or contradicts what was given.
    """
    path = config.sharding.deepspeed
    if path is None:
        return config
    file = read_file(path)
    problems = file.problems
    changes: dict[str, Any] = {}
    for name, said in file.fields.items():
        ours = _field(config, name)
        if name == "steps" and "epochs" in given:
            problems.append(f"{said.key} is {said.shown}, but --epochs is {config.loop.epochs}")
        elif name not in given:
            changes[name] = said.value
        elif isinstance(ours, AutoMicroBatch) or ours not in (said.value, *said.also):
            problems.append(f"{said.key} is {said.shown}, but {flag(name)} is {_shown(ours)}")
    problems += _strategy_problems(config, file, given)
    precision = changes.get("precision", config.optim.precision)
    problems += _type_problems(file, precision)
    if world_size is not None:
        changes |= _batch(config, file, given, world_size)
    if precision == "bf16-pure":
        changes.pop("grad_accum_dtype", None)  # it says that itself
    if problems:
        raise UserError(_one_sentence(path, problems))
    try:
        return config.replace(**changes)
    except UserError as error:
        raise UserError(f"{called(path)}: {error}") from None


def adopted_fields(path: Path | None) -> set[str]:
    """The fields that a file has a say in."""
    if path is None:
        return set()
    file = read_file(path)
    batch = {"global_batch", "micro_batch"}  # with an accumulation, one follows from the other
    return {*file.fields} | (batch if "gradient_accumulation_steps" in file.values else set())


def passed_on(path: Path | None) -> JsonObject:
    """What DeepSpeed gets of a file besides our own fields."""
    return {} if path is None else read_file(path).passed


def opening_lines(path: Path | None) -> list[str]:
    """What a run with a file says at its start."""
    if path is None:
        return []
    file = read_file(path)
    sets = ", ".join(f"{flag(name)} {_shown(said.value)}" for name, said in file.fields.items())
    lines = [f"DeepSpeed file {printable(str(path))}: {sets or 'no flags'}"]
    if file.renamed():
        lines.append(f"... read under its name of today: {', '.join(file.renamed())}")
    if file.idle:
        lines.append(f"... without effect here: {', '.join(file.idle)}")
    return lines


def _field(config: RunConfig, name: str) -> Any:
    sections = (config.data, config.sharding, config.offload, config.optim, config.loop)
    return next(getattr(section, name) for section in sections if hasattr(section, name))


def _shown(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return printable(text)


def _strategy_problems(config: RunConfig, file: DeepSpeedFile, given: Collection[str]) -> list[str]:
    problems = []
    sharding, precision = config.sharding, config.optim.precision
    if sharding.strategy not in (None, "zero"):
        problems.append(f"needs --strategy zero, not {sharding.strategy}")
    elif "zero" not in file.fields and sharding.zero is None:
        problems.append("says no zero_optimization.stage: give --zero too")
    for name in ("bf16", "fp16"):
        off = file.values.get(f"{name}.enabled") is False
        if off and "precision" in given and precision.startswith(name):
            problems.append(f"{name}.enabled is false, but --precision is {precision}")
    for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
        theirs = file.values.get(f"zero_optimization.{name}", sharding.bucket)
        if "bucket" in given and theirs != sharding.bucket:
            problems.append(f"{name} is {theirs:g}, but --bucket is {sharding.bucket}")
    return problems


def _type_problems(file: DeepSpeedFile, precision: str) -> list[str]:
    """Gradients travel in the type they are computed in: nothing else is proven."""
    theirs = file.values.get("communication_data_type")
    if theirs is None or theirs == precision.removesuffix("-pure"):
        return []
    return [f"communication_data_type is {theirs}, but with --precision {precision} it is that"]


def _batch(
    config: RunConfig, file: DeepSpeedFile, given: Collection[str], world_size: int
) -> dict[str, int]:
    """The two of our batch sizes that three of DeepSpeed's come to on so many ranks."""
    micro = _merged(config, file, given, "micro_batch")
    total = _merged(config, file, given, "global_batch")
    accumulation = file.values.get("gradient_accumulation_steps")
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    if accumulation is not None:
        accumulation = int(accumulation)
        if micro is None and total is None:
            micro = config.data.micro_batch
    if micro is None:
        if total is None or (accumulation is None and "global_batch" not in file.fields):
            return {}
        micro, rest = divmod(total, (accumulation or 1) * world_size)
        if rest:
            file.problems.append(
                f"the global batch of {total} is no multiple of {accumulation or 1} "
                f"accumulated x {ranks}"
            )
        return {"micro_batch": micro}
    if accumulation is not None and total not in (None, micro * accumulation * world_size):
        file.problems.append(
            f"micro-batch {micro} x {accumulation} accumulated x {ranks} = "
            f"{micro * accumulation * world_size}, but the global batch is {total}"
        )
    elif accumulation is not None:
        return {"global_batch": micro * accumulation * world_size}
    elif "global_batch" in file.fields and total is not None and total % (micro * world_size):
        file.problems.append(
            f"the global batch of {total} is no multiple of micro-batch {micro} x {ranks}"
        )
    return {}


def _merged(
    config: RunConfig, file: DeepSpeedFile, given: Collection[str], name: str
) -> int | None:
    """A batch size that was given, or that the file says."""
    if name in given:
        size: int | None = getattr(config.data, name)
        return size
    said: Said | None = file.fields.get(name)
    return None if said is None else int(said.value)


def _one_sentence(path: Path, problems: list[str]) -> str:
    """As many problems as a sentence takes, at least one, and the number of the others."""
    text, left = f"{called(path)}: {problems[0][:200]}", len(problems) - 1
    for problem in problems[1:]:
        if len(text) + len(problem) > MOST_CHARACTERS - len("; ; and 99 more"):
            break
        text, left = f"{text}; {problem}", left - 1
    return f"{text}; and {left} more" if left else text

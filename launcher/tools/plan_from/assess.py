"""The ledger, the seconds and the verdict of the run that a file describes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from launcher.config.arguments import parse_run_config
from launcher.config.schema import AutoMicroBatch, RunConfig
from launcher.forecast.assess import Assessment, assess
from launcher.forecast.candidates import Choice, run_of
from launcher.forecast.cluster import Cluster, find_cluster
from launcher.forecast.fit import Verdict, verdict
from launcher.forecast.plan_cli import parse_options
from launcher.forecast.predict import by_category
from launcher.strategies import strategy_of, variant_of
from launcher.strategies.base import unknown_versions
from launcher.tools.plan_from.flags import gpus_of, training_flags
from launcher.tools.plan_from.keys import Facts
from launcher.tools.plan_from.reading import Source
from launcher.tools.plan_from.translate import Reading, read_files
from launcher.util.errors import UserError
from launcher.util.flags import flag

_DEFAULT_BUCKETS: Final = {
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""DeepSpeed 0.19, runtime/zero/config.py, in elements."""
_NEAREST: Final = {
    "attention": "auto",
    "activation_checkpointing": "full",
    "lora_targets": "all",
    "precision": "bf16",
    "loss_chunk": "None",
    "optimizer": "adamw",
}
"""Field -> what is planned where the value asked for does not go with the rest."""
_FP32, _EIGHT_BIT_MOMENTS = 4, 2
_NORMS: Final = 2
"""Of a block."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The run of a file."""

    reading: Reading
    assessment: Assessment
    cluster: Cluster
    fields: Facts
    others: Sequence[Source]
    """Files beside the first one."""
    corrections: dict[str, int]
    """Tensors that the trainer holds and shardscale would not -> bytes at the peak."""
    notes: list[str]

    @property
    def used_bytes(self) -> int:
        """Peak of the device."""
        return self.assessment.used_bytes + sum(self.corrections.values())

    @property
    def memory_bytes(self) -> int:
        """Memory of the device."""
        return self.cluster.memory_bytes

    @property
    def verdict(self) -> Verdict:
        """Return whether it would run."""
        return verdict(self.used_bytes, self.memory_bytes)

    @property
    def step_s(self) -> float | None:
        """Predicted seconds of a step; None where it does not fit."""
        time = self.assessment.time
        return None if time is None else time.total_s

    def lines(self) -> dict[str, int]:
        """Bytes at the peak by category, and what lies around the tensors."""
        a = self.assessment
        found = {name: size for name, size in by_category(a.highest).items() if size}
        found |= self.corrections
        around = a.used_bytes - a.prediction.peak_bytes - self.cluster.fixed_bytes
        if around > 0:
            found["freed blocks that the allocator keeps"] = around
        if self.cluster.fixed_bytes:
            found["CUDA context, NCCL, workspaces"] = self.cluster.fixed_bytes
        return found


def plan_of(sources: Sequence[Source], argv: Sequence[str]) -> Planned:
    """Plan the run of some files; `argv` holds options of a plan and flags of a training.

    Raises:
        UserError: something is missing, or cannot be planned, with its name.
    """
    reading = read_files(sources)
    options, user = parse_options([*argv])
    asked = options.gpus if _gives_gpus(argv) else None
    if reading.facts.get("cpu"):
        raise UserError(f"{reading.source.path}: trains on a CPU: a plan needs a GPU")
    gpus, machines = gpus_of(reading, asked, options.gpus_per_node)
    options, user = parse_options([*_without_gpus(argv), "--gpus", str(gpus)])
    try:
        flags, fields = training_flags(reading, user, gpus, machines)
        cluster, notes = find_cluster(options)
        with TemporaryDirectory() as folder:
            assessment = _relaxed(reading, flags, fields, cluster, Path(folder))
    except UserError as error:
        text = str(error)
        name = str(reading.source.path)
        raise UserError(text if text.startswith(name) else f"{name}: {text}") from None
    corrections = corrections_of(reading, assessment, cluster.world_size)
    return Planned(
        reading=reading,
        assessment=assessment,
        cluster=cluster,
        fields=fields,
        others=[source for source in sources if source is not reading.source],
        corrections=corrections,
        notes=[*reading.notes, *notes],
    )


def _relaxed(
    reading: Reading, flags: list[str], fields: Facts, cluster: Cluster, folder: Path
) -> Assessment:
    """Plan the run, with the nearest choice where this decoder or sharding lacks one."""
    for _ in _NEAREST:
        try:
            return assessed(_config(reading, flags, fields, cluster, folder), cluster)
        except UserError as error:
            names = [
                name for name in _NEAREST if f"{flag(name)} " in f"{error} " and name in fields
            ]
            change = next((n for n in names if _NEAREST[n] != fields[n] != "none"), None)
            if change is None:
                raise
            reading.left_out.append(
                f"{flag(change)} {fields[change]}: planned as {_NEAREST[change]}, since {error}"
            )
            fields[change] = _NEAREST[change]
            flags = [*flags, flag(change), str(_NEAREST[change])]
    return assessed(_config(reading, flags, fields, cluster, folder), cluster)


def _gives_gpus(argv: Sequence[str]) -> bool:
    return any(token.partition("=")[0] == "--gpus" for token in argv)


def _without_gpus(argv: Sequence[str]) -> list[str]:
    kept: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        if token == "--gpus":
            next(tokens, None)
        elif not token.startswith("--gpus="):
            kept.append(token)
    return kept


def _config(
    reading: Reading, flags: list[str], fields: Facts, cluster: Cluster, folder: Path
) -> RunConfig:
    config = parse_run_config(flags, cluster.world_size)
    if config.sharding.zero and config.sharding.deepspeed is None:
        # DeepSpeed's own buckets, or those that transformers fills in: shardscale's are smaller.
        path = folder / "buckets.json"
        width = config.model.build().d_model
        section = {"stage": config.sharding.zero} | _buckets(reading, width)
        path.write_text(json.dumps({"zero_optimization": section}), encoding="utf-8")
        config = parse_run_config([*flags, "--deepspeed", str(path)], cluster.world_size)
    return config


def _buckets(reading: Reading, width: int) -> dict[str, int]:
    auto = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    said = {
        name.removeprefix("bucket "): value
        for name, value in reading.facts.items()
        if name.startswith("bucket ")
    }
    found = dict(_DEFAULT_BUCKETS)
    for name, value in said.items():
        found[name] = auto.get(name, found[name]) if value == "auto" else value
    found["allgather_bucket_size"] += found["allgather_bucket_size"] % 2
    return found


def assessed(config: RunConfig, cluster: Cluster) -> Assessment:
    """Evaluate a config as it is, at its own micro-batch.

    Raises:
        UserError: it cannot run, or its bytes are not known here.
    """
    if isinstance(config.data.micro_batch, AutoMicroBatch):
        raise UserError("--micro-batch auto: give a number, since this run is planned as it is")
    run = run_of(config, config.data.micro_batch, cluster.world_size, cluster.machine.device)
    if unknown := unknown_versions(strategy_of(run.config)):
        raise UserError(unknown)
    choice = Choice(
        label=variant_of(run.config).label,
        precision=run.config.optim.precision,
        checkpointing=run.config.model.activation_checkpointing,
        runs=(run,),
    )
    return assess(choice, cluster)


def corrections_of(reading: Reading, a: Assessment, world_size: int) -> dict[str, int]:
    """Return what the trainer holds at the peak beside what shardscale would, by name."""
    found: dict[str, int] = {}
    facts, engine, held = reading.facts, reading.engine, a.prediction.held.device
    run, model = a.run.config, a.run.model
    optimizer = run.optim.optimizer
    sharded = variant_of(run).level >= 1
    adapters = run.model.lora_rank is not None
    if optimizer == "adamw" and facts.get("foreach", engine.foreach) and run.sharding.zero is None:
        over = _beyond(a, ("step",), held.optimizer_bytes // 2)
        found["temporaries of the foreach update"] = over
    norm_bytes = 0 if run.loop.compile else facts.get("norm_bytes", engine.norm_bytes)
    if norm_bytes and getattr(model, "norm", "") == "rms":
        tokens = run.data.micro_batch * a.run.local_seq_len
        kept = _blocks_kept(run.model.activation_checkpointing, model.layers)
        more = norm_bytes * _NORMS * kept * tokens * model.d_model
        found["norms composed of operators"] = _beyond(a, ("forward", "backward"), more)
    if optimizer == "adamw8bit" and facts.get("embedding_moments") and not adapters:
        elements = model.vocab_size * model.d_model
        ranks = run.sharding.shard_ranks(world_size) if sharded else 1
        wider = 2 * _FP32 - _EIGHT_BIT_MOMENTS
        found["moments of the embedding in 32 bits"] = wider * elements // ranks
    loaded = facts.get("weights", facts.get("base", "fp32"))
    casts = run.model.quantize_base == "none" and run.optim.arithmetic.computed != "fp32"
    if adapters and loaded == "fp32" and run.sharding.zero is None and casts:
        found["frozen weights in fp32"] = held.frozen_bytes
    return {name: size for name, size in found.items() if size > 0}


def _beyond(a: Assessment, phases: Sequence[str], more_bytes: int) -> int:
    """Return by how much the peak grows where some phases need so much more."""
    highest = max(size for (_, phase), size in a.prediction.peaks.items() if phase in phases)
    return max(0, highest + more_bytes - a.prediction.peak_bytes)


def _blocks_kept(checkpointing: str, layers: int) -> int:
    """Return how many blocks keep what their norms save: at least the one in work."""
    if checkpointing == "none":
        return layers
    if checkpointing.startswith("every="):
        every = int(checkpointing.partition("=")[2])
        return max(1, layers - -(-layers // every))
    return 1

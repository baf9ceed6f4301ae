"""The ledger, the seconds and the verdict of the run that a file describes."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from launcher.config.arguments import parse_run_config
from launcher.config.schema import AutoMicroBatch, RunConfig
from launcher.forecast.allocator import replay
from launcher.forecast.assess import Assessment, assess
from launcher.forecast.candidates import Choice, run_of
from launcher.forecast.cluster import Cluster, find_cluster
from launcher.forecast.fit import Verdict, verdict
from launcher.forecast.plan_cli import parse_options
from launcher.forecast.predict import by_category
from launcher.forecast.prediction_cache import PredictionCache
from launcher.strategies import strategy_of, variant_of
from launcher.strategies.base import unknown_versions
from launcher.tools.plan_from.corrections import corrections_of, marks_of
from launcher.tools.plan_from.decoders import computed_by_transformers
from launcher.tools.plan_from.flags import gpus_of, training_flags
from launcher.tools.plan_from.keys import Facts
from launcher.tools.plan_from.reading import Source
from launcher.tools.plan_from.translate import Reading, configured, read_files
from launcher.util.errors import UserError, naming
from launcher.util.flags import fields_of, flag, without

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
    "context_parallel_method": "auto",
    "activation_checkpointing": "full",
    "lora_targets": "all",
    "precision": "bf16",
    "loss_chunk": "None",
    "optimizer": "adamw",
}
"""Field -> what is planned where the value asked for does not go with the rest."""


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
    allocated_bytes: int
    """Peak of `torch.cuda.memory_allocated`: tensors in the blocks that they get."""
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
        return None if time is None or self.verdict == "does not fit" else time.total_s

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
    sources = [configured(source) for source in sources]
    reading = read_files(sources)
    options, user = parse_options([*argv])
    asked = options.gpus if "gpus" in fields_of(argv) else None
    with naming(f"{reading.source.path}:"):
        if reading.facts.get("cpu"):
            raise UserError("trains on a CPU: a plan needs a GPU")
        gpus, machines = gpus_of(reading, asked, options.gpus_per_node)
    # again, as if the GPUs of the file had been given, on as many machines
    given = [*without(argv, "--gpus"), "--gpus", str(gpus)]
    if options.gpus_per_node is None and machines > 1 and gpus % machines == 0:
        given += ["--gpus-per-node", str(gpus // machines)]
    options, user = parse_options(given)
    with naming(f"{reading.source.path}:"), TemporaryDirectory() as folder:
        flags, fields = training_flags(reading, user, gpus, machines)
        cluster, notes = find_cluster(options)
        assessment = _relaxed(reading, flags, fields, cluster, Path(folder))
        blocks_bytes = _allocated(assessment, cluster)
    notes = [*reading.notes, *notes]
    if "seq_len" not in fields and "seq_len" not in fields_of(user):
        length = assessment.run.seq_len
        notes.append(f"sequences of {length} tokens are assumed: --seq-len N for others")
    corrections = corrections_of(reading, assessment, cluster.world_size)
    return Planned(
        reading=reading,
        assessment=assessment,
        cluster=cluster,
        fields=fields,
        others=[source for source in sources if source is not reading.source],
        corrections=corrections,
        allocated_bytes=blocks_bytes + sum(corrections.values()),
        notes=notes,
    )


def _allocated(a: Assessment, cluster: Cluster) -> int:
    """Return the peak of the blocks that tensors are in."""
    if cluster.gpu is None:
        return a.prediction.peak_bytes
    events, streams = a.prediction.events, a.prediction.streams
    if events:
        use = replay(events, streams, expandable_segments=a.run.expandable_segments)
        return use.peak_allocated_bytes
    cache = PredictionCache(a.run, cluster)  # which had it from another run
    use = cache.use(a.run, limit_bytes=None)
    cache.save()
    return use.peak_allocated_bytes


def _relaxed(
    reading: Reading, flags: list[str], fields: Facts, cluster: Cluster, folder: Path
) -> Assessment:
    """Plan the run, with the nearest choice where this decoder or sharding lacks one."""
    # each round changes one field to its nearest, so there are at most as many
    for _ in _NEAREST:
        try:
            return _assessed(reading, flags, cluster, folder)
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
    return _assessed(reading, flags, cluster, folder)


def _assessed(reading: Reading, flags: list[str], cluster: Cluster, folder: Path) -> Assessment:
    """Plan the run, with transformers' decoder where its trainer computes that."""
    config = _config(reading, flags, cluster, folder)
    if reading.engine.computes_transformers:
        theirs = computed_by_transformers(
            config, folder, marks_of(reading, config), reading.facts.get("layers")
        )
        if theirs is not None:
            with contextlib.suppress(UserError):
                return assessed(theirs, cluster, expandable=reading.engine.expandable_segments)
    return assessed(config, cluster, expandable=reading.engine.expandable_segments)


def _config(reading: Reading, flags: list[str], cluster: Cluster, folder: Path) -> RunConfig:
    config = parse_run_config(flags, cluster.world_size)
    stage = config.sharding.zero
    if stage and config.sharding.deepspeed is None:
        # DeepSpeed's own buckets, or those that transformers fills in: shardscale's are smaller.
        path = folder / "buckets.json"
        width = config.model.build().d_model
        # Overlapped, a reduction has a second bucket: DeepSpeed's default at stage 3 only.
        section = {"stage": stage, "overlap_comm": reading.facts.get("overlap_comm", stage == 3)}
        section |= _buckets(reading, width)
        path.write_text(json.dumps({"zero_optimization": section}), encoding="utf-8")
        config = parse_run_config([*flags, "--deepspeed", str(path)], cluster.world_size)
    return config


def _buckets(reading: Reading, width: int) -> dict[str, int]:
    # as transformers fills them in (integrations/deepspeed.py)
    auto = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    found = dict(_DEFAULT_BUCKETS)
    for name, default in _DEFAULT_BUCKETS.items():
        value = reading.facts.get(f"bucket {name}", default)
        found[name] = auto.get(name, default) if value == "auto" else value
    # DeepSpeed asserts an even one (nccl_start_alignment_factor of 2)
    found["allgather_bucket_size"] += found["allgather_bucket_size"] % 2
    return found


def assessed(
    config: RunConfig, cluster: Cluster, *, own: bool = False, expandable: bool | None = None
) -> Assessment:
    """Evaluate a config as it is, at its own micro-batch.

    Args:
        own: shardscale runs it, and no other trainer.
        expandable: whether the allocator's segments are; None as in shardscale's own runs.

    Raises:
        UserError: it cannot run, or its bytes are not known here.
    """
    if isinstance(config.data.micro_batch, AutoMicroBatch):
        raise UserError("--micro-batch auto: give a number, since this run is planned as it is")
    run = run_of(config, config.data.micro_batch, cluster.world_size, cluster.machine.device)
    run = dataclasses.replace(run, of_another_trainer=not own)
    if expandable is not None:
        run = dataclasses.replace(run, expandable_segments=expandable)
    if unknown := unknown_versions(strategy_of(run.config)):
        raise UserError(unknown)
    choice = Choice(
        label=variant_of(run.config).label,
        precision=run.config.optim.precision,
        checkpointing=run.config.model.activation_checkpointing,
        runs=(run,),
    )
    return assess(choice, cluster)

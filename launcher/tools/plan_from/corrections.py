"""Correct a plan by the bytes that a trainer holds and shardscale's own engine would not."""

from collections.abc import Iterator, Sequence
from typing import Final

from launcher.config.schema import RunConfig
from launcher.forecast.assess import Assessment
from launcher.model.foreign.config import FROZEN_FP32, LIGER, TRL_LOSS, ForeignConfig
from launcher.strategies import variant_of
from launcher.tools.plan_from.computing import holds_logits
from launcher.tools.plan_from.translate import Reading

_FP32, _LOW, _EIGHT_BIT_MOMENTS = 4, 2, 2
_NORMS: Final = 2  # of a block
_COMPUTING: Final = ("forward", "backward")
_STEP: Final = ("step",)
_EVERY: Final = ""
_STEADY: Final = "steady"


def corrections_of(reading: Reading, a: Assessment, world_size: int) -> dict[str, int]:
    """Return name -> bytes by which the peak changes with what the trainer holds more or less."""
    peaks, found = dict(a.prediction.peaks), dict[str, int]()
    for name, phases, period, more_bytes in _differences(reading, a, world_size):
        before = max(peaks.values())
        for when, phase in peaks:
            if phase in phases and when.startswith(period):
                peaks[when, phase] += more_bytes
        if change := max(peaks.values()) - before:
            found[name] = change
    return found


def _differences(
    reading: Reading, a: Assessment, world_size: int
) -> Iterator[tuple[str, Sequence[str], str, int]]:
    """Yield what is held, in which phases of which periods, and how many bytes more it takes."""
    facts, engine, held = reading.facts, reading.engine, a.prediction.held.device
    run, model = a.run.config, a.run.model
    optimizer = run.optim.optimizer
    adapters = run.model.lora_rank is not None
    level, by_torch = variant_of(run).level, run.sharding.zero is None
    tokens = run.data.micro_batch * a.run.local_seq_len
    logits = tokens * model.vocab_size
    below_fp32 = run.optim.arithmetic.computed != "fp32"
    if optimizer == "adamw" and facts.get("foreach", engine.foreach) and by_torch:
        # of exp_avg and exp_avg_sq, one has the size of the temporaries
        more = held.optimizer_bytes // 2
        yield "temporaries of the foreach update", _STEP, _EVERY, more
    norm_bytes = 0 if run.loop.compiles else facts.get("norm_bytes", engine.norm_bytes)
    composed = isinstance(model, ForeignConfig)  # whose norms are traced as they are
    if norm_bytes and not composed and model.norm == "rms":
        kept = _blocks_kept(run.model.activation_checkpointing, model.layers)
        more = norm_bytes * _NORMS * kept * tokens * model.d_model
        yield "norms composed of operators", _COMPUTING, _EVERY, more
    if composed and run.model.loss_chunk == 0 and below_fp32:
        # Its output has them while the loss makes fp32 of them, and of these their logarithms.
        yield "logits as they were computed", ("forward",), _EVERY, _LOW * logits
    gathers = engine.computes_transformers and run.model.loss_chunk is None
    if run.sharding.tensor_parallel > 1 and gathers and holds_logits(reading):
        # the head's plan gathers its output (colwise_gather_output): logits as they were computed,
        # in fp32, and their logarithms or gradients
        more = (_LOW + 2 * _FP32) * logits
        yield "logits gathered from the ranks of a matrix", _COMPUTING, _EVERY, more
    if engine.shifts_logits:
        yield "logits without the last token's", ("forward",), _EVERY, _FP32 * logits
    if adapters and engine.adapters_chunk_head:
        yield "gradients of the logits in chunks", ("backward",), _EVERY, -_FP32 * logits
    if by_torch and level == 0 and world_size > 1 and engine.gradients_beside_buckets:
        # At the peak of a backward none are there yet, unless an earlier one has left them. A first
        # step has them in shardscale, too.
        phases = (*_COMPUTING, *_STEP) if a.run.accumulation > 1 else _STEP
        yield "gradients beside DDP's buckets", phases, _STEADY, held.grads_bytes
    if by_torch and level > 0 and engine.reduces_as_computed and a.run.accumulation > 1:
        wider = _FP32 - _LOW if below_fp32 else 0
        more = -wider * model.trained_parameter_count
        yield "gradients added up in the type of computing", _COMPUTING, _EVERY, more
    if optimizer == "adamw8bit" and facts.get("embedding_moments") and not adapters:
        elements = model.vocab_size * model.d_model
        ranks = run.sharding.shard_ranks(world_size) if level >= 1 else 1
        more = (2 * _FP32 - _EIGHT_BIT_MOMENTS) * elements // ranks
        yield "moments of the embedding in 32 bits", (*_COMPUTING, *_STEP), _EVERY, more
    if engine.adapters_in_bf16 and run.model.quantize_base != "none":
        states = held.optimizer_bytes if optimizer == "adamw" else 0
        more = -(2 * held.params_bytes + states) // 2  # weights, their gradients, moments
        yield "adapters in bf16", (*_COMPUTING, *_STEP), _EVERY, more
    if _freezes_fp32(reading, run):
        yield "frozen weights in fp32", (*_COMPUTING, *_STEP), _EVERY, _frozen_more(a)


def marks_of(reading: Reading, run: RunConfig) -> list[str]:
    """Return what a trace of transformers' decoder has to know of its trainer."""
    facts, marks = reading.facts, []
    if facts.get("liger"):
        marks.append(LIGER)
    elif reading.engine.loss_in_tiles and run.model.loss_chunk is None:
        marks.append(TRL_LOSS)
    if _freezes_fp32(reading, run):
        marks.append(FROZEN_FP32)
    return marks


def _freezes_fp32(reading: Reading, run: RunConfig) -> bool:
    """Return whether frozen weights that are not quantized are in fp32, where less is computed."""
    loaded = reading.facts.get("weights", reading.facts.get("base", "fp32"))
    less = run.sharding.zero is None and run.optim.arithmetic.computed != "fp32"
    return run.model.lora_rank is not None and loaded == "fp32" and less


def _frozen_more(a: Assessment) -> int:
    """Return what fp32 adds to the frozen weights that are not quantized."""
    frozen, model = a.prediction.held.device.frozen_bytes, a.run.model
    if a.run.config.model.quantize_base == "none":
        return frozen
    tables = 1 if model.tied else 2
    return _LOW * tables * model.vocab_size * model.d_model


def _blocks_kept(checkpointing: str, layers: int) -> int:
    """Return how many blocks keep what their norms save: at least the one in work."""
    if checkpointing == "none":
        return layers
    if checkpointing.startswith("every="):
        every = int(checkpointing.partition("=")[2])
        return max(1, layers - -(-layers // every))
    return 1

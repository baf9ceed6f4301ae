"""What a step computes: batches, sequences, compilation, where activations wait."""

from collections.abc import Iterator

from launcher.config.rules.setting import Setting


def seq_len(setting: Setting) -> Iterator[str]:
    """Sequences longer than the model can read."""
    tokens, context = setting.seq_len, setting.model.context
    if tokens > context:
        yield (
            f"--seq-len {tokens} is longer than the model's context of {context}: "
            f"give --seq-len {context} or less, or --context {tokens}"
        )


def batch(setting: Setting) -> Iterator[str]:
    """A global batch that micro-batches do not add up to."""
    total, per_step = setting.config.data.global_batch, setting.batch_per_micro_batch
    assert total is not None  # filled in
    if total % per_step:
        lower = setting.accumulation * per_step
        upper = lower + per_step
        nearest = upper if lower == 0 or upper - total < total - lower else lower
        yield (
            f"--global-batch {total} is not a multiple of micro-batch "
            f"{setting.config.data.micro_batch} x {setting.world_size} ranks = {per_step}: "
            f"use --global-batch {nearest}"
        )


def memory_snapshot(setting: Setting) -> Iterator[str]:
    """A GPU's allocator only."""
    if setting.config.measure.memory_snapshot and setting.device_type == "cpu":
        yield "--memory-snapshot records a GPU's allocator: on a CPU use --memory-trace"


def compiled(setting: Setting) -> Iterator[str]:
    """--compile."""
    config = setting.config
    if not config.loop.compile:
        return
    if setting.stage == 3:
        # It runs, with the same losses: 30 graphs of a few operators each where a block has one.
        yield (
            "--compile with --zero 3: DeepSpeed fetches parameters in the middle of each block, "
            "which splits it into tiny graphs, so that compiling gains nothing: use --strategy "
            "fsdp, which shards the same"
        )
    if config.model.activation_checkpointing == "offload":
        yield (
            "--compile with --activation-checkpointing offload: blocks that move what they save "
            "are not compiled: use full or selective, or leave --compile out"
        )
    if config.measure.memory_trace:
        yield (
            "--compile with --memory-trace: the trace follows single operators, and with it torch "
            "would run the model uncompiled: leave one of them out"
        )


def activation_offload(setting: Setting) -> Iterator[str]:
    """--activation-checkpointing offload."""
    config = setting.config
    if config.model.activation_checkpointing != "offload":
        return
    if setting.device_type == "cpu":
        yield (
            "--activation-checkpointing offload moves activations from a GPU to host memory, and "
            "has no effect on a CPU: use full"
        )
    if config.loop.compile:
        yield (
            "--activation-checkpointing offload copies between blocks' operators, which compiled "
            "code has no hooks for: use full, or leave out --compile"
        )

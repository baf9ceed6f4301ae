"""From what was asked for to what runs: batches, accumulation, names and length."""

from pathlib import Path
from typing import Any

import pytest

from launcher.config.resolve import (
    DEFAULT_STEPS,
    Resolved,
    check_run_folder,
    resolve,
)
from launcher.config.schema import RunConfig
from launcher.run.epochs import steps_of_epochs
from launcher.strategies import VARIANTS, variant_of
from launcher.util.errors import UserError


def resolved(world_size: int = 1, device_type: str = "cpu", **changes: Any) -> Resolved:
    return resolve(RunConfig().replace(**changes), world_size=world_size, device_type=device_type)


@pytest.mark.parametrize(
    ("micro_batch", "global_batch", "ranks", "total", "accumulation"),
    [
        (8, None, 1, 8, 1),
        (8, None, 4, 32, 1),
        (8, 32, 1, 32, 4),
        (8, 32, 4, 32, 1),
        (1, 1, 1, 1, 1),
        (3, 36, 4, 36, 3),
        (125, 1000, 2, 1000, 4),
    ],
)
def test_accumulation(
    micro_batch: int, global_batch: int | None, ranks: int, total: int, accumulation: int
) -> None:
    found = resolved(ranks, micro_batch=micro_batch, global_batch=global_batch)
    assert (found.config.data.global_batch, found.accumulation) == (total, accumulation)


@pytest.mark.parametrize(
    ("micro_batch", "global_batch", "ranks", "smaller", "nearest"),
    [
        (8, 17, 2, None, 16),
        (8, 23, 2, None, 16),
        (8, 24, 2, 6, 16),  # both are as near: the one that needs less memory
        (8, 25, 2, None, 32),
        (8, 1, 2, None, 16),  # 0 is nearer, but not a batch
        (8, 8, 2, 4, 16),  # a run of one process goes on with two
        (3, 100, 4, 1, 96),
        (7, 1000, 1, 5, 1001),
    ],
)
def test_batches_that_divide_are_named(
    micro_batch: int, global_batch: int, ranks: int, smaller: int | None, nearest: int
) -> None:
    also = "" if smaller is None else f"--micro-batch {smaller}, or "
    with pytest.raises(
        UserError, match=f"--global-batch {global_batch} .*: use {also}--global-batch {nearest}$"
    ):
        resolved(ranks, micro_batch=micro_batch, global_batch=global_batch)
    accepted = resolved(ranks, micro_batch=micro_batch, global_batch=nearest)
    assert accepted.config.data.global_batch == nearest
    if smaller is not None:
        resolved(ranks, micro_batch=smaller, global_batch=global_batch)


@pytest.mark.parametrize(
    ("changes", "ranks", "label", "also_called"),
    [
        ({}, 1, "single", "one device"),
        ({}, 2, "ddp", "ZeRO-0"),
        ({"strategy": "ddp"}, 1, "ddp", "ZeRO-0"),
        ({"strategy": "fsdp"}, 2, "fsdp", "ZeRO-3"),
        ({"strategy": "fsdp", "reshard_after_forward": False}, 2, "fsdp-grad-op", "ZeRO-2"),
        (
            {"strategy": "fsdp", "replicate": 2},
            4,
            "fsdp-hybrid",
            "ZeRO-3 in groups, replicated",
        ),
        (
            {"strategy": "fsdp", "replicate": 2, "reshard_after_forward": False},
            4,
            "fsdp-hybrid-grad-op",
            "ZeRO-2 in groups, replicated",
        ),
        ({"zero": 0}, 2, "zero0", "DDP"),
        ({"zero": 1}, 2, "zero1", "optimizer sharding"),
        ({"zero": 2}, 2, "zero2", "FSDP shard grad op"),
        ({"zero": 3}, 2, "zero3", "FSDP full shard"),
        ({"strategy": "zero", "zero": 3}, 1, "zero3", "FSDP full shard"),
    ],
)
def test_both_vocabularies(
    changes: dict[str, Any], ranks: int, label: str, also_called: str
) -> None:
    found = resolved(ranks, **changes)
    variant = variant_of(found.config)
    assert (variant.label, variant.also_called) == (label, also_called)


def test_every_label_has_its_other_name() -> None:
    assert set(VARIANTS) == {
        *("single", "ddp", "fsdp", "fsdp-grad-op", "fsdp-hybrid", "fsdp-hybrid-grad-op"),
        *("zero0", "zero1", "zero2", "zero3"),
    }


def test_sequence_length_comes_from_the_model() -> None:
    assert resolved().config.data.seq_len == resolved().model.context == 128
    assert resolved(model="gpt2").config.data.seq_len == 1024
    assert resolved(seq_len=32).config.data.seq_len == 32
    assert resolved(context=512, seq_len=512).model.context == 512


def test_the_schedule_is_steps_or_epochs_or_the_default() -> None:
    assert resolved().config.loop.steps == DEFAULT_STEPS
    assert resolved(steps=7).config.loop.steps == 7
    assert resolved(epochs=2.0).config.loop.steps is None  # the corpus is not open yet


def test_a_warm_up_fits_into_the_schedule() -> None:
    with pytest.raises(UserError, match=r"--warmup-steps 11 is more than the 10 steps"):
        resolved(warmup_steps=11, steps=10)
    assert resolved(warmup_steps=10, steps=10).config.optim.warmup_steps == 10
    assert resolved(warmup_steps=10**6, epochs=2.0)  # how many steps that is, the corpus says


@pytest.mark.parametrize(
    ("epochs", "sequences", "global_batch", "steps"),
    [(1, 100, 10, 10), (1, 101, 10, 11), (0.5, 100, 10, 5), (2.5, 4, 2, 5), (0.001, 10, 10, 1)],
)
def test_epochs_in_steps(epochs: float, sequences: int, global_batch: int, steps: int) -> None:
    assert steps_of_epochs(epochs, sequences, global_batch) == steps


def test_the_device_is_the_one_that_was_found() -> None:
    assert resolved(device_type="cuda").config.loop.device == "cuda"


def test_fsdp_offloads_parameters_and_optimizer_together() -> None:
    for name in ("offload_optimizer", "offload_param"):
        sharding = resolved(2, strategy="fsdp", **{name: "cpu"}).config.sharding
        assert (sharding.offload_optimizer, sharding.offload_param) == ("cpu", "cpu")


def test_resolving_again_changes_nothing() -> None:
    for changes in ({}, {"zero": 2}, {"strategy": "fsdp", "offload_param": "cpu"}):
        once = resolved(2, **changes)
        assert resolve(once.config, world_size=2, device_type="cpu") == once


def test_checking_a_run_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    check_run_folder(tmp_path / "a" / "b" / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_dangling_link_is_no_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="already exists"):
        check_run_folder(tmp_path / "run")


@pytest.mark.parametrize(
    ("device", "changes", "precision", "reason"),
    [
        ("cpu", {}, "fp32", ""),
        ("cuda", {}, "bf16", "auto: the GPU computes in it"),
        ("cuda", {"precision": "tf32"}, "tf32", ""),
        # Heads of 20 go around a ring on GPUs in fp32 only.
        (
            "cuda",
            {"heads": 2, "d_model": 40, "context_parallel": 2, "context_parallel_method": "ring"},
            "fp32",
            "auto: not bf16, since --context-parallel-method ring on GPUs takes heads",
        ),
    ],
)
def test_precision_follows_the_device_and_the_rest(
    device: str, changes: dict[str, Any], precision: str, reason: str
) -> None:
    config = RunConfig().replace(model="nano", **changes)
    resolved = resolve(config, world_size=2, device_type=device)
    assert resolved.config.optim.precision == precision
    assert resolved.precision_reason.startswith(reason)
    assert bool(resolved.precision_reason) == bool(reason)


def test_what_is_refused_in_both_precisions_is_refused_for_its_own_reason() -> None:
    config = RunConfig().replace(model="nano", strategy="zero", zero=0, offload_optimizer="cpu")
    with pytest.raises(UserError, match="--offload-optimizer") as error:
        resolve(config, world_size=2, device_type="cuda")
    assert "auto" not in str(error.value)

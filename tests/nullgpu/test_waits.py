"""How often the host waits for the device."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from nullgpu.runs import ROOT, command, train
from tiny_architectures import ARCHITECTURES

LOG_EVERY = 6  # 20 skipped steps in a row, as every step is here, end a run
WAITS = ("device_synchronize", "stream_synchronize", "event_synchronize", "blocking_copy")


APPLIED = {"SHARDSCALE_NULL_GPU_CHECKS": "false"}
"""DeepSpeed asks whether a step has overflowed: one that is skipped waits less. And decoders of
transformers are asked for values that nothing has set."""


def calls(
    folder: Path, steps: int, log_every: int, *flags: str, more: Mapping[str, str] | None = None
) -> Counter[str]:
    """Count what a run of so many steps has asked the device to wait for, by the call's name."""
    log = folder / f"{steps}.log"
    run = train(
        folder / str(steps),
        *("--precision", "bf16", "--steps", str(steps), "--log-every", str(log_every)),
        *("--test-batches", "0", "--save-every=0", *flags),
        tiny="--model" not in flags,
        more={"SHARDSCALE_NULL_GPU_LOG": str(log), **(more or {})},
    )
    assert run.code == 0, run.output[-4000:]
    # Elsewhere the device decides, and the host waits alike.
    assert "--zero" not in flags or all(step["applied"] for step in run.records("step"))
    return Counter(line.split()[0] for line in log.read_text().splitlines())


def between(
    folder: Path,
    steps: tuple[int, int],
    log_every: int,
    *flags: str,
    more: Mapping[str, str] | None = None,
) -> Counter[str]:
    """Count what the longer of two runs waits for more often; their start and end are the same."""
    shorter, longer = (calls(folder, count, log_every, *flags, more=more) for count in steps)
    return longer - shorter


def test_a_logged_step_waits_for_the_device_once_and_reads_once(tmp_path: Path) -> None:
    # Both end with a logged step; the longer has another one on the way.
    waits = between(tmp_path, (2 * LOG_EVERY, 3 * LOG_EVERY), LOG_EVERY)
    assert waits == {"device_synchronize": 1, "copy_to_host": 1, "stream_synchronize": 1}


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--strategy", "fsdp"),
        ("--activation-checkpointing", "selective"),
        ("--global-batch", "8"),
        ("--precision", "fp16"),
    ],
    ids=lambda flags: " ".join(flags) or "single",
)
def test_at_most_one_wait_a_step_beside_logged_steps(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    assert waits_of_ten_steps(tmp_path, *flags) <= 10


def test_a_decoder_of_transformers_waits_no_more(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURES["phi3"]))
    flags = ("--model", str(tmp_path), "--seq-len", "64", "--micro-batch", "2")
    (tmp_path / "ours").mkdir()
    ours = waits_of_ten_steps(tmp_path / "ours", more=APPLIED)
    assert waits_of_ten_steps(tmp_path, *flags, more=APPLIED) == ours


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_of_deepspeed_waits_at_most_once_more_than_without_us(
    tmp_path: Path, stage: int
) -> None:
    # It looks itself at the norm of the gradients and at overflows, for each group of parameters.
    # Stage 3 waits for its streams at every block, too.
    ours = waits_of_ten_steps(tmp_path, "--zero", str(stage), more=APPLIED)
    assert ours <= waits_of_ten_bare_steps(tmp_path, stage) + 10


def waits_of_ten_steps(folder: Path, *flags: str, more: Mapping[str, str] | None = None) -> int:
    return total(between(folder, (8, 18), 1000, *flags, more=more))


def waits_of_ten_bare_steps(folder: Path, stage: int) -> int:
    shorter, longer = (bare_calls(folder, stage, steps) for steps in (8, 18))
    return total(longer - shorter)


def bare_calls(folder: Path, stage: int, steps: int) -> Counter[str]:
    log = folder / f"bare-{steps}.log"
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    more = {**APPLIED, **alone, "MASTER_PORT": "0", "SHARDSCALE_NULL_GPU_LOG": str(log)}
    more["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    run = command(folder / "bare", "nullgpu.bare_deepspeed", str(stage), str(steps), more=more)
    assert run.code == 0, run.output[-4000:]
    return Counter(line.split()[0] for line in log.read_text().splitlines())


def total(calls: Counter[str]) -> int:
    return sum(calls[name] for name in WAITS)

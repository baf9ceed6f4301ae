"""How often the host waits for the device."""

from collections import Counter
from pathlib import Path

import pytest
from nullgpu.runs import train

LOG_EVERY = 10
WAITS = ("device_synchronize", "stream_synchronize", "event_synchronize", "blocking_copy")


def calls(folder: Path, steps: int, log_every: int, *flags: str) -> Counter[str]:
    """What a run of so many steps has asked the device to wait for, by the call's name."""
    log = folder / f"{steps}.log"
    run = train(
        folder / str(steps),
        *("--precision", "bf16", "--steps", str(steps), "--log-every", str(log_every)),
        *("--test-batches", "0", "--no-save-last", *flags),
        more={"NULLGPU_LOG": str(log)},
    )
    assert run.code == 0, run.output[-4000:]
    return Counter(line.split()[0] for line in log.read_text().splitlines())


def between(folder: Path, steps: tuple[int, int], log_every: int, *flags: str) -> Counter[str]:
    """What the longer of two runs waits for more often; their start and end are the same."""
    shorter, longer = (calls(folder, count, log_every, *flags) for count in steps)
    longer.subtract(shorter)
    return +longer


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


@pytest.mark.parametrize(("stage", "most"), [(1, 3), (2, 2)])
def test_what_deepspeed_waits_for_in_a_step(tmp_path: Path, stage: int, most: int) -> None:
    # It looks at the norm of the gradients itself before it updates anything. Stage 3 waits for
    # its streams at every block, too.
    assert waits_of_ten_steps(tmp_path, "--zero", str(stage)) <= 10 * most


def waits_of_ten_steps(folder: Path, *flags: str) -> int:
    waits = between(folder, (8, 18), 1000, *flags)
    return sum(waits[name] for name in WAITS)

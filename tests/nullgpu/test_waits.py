"""How often the host waits for the device."""

from collections import Counter
from pathlib import Path

from nullgpu.runs import train

LOG_EVERY = 10


def calls(folder: Path, steps: int) -> Counter[str]:
    """What a run of so many steps has asked the device to wait for, by the call's name."""
    log = folder / f"{steps}.log"
    run = train(
        folder / str(steps),
        *("--precision", "bf16", "--steps", str(steps), "--log-every", str(LOG_EVERY)),
        *("--test-batches", "0", "--no-save-last"),
        more={"NULLGPU_LOG": str(log)},
    )
    assert run.code == 0, run.output[-4000:]
    return Counter(line.split()[0] for line in log.read_text().splitlines())


def test_waits_between_two_logged_steps(tmp_path: Path) -> None:
    # What both runs do at their start and end is the same.
    shorter, longer = (calls(tmp_path, steps) for steps in (2 * LOG_EVERY, 4 * LOG_EVERY))
    longer.subtract(shorter)
    between = {name: count / 2 for name, count in longer.items() if count}
    # The device is waited for once, when a step is logged. The journal then reads four values of
    # each step since the last one, and two more, from a device that has nothing left to do.
    assert between.pop("device_synchronize") == 1
    assert between.pop("copy_to_host") <= 4 * LOG_EVERY + 2
    assert between.pop("stream_synchronize") <= 4 * LOG_EVERY + 5
    assert between == {}

"""The arithmetic under a report: fast reading of steps, thinning, the Pareto front."""

import json
import math
import random

import numpy as np
import pytest
from report_folder import steps

from launcher.compare.report.columns import printable, shown
from launcher.compare.report.goals import pareto
from launcher.compare.report.series import BUCKETS, read_steps, thin, timeline
from launcher.util.sizes import GIB


def lines(losses: list[float]) -> list[str]:
    return [json.dumps(record.as_dict()) for record in steps(losses, gpu=True)]


def test_fast_reading_is_what_a_json_parser_reads() -> None:
    rng = random.Random(0)
    written = lines([rng.random() * 10 ** rng.randint(-8, 8) for _ in range(300)])
    fast, damaged = read_steps("\n".join(written) + "\n")
    # Another order of the keys is not what the fast way knows.
    other = [json.dumps(dict(reversed(json.loads(line).items()))) for line in written]
    other = ['{"kind": "step", ' + line[1:].replace(', "kind": "step"', "") for line in other]
    slow, _ = read_steps("\n".join(other) + "\n")
    assert fast is not None
    assert slow is not None
    assert damaged == 0
    for name in ("step", "loss"):
        assert np.array_equal(getattr(fast, name), getattr(slow, name))
    assert (fast.phases_s, fast.tokens_per_s) == (slow.phases_s, slow.tokens_per_s)
    assert fast.peaks_bytes == slow.peaks_bytes
    assert fast.peaks_bytes["reserved_peak_bytes"] == 2 * GIB


def test_warm_up_is_left_out_as_the_run_itself_does() -> None:
    series, _ = read_steps("\n".join(lines([1.0] * 10)))
    assert series is not None
    assert series.step_time_s == pytest.approx(0.5)
    assert series.first_step_s == pytest.approx(5.0)
    assert series.phases_s is not None
    assert sum(series.phases_s.values()) == pytest.approx(0.5)
    short, _ = read_steps("\n".join(lines([1.0] * 2)))
    assert short is not None
    assert (short.step_time_s, short.tokens_per_s, short.phases_s) == (None, None, None)


def test_warm_up_of_every_start_is_left_out() -> None:
    records = [json.loads(line) for line in lines([1.0] * 10)]
    for record in records[5:7]:  # a restart compiles anew
        record["duration_s"] = 60.0
    written = [*map(json.dumps, records)]
    begins = '{"kind": "run", "run": "resumed"}'
    series, _ = read_steps("\n".join([begins, *written[:5], begins, *written[5:]]))
    assert series is not None
    assert series.step_time_s == pytest.approx(0.5)
    assert series.tokens_per_s == pytest.approx(2048 / 0.5)
    assert series.steady_steps == 6


def test_the_spread_of_throughput_is_said_where_there_are_steps_enough() -> None:
    records = [json.loads(line) for line in lines([1.0] * 10)]
    for record, duration_s in zip(records, (9, 9, 1, 1, 2, 2, 2, 4, 4, 4), strict=True):
        record["duration_s"] = duration_s
    series, _ = read_steps("\n".join(map(json.dumps, records)))
    assert series is not None
    assert series.rate_quartiles == (512.0, 1024.0, 1280.0)
    assert series.steady_steps == 8
    few, _ = read_steps("\n".join(lines([1.0] * 6)))
    assert few is not None
    assert (few.steady_steps, few.rate_quartiles) == (4, None)


def test_a_repeated_step_counts_once_with_its_last_record() -> None:
    series, _ = read_steps("\n".join(lines([5.0, 4.0, 3.0]) + lines([5.0, 4.5])[1:]))
    assert series is not None
    assert series.step.tolist() == [1, 2, 3]
    assert series.loss.tolist() == [5.0, 4.5, 3.0]


def test_no_step_is_no_series() -> None:
    assert read_steps("") == (None, 0)
    assert read_steps('{"kind": "step", "step": 1, "lo') == (None, 1)


def test_thinning_keeps_extremes_ends_and_gaps() -> None:
    y = np.sin(np.arange(10_000) / 300)
    y[1234], y[8765], y[5000:5200] = 9.0, -9.0, math.nan
    x, thinned = thin(np.arange(10_000), y, 500)
    assert len(x) <= 502
    assert (x[0], x[-1]) == (0, 9999)
    assert thinned[x.index(1234)] == 9.0
    assert thinned[x.index(8765)] == -9.0
    assert None in thinned


def test_pareto_front_is_what_nothing_dominates() -> None:
    rng = random.Random(1)
    for _ in range(50):
        points = {str(i): (rng.randint(1, 9), rng.randint(1, 9)) for i in range(12)}
        front = pareto({name: (float(m), float(r)) for name, (m, r) in points.items()})
        for name, (memory, rate) in points.items():
            dominated = any(
                m <= memory and r >= rate and (m, r) != (memory, rate) for m, r in points.values()
            )
            assert not (name in front and dominated)
            same = {other for other, point in points.items() if point == points[name]}
            assert dominated or same <= front


def test_a_timeline_keeps_memory_peaks_and_means_of_power() -> None:
    samples = [
        {"t_s": t / 10, "source": "nvml", "memory_used_bytes": 100 + (t == 777), "power_w": t % 2}
        for t in range(2000)
    ]
    result = timeline(0, samples)
    assert len(result.t_s) <= BUCKETS
    assert max(v for v in result.readings["memory_used_bytes"] if v is not None) == 101
    assert result.readings["power_w"][3] == pytest.approx(0.5, abs=0.05)
    assert "temperature_c" not in result.readings


def test_unknown_is_never_zero() -> None:
    assert shown(None, "bytes") == "n/a"
    assert shown(math.nan, "loss") == "n/a"
    assert shown(0, "bytes") == "0 B"
    assert shown(0.0114 * GIB, "bytes") == "11.7 MiB"
    assert shown(1.125 * GIB, "bytes") == "1.13 GiB"  # as the page rounds
    assert shown(999.96 * GIB, "bytes") == "1,000 GiB"
    assert shown(3 * GIB, "bytes") == "3.00 GiB"
    assert shown(0.5, "seconds") == "0.500 s"


def test_names_are_printable() -> None:
    assert printable("a\x1b[31m\n\u202eb\udcff") == "a\ufffd[31m\ufffd\ufffdb\ufffd"

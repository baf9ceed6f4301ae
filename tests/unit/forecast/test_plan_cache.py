"""Cached predictions: the same results, and damaged or foreign files are ignored."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config.arguments import parse_run_config
from launcher.forecast import prediction_cache
from launcher.forecast.assess import Assessment, assess
from launcher.forecast.candidates import choices, given_fields
from launcher.forecast.cluster import Cluster, find_cluster
from launcher.forecast.plan_cli import parse_options

FLAGS = "--model nano --layers 2 --seq-len 64 --precision bf16 --global-batch 16"
FLAGS += " --activation-checkpointing none"
CLUSTER = "--gpus 2 --gpu H100 --gpu-memory 1700MiB --no-calibration"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDSCALE_CACHE", str(tmp_path))
    return tmp_path / prediction_cache.FOLDER


def planned(more: str = "", strategy: str = "--zero 3") -> Assessment:
    flags = [*FLAGS.split(), *strategy.split(), *more.split()]
    config = parse_run_config(flags)
    given = given_fields(flags, config)
    choice = choices(config, given, world_size=2, ranks_per_node=2, device_type="cuda")[0]
    cluster: Cluster = find_cluster(parse_options(CLUSTER.split())[0])[0]
    found = assess(choice, cluster)
    return replace(found, prediction=replace(found.prediction, events=(), streams={}))


def refused(*_: object, **__: object) -> None:
    raise AssertionError("it was known")


def test_what_was_predicted_is_not_predicted_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planned()
    (file,) = cache.iterdir()
    monkeypatch.setattr(prediction_cache, "predict", refused)
    monkeypatch.setattr(prediction_cache, "reserved", refused)
    assert planned() == first
    # Each of these is another question.
    for more in ("--dropout 0.1", "--seq-len 32", "--grad-accum-dtype bf16"):
        with pytest.raises(AssertionError, match="it was known"):
            planned(more)
    assert list(cache.iterdir()) == [file]


def test_a_file_that_is_not_whole_is_not_used(cache: Path) -> None:
    first = planned()
    (file,) = cache.iterdir()
    whole = file.read_text(encoding="utf-8")
    peak = str(first.prediction.peak_bytes)
    assert peak in whole
    damaged = ["", "{}", whole[: len(whole) // 2], whole.replace(peak, "1"), "a\nb\nc\n", "\0"]
    for text in damaged:
        file.write_text(text, encoding="utf-8")
        assert planned() == first
        assert file.read_text(encoding="utf-8") == whole


def test_a_cache_that_cannot_be_written_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planned()
    taken = tmp_path / "taken"
    taken.write_text("a file")
    monkeypatch.setenv("SHARDSCALE_CACHE", str(taken))
    assert planned() == first


def test_other_sources_have_other_files(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned()
    monkeypatch.setattr(prediction_cache, "_code_version", lambda: "other")
    assert planned() == first
    assert len(list(cache.iterdir())) == 2


def test_what_depends_on_a_file_is_not_kept(tmp_path: Path, cache: Path) -> None:
    settings = tmp_path / "ds.json"
    settings.write_text('{"zero_optimization": {"stage": 3}}')
    planned(strategy=f"--deepspeed {settings}")
    assert not cache.exists()


def test_the_oldest_are_forgotten(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    files = [cache / f"{number}.json" for number in range(6)]
    for number, path in enumerate(files):
        path.touch()
        os.utime(path, (number, number))
    monkeypatch.setattr(prediction_cache, "MAX_FILES", 6)
    prediction_cache.remove_oldest_files()
    assert len(list(cache.iterdir())) == 6
    monkeypatch.setattr(prediction_cache, "MAX_FILES", 4)
    prediction_cache.remove_oldest_files()
    assert sorted(cache.iterdir()) == files[4:]

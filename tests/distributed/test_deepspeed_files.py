"""Two ranks train with DeepSpeed files as people have them, and with every key that is passed on:
losses, norms and the state that a checkpoint would hold are those of the flags without a file."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import HERE, Results, run_ranks, write_text

from launcher.config.arguments import parse_run_config
from launcher.config.deepspeed_file.table import ZERO
from launcher.config.schema import RunConfig
from launcher.util.errors import UserError
from launcher.util.flags import flag

REAL = sorted((HERE.parent / "deepspeed_files").glob("*.json"))
RANKS = 2
# What is passed on, at values that DeepSpeed does not have anyway.
OTHERWISE: dict[str, Any] = {
    "contiguous_gradients": False,
    "reduce_scatter": False,
    "reduce_bucket_size": 101,
    "allgather_partitions": False,
    "allgather_bucket_size": 102,
    "use_multi_rank_bucket_allreduce": False,
    "overlap_comm": True,
    "parameter_alignment": True,
    "sub_group_size": 100,
    "memory_efficient_linear": False,
    "ignore_unused_parameters": False,
    "enable_sanity_checks": True,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 10**9,
    "stage3_model_persistence_threshold": 1000,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_module_granularity_threshold": 16,
    "stage3_use_all_reduce_for_fetch_params": True,
    "stage3_allgather_sequential": True,
}


def by_flags(config: RunConfig) -> list[str]:
    """Return the flags that set the same fields without the file."""
    default, flat = RunConfig().flat(), config.flat()
    changed = {k: v for k, v in flat.items() if v != default.get(k) and k != "deepspeed"}
    argv: list[str] = []
    for name, value in changed.items():
        if isinstance(value, bool):
            argv.append(flag(name) if value else f"--no-{flag(name)[2:]}")
        else:
            argv += [flag(name), *map(str, value if isinstance(value, list) else [value])]
    return argv


def cases(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """(name, arguments with a file, arguments without)."""
    usual = ["--steps=3", "--lr=0.01"]
    batch = ["--micro-batch=2", "--global-batch=8"]
    for path in REAL:
        said = f"--deepspeed={path}"
        for attempt in ([said, *usual, *batch], [said, "--steps=3"]):
            try:
                config = parse_run_config(attempt, world_size=RANKS)
            except UserError:
                continue
            yield path.stem, attempt, by_flags(config)
            break
    for stage in (2, 3):
        flags = [f"--zero={stage}", *usual, *batch]
        for key, value in OTHERWISE.items():
            if stage == 3 or not key.startswith("stage3_"):
                path = folder / f"{key}-{stage}.ds"
                path.write_text(json.dumps({"zero_optimization": {"stage": stage, key: value}}))
                yield f"{key}-{stage}", [f"--deepspeed={path}", *usual, *batch], flags


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    folder = tmp_path_factory.mktemp("deepspeed")
    text = write_text(folder / "text.txt")
    known = list(cases(folder))
    runs: dict[str, list[str]] = {}
    for name, with_file, without in known:
        runs[name] = with_file
        runs[" ".join(without)] = without
    (folder / "runs.json").write_text(json.dumps(runs))
    ended = run_ranks((RANKS, "deepspeed_rank", text, folder))
    found = {result["name"]: result for result in Results.of(folder, ended).found}
    assert set(found) == set(runs), ended.stderr
    return {name: (found[name], found[" ".join(without)]) for name, _, without in known}


def test_every_key_that_is_passed_on_is_tried() -> None:
    assert {name for name, key in ZERO.items() if key.fate == "passed"} == set(OTHERWISE)


def test_a_file_trains_as_its_flags_do(results: dict[str, tuple[Any, Any]]) -> None:
    assert len(results) >= 15 + 2 * 12 + 8
    wrong = {}
    for name, (with_file, without) in results.items():
        assert "error" not in without, without["error"]
        if "error" in with_file:
            wrong[name] = with_file["error"]
            continue
        close = all(
            math.isclose(a, b, rel_tol=2e-3 if with_file["precision"] == "bf16" else 1e-5)
            for kind in ("losses", "norms")
            for a, b in zip(with_file[kind], without[kind], strict=True)
        )
        # The sums are weighted by place: what lies elsewhere is thousands off.
        same = with_file["state"]["whole"] == 1 and all(
            math.isclose(value, without["state"][kind], abs_tol=10.0 if kind == "param" else 0.1)
            for kind, value in with_file["state"].items()
        )
        if not (close and same):
            wrong[name] = f"{with_file} instead of {without}"
    assert wrong == {}

"""A plan's search for what was asked, and what is printed and written of it."""

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from launcher.config.arguments import parse_run_config, with_micro_batch
from launcher.config.init_from import HF_CONFIG
from launcher.config.schema import DefaultMicroBatch, RunConfig
from launcher.config.sharding import MODEL_PARALLEL
from launcher.forecast.assess import Assessment
from launcher.forecast.candidates import given_fields
from launcher.forecast.cluster import Cluster, find_cluster
from launcher.forecast.evaluation import Progress, Search
from launcher.forecast.plan_records import as_records, failed_records, write_page
from launcher.forecast.search import SearchResult, plan
from launcher.forecast.table import (
    allocator_lines,
    best_of_each,
    closing_lines,
    opening_lines,
    table,
)
from launcher.strategies import STRATEGIES
from launcher.strategies.base import missing_library
from launcher.util.errors import ExitCode, Failure, tell
from launcher.util.flags import as_words
from launcher.util.sizes import duration
from launcher.util.tables import say

MODEL_FOLDER: Final = Path("MODEL_FOLDER")
"""Placeholder in a printed command for weights that the planner has not seen."""
_LINE_EVERY_S: Final = 15.0


def print_plan(options: argparse.Namespace, training: Sequence[str]) -> int:
    """Plan, print and write what was asked for; returns an exit code of `ExitCode`."""
    with contextlib.closing(ProgressLine()) as line:
        silent = options.quiet or str(options.json) == "-"
        try:
            found, cluster, notes = answer(options, training, _silence if silent else line)
        except Failure as error:
            tell(error)
            return ExitCode.FAILED
    show(found, options, training, cluster, notes)
    fits = found.best_first[0].verdict != "does not fit"
    return ExitCode.DONE if fits else ExitCode.NOTHING_FITS


def _silence(done: int, total: int) -> None:
    pass


def answer(
    options: argparse.Namespace, training: Sequence[str], progress: Progress = _silence
) -> tuple[SearchResult, Cluster, list[str]]:
    """Return the ranked candidates, the machines, and notes on what was assumed.

    Raises:
        UserError: a value is invalid, or no candidate is.
        Failure: none could be evaluated.
    """
    cluster, notes = find_cluster(options)
    config = with_weights(parse_run_config(training, cluster.world_size), options)
    fixed = given_fields(training, config)
    if not fixed & {"strategy", "zero"}:
        missing = [missing_library(strategy) for strategy in STRATEGIES.values()]
        notes += [f"left out: {reason}" for reason in missing if reason]
    evaluate_all = options.all or options.json is not None or options.page is not None
    search = Search(cluster=cluster, goal=options.goal, evaluate_all=evaluate_all)
    return plan(config, fixed, search, progress=progress), cluster, notes


def with_weights(config: RunConfig, options: argparse.Namespace) -> RunConfig:
    """Return the config with the folder of the weights that it trains, so that the printed command
    does what was asked.

    That is the folder of an `--hf-config` whose shape no flag changes, or a placeholder beside
    adapters.
    """
    model, folder = config.model, None
    if model.init_from is not None or model.random_base:
        return config
    if options.shape and model.build().computes() == _computes(options.shape):
        own = options.hf_config.name == HF_CONFIG
        folder = options.hf_config.parent if own else MODEL_FOLDER
    elif model.lora_rank is not None:
        folder = MODEL_FOLDER
    return config if folder is None else config.replace(init_from=folder)


def _computes(shape: Sequence[str]) -> Mapping[str, Any]:
    return parse_run_config(shape).model.build().computes()


class ProgressLine:
    """Candidates done and estimated time left: one line rewritten on a terminal, few lines in a
    log. On stderr, so that the plan itself can be piped."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._started_s = self._said_s = time.monotonic()
        self._reached_s = {0: self._started_s}
        self._shown = ""

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` candidates are evaluated."""
        now_s = time.monotonic()
        self._reached_s.setdefault(done, now_s)
        text = f"planning: {done} of {total} choices, {duration(now_s - self._started_s)}"
        if done * 4 >= total:
            # The first ones record what the others share, so that they say nothing of the rest.
            half = max(number for number in self._reached_s if number <= done / 2)
            left_s = (now_s - self._reached_s[half]) * (total - done) / (done - half)
            text += f", about {duration(left_s)} left"
        if self._live and text != self._shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._shown = text
        elif not self._live and now_s - self._said_s >= _LINE_EVERY_S:
            print(text, file=sys.stderr, flush=True)
            self._said_s = now_s

    def close(self) -> None:
        """Erase the line."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def show(
    result: SearchResult,
    options: argparse.Namespace,
    training: Sequence[str],
    cluster: Cluster,
    notes: Sequence[str],
) -> None:
    """Print the table and the command, and write what was asked for."""
    found, best = result.best_first, result.best_first[0]
    command = best_command(result, options, training, cluster)
    records = [*as_records(found, cluster), *failed_records(result.failed)]
    text = json.dumps(records, indent=2) + "\n"
    to_screen = str(options.json) == "-"
    # Files first: a pipe that reads the console may close early.
    if options.json is not None and not to_screen:
        options.json.write_text(text, encoding="utf-8")
    if options.page is not None:
        write_page(options.page, found, cluster, command)
    applied = options.apply is not None and best.verdict != "does not fit"
    if applied:
        flat = best.run.config.replace(device="auto").flat()
        options.apply.write_text(yaml.safe_dump(flat, sort_keys=False), encoding="utf-8")
    if to_screen:
        print(text, end="")
    else:
        shown = found if options.all else best_of_each(found)
        for line in opening_lines(shown, cluster, notes):
            say(line)
        failed = result.failed if options.all else best_of_each(result.failed)
        table(shown, failed, cluster, price=options.price_per_gpu_hour, choices=result.choices)
        for line in (*allocator_lines(shown, cluster), *closing_lines(result, cluster)):
            say(line)
        if best.verdict != "does not fit":
            print(f"\n  {command}")
            if best.run.config.model.init_from == MODEL_FOLDER:
                label = best.run.config.model.label
                say(f"\n{MODEL_FOLDER}: the folder with the weights of {label}")
    if options.apply is not None and not applied:
        tell(f"--apply {options.apply}: nothing fits: not written")


def best_command(
    result: SearchResult, options: argparse.Namespace, training: Sequence[str], cluster: Cluster
) -> str:
    """Compose the command of the best candidate; a folder of weights says the model's shape."""
    best = result.best_first[0]
    shaped = best.run.config.model.init_from is not None
    return command_of(best, training[len(options.shape) :] if shaped else training, cluster)


def command_of(best: Assessment, training: Sequence[str], cluster: Cluster) -> str:
    """Compose the command of a candidate: the user's own flags, and those the plan has chosen."""
    config = parse_run_config(training, cluster.world_size)
    asked = RunConfig().flat() | config.flat()
    if isinstance(config.data.micro_batch, DefaultMicroBatch):
        del asked["micro_batch"]  # said in any case, or the run would choose again
    chosen = best.run.config.flat()
    names = (
        *("init_from", "model"),  # --goal largest-model
        *("strategy", "zero", "reshard_after_forward", "replicate", "reduce_each_micro_batch"),
        *("offload_optimizer", "offload_param", *MODEL_PARALLEL),
        *("precision", "activation_checkpointing", "micro_batch", "global_batch"),
    )
    flags = list(training)
    if asked.get("micro_batch") == "auto":
        flags = with_micro_batch(flags, chosen["micro_batch"])
        asked["micro_batch"] = chosen["micro_batch"]
    for name in names:
        value = chosen.get(name)
        if value == asked.get(name) or (name == "strategy" and "zero" in chosen):
            continue
        if name == "model" and chosen.get("init_from") not in (None, str(MODEL_FOLDER)):
            continue  # the folder says it
        flags += as_words({name: value})
    if asked["device"] == "cpu" and cluster.machine.device == "cuda":
        flags += ["--device", "cuda"]  # the config is of a trial without a GPU
    nodes = -(-cluster.world_size // cluster.ranks_per_node)
    start = ["torchrun"]
    if nodes > 1:
        start += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29400"]
    start += ["--nproc", str(cluster.ranks_per_node), "-m", "launcher.train"]
    return shlex.join([*start, *flags])

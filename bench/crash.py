"""kill -9 of a random rank at a random moment, again and again, with torchrun restarting the run.

    python bench/crash.py [--kills 200] [--only NAME...] [--output bench/results/crash.json]

A third of the kills wait until a checkpoint is being written, a third until training has gone on,
and a third come while the ranks start. After each kill every checkpoint that is there is read
whole, checksums included. At the end every step must be on record exactly once, on every rank, with
the losses of a run that nobody disturbed.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.append(str(Path(__file__).parents[1]))  # found where nothing is installed

from launcher.checkpoint import Checkpoint, DamagedCheckpoint
from launcher.checkpoint.rank_files import RangeReader
from launcher.strategies.flat_shards import Shard

STRATEGIES = {
    "ddp": ["--strategy", "ddp"],
    "fsdp": ["--strategy", "fsdp"],
    "zero2": ["--zero", "2"],
    "zero3": ["--zero", "3"],
    "fsdp, cut sequences": ["--strategy", "fsdp", "--context-parallel", "2"],
    "single, cut matrices": ["--strategy", "single", "--tensor-parallel", "2"],
}
MODEL = ["--device", "cpu", "--tokenizer", "byte", "--vocab-size", "257", "--layers", "4"]
MODEL += ["--d-model", "256", "--heads", "4", "--context", "32", "--micro-batch", "2"]
# With the default --log-every: between two lines of the log nothing may go missing either.
MODEL += ["--report-to=none"]
RANKS = 2
START_S = 5.0  # in which the ranks import, meet and load
MOST_STEPS, MOST_SAVES = 12, 3  # that a life gets before it is hit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    if options.output is not None and options.output.exists():
        sys.exit(f"{options.output} exists: nothing is overwritten")
    draw = random.Random(options.seed)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text(Path(argparse.__file__).read_text())
        for number, name in enumerate(options.only):
            each, left = divmod(options.kills, len(options.only))
            share = each + (number < left)
            command = [*STRATEGIES[name], *MODEL, "--data", str(corpus)]
            results.append({"strategy": name, **disturbed(command, Path(folder), share, draw)})
            print(json.dumps(results[-1]), flush=True)
    total = {
        key: sum(result[key] for result in results)
        for key in ("kills", "kills_while_saving", "checkpoints_read", "checkpoints_unreadable")
    }
    total["steps_not_counted_once"] = sum(r["steps_not_counted_once"] for r in results)
    total["largest_loss_difference"] = max(r["largest_loss_difference"] for r in results)
    result = {"total": total, "runs": results, "torch": torch.__version__}
    print(json.dumps(total))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    bad = total["checkpoints_unreadable"] or total["steps_not_counted_once"]
    sys.exit(1 if bad else 0)


def disturbed(flags: list[str], folder: Path, kills: int, draw: random.Random) -> dict[str, Any]:
    """One run that is killed `kills` times, beside one that is not."""
    steps = 10 * kills + 100
    flags = [*flags, "--steps", str(steps)]
    quiet, out = folder / "quiet", folder / "run"
    for path in (quiet, out):
        shutil.rmtree(path, ignore_errors=True)
    done = subprocess.run(command(flags, quiet), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    saving = [*flags, "--save-every", "5", "--keep", "3"]
    tally = {"kills": 0, "kills_while_saving": 0, "checkpoints_read": 0}
    damages: list[str] = []
    log = (folder / "log.txt").open("w")
    agent = subprocess.Popen(
        command(saving, out, f"--max-restarts={2 * kills}"), stdout=log, stderr=subprocess.STDOUT
    )
    victims: list[psutil.Process] = []
    while tally["kills"] < kills and agent.poll() is None:
        victims = wait_for_ranks(agent, victims)
        if not victims:
            break
        moment = ("saving", "training", "starting")[tally["kills"] % 3]
        saving_folder = wait_for_moment(out, draw, moment)
        victim = draw.choice(victims)
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
        tally["kills"] += 1
        tally["kills_while_saving"] += saving_folder is not None and saving_folder.exists()
        for path in sorted((out / "checkpoints").glob("step-*")):
            if (damage := unreadable(path)) != "gone":
                tally["checkpoints_read"] += 1
                damages += [damage] if damage else []
        print(f"kill {tally['kills']}/{kills}", file=sys.stderr, flush=True)
    code = agent.wait()
    assert code == 0, f"exit code {code}: {(folder / 'log.txt').read_text()[-3000:]}"
    expected, found = losses(quiet, 0), [losses(out, rank) for rank in range(RANKS)]
    counts = [sum(step == s for s, _ in one) for one in found for step in range(1, steps + 1)]
    by_step = dict(found[0])
    return {
        **tally,
        "checkpoints_unreadable": len(damages),
        "damages": damages,
        "steps": steps,
        "steps_not_counted_once": sum(count != 1 for count in counts),
        "largest_loss_difference": max(abs(by_step[s] - loss) for s, loss in expected),
        "test_loss_difference": abs(test_loss(quiet) - test_loss(out)),
    }


def command(flags: list[str], out: Path, *more: str) -> list[str]:
    start = [sys.executable, "-m", "launcher.torchrun", "--nproc", str(RANKS), *more]
    return [*start, "-m", "launcher.train", *flags, "--out", str(out)]


def wait_for_ranks(agent: "subprocess.Popen[bytes]", old: list[psutil.Process]) -> list[Any]:
    """The two ranks of the agent's next life; none when it has ended."""
    while agent.poll() is None:
        ranks = []
        for child in psutil.Process(agent.pid).children():
            try:
                if child not in old and "RANK" in child.environ():
                    ranks.append(child)
            except psutil.Error:
                continue
        if len(ranks) == RANKS:
            return ranks
        time.sleep(0.02)
    return []


def wait_for_moment(out: Path, draw: random.Random, moment: str) -> Path | None:
    """Until the ranks that have just started are where they shall be hit.

    Returns:
        The folder that a checkpoint is being written into, when that is the moment.
    """
    if moment == "starting":
        time.sleep(draw.uniform(0, START_S))
        return None
    until_s = time.monotonic() + 300
    seen = set((out / "checkpoints").glob(".saving-*"))
    saves, steps = draw.randint(1, MOST_SAVES), draw.randint(1, MOST_STEPS)
    begun_s = time.time()
    first: int | None = None
    while time.monotonic() < until_s:
        if moment == "training":
            step = last_step(out / "rank0.jsonl", begun_s)
            first = step if first is None else first
            if step is not None and first is not None and step >= first + steps:
                return None
            time.sleep(0.01)
            continue
        for folder in set((out / "checkpoints").glob(".saving-*")) - seen:
            seen.add(folder)
            saves -= 1
            if saves == 0:
                time.sleep(draw.uniform(0, 0.03))
                return folder
        time.sleep(0.0005)
    return None


def last_step(path: Path, begun_s: float) -> int | None:
    """The newest step on record, when it is of the life that began then."""
    if not path.exists() or path.stat().st_mtime < begun_s:
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8000))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        if line.startswith('{"kind": "run"'):
            break  # what is above is an earlier attempt's
        if line.startswith('{"kind": "step"') and line.endswith("}"):
            return int(json.loads(line)["step"])
    return None


def unreadable(path: Path) -> str | None:
    """Read all of a checkpoint; its damage, None without, `gone` when it was pruned meanwhile."""
    try:
        checkpoint = Checkpoint.open(path)
        with RangeReader(checkpoint) as reader:
            for kind in checkpoint.kinds:
                for name, shape in checkpoint.shapes.items():
                    values = torch.empty(torch.Size(shape).numel())
                    reader.read_into(Shard(name=name, kind=kind, start=0, data=values))
    except DamagedCheckpoint as error:
        return str(error) if path.exists() else "gone"
    return None


def losses(run: Path, rank: int) -> list[tuple[int, float]]:
    """(step, loss) of every step record, in the order of the file."""
    records = map(json.loads, (run / f"rank{rank}.jsonl").read_text().splitlines())
    return [(r["step"], r["loss"]) for r in records if r["kind"] == "step"]


def test_loss(run: Path) -> float:
    return float(json.loads((run / "summary.json").read_text())["test_loss"])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

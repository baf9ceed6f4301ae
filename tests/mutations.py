"""Faults set by hand, one at a time, and the test that catches each.

    python tests/mutations.py [FAULT...]

Each fault replaces a piece of the source in a copy of the tree and runs the tests that should fail
there; the first that does is printed. Exit code 1 if one is not caught. Minutes of CPU time: it is
run by hand, when tests are removed. A fault whose text is not in the source any more is an error,
to be said anew in today's words.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PARITY: Final = "tests/distributed/test_parity.py"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`right` becomes `wrong` in `file`; `tests` are pytest's arguments."""

    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


FAULTS: Final = {
    "a gradient is not divided by accumulation": Fault(
        file="launcher/strategies/native.py",
        right="scale(loss * self._scale).backward()",
        wrong="scale(loss).backward()",
        tests=("tests/unit/strategies/test_train_step.py",),
    ),
    "a moment is not restored": Fault(
        file="launcher/strategies/flat_shards.py",
        right="tensor if kind == PARAM else optimizer.state[tensor][kind]",
        wrong="tensor if kind == PARAM else optimizer.state[tensor][kind].clone()",
        tests=("tests/unit/checkpoint/test_checkpoint.py",),
    ),
    "a rank's slice of the batch is off by one": Fault(
        file="launcher/data/batches.py",
        right="[rank * rows : (rank + 1) * rows]",
        wrong="[rank * rows + 1 : (rank + 1) * rows + 1]",
        tests=("tests/unit/data/test_data_batches.py",),
    ),
    "all ranks draw the same dropout": Fault(
        file="launcher/train.py",
        right="torch.manual_seed(loop.seed + world.rank)",
        wrong="torch.manual_seed(loop.seed)",
        tests=("tests/distributed/test_periodic.py", "-k", "zero1-equal"),
    ),
    "a bucket of DDP is not counted in the forecast": Fault(
        file="launcher/strategies/ddp/forecast.py",
        right="elements = sum(p.elements for p in self.trained)",
        wrong="elements = sum(p.elements for p in self.trained[:1])",
        tests=("tests/distributed/test_plan_fake_group.py",),
    ),
    "a clip norm is computed over local shards only": Fault(
        file="launcher/strategies/native.py",
        right="(self._model_parallel.all_reduce(square_sum) + norm.square()).sqrt()",
        wrong="(square_sum + norm.square()).sqrt()",
        tests=(PARITY, "-k", "single and tensor and odd"),
    ),
    "the number of targets of a micro-batch is ignored": Fault(
        file="launcher/data/batches.py",
        right="return tuple((counted * means / counts[self.indices(step)].sum()).tolist())",
        wrong="return (1.0,) * len(counted)",
        tests=(PARITY, "-k", "masked and by and zero1"),
    ),
    "a checkpoint has its name before its data is on disk": Fault(
        file="launcher/checkpoint/store.py",
        right="            sync(file)\n",
        wrong="            pass\n",
        tests=("tests/unit/checkpoint/test_checkpoint.py",),
    ),
    "a loss scale is not restored": Fault(
        file="launcher/run/saves.py",
        right="engine.set_loss_scale(scale)",
        wrong="pass",
        tests=("tests/distributed/test_resume.py", "-k", "loss_scale"),
    ),
    "RoPE counts a rank's positions from 0 under context parallel": Fault(
        file="launcher/parallel/context/local.py",
        right="super().rotation(self._positions(len(positions), positions.device))",
        wrong="super().rotation(positions)",
        tests=(PARITY, "-k", "zero2 and rope and context"),
    ),
    "LoRA's scale is left out": Fault(
        file="model/linears.py",
        right="alpha=self.scale",
        wrong="alpha=1.0",
        tests=("tests/unit/model/test_lora.py",),
    ),
    "weight decay is applied to norms": Fault(
        file="launcher/optim/entry.py",
        right='{"params": vectors, "weight_decay": 0.0}',
        wrong='{"params": vectors, "weight_decay": weight_decay}',
        tests=("tests/unit/optim/test_optim.py",),
    ),
}


def main(names: list[str]) -> int:
    """Set each fault and print what caught it; 1 if one was not caught."""
    missed = 0
    for name in names or FAULTS:
        caught = caught_by(FAULTS[name])
        missed += caught is None
        print(f"{name}: {caught or 'NOT CAUGHT'}", flush=True)
    return min(1, missed)


def caught_by(fault: Fault) -> str | None:
    """The first test that fails with the fault, or None if all pass.

    Raises:
        ValueError: the source does not have the text, or not once.
        RuntimeError: no test was run, or they did not get so far.
    """
    with tempfile.TemporaryDirectory(prefix="shardscale-fault-") as folder:
        tree = Path(folder) / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for file in filter(None, listed.stdout.split("\0")):
            if (ROOT / file).exists():
                (tree / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, tree / file, follow_symlinks=False)
        source = tree / fault.file
        text = source.read_text(encoding="utf-8")
        if text.count(fault.right) != 1:
            raise ValueError(f"{fault.file} has {fault.right!r} {text.count(fault.right)} times")
        source.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-rf", "--tb=no", *fault.tests],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0].removeprefix("FAILED ") if failed else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

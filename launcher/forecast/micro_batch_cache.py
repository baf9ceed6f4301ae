"""Cache of the results of `--micro-batch auto`, one small file each in the cache folder."""

import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from typing import Any, Final

import psutil
import torch

from launcher.config.deepspeed_file import passed_on
from launcher.config.schema import RunConfig
from launcher.measure.hardware import is_rehearsal
from launcher.util.errors import WHY, UserError, refused
from launcher.util.files import default_cache_dir, replace_text
from launcher.util.packages import version_of
from launcher.util.startup import allocator_variable

SCHEMA_VERSION: Final = 2
SAME_MEMORY: Final = (0.99, 1.1)
"""Ratio of the memory now to that of a cached search within which its result still holds."""
# Fields that change neither the size nor the number of tensors.
WITHOUT_EFFECT: Final = frozenset(
    {
        *("micro_batch", "steps", "epochs", "max_minutes", "eval_every", "save_every", "keep"),
        *("test_batches", "sample_every"),
        *("save_minutes", "stop_after", "resume", "seed", "out", "collective_timeout_s"),
        *("lr", "min_lr_ratio", "warmup_steps", "weight_decay", "betas"),
        *("eps", "log_every", "log_level", "schedule", "decay_steps"),
    }
)
ASK_CUDA = """
import json, torch
devices = [torch.cuda.device(i) for i in range(torch.cuda.device_count())]
free = [torch.cuda.mem_get_info(d.idx)[0] for d in devices]
print(json.dumps([torch.cuda.get_device_name(0), min(free)]))
"""


def free_on_gpus() -> tuple[str, int]:
    """Return the GPU's name in CUDA and the free bytes of the fullest one.

    Asked in another process: one that has asked keeps a CUDA context, which takes memory itself.

    Raises:
        UserError: CUDA does not answer.
    """
    done = subprocess.run(
        [sys.executable, "-c", ASK_CUDA], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"--micro-batch auto: the GPUs do not say what is free: {said}")
    name, free_bytes = json.loads(done.stdout)
    return name, free_bytes


class MicroBatchCache:
    """Result for one configuration on one kind of machine with one set of versions."""

    def __init__(self, config: RunConfig, gpu: str | None, ranks: int, most: int) -> None:
        self._key = {
            "schema_version": SCHEMA_VERSION,
            "config": {k: v for k, v in config.flat().items() if k not in WITHOUT_EFFECT},
            # contents of files that the config has the paths of
            "model": repr(config.model.build()),
            "deepspeed": passed_on(config.sharding.deepspeed),
            "ranks": ranks,
            "most": most,  # data that has grown since allows more
            "gpu": gpu,
            "rehearsal": is_rehearsal(),
            "cpus": os.cpu_count(),
            "host_bytes": psutil.virtual_memory().total,
            "machine": platform.machine(),
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "allocator": allocator_variable(),
            "packages": {name: version_of(name) for name in ("shardscale", "torch", "deepspeed")},
        }
        name = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:16]
        self._path = default_cache_dir() / "micro-batch" / f"{name}.json"

    def get(self, memory_bytes: int) -> tuple[int, str] | None:
        """Return (micro-batch, date of its search) for about this much memory; None if unknown."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            then_bytes, size = int(content["memory_bytes"]), int(content["micro_batch"])
            date = str(content["date"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        least, most = SAME_MEMORY
        same = content.get("key") == self._key and size > 0
        if not same or not least <= memory_bytes / max(1, then_bytes) <= most:
            return None
        return size, date

    def save(self, size: int, memory_bytes: int) -> None:
        """Save a result.

        Raises:
            UserError: the cache folder cannot be written.
        """
        content: dict[str, Any] = {
            "micro_batch": size,
            "memory_bytes": memory_bytes,
            "date": datetime.date.today().isoformat(),
            "key": self._key,
        }
        with refused(OSError, f"{self._path}: cannot be written ({WHY})"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, json.dumps(content, indent=2) + "\n")

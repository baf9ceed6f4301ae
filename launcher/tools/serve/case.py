"""`python -m launcher.tools.serve.case`: measure one engine with one kind of weights.

Runs in a process of its own. Reads a `Case` as JSON from standard input and writes the measurement,
or the reason why there is none, as the last line of standard output.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F

from launcher.checkpoint.pretrained.loading import open_source
from launcher.data import IGNORED_TARGET
from launcher.measure.memory import peak_rss_bytes
from launcher.tools.serve import engines
from launcher.tools.serve.engines import InferenceEngine
from launcher.tools.serve.runtime import NoKernel
from launcher.util.errors import UserError, one_line

WARM_UP_PROMPTS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement to make."""

    run: str
    engine: str
    weights: str
    device: str
    threads: int
    prompts: list[list[int]]
    new_tokens: int
    repeats: int
    text: str
    """A .npz file with the `tokens` and `targets` that perplexity is computed on."""
    graph: str
    """Path of the exported graph, for engines that run one; `prepare` writes it."""
    prepares: bool
    """Only write the graph, so that its memory is not counted as the engine's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Figures of one case."""

    before_model_bytes: int | None
    """Resident set before the model is loaded; None on a GPU, where libraries do not count."""
    peak_bytes: int | None
    """Peak during prefill and decoding: on a CPU the process's resident set, on a GPU memory
    allocated by torch; None if unknown."""
    prefill_s: float
    """Median time to first token."""
    token_s: float
    """Median time per further token."""
    token_p90_s: float
    cpu_s: float
    """Median CPU time per new token over all threads, prefill included; less sensitive than wall
    time to other processes."""
    tokens_per_s: float
    """New tokens per second of prefill and decoding, median over repeats."""
    perplexity: float
    tokens: list[list[int]]
    """Greedy continuation of each prompt."""


def main() -> None:
    """Measure the case on standard input."""
    case = Case(**json.loads(sys.stdin.read()))
    torch.set_num_threads(case.threads)
    try:
        # Libraries print to stdout, which carries the result.
        with contextlib.redirect_stdout(sys.stderr):
            found = measure(case)
        print(json.dumps(found))
    except (NoKernel, UserError) as error:
        print(json.dumps({"reason": one_line(str(error))}))
    except Exception as error:  # one engine's failure must not end the benchmark
        lines = str(error).strip().splitlines() or [""]
        print(json.dumps({"reason": one_line(f"{type(error).__name__}: {lines[0]}")}))


def measure(case: Case) -> dict[str, Any]:
    """Run the case; returns the fields of `Measured`, nothing if it only prepares.

    Raises:
        NoKernel, UserError: the engine cannot run it.
    """
    if case.prepares:
        engines.prepare(Path(case.run), case.weights, Path(case.graph))
        return {}
    device = torch.device(case.device)
    before = psutil.Process().memory_info().rss if device.type == "cpu" else None
    engine = _engine(case, device)
    capacity = len(case.prompts[0]) + case.new_tokens
    with torch.inference_mode():
        for prompt in case.prompts[:WARM_UP_PROMPTS]:
            _continued(engine, prompt, case.new_tokens, capacity)
        _reset_peak(device)
        rounds = [
            [_continued(engine, prompt, case.new_tokens, capacity) for prompt in case.prompts]
            for _ in range(case.repeats)
        ]
        peak = _peak_bytes(case, device)
        perplexity = _perplexity(engine, case)
    each = [one for found in rounds for one in found]
    steps = [seconds for token_s, _, _ in each for seconds in token_s[1:]]
    rates = [
        len(found) * case.new_tokens / sum(sum(token_s) for token_s, _, _ in found)
        for found in rounds
    ]
    return asdict(
        Measured(
            before_model_bytes=before,
            peak_bytes=peak,
            prefill_s=statistics.median(token_s[0] for token_s, _, _ in each),
            token_s=statistics.median(steps),
            token_p90_s=float(np.quantile(steps, 0.9)),
            cpu_s=statistics.median(cpu_s for _, cpu_s, _ in each) / case.new_tokens,
            tokens_per_s=statistics.median(rates),
            perplexity=perplexity,
            tokens=[tokens for _, _, tokens in rounds[0]],
        )
    )


def _engine(case: Case, device: torch.device) -> InferenceEngine:
    run, graph = Path(case.run), Path(case.graph)
    if case.engine in ("pytorch", "compiled"):
        model = engines.load(run, case.weights, device)
        return engines.eager(model) if case.engine == "pytorch" else engines.compiled(model)
    with open_source(run) as source:
        config = source.config
    make = engines.onnx_runtime if case.engine == "onnxruntime" else engines.tensorrt
    return make(config, case.weights, graph)


def _continued(
    engine: InferenceEngine, prompt: list[int], count: int, capacity: int
) -> tuple[list[float], float, list[int]]:
    """Decode `count` tokens after a prompt; `int()` waits for the GPU within each token's time.

    Returns:
        Seconds of each token, the first with the prefill; CPU seconds of all; the tokens.
    """
    ids, seconds, found = torch.tensor(prompt), [], []
    extend, cpu_s = engine.begin(capacity), time.process_time()
    for _ in range(count):
        started = time.perf_counter()
        token = int(extend(ids).argmax())
        seconds.append(time.perf_counter() - started)
        found.append(token)
        ids = torch.tensor([token])
    return seconds, time.process_time() - cpu_s, found


def _perplexity(engine: InferenceEngine, case: Case) -> float:
    with np.load(case.text) as text:
        tokens, targets = torch.from_numpy(text["tokens"]), torch.from_numpy(text["targets"])
    total, count = 0.0, 0
    for ids, wanted in zip(tokens, targets, strict=True):
        logits = engine.logits(ids).float().cpu()
        total += float(F.cross_entropy(logits, wanted, reduction="sum"))
        count += int((wanted != IGNORED_TARGET).sum())
    # exp overflows a double above 709
    return math.exp(min(total / count, 700.0))


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # Writing 5 resets the peak resident set to the current one (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes(case: Case, device: torch.device) -> int | None:
    if device.type == "cpu":
        return peak_rss_bytes()
    # TensorRT allocates its own memory, which torch does not count.
    return None if case.engine == "tensorrt" else torch.cuda.max_memory_allocated(device)


if __name__ == "__main__":
    main()

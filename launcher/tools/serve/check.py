"""Compare an exported graph with PyTorch by running both."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from torch import Tensor

from launcher.model.decode import Cache
from launcher.model.gpt import GPT
from launcher.tools.serve.graph import empty_past
from launcher.tools.serve.runtime import GraphSession, NoKernel, onnx_session
from launcher.util.errors import UserError

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Tolerance of logits: absolute, and relative to the largest logit above 1. Half precision gets ten
steps, because graph and eager kernels round at different places."""
GREEDY_TOKENS = 50
# 2 is the batch that is traced; 1 and 5 show that its size is dynamic
_BATCHES = (1, 2, 5)
_MOST_LOGITS = 2**24
"""Logits per comparison (64 MiB in fp32): bounds the sequence length for large vocabularies."""


def check_graph(path: Path, model: GPT, *, cache: bool) -> str:
    """Check a graph against `model` in ONNX Runtime; returns a description of the check.

    Raises:
        UserError: they differ by more than the tolerance of the type.
    """
    # By path: with weights in a file beside it, a graph can exceed what protobuf can load.
    onnx.checker.check_model(str(path), full_check=True)
    try:
        session = onnx_session(path, model.config, cache=cache)
    except NoKernel:
        dtype = str(model.dtype).removeprefix("torch.")
        return f"its structure checked, but not run: ONNX Runtime has no CPU kernels for {dtype}"
    return check_session(session, model, cache=cache)


def check_session(session: GraphSession, model: GPT, *, cache: bool) -> str:
    """Compare a loaded graph with `model`; returns a description of the check.

    Raises:
        UserError: they differ by more than the tolerance of the type.
    """
    checks = _Checks(session, model)
    with torch.inference_mode():
        for batch in _BATCHES:
            for length in checks.lengths(batch):
                checks.compare(batch, length, cache=cache)
        shapes = f"batch 1 to {_BATCHES[-1]}, sequence 1 to {checks.lengths(1)[-1]}"
        if cache:
            checks.padded()
            shapes += f", {checks.greedy()} greedy tokens"
    return f"equal to PyTorch within {checks.worst:.1g} ({shapes})"


class _Checks:
    """Comparisons of one graph with its model; `worst` is the largest difference so far."""

    def __init__(self, session: GraphSession, model: GPT) -> None:
        self._session, self._model = session, model
        self._draw = torch.Generator().manual_seed(0)
        self.worst = 0.0

    def lengths(self, batch: int) -> list[int]:
        """Choose sequence lengths from 1 to the context, bounded by `_MOST_LOGITS`."""
        config = self._model.config
        most = max(1, min(config.context, _MOST_LOGITS // (batch * config.vocab_size)))
        return sorted({1, max(1, most // 2), most})

    def compare(self, batch: int, length: int, *, cache: bool) -> None:
        """Compare a whole sequence; with a cache, also its end after its start."""
        tokens = self._tokens(batch, length)
        expected = self._model(tokens)
        if not cache:
            self._compare_logits(self._session.score(tokens), expected)
            return
        # 0: prefill alone; length - 1: one token after a cache, as in decoding
        for split in {0, length // 3, length - 1}:
            past = empty_past(self._model, batch)
            first: list[Tensor] = []
            if split:
                logits, past = self._session.extend(tokens[:, :split], past)
                first = [logits]
            logits, _ = self._session.extend(tokens[:, split:], past)
            self._compare_logits(torch.cat([*first, logits], dim=1), expected)

    def padded(self) -> None:
        """Compare prompts of different lengths in one left-padded batch."""
        length = self.lengths(2)[-1]
        tokens = self._tokens(2, length)
        padding = length // 2
        mask = torch.ones_like(tokens)
        mask[1, :padding] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        past = empty_past(self._model, 2)
        logits, _ = self._session.extend(tokens, past, mask=mask, positions=positions)
        self._compare_logits(logits[:1], self._model(tokens[:1]))
        self._compare_logits(logits[1:, padding:], self._model(tokens[1:, padding:]))

    def greedy(self) -> int:
        """Compare greedy decoding token by token; returns how many tokens."""
        config = self._model.config
        prompt = self._tokens(1, max(1, min(8, config.context - GREEDY_TOKENS)))
        count = min(GREEDY_TOKENS, config.context - prompt.size(1))
        ours, past = Cache(self._model, prompt.size(1) + count), empty_past(self._model, 1)
        tokens = prompt
        for _ in range(count):
            expected = ours.extend(tokens[0])
            logits, past = self._session.extend(tokens, past)
            self._compare_logits(logits[0, -1], expected)
            tokens = expected.argmax().view(1, 1)
        return count

    def _tokens(self, batch: int, length: int) -> Tensor:
        vocabulary = self._model.config.vocab_size
        tokens = torch.randint(vocabulary, (batch, length), generator=self._draw)
        return tokens.to(self._model.device)

    def _compare_logits(self, found: Tensor, expected: Tensor) -> None:
        tolerance = TOLERANCES[expected.dtype]
        difference = float((found.float() - expected.float()).abs().max())
        most = tolerance * max(1.0, float(expected.abs().max()))
        if not difference <= most:  # true for NaN too
            dtype = str(expected.dtype).removeprefix("torch.")
            raise UserError(
                f"the exported graph's logits differ from PyTorch's by {difference:.2g}, more than "
                f"the {most:.2g} that {dtype} explains: nothing was written; try --dtype fp32 or "
                "another version of torch"
            )
        self.worst = max(self.worst, difference)

"""Seconds and live bytes of the head's loss, forward and backward, on this CPU: plain, in the
automatic chunks, and in chunks of an eighth of the rows.

python bench/loss_chunks.py
"""

import statistics
import time

import torch

from launcher.measure.live_trace import LiveTrace
from launcher.model.loss import automatic_chunk_rows, linear_cross_entropy

# Vocabulary, width, rows: nano's, GPT-2 small's and medium's.
SHAPES = ((4096, 192, 1024), (50257, 768, 1024), (50257, 1024, 2048))
REPETITIONS = 5


def once(vocab_size: int, d_model: int, rows: int, chunk_rows: int) -> None:
    """One loss and its gradients."""
    hidden = torch.randn(rows, d_model, requires_grad=True)
    weight = torch.randn(vocab_size, d_model, requires_grad=True)
    targets = torch.randint(0, vocab_size, (rows,))
    linear_cross_entropy(hidden, weight, targets, chunk_rows=chunk_rows).backward()


def main() -> None:
    """Prints a line for each shape and way."""
    print("vocabulary  width  rows  rows of a chunk  ms (median)  live MiB at most")
    for vocab_size, d_model, rows in SHAPES:
        automatic = automatic_chunk_rows(rows, vocab_size, d_model, fused=False)
        for chunk_rows in (0, automatic, rows // 8):
            times_s = []
            for _ in range(REPETITIONS):
                began_s = time.process_time()
                once(vocab_size, d_model, rows, chunk_rows)
                times_s.append(time.process_time() - began_s)
            with LiveTrace() as live:
                once(vocab_size, d_model, rows, chunk_rows)
            ms, mib = 1000 * statistics.median(times_s), live.peak_bytes() / 2**20
            print(f"{vocab_size:10} {d_model:6} {rows:5} {chunk_rows:16} {ms:12.0f} {mib:17.0f}")


if __name__ == "__main__":
    main()

"""The kernel of the fused loss against torch's own cross-entropy in fp32.

`python tests/loss_kernel_cases.py`, with TRITON_INTERPRET=1, has Triton's interpreter run it on the
CPU, and prints a line of JSON per case. On a GPU, `compared` is called as it is.
"""

import json
from functools import partial

import torch
import torch.nn.functional as F

from launcher.model.loss import IGNORE_INDEX, padded_size, softmax_gradient_

ROWS = 7
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Less than one block of the kernel, about one, several; with and without padding.
CASES = [(dtype, size) for dtype in DTYPES for size in (1, 97, 4096, 4097, 13_000)]
LOSS_TOLERANCE = 1e-5


def compared(dtype_name: str, vocab_size: int, device: str) -> dict[str, float]:
    """Largest errors: of the losses; of gradients, in halves of the last place of 1 of their type;
    and the largest numbers where there should be 0."""
    dtype = DTYPES[dtype_name]
    torch.manual_seed(0)
    width = padded_size(vocab_size, dtype)
    logits = (4 * torch.randn(ROWS, width)).to(dtype)
    targets = torch.randint(0, vocab_size, (ROWS,))
    targets[2] = IGNORE_INDEX
    reference = logits[:, :vocab_size].float().requires_grad_()
    expected = F.cross_entropy(reference, targets, ignore_index=IGNORE_INDEX, reduction="none")
    expected.sum().backward()
    assert reference.grad is not None

    there = logits.to(device)
    read = softmax_gradient_(there, targets.to(device), vocab_size, IGNORE_INDEX, False)
    untouched = torch.equal(there.cpu(), logits)
    losses = softmax_gradient_(there, targets.to(device), vocab_size, IGNORE_INDEX, True)
    gradients = there.cpu().float()
    error = (gradients[:, :vocab_size] - reference.grad).abs().max()
    return {
        "losses": float((losses.cpu() - expected).abs().max()),
        "losses alone": float((read.cpu() - expected).abs().max()),
        "gradients": float(error / torch.finfo(dtype).eps * 2),
        "written when not asked": float(not untouched),
        "ignored rows": float(gradients[2].abs().max()),
        "padding": float(gradients[:, vocab_size:].abs().sum()),
    }


def edges(device: str) -> dict[str, bool]:
    """Return what holds of rows with -inf in a whole block, or in all of them, and of targets that
    are no token. None of it is a comparison with numbers that may be NaN."""
    size = 13_000  # blocks of 4096
    torch.manual_seed(0)
    logits = torch.randn(ROWS, size)
    logits[0, :4096] = -torch.inf
    logits[1, 4096:] = -torch.inf
    logits[2] = -torch.inf
    logits[3, 5000] = torch.inf
    logits[4, 5000] = torch.nan
    targets = torch.full((ROWS,), 1000)
    targets[0] = 9000
    beyond = torch.tensor([size, size + 7, 2**31, 2**40, -1, -99, IGNORE_INDEX])
    reference = logits.clone().requires_grad_()
    expected = F.cross_entropy(reference, targets, reduction="none")
    expected.sum().backward()
    assert reference.grad is not None

    there = logits.to(device)
    alone = softmax_gradient_(there, targets.to(device), size, IGNORE_INDEX, False)
    losses = softmax_gradient_(there, targets.to(device), size, IGNORE_INDEX, True)
    finite = torch.randn(ROWS, size).to(device)
    lost = softmax_gradient_(finite, beyond.to(device), size, IGNORE_INDEX, True)
    as_torch = partial(torch.allclose, rtol=1e-5, atol=1e-6, equal_nan=True)
    return {
        "losses are torch's": as_torch(losses.cpu(), expected),
        "losses alone are torch's": as_torch(alone.cpu(), expected),
        "gradients are torch's": as_torch(there.cpu(), reference.grad),
        "no loss of what is no token": bool(lost[:-1].isnan().all()),
        "no gradient of what is no token": bool(finite[:-1].isnan().all()),
        "an ignored row is 0": not lost[-1] and not finite[-1].any(),
    }


def assert_as_torch(dtype_name: str, found: dict[str, float]) -> None:
    """Losses in fp32; gradients but for the rounding of their type, in fp32 of long sums."""
    assert found.pop("losses") < LOSS_TOLERANCE, found
    assert found.pop("losses alone") < LOSS_TOLERANCE, found
    assert found.pop("gradients") < (64 if dtype_name == "fp32" else 2), found
    assert not any(found.values()), found


if __name__ == "__main__":
    print(json.dumps({"case": "edges", "size": 0, "found": edges("cpu")}))
    for name, size in CASES:
        print(json.dumps({"case": name, "size": size, "found": compared(name, size, "cpu")}))

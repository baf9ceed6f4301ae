"""Random number generators across a resume: dropout continues where it was."""

import base64
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_CUDA_STATE_BYTES = 16  # seed and offset of Philox


def generator_states() -> dict[str, str]:
    """Return device type -> base64 of the state of torch's generator on this rank."""
    states = {"cpu": _encode(torch.get_rng_state())}
    if torch.cuda.is_initialized():
        states["cuda"] = _encode(torch.cuda.get_rng_state())
    return states


def is_state(device_type: str, text: str) -> bool:
    """Return whether `text` encodes a state of a generator of this type."""
    try:
        state = _decode(text)
        if device_type == "cpu":
            torch.Generator().set_state(state)
    except (ValueError, RuntimeError, TypeError):
        return False
    return device_type == "cpu" or (device_type == "cuda" and len(state) == _CUDA_STATE_BYTES)


def restore_generators(
    saved: Sequence[Mapping[str, str]], *, rank: int, world_size: int, step: int
) -> None:
    """Restore this rank's generators, so that dropout continues exactly.

    On other hardware or another number of ranks no state fits: every rank starts a sequence of its
    own, different from the one at step 0.
    """
    here = generator_states()
    if len(saved) != world_size or saved[rank].keys() != here.keys():
        torch.manual_seed((torch.initial_seed() + step * 1_000_003) % 2**63)
        return
    torch.set_rng_state(_decode(saved[rank]["cpu"]))
    if "cuda" in here:
        torch.cuda.set_rng_state(_decode(saved[rank]["cuda"]))


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)

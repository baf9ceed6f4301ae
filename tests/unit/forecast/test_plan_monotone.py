"""A larger micro-batch never needs less, as the search assumes."""

import itertools
from collections.abc import Sequence

import pytest

from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.forecast.predict import predict
from launcher.measure.hardware import find_gpu
from launcher.strategies import VARIANTS

WORLD_SIZE = 4
SIZES = (1, 2, 3, 4, 5, 6, 9, 10, 14)


def peaks(
    label: str, device_type: str, precision: str, checkpointing: str, sizes: Sequence[int]
) -> list[int]:
    found = []
    for micro_batch in sizes:
        fields = dict(VARIANTS[label].fields)
        world_size = 1 if fields["strategy"] == "single" else WORLD_SIZE
        if VARIANTS[label].replicates:
            fields["replicate"] = 2
        # Width 64 and 24 tokens: chunks begin at the third, and later ones have several.
        shape = {"layers": 2, "d_model": 64, "heads": 4, "vocab_size": 262_144, "context": 24}
        config = RunConfig().replace(
            model="nano",
            **shape,
            **fields,
            precision=precision,
            activation_checkpointing=checkpointing,
            micro_batch=micro_batch,
        )
        run = resolve(config, world_size=world_size, device_type=device_type)
        gpu = find_gpu("H100") if device_type == "cuda" else None
        found.append(predict(run, gpu=gpu).peak_bytes)
    return found


@pytest.mark.parametrize("label", VARIANTS)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_bytes_grow_with_the_micro_batch(label: str, device_type: str) -> None:
    for precision, checkpointing in (("fp32", "full"), ("bf16", "none")):
        found = peaks(label, device_type, precision, checkpointing, SIZES)
        assert all(less <= more for less, more in itertools.pairwise(found)), found
        assert found[0] < found[-1]

"""Names of DeepSpeed's own attributes that the ledger reads."""

import importlib.util
from pathlib import Path

import pytest

from launcher.strategies.zero.states import GRADIENTS, MASTER_WEIGHTS, PARAMETERS


@pytest.mark.parametrize("name", [*GRADIENTS, *MASTER_WEIGHTS, *PARAMETERS])
def test_deepspeed_sets_it(name: str) -> None:
    found = importlib.util.find_spec("deepspeed")
    assert found is not None
    assert found.origin is not None
    runtime = Path(found.origin).parent / "runtime"
    files = [runtime / "bf16_optimizer.py", *runtime.glob("zero/stage*.py")]
    own = name.removeprefix("_DeepSpeedZeroOptimizer_Stage3")  # of a private name
    assert any(f"self.{own} = " in file.read_text() for file in files)

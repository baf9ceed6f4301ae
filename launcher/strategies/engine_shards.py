"""Which training state belongs to which engine."""

from launcher.strategies.engine import Engine
from launcher.strategies.flat_shards import TrainingState
from launcher.strategies.native import NativeEngine
from launcher.strategies.native_shards import NativeState
from launcher.strategies.zero import ZeroEngine
from launcher.strategies.zero_shards import zero_state


def training_state(engine: Engine) -> TrainingState:
    """The state of any engine that `strategies.build` returns; optimizer states exist after it."""
    if isinstance(engine, ZeroEngine):
        return zero_state(engine._engine)
    assert isinstance(engine, NativeEngine)
    return NativeState(engine._module, engine._optimizer)

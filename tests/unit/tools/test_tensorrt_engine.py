"""What TensorRT says with False is heard. The library runs on a GPU only, so that a context that
answers like its own stands in; tests/gpu/test_inference.py runs the real one."""

import pytest
import torch

from launcher.tools.serve.tensorrt import execute
from launcher.util.errors import UserError

TOKENS = torch.zeros(2, 3, dtype=torch.int64)


class Context:
    """`IExecutionContext`, as far as it is asked: `refused` is the call that answers False."""

    def __init__(self, refused: str | None = None, of: str | None = None) -> None:
        self.refused, self.of, self.addresses = refused, of, dict[str, int]()

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        return self._answer("set_input_shape", name)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return self._answer("set_tensor_address", name)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (2, 3, 5)

    def execute_async_v3(self, stream: int) -> bool:
        return self._answer("execute_async_v3", None)

    def _answer(self, call: str, name: str | None) -> bool:
        return (call, name) != (self.refused, self.of)


def executed(context: Context) -> list[torch.Tensor]:
    return execute(context, {"input_ids": TOKENS}, ["logits"], torch.float32, 0)


@pytest.mark.parametrize(
    ("refused", "of", "said"),
    [
        ("set_input_shape", "input_ids", r"take input_ids of shape \[2, 3\]"),
        ("set_tensor_address", "input_ids", "read input_ids"),
        ("set_tensor_address", "logits", "write logits"),
        ("execute_async_v3", None, "run the engine"),
    ],
)
def test_no_logits_of_memory_that_nobody_has_written(
    refused: str, of: str | None, said: str
) -> None:
    with pytest.raises(UserError, match=f"^TensorRT cannot {said}: .*; use "):
        executed(Context(refused, of))


def test_the_engine_writes_where_the_outputs_are() -> None:
    context = Context()
    (logits,) = executed(context)
    assert logits.shape == (2, 3, 5)
    assert context.addresses == {"input_ids": TOKENS.data_ptr(), "logits": logits.data_ptr()}

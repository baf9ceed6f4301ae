"""What an optimizer takes for one tensor, or for the range of it that a rank holds."""

from dataclasses import dataclass

COUNTER_BYTES = 4
"""torch counts an optimizer's steps in one fp32 scalar per tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Bytes and FLOPs."""

    states_bytes: tuple[int, ...]
    """Of each of its states and counters, in the order in which they are made."""
    update_bytes: int
    """What the kernels of its update read and write: weight, gradient, states, and what one kernel
    leaves to the next."""
    update_flops: int = 0
    """Of the matmuls in that update that are in bf16."""
    update_fp32_flops: int = 0
    """Of those in fp32."""
    temporary_bytes: int = 0
    """What the update holds at most beside weight, gradient and states; nothing where it is fused.
    """

    @property
    def state_bytes(self) -> int:
        """Of all states and counters."""
        return sum(self.states_bytes)


def fused_adam_costs(elements: int) -> Costs:
    """Two moments in fp32; reads weight, gradient and moments, and writes all but the gradient."""
    return Costs(
        states_bytes=(COUNTER_BYTES, 4 * elements, 4 * elements), update_bytes=28 * elements
    )

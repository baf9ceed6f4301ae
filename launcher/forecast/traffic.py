"""Bytes that a rank sends to others and moves to and from its host in a step.

Which collectives run, in which type and how often, was read in the strategies here and in torch's
and DeepSpeed's sources; each strategy's docstring says which. What it takes in seconds depends on
the machine, and is the planner's business.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Final, Literal, NamedTuple

from launcher.config.resolve import Resolved
from launcher.model.config import ModelConfig
from launcher.model.parts import block_of
from launcher.optim.dtypes import dtypes
from launcher.strategies.parameters import parameters_of

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Move = Literal["copy", "to_device", "to_host"]
"""Within a device (read and written), and over the link between host and device."""
GroupName = Literal["shard", "replica", "sequence", "tensor"]
"""Ranks that each have a shard of the same states, that have the same shard, that share sequences,
and that share matrices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Bytes on their way: of the whole tensor for a collective, of this rank for a move."""

    kind: Collective | Move
    size_bytes: float
    pieces: float = 1
    """Issued one after the other, each with its own latency."""
    among: GroupName = "shard"
    hideable: bool = True
    """Computation can go on meanwhile."""


class Hooks(NamedTuple):
    """Count the calls of a strategy's own Python in a pass over the model: for the next modules, in
    a forward as in a backward, and for gradients in a backward."""

    modules: int = 0
    """Modules whose parameters are fetched, one at a time."""
    groups: int = 0
    """Groups of parameters that are gathered together."""
    gradients: int = 0
    """Gradients of single parameters."""


NO_HOOKS: Final = Hooks()


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """A rank's transfers: in each micro-batch's forward and backward, once more in the last
    backward of a step, and in the optimizer step."""

    forward: tuple[Transfer, ...] = ()
    backward: tuple[Transfer, ...] = ()
    last_backward: tuple[Transfer, ...] = ()
    step: tuple[Transfer, ...] = ()
    hooks: Hooks = NO_HOOKS


class Wire:
    """The parameters of a run by when they travel, and the transfers that strategies share."""

    def __init__(self, resolved: Resolved) -> None:
        config, model = resolved.config, resolved.own_model
        types = dtypes(config.optim)
        self.config = config
        self.sharding = config.sharding
        self.model = model
        """Computed by a rank."""
        self.device_type = resolved.device_type
        self.of_another_trainer = resolved.of_another_trainer
        self.stored_bytes = types.stored.itemsize
        """Bytes of an element between steps."""
        self.computed_bytes = types.computed.itemsize
        self.shard_ranks = self.sharding.shard_ranks(resolved.world_size) // self.sharding.replicate
        self.blocks = _block_elements(model, self.computed_bytes)
        """Elements that are computed with; quantised weights count by their bytes."""
        self.embeddings = _embedding_elements(model)
        """Embeddings of tokens and positions: used first, so their gradients are complete last."""
        self.modules = _modules(model)
        """That have parameters: norms, linears, embeddings, the head."""
        self.tensors = _trained_tensors(model)
        """That have gradients."""
        self.head = 0 if model.tied else model.vocab_size * model.d_model
        trained = model.trained_parameter_count
        whole = model.lora is None
        self.trained_early: float = self.blocks + self.head if whole else trained
        """Parameters whose gradients are complete before those of the embeddings."""
        self.trained_embeddings = self.embeddings if whole else 0
        resting = self.stored_bytes * trained
        resting += self.computed_bytes * (model.parameter_count - trained)
        self.resting_bytes = resting / model.parameter_count
        """Mean bytes of an element of a shard: frozen ones are stored as they are computed."""

    def gather(
        self, parameters: float, *, pieces: int, host_element: float, hideable: bool = True
    ) -> Iterator[Transfer]:
        """Gather parameters; from host memory first where they live there (`host_element` bytes
        each), and copied out of the gathered buffer afterwards."""
        size = self.computed_bytes * parameters
        if size == 0:
            return
        yield Transfer(kind="all_gather", size_bytes=size, pieces=pieces, hideable=hideable)
        yield Transfer(kind="copy", size_bytes=2 * size, hideable=False)  # read and written
        if self.sharding.offload_param != "none":
            shard = host_element * parameters / self.shard_ranks
            yield Transfer(kind="to_device", size_bytes=shard, hideable=hideable)

    def all_reduce(
        self, element: int, *, pieces: float, hideable: bool = True
    ) -> Iterator[Transfer]:
        """Sum whole gradients of `element` bytes each. The embeddings' come last: nothing is left
        to hide them behind."""
        before = element * self.trained_early
        yield Transfer(kind="all_reduce", size_bytes=before, pieces=pieces, hideable=hideable)
        if last := element * self.trained_embeddings:
            yield Transfer(kind="all_reduce", size_bytes=last, hideable=False)

    def gather_model(self, host_element: float, *, groups: int) -> Iterator[Transfer]:
        """Gather all parameters for a forward, blocks in so many groups: nothing hides the
        first."""
        first = self.blocks / groups
        yield from self.gather(
            self.embeddings + first, pieces=2, host_element=host_element, hideable=False
        )
        others = self.blocks - first + self.head
        yield from self.gather(others, pieces=groups, host_element=host_element)

    def reduce_model(self, element: int, *, groups: int) -> Iterator[Transfer]:
        """Copy gradients of `element` bytes into a buffer, reduce-scatter them, all-reduce the
        shards across replicas, group by group; the embeddings' come last. Then offload them."""
        for parameters, pieces, hideable in (
            (self.trained_early, groups, True),
            (self.trained_embeddings, 1, False),
        ):
            if parameters == 0:
                continue
            size = element * parameters
            yield Transfer(kind="copy", size_bytes=2 * size, hideable=False)
            sent = Transfer(
                kind="reduce_scatter", size_bytes=size, pieces=pieces, hideable=hideable
            )
            yield sent
            shard = size / self.shard_ranks
            # among the replicas of the shard; 0 s where there is one
            yield replace(sent, kind="all_reduce", size_bytes=shard, among="replica")
        yield from self.gradients_to_host()

    def gradients_to_host(self) -> Iterator[Transfer]:
        """This rank's share of the gradients, in fp32, to where an offloaded optimizer is."""
        if self.sharding.offload_optimizer != "none":
            own = self.model.trained_parameter_count / self.shard_ranks
            size_bytes = 4 * self.sharding.offload_fraction * own
            yield Transfer(kind="to_host", size_bytes=size_bytes)


@cache
def _modules(model: ModelConfig) -> int:
    # A tied head has the embedding's parameter, which is named once.
    return len({p.name.rpartition(".")[0] for p in parameters_of(model)}) + model.tied


@cache
def _trained_tensors(model: ModelConfig) -> int:
    return sum(parameter.trained for parameter in parameters_of(model))


@cache
def _embedding_elements(model: ModelConfig) -> int:
    # Counted, since a decoder of transformers does not say whether its positions are learned.
    before_blocks = takewhile(lambda p: block_of(p.name) is None, parameters_of(model))
    return sum(parameter.elements for parameter in before_blocks)


@cache
def _block_elements(model: ModelConfig, element_bytes: int) -> float:
    blocks = (p for p in parameters_of(model) if block_of(p.name) is not None)
    return sum(p.elements / element_bytes if p.packed else p.elements for p in blocks)

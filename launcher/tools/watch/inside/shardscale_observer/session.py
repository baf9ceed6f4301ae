"""Follow the program through its phases, by what the hooks report."""

from __future__ import annotations

from typing import Any

from shardscale_observer.clock import APART, Clock
from shardscale_observer.errors import (
    is_called_by,
    is_out_of_memory,
    place_of_error,
    sentence_of_wait,
)
from shardscale_observer.history import History
from shardscale_observer.leaving import leave
from shardscale_observer.parts import is_beside_steps, name_of, named, owner_of
from shardscale_observer.rank_file import RankFile, rank_of_process
from shardscale_observer.reading import (
    data_ranks,
    describe,
    is_trainable,
    libraries_in_use,
    loss_of,
    makes_optimizers,
    parameters_of,
    prepares_data,
    tokens_in,
)
from shardscale_observer.recorder import Recorder
from shardscale_observer.sampler import Sampler
from shardscale_observer.scaling import unscaled

_WITHOUT_OPTIMIZER = 8
"""Backward passes by which a program has made its optimizer, if it makes any."""


class Session(Recorder):
    """One process of the program. Hooks call its methods; all of them run guarded.

    A step begins with the first forward (with gradients) or backward after an optimizer's step, and
    ends with the last `step` of an optimizer before the next forward: several optimizers, and those
    that update inside of backward, make one step. Where the program updates its weights without an
    optimizer, every backward that a forward follows is one.
    """

    def open(self, module: Any, args: Any, kwargs: Any) -> bool:
        """Open the rank's file at the first sign of a training, in a rehearsal one on the GPU;
        returns whether it is open."""
        used = self.torch.cuda.is_initialized() or not self.rehearses
        if self.file is not None or self.closed or not used:
            return self.file is not None
        try:
            self.file = RankFile(self.settings["folder"], *rank_of_process())
        except FileExistsError:  # a helper process that computes something, too
            self.closed = True
            return False
        self._use_device()
        self._describe(module, args, kwargs)
        return True

    def _follow(self, module: Any, args: Any, kwargs: Any) -> None:
        """See a root module, and describe the run anew if it is larger than those before, or is the
        first on a GPU: a program may have tried something small."""
        if self.closed:
            return
        if self.device is None and self.torch.cuda.is_initialized():
            # `_use_device` replaces the clock, which has the marks of these steps
            self._write_steps(wait=True)
            self._use_device()
            self.roots.clear()
            self._parameters = -1
        if not self.torch.is_grad_enabled() or module in self.roots:
            return
        self.names = named(module, self.names, self.roots, self.prefixes)
        self.roots.add(module)
        if is_trainable(module) and parameters_of(module) > self._parameters:
            self._describe(module, args, kwargs)

    def _use_device(self) -> None:
        """Record the GPU that the process uses, if it does."""
        assert self.file is not None
        cuda = self.torch.cuda
        on_gpu = cuda.is_available() and cuda.is_initialized()
        self.device = cuda.current_device() if on_gpu else None
        if on_gpu and self.history is None:
            self.history = History(self.torch, self.peaks, cuda.current_device())
        elif self.history is not None and on_gpu:
            self.history.device = cuda.current_device()  # chosen after CUDA began
        self._clock = Clock(self.torch, on_gpu=on_gpu, timed=not self.rehearses)
        if self._sampler is not None:
            self._sampler.stop()
        uuid = f"GPU-{cuda.get_device_properties(self.device).uuid}" if on_gpu else None
        self._sampler = Sampler(uuid, self.file.add)
        self._sampler.start()

    def _describe(self, module: Any, args: Any, kwargs: Any) -> None:
        """Write the record that describes the run; the last one counts."""
        assert self.file is not None
        described = describe(self.torch, module, args, kwargs)
        if args or kwargs:
            self._shape = {name: described[name] for name in ("micro_batch", "seq_len")}
        described |= self._shape
        world_size, on_gpu = rank_of_process()[1], self.device is not None
        trains = self.torch.is_grad_enabled() and module is not None and is_trainable(module)
        self._parameters = described["parameters"] if trains else -1
        self.data_ranks = data_ranks(module, described["strategy"], world_size)
        self.file.begin(
            folder=self.settings["folder"],
            world_size=world_size,
            device=f"cuda:{self.device}" if on_gpu else "cpu",
            device_name=self.torch.cuda.get_device_name(self.device) if on_gpu else None,
            **described,
        )

    def root_begins(self, module: Any, args: Any, kwargs: Any) -> None:
        """An outermost module begins its forward."""
        if self.depth["backward"] or self.depth["optimizer"] or prepares_data(self, module):
            return
        if not self.open(module, args, kwargs):
            return
        self._follow(module, args, kwargs)
        with_gradients = self.torch.is_grad_enabled()
        if not with_gradients and (self.stepped or not self.in_step):
            if self.timeline is not None and is_beside_steps(self, module):
                self.enter("forward")
                return
            self.before_evaluation = "other"
            self.enter("evaluation")
            return
        if with_gradients:
            self._ends_without_optimizer()
        self.begin_step()
        if with_gradients and self.data_ranks is not None and is_trainable(module):
            self.tokens = tokens_in(self.tokens, args, kwargs, self.data_ranks)
        self.enter("forward")

    def _ends_without_optimizer(self) -> None:
        """End the step before this forward, in a program that has no optimizer."""
        if self.backwards >= _WITHOUT_OPTIMIZER and self.has_optimizer is None:
            self.has_optimizer = bool(self.optimizers) or makes_optimizers(self.torch)
        if self.has_optimizer is False and self.backwards > self._backwards_before:
            self.stepped = self.in_step
            self._backwards_before = self.backwards

    def root_ends(self) -> None:
        """An outermost module has ended its forward."""
        if self.phase == "evaluation":
            self.enter(self.before_evaluation)

    def backward_begins(self, losses: Any) -> None:
        """Backward begins, perhaps inside another one (activation checkpointing)."""
        self.depth["backward"] += 1
        if self.depth["backward"] > 1 or self.depth["optimizer"]:
            return
        if not self.open(None, (), {}):
            return
        self.begin_step()
        self.backwards += 1
        if not self.rehearses:
            self.losses += [loss_of(unscaled(loss)) for loss in losses]
        self.mark("end_forward", owned=True)
        self.enter("backward")

    def backward_ends(self) -> None:
        """Backward has ended."""
        self.depth["backward"] = max(0, self.depth["backward"] - 1)
        if not self.depth["backward"] and self.phase == "backward":
            self.enter("other")

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer begins its step, perhaps inside of backward or of another optimizer."""
        self.depth["optimizer"] += 1
        is_new = optimizer not in self.optimizers
        self.optimizers.add(optimizer)
        if self.captures():
            self.in_graphs.add(id(optimizer))
        lr = optimizer.param_groups[0].get("lr")
        # the value of a tensor would make the host wait for the device
        self.lr = float(lr) if isinstance(lr, (int, float)) else None
        if self.depth["optimizer"] > 1 or self.depth["backward"]:
            return
        # DCP makes the states that it will load by a step with gradients of 0
        if is_called_by("_init_optim_state") or not self.open(None, (), {}):
            return
        if is_new and (owner := owner_of(self.torch, optimizer, self.roots)) is not None:
            self._follow(owner, (), {})
        del self.modules[:]
        self.stepping.add(id(optimizer))
        self.in_step = self.has_optimizer = True
        self.mark("owners", owned=True)
        self.enter("step")

    def optimizer_made(self, optimizer: Any) -> None:
        """An optimizer is made; of a stage that is to come, if others have stepped."""
        if self.optimizers:
            self.limit.waits_for.add(optimizer)

    def closure_begins(self) -> None:
        """An optimizer calls the closure that it was given, from where it will go on."""
        self.depth["optimizer"] = 0
        if self.phase == "step":  # a second call in one step
            self.enter("other")

    def optimizer_ends(self) -> None:
        """An optimizer has ended its step."""
        self.depth["optimizer"] = max(0, self.depth["optimizer"] - 1)
        self.stepped = self.in_step
        if not self.depth["optimizer"] and self.phase == "step":
            self.mark("owners", owned=True)
            self.enter("other")

    def replay_begins(self) -> None:
        """A CUDA graph is replayed, perhaps of a whole step."""
        if self.timeline is not None:
            self.timeline.replays += 1
        if self.in_graphs and not self.modules and not any(self.depth.values()):
            self.begin_step()
            self.stepping |= self.in_graphs
            self.stepped = self.in_step

    def apart_begins(self, phase: str) -> str:
        """A phase that libraries name begins (`data`, `checkpoint`); returns the one before."""
        before = self.phase
        if self.file is not None and before not in (*APART, "data", "backward", "step"):
            self.enter(phase)
        return before

    def apart_ends(self, before: str) -> None:
        """That phase has ended."""
        if self.file is not None and self.phase in ("data", "checkpoint"):
            self.enter(before)

    def out_of_memory(self, **detail: Any) -> None:
        """The device has no memory for a request; the program may yet go on."""
        if self.closed:
            return
        self.open(None, (), {})
        owners, phase = self.owners(), self.phase
        if self.stepped:  # an evaluation or a save behind a whole step
            self._end_step()
            self.phase = phase
        self.mark("out_of_memory", owned=True)
        module = self.names.get(id(self.modules[-1])) if self.modules else None
        self.event(
            "out_of_memory",
            phase=phase,
            module=module,
            libraries=libraries_in_use(),
            held=owners.bytes_by_category("cuda" if self.device is not None else "cpu"),
            **detail,
        )
        # An optimizer's step ends by the exception, after which torch calls no hook.
        self.depth["optimizer"] = 0
        self.stepping.clear()

    def fails(self, error: BaseException) -> None:
        """An exception that the program does not catch ends it."""
        ran_out = is_out_of_memory(self.torch, error, of_host=not self.rehearses)
        if self.timeline is not None:
            self.ends_untimed(repr(error), out_of_memory=ran_out)
        if isinstance(error, SystemExit):
            return
        if self.torch.cuda.is_initialized():  # one that has used no GPU may be a launcher of ranks
            self.open(None, (), {})
        if self.file is None:
            return
        self.event(
            "uncaught",
            error=f"{type(error).__name__}: {error}"[:1000],
            out_of_memory=ran_out,
            phase=self.phase,
            place=place_of_error(error),
        )
        self.failed = True

    def program_ends(self, reason: str) -> None:
        """The process ends, perhaps with the step whose operators are written down."""
        if self.timeline is not None and self.stepped and self._round_ends():
            self._end_timeline()
        self.end(reason)

    def waits(self, read: dict[str, Any]) -> None:
        """A line reads a value again and again: no kernel will ever change it."""
        if self.timeline is not None:
            leave()
        sentence, place = sentence_of_wait(read)
        self.open(None, (), {})
        more = {"out_of_memory": False, "phase": self.phase, "place": place}
        self.event("uncaught", error=sentence, **more)
        self.end("loop")
        leave(1)

    def mark_module(self) -> None:
        """Allocations from now on are made inside the innermost module that is in its forward."""
        if self.recording:
            self.mark("module", name_of(self.modules, self.names))

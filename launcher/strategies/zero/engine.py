"""DeepSpeed ZeRO 0 to 3. Imported only when asked for, since deepspeed takes its time."""

import contextlib
import gc
import io
import logging
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.model.build import prepare
from launcher.model.foreign.routing import Routing
from launcher.parallel.model_parallel import ModelShards
from launcher.strategies.build_inputs import BuildInputs, fill_flat_slice, place_buffers
from launcher.strategies.compiled import compile_blocks
from launcher.strategies.engine import Engine, LossScale, StepResult, StorageCount
from launcher.strategies.flat_shards import TrainingState
from launcher.strategies.native import Gradients
from launcher.strategies.zero.config import build_config
from launcher.strategies.zero.fraction import accumulate_beside_masters, leaving_on_device
from launcher.strategies.zero.saved import saving_places
from launcher.strategies.zero.states import count_states, zero_state
from launcher.strategies.zero.swap import (
    fill_swapped,
    is_swapped,
    keep_gradients_in_memory,
    place_swap_files,
    prefetch_each_once,
)
from launcher.util.startup import importing


def build(inputs: BuildInputs) -> Engine:
    """Hand model and optimizer to DeepSpeed; stage 3 shards the model during construction."""
    deepspeed = import_deepspeed(inputs.world.device)
    config = inputs.config
    ds_config = build_config(inputs.resolved, world_size=inputs.data_parallel.size)
    if "nvme" in (config.sharding.offload_optimizer, config.sharding.offload_param):
        assert config.sharding.nvme_path is not None  # resolve has refused it
        place_swap_files(ds_config, config.sharding.nvme_path)
    if config.sharding.zero == 3:
        module = _sharded_module(deepspeed, inputs, ds_config)
    else:
        module = inputs.whole_module()
    if (shards := inputs.model_shards) is not None:
        _mark_sharded(module, shards)
    if config.loop.compiles:
        compile_blocks(module, kept_share=inputs.resolved.kept_share)
    fraction = config.sharding.offload_fraction
    placing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if fraction < 1:
        placing = leaving_on_device(fraction, inputs.world.device)
    with placing, contextlib.redirect_stdout(io.StringIO()):  # it prints its memory use as it goes
        engine, _, _, _ = deepspeed.initialize(
            model=module,
            optimizer=inputs.new_optimizer(module),
            config=ds_config,
            mpu=_groups(inputs),
        )
    if fraction < 1:
        accumulate_beside_masters(engine.optimizer, fraction)
    if config.sharding.offload_optimizer == "nvme":
        keep_gradients_in_memory(engine.optimizer)
    if config.sharding.offload_param == "nvme":
        prefetch_each_once(engine)
    return ZeroEngine(engine, inputs)


class ZeroEngine:
    """DeepSpeed's engine behind our verbs.

    The loop decides where an accumulation window ends, and scales losses itself: DeepSpeed's
    counting would hide the optimizer step inside whichever call comes last.
    """

    def __init__(self, engine: Any, inputs: BuildInputs) -> None:
        self._routing = Routing.of(engine.module)
        self._engine = engine
        self._scale = 1.0 / inputs.resolved.accumulation
        self._norm_is_ours = inputs.config.sharding.zero == 0
        self._shards = inputs.model_shards
        self._gradients = Gradients(engine.module, self._shards)
        sharded = inputs.config.sharding.zero == 3
        self._saving = saving_places(engine.module) if sharded else contextlib.nullcontext()
        if self.loss_scale() is not None:
            # Else a bare exception ends a run whose scale is down to its least: the run itself
            # counts skipped steps, and ends with their remedy.
            engine.optimizer.loss_scaler.raise_error_at_min_scale = False

    def begin_step(self, lr: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr

    def forward(
        self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None, *, last: bool
    ) -> Tensor:
        self._engine.set_gradient_accumulation_boundary(last)
        with self._saving:
            loss: Tensor = self._engine(tokens, targets, starts)
        return loss

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss * self._scale, scale_wrt_gas=False)  # its default divides again

    def step(self) -> StepResult:
        # DeepSpeed calls our optimizer as it is at stage 0: the flag makes that skip the step.
        if self._norm_is_ours:  # stage 0 has none to tell, and would train on with NaN
            norm = self._gradients.norm()
            finite = torch.isfinite(norm)
            self._engine.optimizer.found_inf = (~finite).float()
            self._engine.step()
            return norm, finite
        self._engine.step()
        return self._engine.get_global_grad_norm(), bool(self._engine.was_step_applied())

    def loss_scale(self) -> LossScale | None:
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        if scaler is None or not scaler.dynamic:
            return None
        # DeepSpeed counts since the last overflow, also when the scale grows, and leaves out the
        # first good step after it: it doubles the scale a step later than torch.
        good_steps = scaler.cur_iter - 2 - scaler.last_overflow_iter
        return LossScale(
            scale=float(scaler.cur_scale),
            good_steps=max(good_steps, 0) % scaler.scale_window,
            overflowed=good_steps < 0,
        )

    def set_loss_scale(self, value: LossScale) -> None:
        if self.loss_scale() is not None:
            scaler = self._engine.optimizer.loss_scaler
            scaler.cur_scale = value.scale
            good_steps = -1 if value.overflowed else value.good_steps
            scaler.last_overflow_iter = scaler.cur_iter - 2 - good_steps

    def evaluate(
        self, tokens: Tensor, targets: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        self._engine.eval()
        with torch.no_grad():
            loss_or_logits: Tensor = self._engine(tokens, targets, starts)
        self._engine.train()
        # Stage 3 has fetched ahead for a backward that does not come.
        release = getattr(self._engine.optimizer, "empty_partition_cache", None)
        if release is not None:
            release()
        return loss_or_logits

    def routed(self) -> Tensor | None:
        return None if self._routing is None else self._routing.take()

    def count_states(self) -> StorageCount:
        return count_states(self._engine)

    def training_state(self) -> TrainingState:
        return zero_state(self._engine, self._shards)


def import_deepspeed(device: torch.device) -> Any:
    """deepspeed, quiet, and compiling nothing on a CPU."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # else a GPU that is there is taken
    level = logging.DEBUG if logging.getLogger().isEnabledFor(logging.DEBUG) else logging.ERROR
    with importing():
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger

        _import_muon_uncompiled()
    if device.type == "cuda":
        _do_without_nvml()
        # Its reports of memory, which are not shown, would reset the peak that a run records.
        deepspeed.accelerator.get_accelerator().reset_peak_memory_stats = lambda *_: None
    logger.setLevel(level)
    # An optional shared-memory all-reduce that DeepSpeed would compile, needing g++ and 23 s.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _do_without_nvml() -> None:
    """Stages 1 and 2 ask how much memory is free, and DeepSpeed asks NVML: a reading that fails
    would end training, and so would UUIDs in CUDA_VISIBLE_DEVICES, of which it wants numbers."""
    from deepspeed.accelerator import cuda_accelerator

    cuda_accelerator.pynvml = None  # from now on what this process has not allocated is free


def _import_muon_uncompiled() -> None:
    """DeepSpeed asks of each optimizer whether it is its Muon, a module that compiles functions
    as it is imported: every rank would load torch's inductor, over a second, for nothing."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]
        if before is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = before


def _groups(inputs: BuildInputs) -> SimpleNamespace | None:
    """Return the answers of a Megatron-like model parallel unit; None where all ranks shard."""
    tensor, data = inputs.model_parallel.tensor, inputs.data_parallel
    if tensor is None:
        return None
    answers: dict[str, Any] = {
        "get_data_parallel_rank": data.rank,
        "get_data_parallel_world_size": data.size,
        "get_data_parallel_group": data.group,
        "get_data_parallel_group_ranks": dist.get_process_group_ranks(data.group),
    }
    for kind in ("model", "tensor_model"):
        answers[f"get_{kind}_parallel_rank"] = tensor.rank.index
        answers[f"get_{kind}_parallel_world_size"] = tensor.rank.size
        answers[f"get_{kind}_parallel_group"] = tensor.group
    return SimpleNamespace(**{name: lambda it=it: it for name, it in answers.items()})


def _mark_sharded(module: nn.Module, shards: ModelShards) -> None:
    """Tell DeepSpeed's norm which parameters count on each rank; it counts others once."""
    for name, parameter in module.named_parameters():
        if not shards.of[name].replicated:
            marked: Any = parameter
            marked.model_parallel = True


def _sharded_module(deepspeed: Any, inputs: BuildInputs, ds_config: dict[str, Any]) -> nn.Module:
    """Build under zero.Init and write each rank's flat slice of the initial values."""
    # zero.Init ignores its dtype argument where fp16 is not supported (it then takes bf16), so the
    # type comes from the config.
    sharded_over = {"data_parallel_group": inputs.data_parallel.group, "mpu": _groups(inputs)}
    prepare(inputs.resolved.model)
    with inputs.world.device, deepspeed.zero.Init(config_dict_or_path=ds_config, **sharded_over):
        module = inputs.new_module()
    if inputs.resolved.model.quantize_base != "none":
        # Weights of transformers' linear layers that quantised ones have replaced: DeepSpeed gives
        # parameters methods that refer to them, so that they would stay until Python looks.
        gc.collect()
    place_buffers(module, inputs.world.device)
    for name, parameter in module.named_parameters():
        sharded: Any = parameter  # zero.Init hangs its ds_... attributes on it
        local = sharded.ds_tensor
        value = inputs.initial_value(name, sharded.ds_shape)
        offset = inputs.data_parallel.rank * local.ds_numel
        if is_swapped(sharded):
            fill_swapped(sharded, value, offset)
        else:
            fill_flat_slice(local.data, value, offset)
    return module

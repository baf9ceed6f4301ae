"""The recording that a run asks for."""

import torch

from launcher.config.resolve import Resolved
from launcher.forecast.trace.events import Compute, TraceRequest
from launcher.measure.hardware import Gpu
from launcher.model.attention.selection import kernel_for
from launcher.model.foreign.config import FROZEN_FP32, ForeignConfig
from launcher.parallel.mesh import Mesh
from launcher.strategies import strategy_of, variant_of


def asked_of(
    resolved: Resolved, mesh: Mesh, *, device_type: str, gpu: Gpu | None = None
) -> TraceRequest:
    """Return what to trace for a rank at `mesh`."""
    config = resolved.config
    types = strategy_of(config).dtypes(config)
    low = types.computed.itemsize == 2
    composed = isinstance(resolved.model, ForeignConfig) or not kernel_for(resolved.model).fused
    if isinstance(resolved.model, ForeignConfig) and FROZEN_FP32 in resolved.model.fields:
        low = False
    compute = Compute(
        device_type=device_type,
        params_dtype=torch.bfloat16 if types.parameters.itemsize == 2 else torch.float32,
        frozen_dtype=torch.bfloat16 if low else torch.float32,
        autocast=types.autocast is not None,
        stage3=variant_of(config).fetches_by_module,
        documents=config.data.document_attention,
        resident_threads=0 if gpu is None else gpu.resident_threads,
        heads_apart=gpu is not None and gpu.takes_flash,
        compiled=config.loop.compiles,
        kept_share=resolved.kept_share,
        own_kernels=not resolved.of_another_trainer,
        fp8=config.optim.precision == "fp8",
        fp16=types.computed is torch.float16 and composed,
    )
    return TraceRequest(
        resolved.model, compute, config.data.micro_batch, resolved.local_seq_len, mesh.model
    )

"""Models of transformers under accelerate, Lightning Fabric and DeepSpeed, for peers.py.

Each loop is the one of its library's own documentation. Models keep their defaults (sdpa attention,
GPT-2's own GELU, their loss) except for dropout and the generation cache, which are off.
Everybody has torch's fused AdamW, no weight decay groups, and gradients clipped at 1.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from bare_loops import Setting, Step, deepspeed_engine
from torch import Tensor, nn

from launcher.model.foreign.config import ForeignConfig


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Somebody's training loop, and what has to be installed for it."""

    title: str
    kind: str
    packages: tuple[str, ...]
    gelu: str = "gelu_new"
    """transformers' name of the MLP's activation; gelu_new is GPT-2's, in eight operators."""
    stage: int = 0
    """ZeRO's, for DeepSpeed."""

    def missing(self) -> str | None:
        """The command that installs what is missing."""
        names = [name for name in self.packages if _absent(name)]
        return f"pip install {' '.join(names)}" if names else None


_ACCELERATE = ("accelerate", "transformers")
PEERS = {
    "accelerate": Peer(title="transformers + accelerate", kind="accelerate", packages=_ACCELERATE),
    "accelerate-fused-gelu": Peer(
        title="transformers (activation_function=gelu_pytorch_tanh) + accelerate",
        kind="accelerate",
        packages=_ACCELERATE,
        gelu="gelu_pytorch_tanh",
    ),
    "fabric": Peer(
        title="transformers + Lightning Fabric",
        kind="fabric",
        packages=("lightning-fabric", "transformers"),
    ),
    "deepspeed-zero2": Peer(
        title="transformers + DeepSpeed ZeRO-2",
        kind="deepspeed",
        packages=("deepspeed", "transformers"),
        stage=2,
    ),
    "deepspeed-zero3": Peer(
        title="transformers + DeepSpeed ZeRO-3",
        kind="deepspeed",
        packages=("deepspeed", "transformers"),
        stage=3,
    ),
}


def peer_step(peer: Peer, setting: Setting) -> Step:
    """One optimizer step of the peer on tokens [B, T]; the second argument is not used, because
    transformers makes the targets itself, one less per sequence than ours."""
    build = {"accelerate": _accelerate, "fabric": _fabric, "deepspeed": _deepspeed}[peer.kind]
    return build(peer, setting)


def _accelerate(peer: Peer, setting: Setting) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=setting.device_type == "cpu",
        mixed_precision="bf16" if setting.bf16 else "no",
        dynamo_backend="inductor" if setting.compile else "no",
    )
    plain = _causal(peer, setting)
    module, optimizer = accelerator.prepare(plain, _adamw(plain))

    def step(tokens: Tensor, targets: Tensor) -> None:
        loss = module(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _fabric(peer: Peer, setting: Setting) -> Step:
    import torch.distributed as dist
    from lightning_fabric import Fabric

    processes = dist.get_world_size() if dist.is_initialized() else 1
    fabric = Fabric(
        accelerator="cpu" if setting.device_type == "cpu" else "cuda",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        precision="bf16-mixed" if setting.bf16 else "32-true",
    )
    if processes > 1:
        fabric.launch()  # joins the ranks that torchrun has started
    plain = _causal(peer, setting)
    compiled: Any = torch.compile(plain) if setting.compile else plain
    module, optimizer = fabric.setup(compiled, _adamw(plain))

    def step(tokens: Tensor, targets: Tensor) -> None:
        loss = module(input_ids=tokens, labels=tokens).loss
        fabric.backward(loss)
        fabric.clip_gradients(module, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed(peer: Peer, setting: Setting) -> Step:
    module = _causal(peer, setting)
    engine = deepspeed_engine(module, _adamw(module), peer.stage, setting)
    if setting.compile:
        engine.compile()

    def step(tokens: Tensor, targets: Tensor) -> None:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()

    return step


def _causal(peer: Peer, setting: Setting) -> nn.Module:
    if not isinstance(setting.model, ForeignConfig):
        return _gpt2(peer, setting)
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**setting.model.fields)
    module: nn.Module = AutoModelForCausalLM.from_config(config).train().to(setting.device_type)
    return module


def _gpt2(peer: Peer, setting: Setting) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = setting.model
    shape = GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.context,
        n_embd=model.d_model,
        n_layer=model.layers,
        n_head=model.heads,
        activation_function=peer.gelu,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    module: nn.Module = GPT2LMHeadModel(shape).train().to(setting.device_type)
    return module


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)


def _absent(package: str) -> bool:
    return importlib.util.find_spec(package.replace("-", "_")) is None

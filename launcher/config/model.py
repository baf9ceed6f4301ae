"""Section of RunConfig that selects the decoder."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.config.transformers_config import (
    DecoderChoice,
    from_config,
    is_function,
    label_of,
    names_config,
)
from launcher.model import config as shapes
from launcher.model.checkpointing import parse
from launcher.model.config_checks import biased, spelled_bias
from launcher.model.foreign.config import ForeignConfig
from launcher.model.lora_config import MOST_RANK, PROJECTIONS, Lora
from launcher.model.sizes import CUSTOM, known_name, named
from launcher.util.errors import UserError, refused
from launcher.util.flags import as_flags, flag, require_at_most, require_range
from launcher.util.hub_cache import name_of_folder
from launcher.util.sizes import even_part

CHANGES_ADAPTERS = ("lora_rank", "lora_alpha", "lora_targets", "rslora")
"""The fields that change what adapters compute."""
LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "rslora", "random_base")
"""The fields that choose adapters."""
Attention = Literal[shapes.AttentionKind, "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math"]
MOST_ALPHA = 1e6  # usual are 8 to 256; larger than this only overflows


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChoice:
    """The decoder: a named size, with any dimension changed."""

    model: str = "nano"
    """Named size: nano, seed-134m, gpt2 to gpt2-xl, 2.7b to 175b (GPT-3), tinyllama-1.1b,
    smollm2-135m to -1.7b, llama-2-7b to -70b, llama-3-8b, -70b, llama-3.1-8b to -405b,
    llama-3.2-1b, -3b, qwen2.5-0.5b to -72b, qwen3-0.6b to -32b, mistral-7b, -v0.3, gemma-2-9b,
    phi-4, mixtral-8x7b, gpt-oss-20b and 90 more (docs/models.md); the hub's names of these work
    too. custom: only the dimensions of the other flags.
    hf:ORG/NAME, a folder or a config.json: any causal decoder of transformers, by its config."""
    decoder: DecoderChoice = "auto"
    """Code that computes a config of transformers: own (shardscale's, for the families it has),
    transformers, or auto: own where it computes the same. package.module:function: a decoder of
    your own, built from a config (docs/your-own-decoder.md)."""
    init_from: Path | None = None
    """Start from the weights, shape and tokenizer of a folder of transformers' save_pretrained, a
    run folder or a checkpoint (without its optimizer), or hf:ORG/NAME, downloaded once."""
    layers: int | None = None
    """Number of decoder blocks."""
    heads: int | None = None
    """Attention heads; must divide d_model where no head_dim is given."""
    kv_heads: int | None = None
    """Key and value heads, each shared by heads / kv_heads query heads (heads when not given)."""
    head_dim: int | None = None
    """Width of one head (d_model / heads when not given)."""
    d_model: int | None = None
    """Width of the residual stream."""
    d_ff: int | None = None
    """Width of the MLP (4 x d_model when not given)."""
    context: int | None = None
    """Longest sequence of the model."""
    vocab_size: int | None = None
    """Rows of the embedding, and size of a trained BPE vocabulary."""
    position: shapes.Position | None = None
    """Learned position embedding, or rotary embedding of queries and keys."""
    rope_theta: float | None = None
    """Base of the rotary frequencies."""
    rope_scaling: shapes.RopeScaling | None = None
    """Llama 3's: factor, low and high frequency factor, original context (8 1 4 8192)."""
    norm: shapes.Norm | None = None
    """LayerNorm or RMSNorm."""
    norm_eps: float | None = None
    """Added to the variance in norms."""
    qk_norm: bool | None = None
    """RMSNorm of each query and key head."""
    activation: shapes.Activation | None = None
    """Activation of the MLP; swiglu multiplies it with a second projection."""
    bias: str | None = None
    """Projections with biases: some of qkv, proj and mlp with commas between, all, or none."""
    tied: bool | None = None
    """Share the token embedding's weight with the output head."""
    dropout: float | None = None
    """Dropout probability (embedding, attention, residual)."""
    attention: Attention = "auto"
    """Attention kernel: eager (the textbook form), sdpa (PyTorch's choice, or sdpa-BACKEND), flash
    (FlashAttention), flex (FlexAttention), or auto: the fastest that is installed and able."""
    window: int | None = None
    """Sliding causal window: a token sees itself and this many tokens before it."""
    activation_checkpointing: str = "none"
    """Recompute activations in the backward. selective keeps every matmul and attention output,
    keep=qkv,attention,proj,mlp-up only those named. full keeps each block's input, offload keeps it
    in host memory (GPUs). every=2 is full in every second block. budget=8GiB keeps the outputs that
    save most FLOPs per byte, up to that size per micro-batch and rank."""
    loss_chunk: int | None = None
    """Rows of logits that the loss holds at once (automatic when not given); 0 = all."""
    mlp_tile: int | None = None
    """Tokens per tile of the MLP, recomputed in the backward (no tiles when not given)."""
    lora_rank: int | None = None
    """Train only low-rank adapters (LoRA) of this rank, beside frozen weights."""
    lora_alpha: float | None = None
    """Scale an adapter's product by alpha / rank (2 x rank when not given)."""
    lora_dropout: float = 0.0
    """Dropout probability of an adapter's input."""
    lora_targets: str = "qkv,proj"
    """Projections with adapters: qkv, proj and mlp, separated by commas, or all. Of a decoder of
    transformers also names of its layers, as q_proj,v_proj."""
    rslora: bool = False
    """Rank-stabilised LoRA: scale by alpha / sqrt(rank)."""
    random_base: bool = False
    """Allow adapters beside random weights, without --init-from: to measure memory and speed."""
    quantize_base: shapes.Quantization = "none"
    """Type of the frozen projections that have adapters: nf4 (QLoRA's 4 bits) or int8, both with
    quantised scales."""
    masks: bool | None = None
    """Keep pruned weights at zero, at one bit per weight (when not given: if --init-from has
    masks); --no-masks trains them again."""

    def __post_init__(self) -> None:
        if not names_config(self.model):
            object.__setattr__(self, "model", known_name(self.model) or self.model)
        with refused(ValueError):
            text = parse(self.activation_checkpointing).text
            bias = None if self.bias is None else spelled_bias(biased(self.bias))
        object.__setattr__(self, "activation_checkpointing", text)
        object.__setattr__(self, "bias", bias)

    @property
    def label(self) -> str:
        """Name for tables and folders: of a custom model, the folder that it starts from."""
        if is_function(self.decoder):
            return self.decoder.partition(":")[0].rpartition(".")[2]
        if self.model == CUSTOM and self.init_from is not None:
            return name_of_folder(self.init_from)
        return label_of(self.model) if names_config(self.model) else self.model

    def build(self) -> shapes.ModelConfig:
        """Return the decoder's config.

        Raises:
            UserError: unknown name, or dimensions that do not go together.
        """
        by_user = is_function(self.decoder)
        if self.decoder != "auto" and not by_user and not names_config(self.model):
            raise UserError(
                f"--decoder {self.decoder} chooses who computes a config of transformers, and "
                f"--model {self.model} is none: leave it out, or give --model hf:ORG/NAME"
            )
        changes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        name, by = changes.pop("model"), changes.pop("decoder")
        changes["attention"], _, backend = self.attention.partition("-")
        changes["sdpa_backend"] = backend or None
        del changes["init_from"]  # whose shape has been adopted (launcher/config/init_from.py)
        for field in LORA:
            del changes[field]
        with refused(ValueError):
            changes["lora"] = self.build_lora()
            changes = {name: value for name, value in changes.items() if value is not None}
            if by_user:
                from launcher.config.users_decoder import from_function

                return from_function(name, by, changes)
            model = from_config(name, by, changes) if names_config(name) else named(name, **changes)
        for given in ("rope_theta", "rope_scaling"):
            if given in changes and model.position != "rope":
                raise UserError(
                    f"{flag(given)} belongs to --position rope, not {model.position}: leave it out"
                )
        return model

    def build_lora(self) -> Lora | None:
        """Return the adapters, if any.

        Raises:
            UserError: flags of adapters without a rank, or of impossible ones.
        """
        if self.lora_rank is None:
            for field in dataclasses.fields(self):
                if field.name in LORA and getattr(self, field.name) != field.default:
                    given = as_flags({field.name: getattr(self, field.name)})
                    raise UserError(f"{given} belongs to --lora-rank: give one, 8 is usual")
            return None
        require_range("--lora-rank", self.lora_rank, 1, MOST_RANK)
        require_at_most(self, "lora_alpha", most=MOST_ALPHA)
        names = _in_order(name.strip() for name in self.lora_targets.split(","))
        with refused(ValueError):
            return Lora(
                rank=self.lora_rank,
                alpha=2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha,
                dropout=self.lora_dropout,
                targets=PROJECTIONS if names in (("all",), ("all-linear",)) else names,
                rslora=self.rslora,
            )


def adapter_flags(lora: Lora | None) -> dict[str, Any]:
    """Return adapters as fields of RunConfig."""
    if lora is None:
        return {}
    return {
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "lora_targets": ",".join(_in_order(lora.targets)),
        "rslora": lora.rslora,
    }


def _in_order(targets: Iterable[str]) -> tuple[str, ...]:
    """Return targets of adapters in one order: proj,qkv are the same as qkv,proj."""
    order: dict[str, int] = {target: number for number, target in enumerate(PROJECTIONS)}
    return tuple(sorted(targets, key=lambda target: (order.get(target, len(order)), target)))


def part_of(model: shapes.ModelConfig, ranks: int, index: int = -1) -> shapes.ModelConfig:
    """Return the model that rank `index` of `ranks` tensor-parallel ranks computes: its heads,
    width and vocabulary. It holds fewer positions too, which a model config cannot express."""
    if isinstance(model, ForeignConfig):
        from launcher.model.foreign.matrices import with_part

        return with_part(model, (index % ranks, ranks))
    # by default the last rank's, which is one of the largest
    begin, end = even_part(model.vocab_size, index % ranks, ranks)
    return dataclasses.replace(
        model,
        vocab_size=end - begin,
        heads=model.heads // ranks,
        kv_heads=model.kv_head_count // ranks,
        head_dim=model.head_size,
        d_ff=model.ffn_dim // ranks,
    )

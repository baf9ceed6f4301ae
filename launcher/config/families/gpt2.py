"""GPT2LMHeadModel."""

from launcher.config.families.base import Family
from launcher.config.families.fields import ActivationName, Dropout, Only, Value
from launcher.model.config import Activation

# Three ways to compute one tanh approximation; they differ by rounding.
_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
}

FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fixed={"position": "learned", "norm": "layer"},
    fields=(
        Value("vocab_size", "vocab_size", int, 50257),
        # What other programs ask for; transformers itself goes by n_positions.
        Value("n_ctx", "context", int, 1024),
        Value("n_positions", "context", int, 1024),
        Value("n_embd", "d_model", int, 768),
        Value("n_layer", "layers", int, 12),
        Value("n_head", "heads", int, 12),
        Value("n_inner", "d_ff", int, optional=True),
        ActivationName("activation_function", _ACTIVATIONS),
        Value("layer_norm_epsilon", "norm_eps", float, 1e-5),
        Value("tie_word_embeddings", "tied", bool, True),
        Dropout(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
        Only("scale_attn_weights", True),
        Only("scale_attn_by_inverse_layer_idx", False),
    ),
    harmless=frozenset(
        {
            *("reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"),
            *("summary_proj_to_labels", "summary_first_dropout"),
        }
    ),
    tensors={
        "wte": ("transformer.wte",),
        "wpe": ("transformer.wpe",),
        "ln_1": ("transformer.h.{}.ln_1",),
        "attn.qkv": ("transformer.h.{}.attn.c_attn",),
        "attn.proj": ("transformer.h.{}.attn.c_proj",),
        "ln_2": ("transformer.h.{}.ln_2",),
        "mlp.fc": ("transformer.h.{}.mlp.c_fc",),
        "mlp.out": ("transformer.h.{}.mlp.c_proj",),
        "ln_f": ("transformer.ln_f",),
        "head": ("lm_head",),
    },
    prefix="transformer.",
    # The causal mask, which older versions of transformers have saved with the weights.
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
    transposed=True,
)

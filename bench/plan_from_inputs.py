"""Small models, their tokenizers and texts for plan_from_rehearsals.py, in folders as on the hub.

Weights have the right shapes and no content; texts have more tokens than any sequence.
"""

import json
from pathlib import Path
from typing import Any, Final

from rehearsals_inputs import shapes_of, write_hollow

# Layers, width, feed-forward, heads, key/value heads, width of a head, vocabulary; all have their
# embedding as their head.
SHAPES: Final = {
    "HuggingFaceTB/SmolLM2-135M": ("llama", 30, 576, 1536, 9, 3, 64, 49152),
    "HuggingFaceTB/SmolLM2-360M": ("llama", 32, 960, 2560, 15, 5, 64, 49152),
    "Qwen/Qwen2.5-0.5B": ("qwen2", 24, 896, 4864, 14, 2, 64, 151936),
    "Qwen/Qwen3-0.6B": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936),
    "meta-llama/Llama-3.2-1B": ("llama", 16, 2048, 8192, 32, 8, 64, 128256),
}
ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
WORDS: Final = 900
TEXTS: Final = 64
OF_LITGPT: Final = ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-360M")
SPECIAL: Final = ("<unk>", "<s>", "</s>", "<pad>")


def make_hub(folder: Path) -> None:
    """Write all models and texts that are not there yet."""
    for name in SHAPES:
        model = folder / name
        if model.is_dir():
            continue
        model.mkdir(parents=True)
        config = config_of(name)
        _write(model / "config.json", config)
        write_hollow(model / "model.safetensors", shapes_of(config))
        _write_tokenizer(model)
    line = json.dumps({"text": "word " * WORDS}) + "\n"
    for name in ("texts", "factory"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "train.jsonl").write_text(line * TEXTS, encoding="utf-8")
    texts = {"file_name": "train.jsonl", "columns": {"prompt": "text"}}
    _write(folder / "factory" / "dataset_info.json", {"texts": texts})
    example = {"instruction": "word", "input": "", "output": "word " * WORDS}
    _write(folder / "instructions.json", [example] * TEXTS)
    for name in OF_LITGPT:
        _make_checkpoint(folder / "checkpoints" / name, config_of(name))


def config_of(name: str) -> dict[str, Any]:
    """Return a model's config.json."""
    kind, layers, width, inner, heads, groups, head, vocabulary = SHAPES[name]
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the letters of one word, as every class of fast tokenizers reads it."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *"word", "\u0120"))}
    added = [
        {
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            **{"id": number, "content": word, "special": True},
        }
        for number, word in enumerate(SPECIAL)
    ]
    by_byte = {
        "type": "ByteLevel",
        **{"add_prefix_space": False, "trim_offsets": False, "use_regex": True},
    }
    document = {
        **{"version": "1.0", "truncation": None, "padding": None, "normalizer": None},
        **{"post_processor": None, "decoder": by_byte, "added_tokens": added},
        "pre_tokenizer": by_byte,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": SPECIAL[0]},
    }
    _write(folder / "tokenizer.json", document)
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    names = ("unk_token", "bos_token", "eos_token", "pad_token")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    _write(folder / "tokenizer_config.json", settings | dict(zip(names, SPECIAL, strict=True)))


def _make_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write a checkpoint of LitGPT, whose head has a weight of its own."""
    import torch

    if (folder / "lit_model.pth").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    width, inner, head = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    words = {
        **{"name": folder.name, "block_size": 8192, "vocab_size": config["vocab_size"]},
        **{"padded_vocab_size": config["vocab_size"], "n_layer": config["num_hidden_layers"]},
        **{"n_head": heads, "n_embd": width, "head_size": head, "n_query_groups": groups},
        **{"rotary_percentage": 1.0, "parallel_residual": False, "bias": False},
        **{"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": inner},
    }
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in words.items())
    (folder / "model_config.yaml").write_text(text, encoding="utf-8")
    block = {
        "norm_1": [width],
        "attn.attn": [head * (heads + 2 * groups), width],
        "attn.proj": [width, head * heads],
        "norm_2": [width],
        "mlp.fc_1": [inner, width],
        "mlp.fc_2": [inner, width],
        "mlp.proj": [width, inner],
    }
    shapes = {"lm_head": [config["vocab_size"], width], "transformer.ln_f": [width]}
    shapes["transformer.wte"] = shapes["lm_head"]
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"transformer.h.{layer}.{name}": shape for name, shape in block.items()}
    weights = {
        f"{name}.weight": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()
    }
    torch.save(weights, folder / "lit_model.pth")


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")

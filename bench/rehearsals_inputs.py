"""Weights, tokenizers and data with the right shapes and no content, for rehearsals.py.

A safetensors file is its header and a hole: the disk keeps no bytes of it. A tokenizer has all its
ids, and rows are long enough to fill the sequences of a program.
"""

import base64
import json
import math
import struct
from pathlib import Path
from typing import Any

# Layers, width, feed-forward, heads, key/value heads, vocabulary, tied head.
LLAMAS = {
    "llama-3.2-3b": (28, 3072, 8192, 24, 8, 128256, True),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128256, False),
    "llama-2-7b": (32, 4096, 11008, 32, 32, 32000, False),
}
# Blocks, width, width of the two feed-forward products, positions, scales per block.
VITS = {
    "vit_huge_patch14_224": (32, 1280, 5120, 5120, 257, False),
    "vit_giant_patch14_dinov2": (40, 1536, 8192, 4096, 1370, True),
}
TIKTOKEN_IDS = 128_000
ROWS = 300
CLASSES = 45
IMAGES = 4  # per class


def make_inputs(folder: Path) -> None:
    """Write all inputs that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (layers, width, inner, heads, groups, vocabulary, tied) in LLAMAS.items():
        model = folder / name
        if model.is_dir():
            continue
        model.mkdir()
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
        }
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        write_hollow(model / "model.safetensors", shapes_of(config))
        _write_tiktoken(model / "tokenizer.model")
    for name, vit in VITS.items():
        write_hollow(folder / f"{name}.safetensors", vit_shapes(*vit), "F32")
    _write_instructions(folder / "instructions.json")
    for part in ("train", "validation"):
        _write_images(folder / "images" / "timm" / "resisc45" / part)


def write_hollow(path: Path, shapes: dict[str, list[int]], dtype: str = "BF16") -> None:
    """Write a safetensors file whose values are a hole: zeros that take no space."""
    if path.exists():
        return
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + {"BF16": 2, "F32": 4}[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def shapes_of(config: dict[str, Any]) -> dict[str, list[int]]:
    """Return the tensors of a Llama or Qwen of transformers."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", width // config["num_attention_heads"])
    queries = head * config["num_attention_heads"]
    keys = head * config["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": [config["vocab_size"], width],
        "model.norm.weight": [width],
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [config["vocab_size"], width]
    block = {
        "self_attn.q_proj.weight": [queries, width],
        "self_attn.k_proj.weight": [keys, width],
        "self_attn.v_proj.weight": [keys, width],
        "self_attn.o_proj.weight": [width, queries],
        "mlp.gate_proj.weight": [inner, width],
        "mlp.up_proj.weight": [inner, width],
        "mlp.down_proj.weight": [width, inner],
        "input_layernorm.weight": [width],
        "post_attention_layernorm.weight": [width],
    }
    if config["model_type"] == "qwen2":
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            block[f"self_attn.{name}_proj.bias"] = [rows]
    if config["model_type"] == "qwen3":
        block |= {"self_attn.q_norm.weight": [head], "self_attn.k_norm.weight": [head]}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def vit_shapes(
    blocks: int, width: int, inner: int, outer: int, positions: int, scales: bool
) -> dict[str, list[int]]:
    """Return the tensors of a vision transformer of timm; `scales` as of DINOv2's blocks."""
    shapes = {
        "cls_token": [1, 1, width],
        "pos_embed": [1, positions, width],
        "patch_embed.proj.weight": [width, 3, 14, 14],
        "patch_embed.proj.bias": [width],
        "norm.weight": [width],
        "norm.bias": [width],
    }
    products = {
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "mlp.fc1": (inner, width),
        "mlp.fc2": (width, outer),
    }
    for block in range(blocks):
        at = f"blocks.{block}."
        for name, (rows, columns) in products.items():
            shapes |= {f"{at}{name}.weight": [rows, columns], f"{at}{name}.bias": [rows]}
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            shapes[at + name] = [width]
        if scales:
            shapes |= {f"{at}ls1.gamma": [width], f"{at}ls2.gamma": [width]}
    return shapes


def _write_tiktoken(path: Path) -> None:
    """Write the file of a byte-pair encoding: each byte, then words that no text has."""
    words = [bytes([byte]) for byte in range(256)]
    words += [f"token{number}".encode() for number in range(256, TIKTOKEN_IDS)]
    lines = (f"{base64.b64encode(word).decode()} {number}\n" for number, word in enumerate(words))
    path.write_text("".join(lines), encoding="utf-8")


def _write_instructions(path: Path) -> None:
    text = "word " * 200
    rows = [{"instruction": text, "input": "", "output": text}] * ROWS
    path.write_text(json.dumps(rows), encoding="utf-8")


def _write_images(folder: Path) -> None:
    """Write grey images, in a folder per class."""
    for number in range(CLASSES):
        beside = folder / f"class{number:02d}"
        beside.mkdir(parents=True, exist_ok=True)
        for image in range(IMAGES):
            (beside / f"{image}.ppm").write_bytes(b"P6 256 256 255\n" + bytes([128]) * 3 * 256**2)

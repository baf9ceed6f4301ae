"""Tokens per second of `shardscale generate`, over transformers' `generate` with the same weights.

    python bench/generate.py [--output bench/results/generate.json]

Both decode greedily with their caches on, from one prompt, on one CPU, in one process with the same
threads. They take turns, so each pair of neighbours gives one ratio; the median of the ratios is
what counts. Beside it stands that of their CPU time, which other processes of a busy machine change
less (with one thread: OMP_NUM_THREADS=1). That both give the same tokens is checked first.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from runs import refuse_existing

from launcher.checkpoint.pretrained.loading import build, open_source
from launcher.model.config import ModelConfig
from launcher.model.decode import continuation
from launcher.model.gpt import GPT
from launcher.run.sampling import Sampling, token_sampler

PROMPT, TOKENS, PAIRS = 32, 64, 25
LLAMA: dict[str, Any] = {
    **{"vocab_size": 8192, "context": 512, "layers": 8, "heads": 8, "kv_heads": 2, "d_model": 384},
    **{"d_ff": 1024, "position": "rope", "norm": "rms", "activation": "swiglu"},
    **{"bias": "none", "tied": False},
}
MODELS = {
    "gpt2-shaped": ModelConfig(vocab_size=8192, context=512, layers=8, heads=6, d_model=384),
    "llama-shaped": ModelConfig(**LLAMA),
}
Decode = Callable[[], list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    if options.output is not None:
        refuse_existing(options.output)
    results = {}
    for name, config in MODELS.items():
        results[name] = {"parameters": config.parameter_count, **compared(config)}
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    if options.output:
        setting: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "prompt": PROMPT,
            "tokens": TOKENS,
        }
        setting |= {"torch": str(torch.__version__), "transformers": transformers.__version__}
        options.output.write_text(json.dumps({**setting, "results": results}, indent=2) + "\n")


def compared(config: ModelConfig) -> dict[str, Any]:
    """Ratios of neighbours, ours over theirs, and the median rates."""
    torch.manual_seed(0)
    theirs = their_model(config)
    ours, them = our_decoding(our_model(theirs)), their_decoding(theirs)
    assert ours() == them()  # which warms both up
    pairs = [(taken(ours), taken(them)) for _ in range(PAIRS)]
    return {
        "ratio": spread([b.wall_s / a.wall_s for a, b in pairs]),
        "cpu_time_ratio": spread([b.cpu_s / a.cpu_s for a, b in pairs]),
        "tokens_per_s": round(TOKENS / statistics.median(a.wall_s for a, _ in pairs), 1),
        "transformers_tokens_per_s": round(
            TOKENS / statistics.median(b.wall_s for _, b in pairs), 1
        ),
    }


class Taken(NamedTuple):
    wall_s: float
    cpu_s: float


def taken(decode: Decode) -> Taken:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    decode()
    return Taken(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def spread(ratios: list[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(ratios, n=4)
    return {
        name: round(value, 3)
        for name, value in (
            ("median", median),
            ("lower_quartile", lower),
            ("upper_quartile", upper),
        )
    }


def prompt() -> torch.Tensor:
    return torch.arange(100, 100 + PROMPT)


def our_decoding(model: GPT) -> Decode:
    tokens = prompt().tolist()
    return lambda: list(continuation(model, tokens, token_sampler(Sampling(), seed=0), most=TOKENS))


def their_decoding(model: Any) -> Decode:
    tokens = prompt()[None]
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "use_cache": True}
    options |= {"attention_mask": torch.ones_like(tokens), "eos_token_id": None, "pad_token_id": 0}
    return lambda: list(model.generate(tokens, **options)[0, PROMPT:].tolist())


def their_model(config: ModelConfig) -> Any:
    """Random weights, large enough for one token to stand out."""
    if config.position == "learned":
        settings = transformers.GPT2Config(
            **{"vocab_size": config.vocab_size, "n_positions": config.context},
            **{"n_embd": config.d_model, "n_layer": config.layers, "n_head": config.heads},
            **{"bos_token_id": None, "eos_token_id": None},
            initializer_range=0.1,
        )
        return transformers.GPT2LMHeadModel(settings).eval()
    settings = transformers.LlamaConfig(
        **{"vocab_size": config.vocab_size, "max_position_embeddings": config.context},
        **{"hidden_size": config.d_model, "intermediate_size": config.ffn_dim},
        **{"num_hidden_layers": config.layers, "num_attention_heads": config.heads},
        **{"num_key_value_heads": config.kv_head_count, "rms_norm_eps": config.norm_eps},
        initializer_range=0.1,
    )
    return transformers.LlamaForCausalLM(settings).eval()


def our_model(theirs: Any) -> GPT:
    """The same weights, as the verb loads them."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        with open_source(Path(folder)) as source:
            return build(source, device=torch.device("cpu"), dtype=torch.float32)


if __name__ == "__main__":
    main()

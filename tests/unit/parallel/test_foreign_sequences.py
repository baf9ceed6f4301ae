"""Decoders of transformers over parts of sequences compute what they do over whole ones, and what
cannot is refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rank_threads import require_sequence_parity
from tiny_architectures import ARCHITECTURES, MORE

from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.model.config import ModelConfig
from launcher.model.foreign import attention
from launcher.model.foreign.attention import attention_obstacle
from launcher.model.foreign.reading import foreign_config
from launcher.util.errors import UserError

FIELDS = {
    name: {**fields, "output_router_logits": False}
    for name, fields in {**ARCHITECTURES, **MORE}.items()
    if name != "apertus"  # refused as a whole
}
REASONS: Mapping[str, str] = {
    **dict.fromkeys(("falcon_h1", "mamba2", "mamba", "lfm2", "qwen3_next"), "carries a state"),
    **dict.fromkeys(("bloom", "falcon", "mpt"), "in a way of its own"),
}


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in REASONS])
def test_halves_of_a_sequence_have_the_loss_and_gradients_of_the_whole(name: str) -> None:
    require_sequence_parity(foreign_config(FIELDS[name]))


def resolved(folder: Path, name: str, **changes: Any) -> ModelConfig:
    path = folder / "config.json"
    path.write_text(json.dumps({**ARCHITECTURES, **MORE}[name]), encoding="utf-8")
    config = {"model": str(path), "decoder": "transformers", "seq_len": 16, "strategy": "ddp"}
    run = RunConfig().replace(**{**config, "context_parallel": 2, **changes})
    return resolve(run, world_size=run.sharding.context_parallel, device_type="cpu").model


@pytest.mark.parametrize("name", REASONS)
def test_what_sees_other_tokens_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    assert attention_obstacle(foreign_config(FIELDS[name])) is not None
    with pytest.raises(UserError, match=f"--context-parallel 2 .* {REASONS[name]}"):
        resolved(tmp_path, name)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("qwen3", {"context_parallel": 4}, "4 heads with 2 of keys .* use --context-parallel 2"),
        ("gpt_bigcode", {}, "4 heads with 1 of keys do not divide: leave it out"),
        ("qwen3", {"context_parallel_method": "ring"}, "ring knows .* use ulysses"),
        ("mixtral", {}, "router loss over whole sequences: set output_router_logits to false"),
        ("qwen3", {"document_attention": True}, "with --document-attention knows"),
        (
            "qwen3",
            {"sample_every": 5},
            "--sample-every 5 writes on one rank alone, and --context-parallel",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(
    name: str, changes: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        resolved(tmp_path, name, **changes)


def test_an_argument_of_attention_that_is_unknown_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_KNOWN", attention._KNOWN - {"scaling"})
    reason = attention_obstacle(foreign_config(FIELDS["llama"]))
    assert reason == "gives each head scaling besides its queries, keys and values"


def test_frequencies_by_the_length_of_a_sequence_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = foreign_config({**FIELDS["llama"], "rope_parameters": rope})
    assert attention_obstacle(config) is not None

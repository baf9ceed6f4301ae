"""The weights that a planned run begins with, so that its command does what was asked."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from launcher.config.arguments import parse_run_config
from launcher.config.init_from import HF_CONFIG
from launcher.config.schema import RunConfig

MODEL_FOLDER: Final = Path("MODEL_FOLDER")
"""In a command: weights that the planner has not seen."""


def with_weights(config: RunConfig, options: argparse.Namespace) -> RunConfig:
    """Return the config with the folder whose weights it trains: that of an `--hf-config` whose
    shape no flag changes, or a placeholder beside adapters."""
    model, folder = config.model, None
    if model.init_from is not None or model.random_base:
        return config
    if options.shape and model.build().computes() == _computes(options.shape):
        own = options.hf_config.name == HF_CONFIG
        folder = options.hf_config.parent if own else MODEL_FOLDER
    elif model.lora_rank is not None:
        folder = MODEL_FOLDER
    return config if folder is None else config.replace(init_from=folder)


def _computes(shape: Sequence[str]) -> Mapping[str, Any]:
    return parse_run_config(shape).model.build().computes()

"""Layers with adapters, in PEFT's words, which several trainers share."""

import re
from typing import Any, Final

from launcher.model.lora_config import LAYERS, PROJECTIONS
from launcher.tools.plan_from.keys import Facts, Unknown, is_on

# where a config names no layers: PEFT's utils/constants.py for Llama, Mistral, Qwen, Gemma ...
PEFT_TARGETS: Final[Facts] = {"lora_targets if lora": "qkv", "layers if lora": "q_proj,v_proj"}
PEFT_LAYERS: Final = {
    "phi": "q_proj,v_proj,fc1,fc2",
    "nemotron_h": "q_proj,k_proj,v_proj,o_proj",
    **dict.fromkeys(("gpt_neox", "falcon", "bloom"), "query_key_value"),
    **{"mpt": "Wqkv", "codegen": "qkv_proj", "gpt_bigcode": "c_attn"},
}
"""model_type -> the layers of those that have others; transformers computes all of these."""


def adapter_targets(value: Any) -> Facts:
    """Read the names of layers with adapters, or PEFT's expression for them; in our words q, k and
    v are one layer."""
    if not is_on(value):
        return {}
    given = value if isinstance(value, list) else str(value).replace(",", " ").split()
    names = list(dict.fromkeys(name for each in given for name in _layers(str(each))))
    if "all" in names or "all-linear" in names:
        return {"lora_targets": "all"}
    known = [name for name in names if name in LAYERS]
    targets = {LAYERS[name] for name in known}
    found = ",".join(target for target in PROJECTIONS if target in targets)
    if not found:
        raise Unknown("is planned as qkv,proj", lora_targets="qkv,proj")
    facts = {"lora_targets": found, "layers": ",".join(known)}
    if len(known) < len(names):
        others = ", ".join(name for name in names if name not in known)
        raise Unknown(f"adapters of {others} are not planned", **facts)
    return facts


def _layers(name: str) -> list[str]:
    """Return the last part of a layer's path; of an expression, all known ones that it spells."""
    if re.fullmatch(r"[\w.-]+", name):
        return [name.rpartition(".")[2]]
    # (q|k|v)_proj
    groups = re.findall(r"\(([\w|]+)\)(\w*)", name)
    spelled = [f"{one}{end}" for ones, end in groups for one in ones.split("|")]
    return [one for one in (*spelled, *re.findall(r"\w+", name)) if one in LAYERS]

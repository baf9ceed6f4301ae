"""Labels of the planner's table as values of `--strategy`: `zero2`, `fsdp-grad-op+each`."""

import re
from typing import Any, Final

from launcher.config.sharding import MODEL_PARALLEL
from launcher.util.errors import UserError
from launcher.util.flags import as_flags

_DEGREES: Final = {name.removesuffix("_parallel"): name for name in MODEL_PARALLEL}
_LABEL: Final = re.compile(
    r"(?:zero(?P<zero>[0-3])|single|ddp|fsdp(?P<hybrid>-hybrid)?(?P<grad_op>-grad-op)?)"
    r"(?P<each>\+each)?(?P<cpu>\+cpu)?(?P<param>\+param)?"
    rf"(?:-(?P<dimension>{'|'.join(_DEGREES)})(?P<ranks>[1-9][0-9]{{0,4}}))?"
)


def is_label(text: str) -> bool:
    """Return whether `text` is a label as the planner prints them."""
    return _LABEL.fullmatch(text) is not None


def expand_label(values: dict[str, Any], said: str) -> None:
    """Replace the label in `values["strategy"]`, if any, by the fields that it stands for.

    Raises:
        UserError: other values contradict it, or it needs one more.
    """
    label = values.get("strategy")
    if label is None:
        return
    match = _LABEL.fullmatch(label)
    if match is None:  # `zero`, whose stage is a field of its own
        return
    fields = _fields(match)
    for name, value in fields.items():
        if name != "strategy" and values.get(name, value) != value:
            raise UserError(
                f"{said} {label} means {as_flags({name: value})}, not "
                f"{as_flags({name: values[name]})}: leave one of them out"
            )
    if match["hybrid"] and values.get("replicate", 1) == 1:
        raise UserError(
            f"{said} {label} replicates across groups of ranks: give their number with --replicate"
        )
    values.update(fields)


def _fields(match: re.Match[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {"strategy": re.split("[0-9+-]", match[0])[0]}
    if match["zero"]:
        fields["zero"] = int(match["zero"])
    if match["grad_op"]:
        fields["reshard_after_forward"] = False
    if match["each"]:
        fields["reduce_each_micro_batch"] = True
    if match["cpu"]:
        fields["offload_optimizer"] = "cpu"
    # FSDP2 offloads both or none.
    if match["param"] or (match["cpu"] and fields["strategy"] == "fsdp"):
        fields["offload_param"] = "cpu"
    if match["dimension"]:
        fields[_DEGREES[match["dimension"]]] = int(match["ranks"])
    return fields

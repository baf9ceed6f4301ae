"""Tensors of a folder as parameters of a decoder of transformers, by transformers' own conversions.

Older names are renamed, and experts that are stored one by one become one parameter.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from launcher.model.foreign.config import ForeignConfig
from launcher.model.foreign.decoder import skeleton

PREFIX = "causal."
"""Prefix of parameter names: our module holds the one of transformers."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Stored tensors that become one parameter, or a few that were stored as one."""

    target: str
    """Name of the first parameter, as transformers calls it."""
    converter: Any | None
    """WeightConverter of transformers; None where a tensor is the parameter."""
    tensors: list[tuple[str, str]] = field(default_factory=list)
    """Stored name and the converter's pattern that it matches, in the order of layers."""

    def make(self, causal: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return parameters by transformers' names; on the meta device, what they come to.

        Args:
            read: returns a stored tensor.
        """
        if self.converter is None:
            return {self.target: read(self.tensors[0][0])}
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.tensors:
            converter.add_tensor(self.target, name, pattern, read(name))
        made = converter.convert(self.target, model=causal, config=causal.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def conversions(causal: Any, names: Iterable[str]) -> tuple[list[Conversion], list[str]]:
    """Return what becomes of stored tensors, and the names of those that no parameter needs.

    Those that transformers ignores, such as rotary frequencies of older folders, are in neither.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(causal)
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    renamings = [one for one in transforms if not isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known, prefix = causal.state_dict(), causal.base_model_prefix
    found: dict[str, Conversion] = {}
    left = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:  # a name of today that looks like an older one
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target not in known:
            left.append(name)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        conversion = found.setdefault(target, Conversion(target, converter))
        conversion.tensors.append((name, name if pattern is None else pattern))
    ignored = re.compile("|".join(_ignored(causal)))
    return [*found.values()], [name for name in left if not ignored.search(name)]


def _ignored(causal: Any) -> Iterator[str]:
    yield from (f"(?:{pattern})" for pattern in causal._keys_to_ignore_on_load_unexpected or ())
    for name, _ in causal.named_buffers():  # constants, which older versions stored in each block
        yield rf"(?:^|\.){re.escape(name.rpartition('.')[2])}$"
    yield r"$^"  # matches nothing


def our_names(config: ForeignConfig) -> dict[str, str]:
    """Each name that transformers has for a parameter -> our one name of it: tied ones have several
    there."""
    causal = skeleton(config.document, config.attention)
    ours: dict[Tensor, str] = {}
    return {
        name: ours.setdefault(parameter, f"{PREFIX}{name}")
        for name, parameter in causal.named_parameters(remove_duplicate=False)
    }


def groups(causal: Any) -> list[list[str]]:
    """Return the parameters, by transformers' names, in groups that are converted together when
    transformers saves them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, apply_converters

    transforms = get_model_conversion_mapping(causal, add_legacy=False)[::-1]
    converters = [t.reverse_transform() for t in transforms if isinstance(t, WeightConverter)]
    found: dict[str, list[str]] = {}
    for name, _ in causal.named_parameters():
        found.setdefault(apply_converters(name, converters)[0], []).append(name)
    return [*found.values()]


def as_saved(causal: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a group's tensors as transformers saves them; on the meta device, their shapes."""
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, Tensor] = revert_weight_conversion(causal, dict(parameters))
    return saved

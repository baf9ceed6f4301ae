"""A model of transformers in a folder, read as the decoder of transformers that it is."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from torch import Tensor

from launcher.checkpoint.pretrained.companions import read_generation_config
from launcher.checkpoint.pretrained.folder_weights import FolderWeights, check_tied, finite
from launcher.checkpoint.pretrained.weight_files import of_another_config
from launcher.model.foreign.config import ForeignConfig


class ForeignWeights(FolderWeights):
    """The parameters of a decoder of transformers in a folder of save_pretrained.

    A parameter that is stored in parts, such as experts, is put together when it is read, and the
    last one is kept: a rank holds one such parameter beside its own shards.

    Raises:
        UserError: files are missing or damaged, or do not fit the model of config.json.
    """

    def __init__(self, folder: Path, config: ForeignConfig) -> None:
        # transformers is imported for these folders only.
        from launcher.model.foreign import conversion
        from launcher.model.foreign.decoder import skeleton

        read_generation_config(folder, config.vocab_size)  # refused now, not by an export
        self._causal = skeleton(config.document, config.attention)
        self._ours = conversion.our_names(config)
        self._conversions = conversion.conversions
        self._made = lru_cache(maxsize=1)(self._make)
        super().__init__(folder, config)

    def read(self, name: str) -> Tensor:
        return finite(self._tensor(name), name).contiguous()

    def read_range(self, name: str, start: int, stop: int) -> Tensor:
        flat = self._tensor(name).reshape(-1)
        return finite(flat[start:stop].float().clone(), name)

    def _tensor(self, name: str) -> Tensor:
        theirs, number = self._places[name]
        return self._made(number)[theirs]

    def _make(self, number: int) -> dict[str, Tensor]:
        return self._found[number].make(self._causal, self._weights.read)

    def _match(self) -> None:
        self._found, left = self._conversions(self._causal, self._weights.names())
        self._places: dict[str, tuple[str, int]] = {}
        """Our name -> transformers' name, and the number of the conversion that makes it."""
        for number, conversion in enumerate(self._found):
            stored = conversion.tensors[0][0]
            try:
                made = conversion.make(self._causal, self._weights.without_values)
            except (RuntimeError, ValueError, IndexError):  # of torch, by their shapes
                what = f"{stored} and its like do not make {conversion.target}"
                raise of_another_config(self.folder, what) from None
            for name, tensor in made.items():
                self._place(name, number, stored, tuple(tensor.shape))
        missing = [name for name in self.shapes if name not in self._places]
        if missing:
            lost = missing[0].partition(".")[2]
            what = f"has no tensor {lost}, which its config.json asks for"
            raise of_another_config(self.folder, what)
        if left:
            what = f"{left[0]} belongs to no {type(self._causal).__name__} of its config.json"
            raise of_another_config(self.folder, what)

    def _place(self, name: str, number: int, stored: str, shape: tuple[int, ...]) -> None:
        """Note where a parameter is made; a tied one may be stored under two names."""
        ours = self._ours[name]
        if shape != self.shapes[ours]:
            wanted = list(self.shapes[ours])
            what = f"{stored} makes {name} {list(shape)}, but config.json makes it {wanted}"
            raise of_another_config(self.folder, what)
        other = self._places.setdefault(ours, (name, number))
        if other != (name, number):
            here, there = self._make(number)[name], self._make(other[1])[other[0]]
            check_tied(self.folder, (stored, other[0]), here, there)

"""A model of transformers in a folder, read as our model that computes the same."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from launcher.checkpoint.pretrained.companions import read_generation_config
from launcher.checkpoint.pretrained.folder_weights import FolderWeights, check_tied, finite
from launcher.checkpoint.pretrained.weight_files import of_another_config
from launcher.config.families import Family, Part, family_of
from launcher.util.errors import UserError
from launcher.util.json_file import read_json

_EMBEDDING = "wte.weight"


class TransformersWeights(FolderWeights):
    """The parameters of our own decoder in a folder that transformers' save_pretrained has written.

    Raises:
        UserError: the model is not one that ours computes, or files are missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "config.json"
        document = read_json(path)
        self.family: Family = family_of(document, path)
        config = self.family.read(document, path)
        read_generation_config(folder, config.vocab_size)  # refused now, not by an export
        super().__init__(folder, config)

    def parts(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield our flattened parameter `name` in consecutive pieces: the first element's number
        and the piece as stored, usually a view of a file that is not read yet.

        Raises:
            UserError: there are values that are NaN or infinite.
        """
        for part in self._parts[name]:
            yield part.start, self._finite(part, self._rows(part).reshape(-1))

    def read(self, name: str) -> Tensor:
        pieces = [self._finite(part, self._rows(part)) for part in self._parts[name]]
        # Some are stored the other way round.
        return (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).contiguous()

    def read_range(self, name: str, start: int, stop: int) -> Tensor:
        found = torch.empty(stop - start)
        for part in self._parts[name]:
            low = max(start, part.start)
            high = min(stop, part.start + math.prod(part.shape))
            if low < high:
                target = found[low - start : high - start]
                target.copy_(self._flat(part, low - part.start, high - part.start))
                self._finite(part, target)
        return found

    def _rows(self, part: Part) -> Tensor:
        return part.turned(self._weights.read(self._stored[part.theirs]))

    def _flat(self, part: Part, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a part, reading only the rows that hold them."""
        width = math.prod(part.shape[1:])
        first = start // width
        rows = self._rows(part)[first : -(-stop // width)]
        return rows.reshape(-1)[start - first * width : stop - first * width]

    def _finite(self, part: Part, tensor: Tensor) -> Tensor:
        return finite(tensor, self._stored[part.theirs])

    def _match(self) -> None:
        self._parts: dict[str, list[Part]] = {}
        for part in self.family.parts(self.config, self.shapes):
            self._parts.setdefault(part.ours, []).append(part)
        prefix = self.family.prefix
        # A language model's names have a prefix, those of its decoder saved alone do not.
        stored = {name.removeprefix(prefix): name for name in self._weights.names()}
        found: dict[str, str] = {}
        for part in (part for parts in self._parts.values() for part in parts):
            name = stored.pop(part.theirs.removeprefix(prefix), None)
            if name is None:
                what = f"has no tensor {part.theirs}, which its config.json asks for"
                raise of_another_config(self.folder, what)
            self._weights.check(name, part.their_shape)
            found[part.theirs] = name
        self._check_tied(stored, found)
        self._check_left_over(stored)
        self._stored = found
        """Their name -> the tensor's name in the files."""

    def _check_tied(self, stored: dict[str, str], found: dict[str, str]) -> None:
        """Check that a stored head which is tied equals the embedding."""
        head = stored.pop(f"{self.family.tensors['head'][0]}.weight", None)
        if head is None:
            return
        embedding = found[self._parts[_EMBEDDING][0].theirs]
        read = self._weights.read
        check_tied(self.folder, (head, embedding), read(head), read(embedding))

    def _check_left_over(self, stored: dict[str, str]) -> None:
        left = {k: name for k, name in stored.items() if not re.fullmatch(self.family.buffers, k)}
        # The number of a block, at its place in the name of each family's ln_1.
        block = re.escape(self.family.tensors["ln_1"][0].removeprefix(self.family.prefix))
        block = block.partition(r"\{\}")[0] + r"(\d{1,6})\."
        blocks = [int(match[1]) for name in left if (match := re.match(block, name))]
        if blocks and max(blocks) >= self.config.layers:
            key = next(field.theirs for field in self.family.fields if field.ours == "layers")
            count = f"{max(blocks) + 1} blocks, and config.json says {key} {self.config.layers}"
            raise of_another_config(self.folder, f"the weights have {count}")
        if left:
            raise UserError(
                f"{self.folder}: {next(iter(left.values()))} belongs to no "
                f"{self.family.architecture} of shardscale; save it as one"
            )

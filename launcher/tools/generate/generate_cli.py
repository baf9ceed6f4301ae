"""`shardscale generate`: what a trained model makes of a prompt."""

import json
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from launcher.checkpoint.pretrained.loading import Vocabulary, build, open_source, vocabulary
from launcher.data.formats import read_jsonl
from launcher.model.config import ModelConfig
from launcher.run.sampling import Sampler, Sampling
from launcher.tools.generate.completion import Completion, complete
from launcher.util.errors import ExitCode, UserError, refusing
from launcher.util.flags import MOST_ITEMS, one_sentence, require_range

DEFAULT_MAX_TOKENS = 256
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Go on with a text. To a terminal it is written as it comes, to a pipe as JSON lines."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_FOLDER")]
    """A run folder (its newest checkpoint is taken), one checkpoint, an export, or a folder that
    transformers' save_pretrained has written."""
    prompt: str | None = None
    """The text to go on with; an empty one begins a new text. Without --prompt and --prompts it is
    what comes on standard input."""
    prompts: Path | None = None
    """A .jsonl file: the field `prompt` of each line is one."""
    max_tokens: int | None = None
    """Most tokens per prompt (256, or what is left of the model's context, when not given)."""
    temperature: float = 0.0
    """0 takes the likeliest token each time; above, tokens are drawn, and higher is wilder."""
    top_k: int | None = None
    """Draw among so many likeliest tokens only."""
    top_p: float | None = None
    """Draw among the fewest likeliest tokens that have this probability together."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """End before this string; may be given several times."""
    seed: int = 0
    """Of what is drawn for the first prompt; each further prompt has the next seed."""
    tokenizer: str | None = None
    """A tokenizer.json, byte or hf:NAME in place of the model's own."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What the weights are kept in and computed with; checkpoints are fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs: a GPU when there is one (auto)."""

    def __post_init__(self) -> None:
        require_range("--max-tokens", self.max_tokens, 1, MOST_ITEMS)
        require_range("--seed", self.seed, 0, 2**62)
        if "" in self.stop:
            raise UserError("--stop '' ends every text before it begins: give some text")
        if self.prompt is not None and self.prompts is not None:
            raise UserError(
                f"--prompt and --prompts {self.prompts} both say what to go on with: give one"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: this machine has no GPU; give --device cpu")

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    @property
    def torch_device(self) -> torch.device:
        """Where it runs, with `auto` resolved."""
        on_gpu = self.device != "cpu" and torch.cuda.is_available()
        return torch.device("cuda" if on_gpu else "cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A text to go on with, its tokens, and how many may follow."""

    text: str
    tokens: list[int]
    most: int


@refusing
def main(argv: Sequence[str]) -> int:
    """Write the text; 0 when it is written, 2 when refused."""
    with one_sentence():
        options = tyro.cli(GenerateOptions, args=list(argv), prog="shardscale generate")
    try:
        generate(options)
    except KeyboardInterrupt:
        print()  # the text ends here, and what is said next begins a line
        raise
    return ExitCode.DONE


def generate(options: GenerateOptions) -> None:
    """Go on with each prompt, one after the other.

    Raises:
        UserError: there is no model, no tokenizer or no prompt, or a prompt has no room.
    """
    sampling = options.sampling
    with open_source(options.source) as source:
        known = vocabulary(source, options.tokenizer)
        prompts = [
            prepared(text, known, source.config, options.max_tokens) for text in texts(options)
        ]
        model = build(source, device=options.torch_device, dtype=_DTYPES[options.dtype])
    live = sys.stdout.isatty()
    for number, prompt in enumerate(prompts):
        completion = complete(
            model,
            known,
            prompt.tokens,
            most=prompt.most,
            choose=Sampler(sampling, options.seed + number),
            stops=options.stop,
            show=begun(prompt.text, number) if live else ignore,
        )
        print("" if live else as_json(prompt.text, completion), flush=True)


def texts(options: GenerateOptions) -> Iterator[str]:
    """What to go on with.

    Raises:
        UserError: nothing is given, or it cannot be read.
    """
    if options.prompts is not None:
        try:
            found = list(read_jsonl(options.prompts, "prompt"))
        except OSError as error:
            raise UserError(
                f"--prompts {options.prompts}: cannot be read ({error.strerror}); give a .jsonl "
                "file"
            ) from None
        if not found:
            raise UserError(f"--prompts {options.prompts}: holds no prompt; give one a line")
        yield from found
    elif options.prompt is not None:
        yield whole(options.prompt, "--prompt")
    elif sys.stdin is None or sys.stdin.isatty():
        raise UserError("there is nothing to go on with: give --prompt TEXT or --prompts FILE")
    else:
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 text ({error}): convert it") from None
        yield whole(text, "standard input")


def whole(text: str, place: str) -> str:
    """`text`, where it is one: bytes that are no UTF-8 come as halves of characters.

    Raises:
        UserError: it holds some.
    """
    if any(unicodedata.category(character) == "Cs" for character in text):
        raise UserError(f"{place} {text!r} is not UTF-8 text: convert it")
    return text


def prepared(text: str, known: Vocabulary, config: ModelConfig, max_tokens: int | None) -> Prompt:
    """The prompt in tokens; an empty text is the end of another one.

    Raises:
        UserError: it cannot be encoded, or has no room in the context.
    """
    tokens = known.encoder.encode_prompt(text) or [known.encoder.end_of_text]
    room = config.context - len(tokens)
    most = min(DEFAULT_MAX_TOKENS, room) if max_tokens is None else max_tokens
    if room < 1:
        raise UserError(
            f"the prompt has {len(tokens)} tokens, and the model's context is {config.context}: "
            f"shorten it to {config.context - 1} or fewer"
        )
    if most > room:
        raise UserError(
            f"the prompt's {len(tokens)} tokens and --max-tokens {most} are more than the model's "
            f"context of {config.context}: give --max-tokens {room} or less"
        )
    return Prompt(text=text, tokens=tokens, most=most)


def begun(prompt: str, number: int) -> Callable[[str], None]:
    """Write the prompt to the terminal; returns what writes on behind it."""
    if number:
        print()
    write(prompt)
    return write


def write(text: str) -> None:
    """To a terminal at once, with no character that it would obey."""
    shown = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    print("".join(shown), end="", flush=True)


def ignore(text: str) -> None:
    """Nobody looks on."""


def as_json(prompt: str, completion: Completion) -> str:
    """One line for a program."""
    return json.dumps({"prompt": prompt, **asdict(completion)})

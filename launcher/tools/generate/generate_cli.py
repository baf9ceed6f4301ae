"""`shardscale generate`: continue prompts with a trained model."""

import json
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from launcher.checkpoint.pretrained.loading import (
    Source,
    Vocabulary,
    build_any,
    chosen_device,
    open_source,
    vocabulary,
)
from launcher.data.formats import read_jsonl
from launcher.model.config import ModelConfig
from launcher.run.sampling import Sampling, TokenSampler
from launcher.tools.generate.decoding import Completion, complete
from launcher.util.errors import ExitCode, UserError, refusing
from launcher.util.flags import MOST_ITEMS, one_sentence, require_range

DEFAULT_MAX_TOKENS = 256
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Continue a text, or chat. Streams to a terminal, writes JSON lines to a pipe."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_FOLDER")]
    """A run folder (its newest checkpoint is used), one checkpoint, an export, a folder written by
    transformers' save_pretrained, or hf:ORG/NAME from the hub's cache."""
    prompt: str | None = None
    """Text to continue; an empty one starts a new text. Without --prompt and --prompts, all of
    standard input is the prompt, its last newline included."""
    prompts: Path | None = None
    """A .jsonl file with a field `prompt` per line."""
    chat: bool = False
    """Answer as a chat model: lines of standard input are turns, or --prompt is the only one. The
    tokenizer's chat template writes the prompt from all turns."""
    system: str | None = None
    """--chat: the system message."""
    max_tokens: int | None = None
    """New tokens per prompt at most (default: 256, or the rest of the model's context)."""
    temperature: float = 0.0
    """0: greedy decoding; above 0: sampling temperature."""
    top_k: int | None = None
    """Sample only among the k most likely tokens."""
    top_p: float | None = None
    """Sample only among the most likely tokens with this total probability (nucleus sampling)."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Stop before this string; may be repeated."""
    seed: int = 0
    """Sampling seed of the first prompt; each further prompt takes the next seed."""
    tokenizer: str | None = None
    """A tokenizer.json, byte or hf:NAME instead of the model's own."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """dtype of weights and computation; checkpoints are fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: a GPU if there is one."""

    def __post_init__(self) -> None:
        require_range("--max-tokens", self.max_tokens, 1, MOST_ITEMS)
        require_range("--seed", self.seed, 0, 2**62)
        if "" in self.stop:
            raise UserError("--stop '' ends every text before it begins: give some text")
        if self.prompt is not None and self.prompts is not None:
            raise UserError(f"--prompt and --prompts {self.prompts} exclude each other: give one")
        if self.chat and self.prompts is not None:
            raise UserError(f"--chat answers turns, not --prompts {self.prompts}: leave one out")
        if self.system is not None and not self.chat:
            raise UserError(f"--system {self.system!r:.40} belongs to --chat: give it, too")
        chosen_device(self.device)

    @property
    def sampling(self) -> Sampling:
        """Sampling options."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt, its tokens, and the limit on new tokens."""

    text: str
    tokens: list[int]
    most: int


@refusing
def main(argv: Sequence[str]) -> int:
    """Write the continuations; 0 on success, 2 when refused."""
    with one_sentence():
        options = tyro.cli(GenerateOptions, args=list(argv), prog="shardscale generate")
    try:
        generate(options)
    except KeyboardInterrupt:
        print()  # the message that follows starts on a new line
        raise
    return ExitCode.DONE


def generate(options: GenerateOptions) -> None:
    """Continue each prompt in turn.

    Raises:
        UserError: no model, tokenizer or prompt, or a prompt that exceeds the context.
    """
    sampling = options.sampling
    with open_source(options.source) as source:
        known = vocabulary(source, options.tokenizer)
        if options.chat:
            converse(options, source, known)
            return
        prompts = [
            tokenized(text, known, source.config, options.max_tokens) for text in texts(options)
        ]
        model = build_any(
            source, device=chosen_device(options.device), dtype=_DTYPES[options.dtype]
        )
    live = sys.stdout.isatty()
    for number, prompt in enumerate(prompts):
        completion = complete(
            model,
            known,
            prompt.tokens,
            most=prompt.most,
            choose=TokenSampler(sampling, options.seed + number),
            stops=options.stop,
            show=start_stream(prompt.text, number) if live else lambda _: None,
        )
        print("" if live else as_json(prompt.text, completion), flush=True)


def converse(options: GenerateOptions, source: Source, known: Vocabulary) -> None:
    """Answer turn by turn.

    Raises:
        UserError: no chat template, or a turn that cannot be answered.
    """
    from launcher.tools.generate.chat import Chat, run_chat, template_of

    template = template_of(source, options.tokenizer)
    model = build_any(source, device=chosen_device(options.device), dtype=_DTYPES[options.dtype])
    chat = Chat(
        model=model,
        known=known,
        template=template,
        sampling=options.sampling,
        seed=options.seed,
        max_tokens=options.max_tokens,
        stops=options.stop,
        context=source.config.context,
        system=options.system,
    )
    run_chat(chat, options.prompt, write)


def texts(options: GenerateOptions) -> Iterator[str]:
    """Yield the prompts.

    Raises:
        UserError: no prompt, or one that cannot be read.
    """
    if options.prompts is not None:
        try:
            found = list(read_jsonl(options.prompts, "prompt", 'write {"prompt": "..."}'))
        except OSError as error:
            raise UserError(
                f"--prompts {options.prompts}: cannot be read ({error.strerror}); give a .jsonl "
                "file"
            ) from None
        if not found:
            raise UserError(f"--prompts {options.prompts}: holds no prompt; give one per line")
        yield from found
    elif options.prompt is not None:
        yield valid(options.prompt, "--prompt")
    elif sys.stdin is None or sys.stdin.isatty():
        raise UserError("there is no prompt: give --prompt TEXT or --prompts FILE")
    else:
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 text ({error}): convert it") from None
        yield valid(text, "standard input")


def valid(text: str, place: str) -> str:
    """Return `text` if it is valid: Python decodes bytes that are not UTF-8 to lone surrogates.

    Raises:
        UserError: the text holds such bytes.
    """
    if any(unicodedata.category(character) == "Cs" for character in text):
        raise UserError(f"{place} {text!r} is not UTF-8 text: convert it")
    return text


def tokenized(text: str, known: Vocabulary, config: ModelConfig, max_tokens: int | None) -> Prompt:
    """Tokenize a prompt; an empty one becomes the end-of-text token.

    Raises:
        UserError: it cannot be encoded, exceeds the context, or has a token without a row.
    """
    tokens = known.encoder.encode_prompt(text) or [known.encoder.end_of_text]
    known.check(tokens)
    room = config.context - len(tokens)
    most = min(DEFAULT_MAX_TOKENS, room) if max_tokens is None else max_tokens
    if room < 1:
        raise UserError(
            f"the prompt has {len(tokens)} tokens, and the model's context is {config.context}: "
            f"shorten it to {config.context - 1} or fewer"
        )
    if most > room:
        raise UserError(
            f"the prompt's {len(tokens)} tokens and --max-tokens {most} exceed the model's context "
            f"of {config.context}: give --max-tokens {room} or less"
        )
    return Prompt(text=text, tokens=tokens, most=most)


def start_stream(prompt: str, number: int) -> Callable[[str], None]:
    """Write the prompt to the terminal; returns the function that writes its continuation."""
    if number:
        print()
    write(prompt)
    return write


def write(text: str) -> None:
    """Write to a terminal at once, without control characters."""
    shown = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    print("".join(shown), end="", flush=True)


def as_json(prompt: str, completion: Completion) -> str:
    """Format one JSON line."""
    return json.dumps({"prompt": prompt, **asdict(completion)})

"""The first training example on the console, as the model sees it."""

import itertools

from rich.text import Text

from launcher.data import Corpus
from launcher.data.tokenizer import load_encoder

MOST_TOKENS = 400


def first_example(corpus: Corpus, tokenizer: str) -> list[str | Text]:
    """Return lines with the first example of a corpus that masks prompts; masked tokens are dim.

    Special tokens are shown, so that a wrong template is seen before the run and not after it.
    """
    shown = corpus.first_document
    if shown.learned is None:
        return []
    encoder = load_encoder(str(corpus.tokenizer_path or tokenizer))
    learned = shown.learned[:MOST_TOKENS] > 0
    text, at = Text(), 0
    for is_learned, group in itertools.groupby(learned.tolist()):
        end = at + len(list(group))
        style = "" if is_learned else "dim"
        text.append(encoder.decode(shown.tokens[at:end].tolist(), special=True), style)
        at = end
    left = len(shown.tokens) - at
    title = (
        f"first example, {len(shown.tokens):,} tokens, {int((shown.learned > 0).sum()):,} learned"
    )
    title += f" (the first {at} are shown)" if left else ""
    return [f"{title}:", text]

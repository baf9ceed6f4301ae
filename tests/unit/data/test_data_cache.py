"""The cache under several real processes at once, and under processes that are killed."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from corpora import open_text

ROOT = Path(__file__).parents[3]

OPEN = """
import sys
from pathlib import Path
from launcher.config.schema import DataChoice
from launcher.data import open_corpus
print("ready", flush=True)
sys.stdin.readline()
choice = DataChoice(data=sys.argv[1])
corpus = open_corpus(choice, vocab_size=int(sys.argv[3]), seq_len=16,
                     cache_dir=Path(sys.argv[2]), show_progress=len(sys.argv) > 4)
print(corpus.fingerprint, "tokenizers" in sys.modules, int(corpus.train.tokens.sum()), flush=True)
"""

# A builder that reports progress and then never ends: a process that hangs or is about to be killed
STUCK = """
import sys, time
from pathlib import Path
from launcher.data.cache import build_once
def build(folder, report):
    (folder / "half").write_text("half")
    report("tokenizing", 4_000_000, 8_000_000)
    print("building", flush=True)
    time.sleep(600)
build_once(Path(sys.argv[1]), is_complete=lambda path: False, build=build, show_progress=False)
"""


def start(program: str, *arguments: str | Path, **other: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=other.get("stderr", subprocess.PIPE),
        text=True,
    )


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "nothing happened within a minute"
        time.sleep(0.005)


def book(folder: Path, paragraphs: int = 20_000) -> Path:
    path = folder / "book.txt"
    path.write_text("\n\n".join(f"Paragraph {n}: {n * n} and {n % 77}." for n in range(paragraphs)))
    return path


def test_the_cache_obeys_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        open_text(
            book(tmp_path, 1000),
            tokenizer="byte",
            vocab_size=257,
            seq_len=16,
            cache_dir=tmp_path / "cache",
        )
    finally:
        os.umask(before)
    folders = [path for path in (tmp_path / "cache").rglob("*") if path.is_dir()]
    assert {oct(path.stat().st_mode & 0o777) for path in folders} == {"0o775"}
    files = [path for path in folders[-1].rglob("*") if path.is_file()]
    assert files
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o664"}


LONG_TRAINING = """
import os, random, time
from launcher.data.tokenizer import train_bpe
words = ["".join(random.choices("abcdefghijklmnop", k=200)) for _ in range(20_000)]
print("ready", flush=True)
try:
    train_bpe([" ".join(words)], 60_000)
except KeyboardInterrupt:
    print("heard", time.process_time() < 30, flush=True)  # all of it takes minutes
    os._exit(7)
"""


def test_ctrl_c_is_heard_while_a_tokenizer_is_trained(tmp_path: Path) -> None:
    process = start(LONG_TRAINING)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert (output, process.returncode) == ("heard True\n", 7), errors


def test_four_processes_at_once_build_one_corpus(tmp_path: Path) -> None:
    path, cache = book(tmp_path), tmp_path / "cache"
    processes = [start(OPEN, path, cache, "400") for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    results = [output.split() for output, _ in outputs]
    assert len({(fingerprint, total) for fingerprint, _, total in results}) == 1
    assert [built for _, built, _ in results].count("True") == 1
    assert [p for p in (cache / "corpora").iterdir() if p.is_dir() and ".tmp-" in p.name] == []


def test_a_killed_builder_does_not_block_the_next(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    builder = start(OPEN, "stdlib", cache, "2000")
    assert builder.stdin is not None
    builder.stdin.write("go\n")
    builder.stdin.flush()
    wait_until(lambda: list(cache.glob("corpora/*.tmp-*")))
    builder.kill()
    builder.communicate()
    assert builder.returncode == -signal.SIGKILL
    assert len(list(cache.glob("corpora/*.tmp-*"))) == 1
    corpus = open_text(
        "stdlib",
        tokenizer="bpe",
        vocab_size=2000,
        seq_len=16,
        cache_dir=cache,
    )
    assert len(corpus.train.tokens) > 1_000_000
    assert list(cache.glob("corpora/*.tmp-*")) == [] == list(cache.glob("corpora/*.progress"))


def test_a_waiting_process_shows_progress_and_takes_over_from_a_killed_builder(
    tmp_path: Path,
) -> None:
    path = book(tmp_path, 3000)
    known = open_text(
        path,
        tokenizer="bpe",
        vocab_size=300,
        seq_len=16,
        cache_dir=tmp_path / "first",
    )
    assert known.tokenizer_path is not None
    key = known.tokenizer_path.parent.name
    builder = start(STUCK, tmp_path / "second" / "corpora" / key)
    assert builder.stdout is not None
    assert builder.stdout.readline() == "building\n"
    waiting = start(OPEN, path, tmp_path / "second", "300", "show")
    assert waiting.stdin is not None
    assert waiting.stderr is not None
    waiting.stdin.write("go\n")
    waiting.stdin.flush()
    assert waiting.stderr.readline() == "data: tokenizing\n"
    assert waiting.poll() is None
    builder.kill()
    builder.communicate()
    output, errors = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, errors
    assert output.split()[1:3] == [known.fingerprint, "True"]
    assert "data: training a BPE tokenizer" in errors


def test_progress_on_a_terminal_is_live(tmp_path: Path) -> None:
    screen, stderr = pty.openpty()
    process = start(OPEN, book(tmp_path), tmp_path / "cache", "400", "show", stderr=stderr)
    os.close(stderr)
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    shown = b""
    while True:
        try:
            block = os.read(screen, 4096)
        except OSError:  # how Linux says that the other side was closed
            break
        shown += block
    os.close(screen)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"data: reading" in shown
    assert b"data: tokenizing" in shown
    assert b"\x1b[" in shown


def test_a_read_only_cache_can_be_opened(tmp_path: Path) -> None:
    path, cache = book(tmp_path, 3000), tmp_path / "cache"
    first = open_text(path, cache_dir=cache)
    assert first.tokenizer_path is not None
    stamps = {p: p.stat().st_mtime_ns for p in [cache, *cache.rglob("*")]}
    open_text(path, cache_dir=cache)
    assert {p: p.stat().st_mtime_ns for p in [cache, *cache.rglob("*")]} == stamps
    meta = json.loads((first.tokenizer_path.parent / "meta.json").read_text())
    assert meta["fingerprint"] == first.fingerprint

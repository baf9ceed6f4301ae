"""Python for browsers: Pyodide, fetched once, checked, kept; and less of its standard library.

Pyodide (https://pyodide.org, MPL-2.0) is CPython compiled to WebAssembly. Its package on npm has
all that runs without a network.
"""

import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from launcher.util.errors import WHY, UserError, refused
from launcher.util.files import default_cache_dir

VERSION: Final = "0.29.3"
SHA256: Final = "924f3167d6bf5e553bda392615eaa82edd82a9cffc32a1cc49853a926b148c5c"
_TIMEOUT_S: Final = 180.0
_PACK: Final = f"npm pack pyodide@{VERSION}"
# What neither the planner nor Pyodide loads, and is large.
_NOT_NEEDED: Final = (
    *("_pydecimal.py", "_pyio.py", "_pyrepl/", "bdb.py", "cProfile.py", "cmd.py", "dbm/"),
    *("doctest.py", "email/_header_value_parser.py", "email/headerregistry.py", "email/mime/"),
    *("ensurepip/", "ftplib.py", "http/", "idlelib/", "imaplib.py", "logging/handlers.py"),
    *("mailbox.py", "mimetypes.py", "optparse.py", "pdb.py", "pickletools.py", "poplib.py"),
    *("pstats.py", "pydoc", "smtplib.py", "socketserver.py", "sqlite3/", "test/", "tkinter/"),
    *("trace.py", "turtle", "unittest/", "urllib/request.py", "urllib/robotparser.py", "venv/"),
    *("wsgiref/", "xml/", "xmlrpc/", "zipapp.py", "zoneinfo/"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """Pyodide's files."""

    loader: str
    """pyodide.js"""
    glue: str
    """pyodide.asm.js"""
    wasm: bytes
    library: bytes
    """python_stdlib.zip, without modules that nothing here loads."""
    lock: str
    """pyodide-lock.json without its packages."""


def load(archive: Path | None) -> Runtime:
    """From the archive of npm, or by npm where none is given and none was kept.

    Raises:
        UserError: it cannot be had, or is another one.
    """
    content = _fetched() if archive is None else _read(archive)
    with tarfile.open(fileobj=io.BytesIO(content)) as packed:

        def file(name: str) -> bytes:
            found = packed.extractfile(f"package/{name}")
            assert found is not None
            return found.read()

        return Runtime(
            loader=file("pyodide.js").decode(),
            glue=file("pyodide.asm.js").decode(),
            wasm=file("pyodide.asm.wasm"),
            library=_slimmed(file("python_stdlib.zip")),
            lock=json.dumps(
                {"info": json.loads(file("pyodide-lock.json"))["info"], "packages": {}}
            ),
        )


def _read(archive: Path) -> bytes:
    with refused(OSError, f"--pyodide {archive}: cannot be read ({WHY})"):
        content = archive.read_bytes()
    _check(content, f"--pyodide {archive}")
    return content


def _fetched() -> bytes:
    """Fetch with npm, which knows the user's mirror and proxy, and cache the package."""
    kept = default_cache_dir() / f"pyodide-{VERSION}.tgz"
    if kept.exists() and _digest(kept.read_bytes()) == SHA256:
        return kept.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        try:
            command = [*_PACK.split(), "--silent", "--pack-destination", folder]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise UserError(
                f"Pyodide {VERSION} cannot be fetched with npm ({said.strip().splitlines()[0]}): "
                f"run `{_PACK}` where npm works, and give the file that it writes with "
                "--pyodide FILE"
            ) from None
        content = (Path(folder) / kept.name).read_bytes()
    _check(content, _PACK)
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_name(f".{kept.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(kept)
    return content


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _check(content: bytes, name: str) -> None:
    if _digest(content) != SHA256:
        raise UserError(
            f"{name} is not Pyodide {VERSION} as npm has it (sha256 {_digest(content):.12}..., not "
            f"{SHA256:.12}...): use what `{_PACK}` writes"
        )


def _slimmed(library: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(library)) as whole:
        kept = [name for name in whole.namelist() if not name.startswith(_NOT_NEEDED)]
        return zipped({name: whole.read(name) for name in kept})


def zipped(files: Mapping[str, bytes]) -> bytes:
    """Zip files reproducibly."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return packed.getvalue()

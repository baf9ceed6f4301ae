"""One HTML file with charts: no network, no dependency, nothing that a name in it can break.

The data goes in as JSON that cannot end its own element, the scripts only ever set text, and a
content security policy allows this one script and style and nothing else.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

LIBRARY = ("format.js", "chart.js", "parts.js", "table.js", "bars.js")


def page_html(
    title: str,
    scripts: Sequence[str],
    data: Mapping[str, Any],
    *,
    styles: Sequence[str] = (),
    blocks: Mapping[str, str] | None = None,
    policy: str = "",
) -> str:
    """A page: the library, the scripts that put it together, and what they show.

    Args:
        scripts: names of our assets.
        styles: the same, behind the style of all pages.
        blocks: id -> text for the scripts to read, without `<`; nothing runs it where it is.
        policy: what the scripts may do besides, as directives of a content security policy.
    """
    style = "\n".join(asset(name) for name in ("page.css", *styles))
    script = "\n".join(asset(name) for name in (*LIBRARY, *scripts))
    # `<` is all that HTML could take for something else inside a script element.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    inert = (
        f'<script type="text/plain" id="{name}">{content}</script>'
        for name, content in (blocks or {}).items()
    )
    parts = {
        "title": html.escape(title),
        "style": style,
        "script": script,
        "data": text.replace("<", "\\u003c"),
        "blocks": "\n".join(inert),
        "policy": (
            f"default-src 'none'; script-src '{_digest(script)}'{policy and ' ' + policy}; "
            f"style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'"
        ),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def asset(name: str) -> str:
    """Return the text of a script or style."""
    return (resources.files("launcher.util.page") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()

"""What mkdocs is told besides mkdocs.yml: bench/results and the calculator are of the site, too."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
CALCULATOR = ROOT / "build" / "calculator"
"""Where `shardscale site` has left it, if it has."""
WIDE = ("calculator.md", "matrix.md", "on-a-gpu.md", "will-it-fit.md")
EMBEDDED = '<iframe class="calculator" loading="lazy" src="{}" title="Calculator"></iframe>'
CALCULATORS = {"index.md": "calculator/app/index.html", "calculator.md": "app/index.html"}
"""Page -> where the calculator is from there; it stands where the page says CALCULATOR_HERE."""
CALCULATOR_HERE = "<!-- calculator -->"

# `../bench/results/x.md`, as it is right in the repository, is `results/x.md` on the site: one
# folder less up.
_RESULT = re.compile(r"\]\(\.\./((?:\.\./)*)bench/results/")
_CODE = re.compile(r"(?<!`)`[^`\n]+`(?!`)")
_SHOWN = (".css", ".html", ".js", ".json", ".md", ".mjs", ".png", ".svg", ".wasm", ".zip")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add what lies outside docs/: as pages where it is Markdown, else as it is."""
    for folder, place in ((RESULTS, "results"), (CALCULATOR, "calculator/app")):
        for path in sorted(folder.rglob("*")):
            if path.suffix in _SHOWN:
                uri = f"{place}/{path.relative_to(folder).as_posix()}"
                files.append(File.generated(config, uri, abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to results lead to where these are on the site; wide tables have the page's width."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri.startswith("results/"):  # long tables would be found first for any word
        page.meta["search"] = {"exclude": True}
    if page.file.src_uri in CALCULATORS and CALCULATOR.exists():
        embedded = EMBEDDED.format(CALCULATORS[page.file.src_uri])
        markdown = markdown.replace(CALCULATOR_HERE, embedded)
    # In a table's code GitHub wants `a\\|b`, and mkdocs shows the backslash.
    markdown = _CODE.sub(lambda code: code[0].replace("\\|", "|"), markdown)
    return _RESULT.sub(r"](\1results/", markdown)

"""MkDocs hooks: the site also has pages outside docs/."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "lab/README.md": "lab.md",
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for path, page in PAGES.items():
        text = (ROOT / path).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=_on_site(text)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _on_site(markdown)


def _on_site(text: str) -> str:
    for path, page in PAGES.items():
        text = re.sub(rf"\]\((?:\.\./)?{re.escape(path)}", f"]({page}", text)
    return text

"""Hooks of MkDocs for `make docs`.

They turn formulas into MathML while the site is built, so that pages need no script for them. They add a page for each
file outside docs/ to which a page links, since a site has no other way to show it. They turn Sphinx roles of
docstrings, such as :func:`mlstm`, into links.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

from math_core import LatexToMathML
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:)([^)#\s]+)(?=#[^)\s]*\)|\))")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
ROLE = re.compile(r":(?:class|data|func|meth|mod):<code>~?([^<]*)</code>")
SOURCE = "source/"  # pages made of files outside docs/


def site_path(path: str) -> str:
    """Return where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return SOURCE + (path if path.endswith(".md") else path + ".md")


def repository_path(page: str) -> str:
    """Return the file of the repository that a Markdown page of the site is made of."""
    if not page.startswith(SOURCE):
        return "docs/" + page
    path = page.removeprefix(SOURCE)
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def target_of(page: str, link: str) -> str | None:
    """Return the path in the repository that a link of a page leads to, or None where there is no such file."""
    path = os.path.normpath(os.path.join(os.path.dirname(repository_path(page)), link))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def content_of(path: str) -> str:
    """Return a file outside docs/ as a Markdown page; a folder becomes the list of its files."""
    at = ROOT / path
    if at.is_dir():
        names = sorted(entry.name + "/" * entry.is_dir() for entry in at.iterdir() if entry.name[0] not in "._")
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    text = at.read_text(encoding="utf-8")
    return text if path.endswith(".md") else f"# {path}\n\n`````{at.suffix[1:]}\n{text}\n`````\n"


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages for files outside docs/ that pages link to, and that these link to."""
    waiting = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while waiting:
        page, text = waiting.pop()
        if page.startswith(SOURCE) and not repository_path(page).endswith(".md"):
            continue
        for link in LINK.findall(text):
            target = target_of(page, link)
            if target is None or target.startswith("docs/") or files.get_file_from_path(site_path(target)):
                continue
            files.append(File.generated(config, site_path(target), content=content_of(target)))
            waiting.append((site_path(target), content_of(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ to the pages that :func:`on_files` has added."""
    name = page.file.src_uri

    def point(match: re.Match[str]) -> str:
        target = target_of(name, match[0])
        if target is None or (target.startswith("docs/") and not name.startswith(SOURCE)):
            return match[0]
        return os.path.relpath(site_path(target), os.path.dirname(name) or ".")

    return LINK.sub(point, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Turn formulas into MathML and roles of docstrings into links."""
    convert = LatexToMathML().convert_with_local_state
    content = FORMULA.sub(lambda m: convert(html.unescape(m[2]).strip(), displaystyle=m[1] == "div"), content)
    return ROLE.sub(reference, content)


def reference(match: re.Match[str]) -> str:
    """Return a link to what a role names, which stays plain where the site does not have it."""
    name = match[1]
    full = name if name.startswith("tfla.") else f"tfla.{name}"
    return f'<autoref identifier="{full}" optional><code>{name.removeprefix("tfla.")}</code></autoref>'

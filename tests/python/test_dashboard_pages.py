# SPDX-License-Identifier: Apache-2.0
"""The files of the dashboard's pages, without a browser: they are in the package, name each other
correctly, and load no resources from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from penstock.live.dashboard_server import page_files

FILES = {path: file.content.decode() for path, file in page_files().items()}


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_pages_reference_exactly_the_packaged_files() -> None:
    named = {"/index.html", "/"}
    for tag, attributes in Elements(FILES["/"]).found:
        target = attributes.get("src") or (attributes.get("href") if tag == "link" else None)
        if target:
            named.add(f"/{target}")
    for path, text in FILES.items():
        if path.endswith(".js"):
            named |= {f"/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
    assert named == set(FILES)


def test_imported_names_are_exported_and_used() -> None:
    for path, text in FILES.items():
        for names, module in re.findall(r'import \{([^}]+)\} from "\./([^"]+)"', text):
            for name in (one.strip() for one in names.split(",")):
                exported = rf"^export (const|function|class) {name}\b"
                assert re.search(exported, FILES[f"/{module}"], re.MULTILINE), f"{path}: {name}"
                assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{path} has no use for {name}"


def test_pages_load_nothing_external_and_evaluate_no_text() -> None:
    for path, text in FILES.items():
        addresses = set(re.findall(r"https?://[^\s\"'<>)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, f"{path} has {word}, which would take a peer's text for markup"
    for tag, attributes in Elements(FILES["/"]).found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        assert tag != "style" and (tag != "script" or attributes.get("src"))


def test_page_declares_its_language_and_landmarks() -> None:
    found = Elements(FILES["/"]).found
    tags = [tag for tag, _ in found]
    assert ("html", {"lang": "en"}) in found
    assert {"header", "nav", "main", "h1", "h2", "title", "noscript"} <= set(tags)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in found
    assert all("alt" in attributes for tag, attributes in found if tag == "img")

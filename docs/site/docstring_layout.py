# SPDX-License-Identifier: Apache-2.0
"""Makes reStructuredText of what docstrings write in another way.

They describe an argument as `name: text`, with further lines indented, of which reStructuredText
would make the whole first line the term. What is indented behind a paragraph is code, of which it
would make a quotation. And it would make links of the addresses of pools.
"""

from __future__ import annotations

import re

ARGUMENT = re.compile(r"(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*): (?P<text>\S.*)")

ADDRESS = re.compile(r'(?<!`)"(tcp://[^"]+)"')


def lay_out(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Sphinx's hook `autodoc-process-docstring`: changes `lines` in place."""
    lines[:] = [ADDRESS.sub(r'``"\1"``', line) for line in with_code(with_definitions(lines))]


def with_definitions(lines: list[str]) -> list[str]:
    result: list[str] = []
    is_in_list = False
    for index, line in enumerate(lines):
        found = ARGUMENT.fullmatch(line)
        begins = found is not None and (is_in_list or _stands_first(lines, index))
        if found is not None and begins:
            if is_in_list:
                result.append("")
            names = ", ".join(f"``{one}``" for one in found["names"].split(", "))
            result += [names, f"    {found['text']}"]
            is_in_list = True
        else:
            if is_in_list and line and not line.startswith(" "):
                is_in_list = False
                if result[-1]:
                    result.append("")
            result.append(line)
    return result


def with_code(lines: list[str]) -> list[str]:
    """Marks as code what is indented behind a paragraph that does not say so with a colon."""
    result: list[str] = []
    for index, line in enumerate(lines):
        if index >= 2 and line.startswith("    ") and not line.strip().startswith(">>>"):
            before = lines[index - 2]
            is_paragraph = before and not before.startswith((" ", "- ")) and not lines[index - 1]
            if is_paragraph and not before.endswith("::"):
                result += ["::", ""]
        result.append(line)
    return result


def _stands_first(lines: list[str], index: int) -> bool:
    return index == 0 or not lines[index - 1].strip()

# SPDX-License-Identifier: Apache-2.0
"""The picture of bench/simulate.py, as SVG: mean completion times of each case, in hours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_BAR, _GAP, _LEFT, _WIDTH, _TOP = 12, 14, 150, 520, 28
_COLOURS = ("#8c959f", "#bf8700", "#bc4c00", "#8250df", "#bf3989", "#0969da", "#1a7f37")
_LEGEND = 104  # for each policy


def draw(policies: Sequence[str], hours: Mapping[str, Mapping[str, float]]) -> str:
    """A group of bars for each case; bars of a group are relative to its longest one."""
    group = len(policies) * _BAR + _GAP
    height = _TOP + len(hours) * group
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 70}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for index, policy in enumerate(policies):
        x = 8 + _LEGEND * index
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(f'<rect x="{x}" y="8" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="17">{policy}</text>')
    for row, (name, of_policy) in enumerate(hours.items()):
        y = _TOP + row * group
        parts.append(f'<text x="8" y="{y + group / 2}">{name}</text>')
        longest = max(of_policy.values())
        for index, policy in enumerate(policies):
            width = _WIDTH * of_policy[policy] / longest
            top = y + index * _BAR
            colour = _COLOURS[index % len(_COLOURS)]
            parts.append(
                f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_BAR - 2}" '
                f'fill="{colour}"/>'
            )
            label = f"{of_policy[policy]:.1f} h"
            parts.append(f'<text x="{_LEFT + width + 4:.1f}" y="{top + 9}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])

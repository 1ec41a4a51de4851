# SPDX-License-Identifier: Apache-2.0
"""A parser for the part of Graphviz's language in which plans are written, and for no more of
it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

TOKEN = re.compile(
    r'\s*(?P<token>->|[{}\[\];,=]|(?P<word>[A-Za-z_]\w*)|"(?P<text>(?:[^"\\\n]|\\["\\n])*)")'
)
KEYWORDS = {"digraph", "subgraph", "node", "edge", "graph", "strict"}


@dataclass
class DotGraph:
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)  # attributes, by name
    cluster_of: dict[str, str] = field(default_factory=dict)  # for nodes inside a cluster
    labels: dict[str, str] = field(default_factory=dict)  # of the clusters
    edges: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


def parse_dot(text: str) -> DotGraph:
    """Parse a graph. Raises ValueError at the first unexpected token."""
    parser = _Parser(text)
    parser.expect("digraph")
    parser.name()
    parser.body("")
    if parser.tokens:
        raise ValueError(f"{parser.tokens[0]!r} follows the graph")
    named = {end for source, target, _ in parser.graph.edges for end in (source, target)}
    if named - parser.graph.nodes.keys():
        raise ValueError(f"no node is called {sorted(named - parser.graph.nodes.keys())}")
    return parser.graph


class _Parser:
    def __init__(self, text: str) -> None:
        self.graph = DotGraph()
        self.tokens: list[tuple[str, bool]] = []  # with whether it can be a name
        position, text = 0, text.rstrip()
        while position < len(text):
            found = TOKEN.match(text, position)
            if found is None:
                raise ValueError(f"no token begins {text[position : position + 40]!r}")
            position = found.end()
            if found["text"] is not None:
                plain = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], found["text"])
                self.tokens.append((plain, True))
            else:
                is_name = found["word"] is not None and found["word"] not in KEYWORDS
                self.tokens.append((found["token"], is_name))

    def expect(self, token: str) -> None:
        if self.tokens.pop(0) != (token, False):
            raise ValueError(f"{token!r} was expected")

    def name(self) -> str:
        token, is_name = self.tokens.pop(0)
        if not is_name:
            raise ValueError(f"a name was expected where {token!r} is")
        return token

    def sees(self, token: str) -> bool:
        return self.tokens[0] == (token, False)

    def body(self, cluster: str) -> None:
        self.expect("{")
        while not self.sees("}"):
            if self.sees("subgraph"):
                self.expect("subgraph")
                self.body(self.name())
                continue
            self.statement(cluster)
            self.expect(";")
        self.expect("}")

    def statement(self, cluster: str) -> None:
        if self.sees("node"):
            self.expect("node")
            self.attributes()
            return
        name = self.name()
        if self.sees("="):
            self.expect("=")
            assert name == "label"
            self.graph.labels[cluster] = self.name()
        elif self.sees("->"):
            self.expect("->")
            self.graph.edges.append((name, self.name(), self.attributes()))
        else:
            if name in self.graph.nodes:
                raise ValueError(f"{name!r} is there twice")
            self.graph.nodes[name] = self.attributes()
            if cluster:
                self.graph.cluster_of[name] = cluster

    def attributes(self) -> dict[str, str]:
        self.expect("[")
        attributes: dict[str, str] = {}
        while not self.sees("]"):
            if attributes:
                self.expect(",")
            name = self.name()
            self.expect("=")
            attributes[name] = self.name()
        self.expect("]")
        return attributes

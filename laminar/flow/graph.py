"""A flow's graph for people: a text tree, and a drawing that needs no other program. Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from laminar.flow.trace import NodeInfo

__all__ = ["Graph", "layers_of"]

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 170, 46, 30, 48, 16
"""A box and the room around it, in pixels."""

_FILL = {"task": "#eef3fb", "stage": "#fdf1e3"}
_LINE = {"task": "#4a74b8", "stage": "#c9822b"}


@dataclass(frozen=True)
class Graph:
    """The nodes of a traced flow, in the order of the calls.

    Example
    -------
    >>> print(Graph("quickstart", [
    ...     NodeInfo("held_out", "k1", "task"),
    ...     NodeInfo("post_train", "k2", "stage"),
    ...     NodeInfo("evaluate", "k3", "stage", depends_on=("post_train", "held_out")),
    ... ]))
    quickstart
    └── evaluate (stage)
        ├── post_train (stage)
        └── held_out (task)
    """

    flow: str
    nodes: Sequence[NodeInfo]

    def __str__(self) -> str:
        """A tree: under each node what it depends on; what is under two of them is spelled out once."""
        needed = {name for node in self.nodes for name in node.depends_on}
        roots = [node.name for node in self.nodes if node.name not in needed]
        return "\n".join([self.flow, *self._branches(roots, "", set())])

    def svg(self) -> str:
        """The drawing: what comes first stands at the top, arrows go along the data."""
        layers = layers_of(self.nodes)
        widest = max((len(layer) for layer in layers), default=0)
        width = 2 * _MARGIN + widest * (_WIDTH + _GAP_X)
        height = 2 * _MARGIN + len(layers) * (_HEIGHT + _GAP_Y)
        at = {
            name: (
                (width - len(layer) * (_WIDTH + _GAP_X) + _GAP_X) // 2 + column * (_WIDTH + _GAP_X),
                _MARGIN + row * (_HEIGHT + _GAP_Y),
            )
            for row, layer in enumerate(layers)
            for column, name in enumerate(layer)
        }
        arrows = [_arrow(at[source], at[node.name]) for node in self.nodes for source in node.depends_on]
        boxes = [_box(node, at[node.name]) for node in self.nodes]
        return _SVG.format(width=width, height=height, body="\n".join([*arrows, *boxes]))

    def _repr_html_(self) -> str:
        return self.svg()

    def _branches(self, names: Sequence[str], indent: str, seen: set[str]) -> list[str]:
        by_name = {node.name: node for node in self.nodes}
        lines: list[str] = []
        for index, name in enumerate(names):
            last = index == len(names) - 1
            node = by_name[name]
            again = name in seen and bool(node.depends_on)
            lines.append(f"{indent}{'└── ' if last else '├── '}{name} ({node.kind}){', as above' if again else ''}")
            if name not in seen:
                seen.add(name)
                lines += self._branches(node.depends_on, indent + ("    " if last else "│   "), seen)
        return lines


def layers_of(nodes: Sequence[NodeInfo]) -> list[list[str]]:
    """Names by the longest way from a node that depends on nothing.

    Nodes come in the order of the calls, so that what one depends on stands before it.

    Example
    -------
    >>> layers_of([NodeInfo("a", "", "task"), NodeInfo("b", "", "task", depends_on=("a",)),
    ...            NodeInfo("c", "", "task"), NodeInfo("d", "", "stage", depends_on=("b", "c"))])
    [['a', 'c'], ['b'], ['d']]
    """
    depth: dict[str, int] = {}
    for node in nodes:
        depth[node.name] = 1 + max((depth[name] for name in node.depends_on), default=-1)
    count = 1 + max(depth.values(), default=-1)
    return [[name for name, level in depth.items() if level == row] for row in range(count)]


def _arrow(source: tuple[int, int], target: tuple[int, int]) -> str:
    x1, y1 = source[0] + _WIDTH // 2, source[1] + _HEIGHT
    x2, y2 = target[0] + _WIDTH // 2, target[1] - 4
    middle = (y1 + y2) // 2
    return (
        f'<path d="M{x1},{y1} C{x1},{middle} {x2},{middle} {x2},{y2}" fill="none" stroke="#666" '
        'stroke-width="1.4" marker-end="url(#tip)"/>'
    )


def _box(node: NodeInfo, corner: tuple[int, int]) -> str:
    x, y = corner
    name = node.name if len(node.name) <= 22 else node.name[:21] + "…"
    return (
        f'<g><title>{html.escape(node.key)}</title><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'rx="7" fill="{_FILL[node.kind]}" stroke="{_LINE[node.kind]}" stroke-width="1.4"/>'
        f'<text x="{x + _WIDTH // 2}" y="{y + 20}" text-anchor="middle" font-size="13">{html.escape(name)}</text>'
        f'<text x="{x + _WIDTH // 2}" y="{y + 36}" text-anchor="middle" font-size="11" fill="#555">{node.kind}'
        "</text></g>"
    )


_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"
 viewBox="0 0 {width} {height}" font-family="sans-serif">
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0,0 L8,4 L0,8 z" fill="#666"/></marker></defs>
{body}
</svg>
"""

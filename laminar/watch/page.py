"""The HTML around a report: one file, no script, nothing fetched; for phones too, in light and in dark."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["definition_table", "page", "sample", "section", "tiles"]

_STYLE = """
:root {
  color-scheme: light dark;
  --bg: #fafafa; --card: #fff; --text: #1c2126; --soft: #5d6770; --edge: #e1e5e9;
  --c1: #2563c9; --c2: #c2500c; --c3: #0b7f66; --c4: #8a3fb0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #14171a; --card: #1c2024; --text: #e6e9ec; --soft: #9aa4ad; --edge: #30363c;
    --c1: #76a9fa; --c2: #f5945c; --c3: #4fc9ab; --c4: #c792ea;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1360px; padding: 20px 16px 48px;
  background: var(--bg); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.4rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 32px 0 10px; }
p { margin: 4px 0 0; color: var(--soft); }
.cards, .tiles { display: grid; gap: 12px; }
.cards { grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); }
.tiles { grid-template-columns: repeat(auto-fill, minmax(min(45%, 280px), 1fr)); margin-top: 16px; }
.tile, figure, .sample { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; }
.tile { padding: 8px 12px; }
.tile b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile span, .sample header { color: var(--soft); font-size: .85rem; }
figure { margin: 0; padding: 10px 10px 6px; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: .9rem; padding: 0 4px 4px; }
figcaption { justify-content: space-between; }
.key { margin-left: 12px; white-space: nowrap; }
.key:first-child { margin-left: 0; }
.key::before {
  content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px;
  background: var(--c);
}
svg { display: block; width: 100%; height: auto; }
text { fill: var(--soft); font: 11px system-ui, sans-serif; }
.c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); } .c4 { --c: var(--c4); }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1.5; }
.grid { stroke: var(--edge); }
.cell { fill: var(--c1); }
.hover { fill: var(--text); opacity: 0; }
.hover:hover { opacity: .08; }
table {
  border-collapse: collapse; width: 100%; align-self: start;
  background: var(--card); border: 1px solid var(--edge);
}
caption { text-align: left; color: var(--soft); padding-bottom: 4px; }
th, td { text-align: left; vertical-align: top; padding: 4px 10px; border-bottom: 1px solid var(--edge); }
th { font-weight: 500; color: var(--soft); width: 45%; }
td { overflow-wrap: anywhere; }
.sample { padding: 10px 12px; min-width: 0; }
pre {
  margin: 6px 0 0; max-height: 16em; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font-size: .85rem;
}
"""


def page(title: str, subtitle: str, sections: Iterable[str]) -> str:
    """The whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(subtitle)}</p>{''.join(sections)}</body></html>\n"
    )


def section(title: str, blocks: Sequence[str], *, empty: str = "") -> str:
    """A heading over blocks in a grid; the text ``empty`` instead of them where there are none."""
    shown = [block for block in blocks if block]
    body = f'<div class="cards">{"".join(shown)}</div>' if shown else f"<p>{html.escape(empty)}</p>"
    return f"<h2>{html.escape(title)}</h2>{body}" if shown or empty else ""


def tiles(numbers: Sequence[tuple[str, str]]) -> str:
    """The headline numbers: (label, value)."""
    cells = (
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>'
        for label, value in numbers
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def definition_table(caption: str, values: Mapping[str, Any]) -> str:
    """Nested values as a table of two columns, inner keys joined by dots."""
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(_cell(value))}</td></tr>"
        for name, value in _flat(values).items()
    )
    return f"<table><caption>{html.escape(caption)}</caption>{rows}</table>" if rows else ""


def sample(header: str, prompt: str, response: str) -> str:
    """One trajectory, as text."""
    return (
        f'<div class="sample"><header>{html.escape(header)}</header><pre>{html.escape(prompt)}</pre>'
        f"<pre><b>{html.escape(response)}</b></pre></div>"
    )


def _cell(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat

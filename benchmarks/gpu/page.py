"""The page of a run: a self-contained HTML file with every part's table and the picture of samples."""

import base64
from html import escape
from pathlib import Path
from typing import Any

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:.5rem 0 1.5rem;display:block;overflow-x:auto}
td,th{border-bottom:1px solid #8884;padding:.25rem .7rem;text-align:right}td:first-child,th:first-child{text-align:left}
.passed{color:#187a3c}.failed,.stopped,.interrupted{color:#b3261e}img{image-rendering:pixelated;max-width:100%}
:root{color-scheme:light dark}"""


def shown(value: object) -> str:
    """A cell."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def table(heads: list[str], rows: list[list[object]]) -> str:
    """Rows of cells, escaped."""
    lines = ["<tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(shown(cell))}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def page(document: dict[str, Any], titles: dict[str, str], picture: Path) -> str:
    """The whole of it."""
    machine, parts = document["machine"], document["parts"]
    blocks = [f"<h1>Duet on {escape(str(machine['device_name']))}</h1>"]
    blocks.append(table(["", ""], [[name.replace("_", " "), value] for name, value in machine.items()]))
    overview = []
    for name, part in parts.items():
        state = f'<span class="{escape(part["state"].split()[0])}">{escape(part["state"])}</span>'
        cells = f"<td>{escape(titles[name])}</td><td>{state}</td><td>{part['seconds']:.0f} s</td>"
        overview.append(f"<tr>{cells}<td>{escape(part['reason'])}</td></tr>")
    blocks.append(f"<table>{''.join(overview)}</table>")
    for name, part in parts.items():
        blocks.append(f"<h2>{escape(titles[name])}</h2>")
        heads = list(dict.fromkeys(key for row in part["rows"].values() for key in row))
        if heads:
            rows = [[row, *(cells.get(head) for head in heads)] for row, cells in part["rows"].items()]
            blocks.append(table(["", *(head.replace("_", " ") for head in heads)], rows))
        if name == "samples" and picture.is_file():
            encoded = base64.b64encode(picture.read_bytes()).decode()
            blocks.append(f'<img alt="samples of the GAN" src="data:image/png;base64,{encoded}">')
    head = f"<!doctype html><meta charset=utf-8><title>Duet on a device</title><style>{STYLE}</style>"
    return f"{head}{''.join(blocks)}\n"

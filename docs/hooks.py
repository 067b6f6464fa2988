"""Write what pages and editors take from the code: `python docs/hooks.py` writes the
lists of keys.md and recipes.md below their marks, and configs/schema.json. MkDocs calls
`on_config`.
"""

import json
import runpy
import sys
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def recipes() -> str:
    """The recipes as a list, by task and size."""
    from duetgan.utils.config.recipes import TITLES
    from duetgan.utils.config.recipes import recipes as read

    lines: list[str] = []
    for task, title in TITLES.items():
        lines += ["", f"## {title}", ""]
        listed = [
            f"- `{recipe.name}.yaml`: {recipe.purpose}" for recipe in read() if recipe.task == task
        ]
        lines += ["\n".join(wrap(line, 120, subsequent_indent="  ")) for line in listed]
    return "\n".join(lines[1:]) + "\n"


def contents() -> dict[Path, str]:
    """The files and what belongs into them."""
    keys = runpy.run_path(str(ROOT / "docs" / "keys.py"))
    pages = {"keys": keys["as_markdown"](keys["groups"]()), "recipes": recipes()}
    files = {}
    for name, text in pages.items():
        page, mark = ROOT / "docs" / f"{name}.md", f"<!-- {name} -->\n"
        files[page] = f"{page.read_text().partition(mark)[0]}{mark}\n{text}"
    return files | {
        ROOT / "configs" / "schema.json": json.dumps(keys["schema"](), indent=1) + "\n"
    }


def on_config(config: Any) -> Any:
    """Anchors as GitHub makes them, so that the same links work in both places."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for file, text in contents().items():
        file.write_text(text)

"""What the site's pages hold that is read from the code: config keys and recipes. MkDocs calls `on_...`."""

import sys
from pathlib import Path
from typing import Any

from pymdownx.slugs import slugify


def keys() -> str:
    """The reference of all config keys."""
    from training.engine.reference import as_markdown, groups  # imports torch

    return as_markdown(groups())


def recipes() -> str:
    """The recipes as a list, by task and size."""
    from utils.config.recipes import TITLES
    from utils.config.recipes import recipes as read

    lines: list[str] = []
    for task, title in TITLES.items():
        lines += ["", f"## {title}", ""]
        lines += [f"- `configs/{recipe.name}.yaml`: {recipe.purpose}" for recipe in read() if recipe.task == task]
    return "\n".join(lines)


MARKS = {"<!-- keys -->": keys, "<!-- recipes -->": recipes}


def on_config(config: Any) -> Any:
    """Anchors as GitHub makes them, so that the same links work in both places."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the imports above
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page's text with its marks replaced."""
    for mark, text in MARKS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, text())
    return markdown

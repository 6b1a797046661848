"""Figures for the page: an SVG file made fit to stand inside HTML beside others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from xml.etree import ElementTree

from markupsafe import Markup

from train_ledger.spec.errors import DataError

_HEAD = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)
_SIZE = re.compile(r'(<svg\b[^>]*?) width="[^"]*"( height="[^"]*")')
_ID = re.compile(r'\b(id="|xlink:href="#|href="#|url\(#)')


def inline_svg(file: Path, name: str, alt: str, tips: Mapping[str, str] | None = None) -> Markup:
    """The file's `<svg>`, its ids made unique by `name`, with `alt` as its accessible name.

    Args:
        file: an SVG of the plot stage.
        name: the figure's name.
        alt: alternative text.
        tips: text that is shown when the pointer rests on the element of that id.

    Raises:
        DataError: the file is missing or not an SVG.
    """
    try:
        text = file.read_text(encoding="utf-8")
        ElementTree.fromstring(text)
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"cannot be read: {getattr(e, 'strerror', None) or e}", file=file) from e
    except ElementTree.ParseError as e:
        raise DataError(f"is not a complete SVG ({e})", file=file) from e
    text = _METADATA.sub("", _COMMENT.sub("", _HEAD.sub("", text, count=1)))
    text = _SIZE.sub(r"\1", text, count=1)
    for key, tip in (tips or {}).items():
        text = text.replace(f'<g id="{key}">', f'<g id="{key}"><title>{escape(tip)}</title>', 1)
    text = _ID.sub(lambda m: f"{m.group(1)}{name}-", text)
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)
    # The words in it were escaped above or are drawn as paths; the rest is the plot stage's own markup.
    return Markup(re.sub(r"\n\s*", "\n", text).strip())

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
_TIP = re.compile(r'<g id="(tip[0-9]+)">')
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
    # On a screen two pixels a point: text is as large as the page's own, in narrow figures and in wide ones.
    width = re.search(r'viewBox="0 0 ([0-9.]+)', text)
    text = _SIZE.sub(rf'\1 style="max-width:{round(2 * float(width[1])) if width else 1000}px"', text, count=1)
    known = tips or {}
    text = _TIP.sub(lambda m: f"{m[0]}<title>{escape(known[m[1]])}</title>" if m[1] in known else m[0], text)
    text = _ID.sub(lambda m: f"{m.group(1)}{name}-", text)
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)
    # The words in it were escaped above or are drawn as paths; the rest is the plot stage's own markup.
    return Markup(re.sub(r"\n\s*", "\n", text).strip())

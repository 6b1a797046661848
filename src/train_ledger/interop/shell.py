"""Flags out of a launch script, without running it: words, variables and arrays, no command of it is executed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train_ledger.spec.errors import ConfigError
from train_ledger.spec.io import parse_yaml, read_text

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)(\[@\]|\[\*\])?(?::?-([^}]*))?\}|([A-Za-z_][A-Za-z0-9_]*))")
_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+)?([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)", re.DOTALL)

#: What ends a command: a newline, a control operator, or a redirection.
_ENDS = frozenset({"\n", ";", "&", "|", "<", ">"})


def read_flags(path: str) -> dict[str, list[str]]:
    """Flags with their values from a launch script, a plain list of flags, or a YAML mapping of flags.

    A script's flags are those after the `.py` file that it starts (so torchrun's own are left out); without one, all
    that begin with `--`. A YAML file may hold the mapping under MODEL_ARGS, as Megatron-LM's functional tests do.

    Returns:
        Values by flag, without the two dashes; the last one given counts, as for argparse.

    Raises:
        ConfigError: unreadable, no flag in it, a value that only a shell could know.
    """
    if Path(path).suffix in {".yaml", ".yml"}:
        flags = _from_yaml(path, parse_yaml(read_text(path), file=path))
    else:
        flags = _from_words(path, command_words(path, read_text(path)))
    if not flags:
        raise ConfigError("holds no flag (--name value)", file=path)
    return flags


def _from_yaml(path: str, data: Any) -> dict[str, list[str]]:
    if isinstance(data, Mapping) and isinstance(data.get("MODEL_ARGS"), Mapping):
        data = data["MODEL_ARGS"]
    if not isinstance(data, Mapping):
        raise ConfigError("must hold a mapping of flags to values", file=path)
    out: dict[str, list[str]] = {}
    for key, value in data.items():
        flag = key.lstrip("-").replace("_", "-") if not key.startswith("--") else key[2:]
        if value is False or value is None:
            continue
        values = [] if value is True else list(value) if isinstance(value, list) else [value]
        if any(isinstance(v, Mapping | list) for v in values):
            raise ConfigError("is not a value of a flag", file=path, key=key)
        out[flag] = [str(v) for v in values]
    return out


def _from_words(path: str, words: list[str]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
            out[name] = values
        else:
            values.append(word)
            if not out:
                values = []
    for name, given in out.items():
        for value in given:
            if "$" in value or "`" in value:
                raise ConfigError(
                    f"{value[:60]!r} is known to the shell only; write the value, or --{name} in a file of its own",
                    file=path,
                    key=f"--{name}",
                )
    return out


def command_words(path: str, text: str) -> list[str]:
    """The words that belong to the program that a script starts, with its variables put in."""
    words: list[str] = []
    arrays: dict[str, list[str]] = {}
    commands: list[list[str]] = [[]]
    tokens = _tokens(path, text)
    i = 0
    while i < len(tokens):
        kind, word = tokens[i]
        assigned = _ASSIGNMENT.fullmatch(word) if kind == "word" and not commands[-1] else None
        if kind == "end":
            commands.append([])
        elif assigned and assigned[3] == "" and i + 1 < len(tokens) and tokens[i + 1] == ("end", "("):
            close = next((j for j in range(i + 2, len(tokens)) if tokens[j] == ("end", ")")), None)
            if close is None:
                raise ConfigError(f"the array {assigned[1]} has no end", file=path)
            inside = [w for k, w in tokens[i + 2 : close] if k != "end"]
            known = arrays.get(assigned[1], []) if assigned[2] else []
            arrays[assigned[1]] = known + [x for w in inside for x in _expand(w, arrays)]
            i = close
        elif assigned:
            value = " ".join(_expand(assigned[3], arrays))
            known = arrays.get(assigned[1], []) if assigned[2] else []
            arrays[assigned[1]] = known + ([value] if value else [])
        elif commands[-1] or word not in ("export", "local", "readonly"):
            commands[-1].extend(_expand(word, arrays))
        i += 1
    starts = [(c, j) for c in commands for j, w in enumerate(c) if w.endswith(".py")]
    if len({tuple(c) for c, _ in starts}) > 1:
        raise ConfigError(f"starts {len(starts)} programs; give a file with one", file=path)
    if starts:
        command, at = starts[0]
        return command[at + 1 :]
    for command in commands:
        words.extend(command)
    return words


#: Marks a dollar sign that stood in single quotes, which stays a dollar sign.
_QUOTED_DOLLAR = "\ue000"


def _expand(word: str, arrays: Mapping[str, list[str]]) -> list[str]:
    """A word with variables put in; a word that is one variable may become several words, or none."""
    only = _VARIABLE.fullmatch(word)
    if only:
        name = only[1] or only[4]
        if name in arrays:
            return [w for value in arrays[name] for w in value.split()]
        return only[3].split() if only[3] else [word]

    def put(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        if name in arrays:
            return " ".join(arrays[name])
        return match[3] if match[3] is not None else match[0]

    return [_VARIABLE.sub(put, word).replace(_QUOTED_DOLLAR, "$")]


def _tokens(path: str, text: str) -> list[tuple[str, str]]:
    """Words and what ends commands. Quotes are taken off, comments dropped, a backslash at a line's end joins lines."""
    out: list[tuple[str, str]] = []
    word: list[str] = []
    begun = False
    i = 0
    text = text.replace("\r\n", "\n")

    def flush() -> None:
        nonlocal begun
        if begun:
            out.append(("word", "".join(word)))
        word.clear()
        begun = False

    while i < len(text):
        c = text[i]
        if c == "\\" and i + 1 < len(text):
            if text[i + 1] != "\n":
                word.append(text[i + 1])
                begun = True
            i += 1
        elif c in "'\"":
            end = text.find(c, i + 1)
            if end < 0:
                raise ConfigError(f"a quote {c} has no end", file=path)
            inside = text[i + 1 : end]
            word.append(inside.replace("$", _QUOTED_DOLLAR) if c == "'" else inside.replace("\\\n", ""))
            begun = True
            i = end
        elif c == "#" and not begun:
            end = text.find("\n", i)
            i = (end if end >= 0 else len(text)) - 1
        elif c == "$" and text[i : i + 2] == "${":
            end = text.find("}", i)
            if end < 0:
                raise ConfigError("a ${ has no end", file=path)
            word.append(text[i : end + 1])
            begun = True
            i = end
        elif c in " \t":
            flush()
        elif c in _ENDS or c in "()":
            if c in "<>" and "".join(word).isdigit():  # the 2 of `2>&1`
                word.clear()
                begun = False
            flush()
            out.append(("end", c))
        else:
            word.append(c)
            begun = True
        i += 1
    flush()
    return out

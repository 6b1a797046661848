"""Files between the stages: written whole or not at all, checked against their schema when read."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from .errors import ConfigError, DataError, LedgerError

SCHEMAS = Path(__file__).parent / "schemas"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

#: Limits of a YAML file from a person: far above any real one, far below what would keep a machine busy.
MAX_YAML_BYTES = 1 << 20
MAX_YAML_NODES = 100_000
MAX_YAML_DEPTH = 20


@functools.cache
def schema(name: str) -> dict[str, Any]:
    """The JSON Schema `schemas/<name>.yaml`."""
    # libyaml's loader where PyYAML has it: a prediction's start is mostly the reading of schemas.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    data: dict[str, Any] = yaml.load((SCHEMAS / f"{name}.yaml").read_text(encoding="utf-8"), Loader=loader)
    return data


@functools.cache
def _validator(name: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(schema(name))


def validate(
    data: Any, schema_name: str, *, file: str | Path, prefix: str = "", error: type[LedgerError] = ConfigError
) -> None:
    """Check `data` against a schema and against NaN and infinity, which JSON Schema lets through.

    Raises:
        LedgerError: of class `error`, naming `file` and the first offending key.
    """
    problems = sorted(_validator(schema_name).iter_errors(data), key=lambda e: [str(p) for p in e.absolute_path])
    for problem in problems:
        path = _dotted(problem.absolute_path)
        message = problem.message
        if problem.validator == "additionalProperties" and isinstance(problem.instance, Mapping):
            known = list(problem.schema.get("properties", {}))
            unknown = sorted(str(k) for k in problem.instance if k not in known)
            path, message = _join(path, unknown[0]), f"unknown key; known here: {', '.join(known)}"
        elif problem.validator == "required":
            missing = [k for k in problem.validator_value if k not in problem.instance]
            path, message = _join(path, missing[0]), "is missing"
        raise error(_short(message), file=file, key=_join(prefix, path) or None)
    _refuse_nonfinite(data, file, prefix, error)


def _refuse_nonfinite(data: Any, file: str | Path, path: str, error: type[LedgerError]) -> None:
    if isinstance(data, float) and not (float("-inf") < data < float("inf")):
        raise error(f"{data} is not a finite number", file=file, key=path or None)
    if isinstance(data, Mapping):
        for key, value in data.items():
            _refuse_nonfinite(value, file, _join(path, str(key)), error)
    elif isinstance(data, list):
        for i, value in enumerate(data):
            _refuse_nonfinite(value, file, f"{path}[{i}]", error)


def _dotted(parts: Any) -> str:
    out = ""
    for part in parts:
        out = f"{out}[{part}]" if isinstance(part, int) else _join(out, str(part))
    return out


def _join(left: str, right: str) -> str:
    return f"{left}.{right}" if left and right else left or right


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ..."


def fill_defaults(data: Mapping[str, Any], schema_part: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with every default of its schema filled in, nested objects too, and 8.0 as 8 where an integer is due.

    JSON Schema counts 8.0 among the integers; `range(8.0)` does not.
    """
    out = dict(data)
    for key, sub in schema_part.get("properties", {}).items():
        if key not in out and "default" in sub:
            out[key] = sub["default"]
        if isinstance(out.get(key), Mapping) and "properties" in sub:
            out[key] = fill_defaults(out[key], sub)
        elif key in out:
            out[key] = _as_integer(out[key], sub)
    return out


def _as_integer(value: Any, sub: Mapping[str, Any]) -> Any:
    if isinstance(value, list) and "items" in sub:
        return [_as_integer(v, sub["items"]) for v in value]
    wanted = sub.get("type", [])
    integer_due = "integer" in ([wanted] if isinstance(wanted, str) else wanted) or any(
        type(v) is int for v in sub.get("enum", [])
    )
    return int(value) if integer_due and isinstance(value, float) and value.is_integer() else value


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice (PyYAML keeps the last one without a word) and does not read dates."""


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a plain word", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in rules if tag != "tag:yaml.org,2002:timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1 reads 3e-4 as a string; people write it as a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _expanded_size(node: yaml.Node, sizes: dict[int, int], depth: int = 0) -> int:
    """Nodes below `node` with every alias written out: nine lines of aliases can stand for a billion nodes."""
    if id(node) in sizes:
        return sizes[id(node)]
    if depth > MAX_YAML_DEPTH:
        raise ValueError(f"nested more than {MAX_YAML_DEPTH} deep")
    sizes[id(node)] = MAX_YAML_NODES + 1  # met again while inside itself: an alias to its own parent
    size = 1
    if isinstance(node, yaml.CollectionNode):
        for child in node.value:
            parts = child if isinstance(child, tuple) else (child,)
            size += sum(_expanded_size(part, sizes, depth + 1) for part in parts)
    sizes[id(node)] = size
    if size > MAX_YAML_NODES:
        raise ValueError(f"has more than {MAX_YAML_NODES:,} values once its aliases are written out")
    return size


def parse_yaml(text: str, *, file: str | Path) -> Any:
    """Plain data (mappings with word keys, lists, strings, numbers, booleans, null) of a YAML text.

    Raises:
        ConfigError: not YAML, a key given twice, nested too deep, aliases without end, a value that is not plain data.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _expanded_size(node, {})
            data = loader.construct_document(node)
        finally:
            loader.dispose()
    # PyYAML lets the odd built-in error through, e.g. IndexError and AttributeError on broken tags.
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError, TypeError) as e:
        message = " ".join(str(e).replace('in "<unicode string>", ', "at ").split())
        raise ConfigError(f"is not valid YAML: {_short(message)}", file=file) from e
    _refuse_odd(data, file, "")
    return data


def _refuse_odd(data: Any, file: str | Path, path: str) -> None:
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                raise ConfigError(f"key {key!r} is not a word; put it in quotes", file=file, key=path or None)
            _refuse_odd(key, file, path)
            _refuse_odd(value, file, _join(path, key))
    elif isinstance(data, list):
        for i, value in enumerate(data):
            _refuse_odd(value, file, f"{path}[{i}]")
    elif isinstance(data, str):
        if any("\ud800" <= c <= "\udfff" or c == "\0" for c in data):
            raise ConfigError(
                f"{_short(ascii(data), 60)} holds a character that no text can", file=file, key=path or None
            )
    elif data is not None and not isinstance(data, bool | int | float):
        raise ConfigError(f"holds a {type(data).__name__}, which no key takes", file=file, key=path or None)


def read_text(path: str | Path, *, limit: int = MAX_YAML_BYTES) -> str:
    """A small UTF-8 text file.

    Raises:
        ConfigError: missing, unreadable, a directory, not UTF-8, or larger than `limit` bytes.
    """
    try:
        with open(path, "rb") as f:
            raw = f.read(limit + 1)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot be read: {getattr(e, 'strerror', None) or e}", file=path) from e
    if len(raw) > limit:
        raise ConfigError(f"is larger than {limit:,} bytes", file=path)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ConfigError(f"is not UTF-8 text: {e.reason} at byte {e.start}", file=path) from e


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file that holds a mapping.

    Raises:
        ConfigError: the file is missing, unreadable, not YAML, or not a mapping.
    """
    data = parse_yaml(read_text(path), file=path)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError("must hold a mapping of keys to values", file=path)
    return data


def read_json(path: str | Path, schema_id: str, schema_name: str | None = None) -> dict[str, Any]:
    """A JSON file of ours: its `schema` field must be `schema_id`, and it must pass `schemas/<schema_name>.yaml`.

    Raises:
        DataError: missing, truncated, of another schema, or failing it; names the file and the key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"cannot be read: {getattr(e, 'strerror', None) or e}", file=path) from e
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise DataError(f"is not complete JSON ({e}); it may be truncated", file=path) from e
    if r"\ud" in text or r"\uD" in text:
        _refuse_halves(data, path, "")
    if not isinstance(data, dict) or data.get("schema") != schema_id:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise DataError(f"is {found!r}, expected {schema_id!r}", file=path, key="schema")
    if schema_name:
        validate(data, schema_name, file=path, error=DataError)
    return data


def _refuse_halves(data: Any, file: str | Path, at: str) -> None:
    """Half of a surrogate pair is no character: JSON can spell it, but no file of text or tables can hold it."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            _refuse_halves(key, file, at)
            _refuse_halves(value, file, _join(at, key))
    elif isinstance(data, list):
        for i, value in enumerate(data):
            _refuse_halves(value, file, f"{at}[{i}]")
    elif isinstance(data, str) and any("\ud800" <= c <= "\udfff" for c in data):
        raise DataError(f"{_short(ascii(data), 60)} holds a character that no text can", file=file, key=at or None)


def file_mode(mode: int = 0o666) -> int:
    """Permissions of a new file: what the umask leaves of `mode`. A temporary file begins with its owner's alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mode & ~mask


@contextlib.contextmanager
def whole_file(path: str | Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """A file to write, under a temporary name in the same folder; flushed to disk and renamed when the block ends well.

    Raises:
        OSError: it cannot be written. Names `path`: a full disk names no file, and a temporary name says nothing.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.", suffix=".tmp")
        try:
            with os.fdopen(fd, mode, encoding=None if "b" in mode else "utf-8") as f:
                yield f
                f.flush()
                os.fsync(f.fileno())
            os.chmod(tmp, file_mode())
            os.replace(tmp, path)
        except BaseException:
            Path(tmp).unlink(missing_ok=True)
            raise
    except OSError as e:
        raise OSError(e.errno, e.strerror or str(e), str(path)) from e


def write_text(path: str | Path, text: str) -> None:
    """A text file, whole or not at all: a reader never sees half of it."""
    with whole_file(path, "w") as f:
        f.write(text)


def write_json(path: str | Path, data: Any) -> None:
    """JSON with a final newline, written whole or not at all. NaN is refused: it is not JSON."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def check_name(name: str, *, file: str | Path | None = None, key: str | None = None) -> str:
    """A name that becomes a file name: letters, digits, `.`, `_`, `-`, no leading dot, at most 100.

    Raises:
        ConfigError: for anything else, `../x` among them.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:120]!r} is not a name: letters, digits, '.', '_' and '-' only, beginning with a letter or digit",
            file=file,
            key=key,
        )
    return name

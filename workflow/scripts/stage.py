"""Runs a stage's script for Snakemake or by hand. A user's error is one line, on the screen and in the job's log.

Importing this puts `src/` on the path, of what it starts too: a rule's conda environment does not hold this package.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
sys.path.insert(0, SOURCE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))

from train_ledger.spec.errors import LedgerError  # noqa: E402
from train_ledger.workflow import seal  # noqa: E402
from train_ledger.workflow.aside import set_aside  # noqa: E402


def run(
    main: Callable[..., Any],
    job: Any,
    arguments: Callable[[Any], tuple[Any, ...]],
    sealed: Callable[[Any], tuple[str, list[str]]] | None = None,
) -> None:
    """Calls `main` with what the Snakemake job says, or with the command line's words where there is no job.

    What a job cannot use is set aside, so that the next run makes it anew.

    Args:
        arguments: arguments of `main` from the job.
        sealed: arguments of `seal.write` from the job, for outputs that can be made by hand too.
    """
    if job is None:
        try:
            main(*sys.argv[1:])
        except LedgerError as e:
            sys.exit(str(e))
        except OSError as e:
            sys.exit(in_words(e))
        return
    try:
        with open(job.log[0], "w", encoding="utf-8") as log:
            _logged(main, job, arguments, sealed, log)
    except OSError as e:  # no log can be kept
        print(f"train-ledger {job.rule}: {in_words(e)}", file=sys.stderr, flush=True)
        sys.exit(1)


def _logged(
    main: Callable[..., Any],
    job: Any,
    arguments: Callable[[Any], tuple[Any, ...]],
    sealed: Callable[[Any], tuple[str, list[str]]] | None,
    log: TextIO,
) -> None:
    try:
        main(*arguments(job))
        if sealed:
            seal.write(*sealed(job))
    except LedgerError as e:
        _say(f"train-ledger {job.rule}: {e}", log)
        if e.file and (unusable := _unusable(job.input, Path(e.file))):
            try:
                _say(f"train-ledger {job.rule}: set aside as {set_aside(unusable)}; the next run makes it anew", log)
            except LedgerError as why:
                _say(f"train-ledger {job.rule}: {why}", log)
        sys.exit(1)
    except OSError as e:  # a full disk, a folder that cannot be written
        with contextlib.suppress(OSError):
            traceback.print_exc(file=log)
        _say(f"train-ledger {job.rule}: {in_words(e)}", log)
        sys.exit(1)
    except Exception:
        traceback.print_exc(file=log)
        raise


def in_words(error: OSError) -> str:
    """The file, where it is known, and what the system says."""
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)


def evidence(job: Any) -> list[Path]:
    """Results folders of what was measured on GPUs: <set>/<comparison> beside the verdict that the job depends on.

    Those of whole worlds come first: they are what the comparison is about.
    """
    found = [p.parent.parent for v in job.params.evidence for p in Path(v).parent.glob("*/*/reconcile/runs.json")]
    return sorted(found, key=lambda p: (-len(list(p.glob("launch/*/rank*.json"))), p))


def _say(text: str, log: TextIO) -> None:
    print(text, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        print(text, file=log, flush=True)


def _unusable(inputs: Iterable[str], file: Path) -> Path | None:
    """The input that has to be made again when `file` is unusable: the whole launch or folder for one of its files."""
    for given in map(Path, inputs):
        whole = given.parent if given.parent.parent.name == "launch" else given
        if whole == file or whole in file.parents:
            return whole
    return None


class _Kept:
    """A stream that also goes to a file, without what a progress line overwrites."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log, self._line = stream, log, ""

    def write(self, text: str) -> int:
        """To the stream as it is, to the log when a line is whole."""
        self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._log.write(line.rsplit("\r", 1)[-1] + "\n")
        return len(text)

    def flush(self) -> None:
        """Both."""
        self._stream.flush()
        self._log.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def kept(log_file: Path) -> Iterator[None]:
    """What is printed to stderr inside is also kept in `log_file`."""
    stream = sys.stderr
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(log_file, "w", encoding="utf-8", buffering=1) as log:
            sys.stderr = _Kept(stream, log)
            try:
                yield
            except OSError:
                traceback.print_exc(file=log)
                raise
            except Exception:
                traceback.print_exc()
                raise SystemExit(1) from None
            finally:
                sys.stderr = stream
    except OSError as e:  # a full disk, a folder that cannot be written
        line = f"train-ledger launch: {log_file.stem}: {in_words(e)}"
        print(line, file=stream, flush=True)
        with contextlib.suppress(OSError), open(log_file, "a", encoding="utf-8") as log:
            print(line, file=log)
        raise SystemExit(1) from None

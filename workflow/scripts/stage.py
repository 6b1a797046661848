"""Runs a stage's script for Snakemake or by hand. A user's error is one line, on the screen and in the job's log.

Importing this puts `src/` on the path, of what it starts too: a rule's conda environment does not hold this package.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
sys.path.insert(0, SOURCE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))

from train_ledger.spec.errors import LedgerError  # noqa: E402
from train_ledger.workflow.aside import set_aside  # noqa: E402


def run(main: Callable[..., Any], job: Any, arguments: Callable[[Any], tuple[Any, ...]]) -> None:
    """Calls `main` with what the Snakemake job says, or with the command line's words where there is no job.

    What a job cannot use is set aside, so that the next run makes it anew.
    """
    if job is None:
        try:
            main(*sys.argv[1:])
        except LedgerError as e:
            sys.exit(str(e))
        return
    with open(job.log[0], "w", encoding="utf-8") as log:
        try:
            main(*arguments(job))
        except LedgerError as e:
            _say(f"train-ledger {job.rule}: {e}", log)
            for unusable in {_whole(Path(i)) for i in job.input} & ({_whole(Path(e.file))} if e.file else set()):
                _say(f"train-ledger {job.rule}: set aside as {set_aside(unusable)}; the next run makes it anew", log)
            sys.exit(1)
        except Exception:
            traceback.print_exc(file=log)
            raise


def evidence(job: Any) -> list[Path]:
    """Results folders of what was measured on GPUs: <set>/<comparison> beside the verdict that the job depends on.

    Those of whole worlds come first: they are what the comparison is about.
    """
    found = [p.parent.parent for v in job.params.evidence for p in Path(v).parent.glob("*/*/reconcile/runs.json")]
    return sorted(found, key=lambda p: (-len(list(p.glob("launch/*/rank*.json"))), p))


def _say(text: str, log: TextIO) -> None:
    print(text, file=sys.stderr, flush=True)
    print(text, file=log, flush=True)


def _whole(file: Path) -> Path:
    """What has to be made again when `file` is unusable: the whole launch for one of its files."""
    return file.parent if file.parent.parent.name == "launch" else file


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
    log_file.parent.mkdir(parents=True, exist_ok=True)
    stream = sys.stderr
    with open(log_file, "w", encoding="utf-8", buffering=1) as log:
        sys.stderr = _Kept(stream, log)
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None
        finally:
            sys.stderr = stream

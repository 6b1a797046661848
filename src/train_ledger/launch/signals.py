"""Ctrl-C and a scheduler's SIGTERM: whoever launches ranks ends them, whatever was going on at that moment."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """SIGINT and SIGTERM raise KeyboardInterrupt inside. Yields a check that raises it again if a library ate it.

    Python drops what is raised in a destructor or in a hook around a fork (logging/__init__.py:_releaseLock), and
    some imports drop it too: a signal that comes just then leaves no trace but the one kept here. A signal ignored on
    entry (nohup, a shell's background job) stays ignored.

    Raises:
        KeyboardInterrupt: a signal came.
    """
    came = list[int]()

    def stop(number: int, frame: Any) -> None:
        came.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # whoever started this thread keeps the signals
        yield check
        return
    with _handled(stop):
        yield check
    check()  # within another `interruptible` that one's check knows nothing of what came here


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """SIGINT and SIGTERM that come inside are delivered at its end. For work of milliseconds.

    A signal mask would not do: it is this thread's, the kernel hands the signal to another, and Python runs the handler
    in the main one all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[int]()
    try:
        with _handled(lambda number, frame: came.append(number)):
            yield
    finally:
        for number in came[:1]:
            signal.raise_signal(number)


@contextlib.contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """SIGINT and SIGTERM go to `handler`, but those that are ignored, or that are not Python's."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    old = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)

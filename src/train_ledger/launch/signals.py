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
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    old = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield check
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """SIGINT and SIGTERM that come inside are delivered at its end. For work of milliseconds."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

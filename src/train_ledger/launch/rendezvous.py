"""Where the ranks of one machine meet: a TCPStore in a process of its own, on a port that the kernel chose."""

from __future__ import annotations

import contextlib
import os
import signal

from train_ledger.spec.errors import LaunchError


class Rendezvous:
    """A store that serves until `close`, or until the launching process ends.

    It must not live in the launching process: its thread looks up the name of each rank that connects, and a rank that
    is forked at that moment inherits the C library's resolver lock and waits for it for ever.

    Args:
        world_size: how many ranks will come.

    Raises:
        LaunchError: the store did not start.
    """

    def __init__(self, world_size: int) -> None:
        read, write = os.pipe()
        parent = os.getpid()
        self._owner = parent
        self._pid = os.fork()
        if self._pid == 0:
            os.close(read)
            _serve(world_size, write, parent)
        os.close(write)
        with os.fdopen(read) as pipe:
            said = pipe.readline()
        if not said:
            self.close()
            raise LaunchError("the store at which ranks meet did not start on 127.0.0.1")
        self.port = int(said)

    def close(self) -> None:
        """Ends the store's process. Only the process that began it can."""
        if self._pid and self._owner == os.getpid():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
        self._pid = 0

    def __del__(self) -> None:
        self.close()


def _serve(world_size: int, pipe: int, parent: int) -> None:
    """What the store's process does; it never returns."""
    import torch.distributed as dist

    from .processes import die_with

    try:
        die_with(parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)  # Ctrl-C is for the launching process, which ends this one
        store = dist.TCPStore("127.0.0.1", 0, world_size + 1, is_master=True, wait_for_workers=False)
        os.write(pipe, f"{store.port}\n".encode())
        os.close(pipe)
        while True:
            signal.pause()
    finally:
        os._exit(1)

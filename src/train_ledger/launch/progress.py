"""What a person sees on stderr while ranks run: run, step, time gone, time to go. A terminal has one live line."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Progress of one run, by the slowest of its ranks.

    Args:
        run: name of the run.
        steps: optimizer steps of a rank.
        ranks: how many ranks run.
        stream: stderr by default.
    """

    def __init__(self, run: str, steps: int, ranks: int, stream: TextIO | None = None) -> None:
        self.run, self.steps, self.ranks = run, steps, ranks
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.began = time.monotonic()
        self.done: dict[int, int] = {}
        self.built_at: float | None = None
        self.shown = ""
        self.last_line_at = 0.0

    def say(self, text: str) -> None:
        """One whole line that stays."""
        self._clear()
        print(f"{self.run}: {text}", file=self.stream, flush=True)

    def step(self, rank: int, step: int) -> None:
        """`rank` finished `step` (0: its session is built)."""
        self.done[rank] = step
        if step == 0 and self.built_at is None:
            self.built_at = time.monotonic()
        self.tick(force=len(self.done) == self.ranks and step == min(self.done.values()))

    def tick(self, force: bool = False) -> None:
        """Show where things stand: on a terminal at once, in a log when a step is done, at most every 5 s."""
        now = time.monotonic()
        text = self.text(now)
        if self.live:
            self._clear()
            self.stream.write(text)
            self.stream.flush()
            self.shown = text
        elif force and (now - self.last_line_at > 5 or min(self.done.values()) == self.steps):
            self.last_line_at = now
            print(text, file=self.stream, flush=True)

    def text(self, now: float) -> str:
        """The line: `run: step 2/4 on 8 ranks, 12 s, about 9 s to go`."""
        gone = now - self.began
        if len(self.done) < self.ranks:
            return f"{self.run}: starting {self.ranks} ranks ({len(self.done)} ready), {gone:.0f} s"
        at = min(self.done.values())
        line = f"{self.run}: step {at}/{self.steps} on {self.ranks} ranks, {gone:.0f} s"
        if 0 < at < self.steps and self.built_at is not None:
            line += f", about {(now - self.built_at) / at * (self.steps - at):.0f} s to go"
        return line

    def close(self) -> None:
        """Leave the terminal's line clean."""
        self._clear()

    def _clear(self) -> None:
        if self.live and self.shown:
            self.stream.write("\r" + " " * len(self.shown) + "\r")
            self.stream.flush()
            self.shown = ""

"""Builds figures and report in a process whose clock, folder, locale and threads are not the caller's.

python build_elsewhere.py RESULTS_DIR PAPER_DIR EPOCH_SECONDS
"""

from __future__ import annotations

import datetime
import sys
import time

import pandas  # noqa: F401  its C parts take datetime's own type when they are loaded
import pyarrow  # noqa: F401


def set_clock(epoch_s: float) -> None:
    """From here on Python's clocks tell another day."""
    shift_s = epoch_s - time.time()
    real_time, real_gmtime, real_localtime = time.time, time.gmtime, time.localtime

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return cls.fromtimestamp(real_time() + shift_s, tz)

        today = now

    time.time = lambda: real_time() + shift_s
    time.gmtime = lambda s=None: real_gmtime(real_time() + shift_s if s is None else s)
    time.localtime = lambda s=None: real_localtime(real_time() + shift_s if s is None else s)
    datetime.datetime = Shifted


def main() -> None:
    """Both stages."""
    set_clock(float(sys.argv[3]))
    import locale

    locale.setlocale(locale.LC_ALL, "")
    from train_ledger.plot.make import make_figures
    from train_ledger.report.build import build_report

    make_figures(sys.argv[1], sys.argv[2])
    build_report(sys.argv[1], sys.argv[2])


if __name__ == "__main__":
    main()

"""Progress on standard error: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

LINE_EVERY_S = 10.0  # without a terminal: one line per stage, and then one in this time


class Progress:
    """Told ``(stage, done, total)`` as work goes on; a context manager.

    ``step`` names work of unknown length. Nothing is printed for stages that are over at once without a terminal.
    """

    def __init__(self) -> None:
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._step: Any = None
        self._line: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            self._bars = Bars(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=16),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bars.start()
            self.step("starting")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bars away, before something else is printed; safe to call again."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def step(self, message: str) -> None:
        """Begin something whose length is unknown."""
        if self._bars is None:
            print(message, file=sys.stderr, flush=True)
            return
        self._end_step()
        self._step = self._bars.add_task(message, total=None)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Tell how far a stage is."""
        if self._bars is None:
            now = time.monotonic()
            last, tenth = self._line.get(stage, (-LINE_EVERY_S, -1))
            reached = 10 * done // max(1, total)
            if (reached > tenth and now - last >= LINE_EVERY_S) or (done >= total and reached > tenth):
                print(f"{stage}: {done} of {total}", file=sys.stderr, flush=True)
                self._line[stage] = (now, reached)
            return
        self._end_step()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)

    def _end_step(self) -> None:
        if self._step is not None:
            self._bars.remove_task(self._step)
            self._step = None

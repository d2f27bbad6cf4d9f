"""Stopping politely: SIGINT and SIGTERM are noted, the step in hand is finished, and the loop decides."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """A context in which the first SIGINT or SIGTERM only sets `caught`; a second one acts as it always did.

    Outside the main thread, where Python cannot install handlers, nothing changes.
    """

    caught: signal.Signals | None = None

    def __enter__(self) -> Self:
        self._old = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._catch)
        return self

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        self.caught = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

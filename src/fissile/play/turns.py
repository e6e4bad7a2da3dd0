"""Experiments take turns in one thread, so that many tabs share the machine and none starves.

>>> turns = Turns()
>>> turns.add(Settings(samples=500), tell=print)
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

import torch

from fissile._common.errors import FissileError, first_line
from fissile.play.experiment import Event, events
from fissile.play.settings import NUMBERS, Settings

_log = logging.getLogger("fissile")

#: Training numbers of all experiments that have begun; another one waits until there is room.
HELD = 2 * NUMBERS
#: Seconds that a first turn may take until there is a curve.
FIRST = 0.2
#: Seconds after which an experiment is given up that nobody takes news from.
PATIENCE = 30.0


class Run:
    """One experiment on its way; ``tell`` is called in the thread of the turns.

    ``tell`` returns whether it can take more for now.
    """

    def __init__(self, settings: Settings, tell: Callable[[Event], bool]) -> None:
        self.settings, self.tell = settings, tell
        self.steps = events(settings)
        self.cancelled = self.curve = False
        self.full_since: float | None = None

    def turn(self) -> bool:
        """Go on for a turn, the first until there is a curve; return whether more is to come."""
        since, more = time.monotonic(), True
        while more and not self.cancelled:
            more = self._step()
            if self.curve or time.monotonic() - since > FIRST:
                break
        return more

    def _step(self) -> bool:
        try:
            event = next(self.steps, _END)
        except FissileError as error:
            event = {"kind": "error", "error": first_line(error)}
        except Exception:
            _log.exception("an experiment of the page failed")
            event = {"kind": "error", "error": "this experiment failed; see the terminal"}
        if event is None:
            return True
        more = event["kind"] not in ("done", "error", "end")
        self.curve = self.curve or event["kind"] == "epochs"
        if not self.cancelled and event is not _END:
            room = self.tell(event)
            self.full_since = None if room else self.full_since or time.monotonic()
        return more


_END: Event = {"kind": "end"}


class Turns:
    """The thread in which experiments take turns: a new one soon, the others one after another."""

    def __init__(self) -> None:
        self._new: deque[Run] = deque()
        self._going: deque[Run] = deque()
        self._gone: deque[Run] = deque()
        self._news, self._stopped, self._was_new, self._busy = Condition(), False, False, False
        self._thread = Thread(target=self._work, name="fissile-play", daemon=True)
        self._thread.start()

    def add(self, settings: Settings, tell: Callable[[Event], bool]) -> Run:
        """Begin an experiment as soon as it is its turn."""
        run = Run(settings, tell)
        with self._news:
            self._new.append(run)
            self._news.notify()
        return run

    def cancel(self, run: Run) -> None:
        """Forget an experiment; a turn that it has begun ends without news."""
        run.cancelled = True
        with self._news:
            for queue in (self._new, self._going):
                if run in queue:
                    queue.remove(run)
                    self._gone.append(run)
            self._news.notify()

    def stop(self) -> None:
        """End the thread after the turn that it is in."""
        with self._news:
            self._stopped = True
            self._news.notify()
        self._thread.join(timeout=5)

    def __len__(self) -> int:
        """Count the experiments that wait or are under way."""
        with self._news:
            return len(self._new) + len(self._going) + self._busy

    def _next(self) -> Run | None:
        """Return whose turn it is; new and old ones alternate, so neither waits for long."""
        with self._news:
            while not self._stopped:
                while self._gone:  # its data go now, and do not wait for a garbage collection
                    self._gone.popleft().steps.close()
                held = sum(run.settings.numbers for run in self._going)
                fits = self._new and held + self._new[0].settings.numbers <= HELD
                if fits and not (self._was_new and self._going):
                    self._was_new = self._busy = True
                    return self._new.popleft()
                self._was_new = False
                for _ in range(len(self._going)):
                    run = self._going.popleft()
                    if run.full_since is None:
                        self._busy = True
                        return run
                    if time.monotonic() - run.full_since < PATIENCE:
                        self._going.append(run)
                    else:
                        run.steps.close()
                self._news.wait(0.05 if self._going or self._new else None)
        return None

    def resume(self, run: Run) -> None:
        """Say that there is room for news again."""
        run.full_since = None
        with self._news:
            self._news.notify()

    def _work(self) -> None:
        torch.set_num_threads(1)  # measures are small: a second thread would mostly wait
        while (run := self._next()) is not None:
            more = run.turn()
            with self._news:
                self._busy = False
                if more and not run.cancelled:
                    self._going.append(run)
                else:
                    run.steps.close()
            del run  # and with it what it holds

"""Experiments take turns: none starves, what is given up ends, and memory has a bound."""

import threading
import time
from itertools import pairwise

import pytest

from fissile._common.errors import FissileError
from fissile.play import turns as module
from fissile.play.settings import Settings
from fissile.play.turns import Turns

SMALL = Settings(samples=500)


@pytest.fixture
def made(monkeypatch):
    """Turns whose experiments have six steps; nothing goes on before the gate is open."""
    gate, log = threading.Event(), []

    def steps(settings):
        gate.wait(10)
        for number in range(settings.fine_tune):
            log.append((settings.seed, number))
            yield {"kind": "epochs", "number": number}
        if settings.seed == 666:
            raise FissileError("out of luck")
        if settings.seed == 667:
            raise ZeroDivisionError
        yield {"kind": "done"}

    monkeypatch.setattr(module, "events", steps)
    turns = Turns()
    yield turns, gate, log
    gate.set()
    turns.stop()


def settings(seed, **more):
    return Settings(samples=500, fine_tune=6, seed=seed, **more)


def emptied(turns):
    end = time.monotonic() + 10
    while len(turns):
        assert time.monotonic() < end
        time.sleep(0.005)


def test_ten_tabs_go_on_side_by_side(made):
    turns, gate, log = made
    for seed in range(10):
        turns.add(settings(seed), lambda event: True)
    gate.set()
    emptied(turns)
    assert sorted(log) == [(seed, number) for seed in range(10) for number in range(6)]
    assert log.index((9, 0)) <= 18  # new and old ones alternate


def test_a_new_one_waits_for_one_turn_and_does_not_starve_the_old(made):
    turns, gate, log = made
    turns.add(settings(0, warm_up=400), lambda event: True)
    gate.set()
    for seed in range(1, 6):
        turns.add(settings(seed), lambda event: True)
    emptied(turns)
    old = [place for place, (seed, _) in enumerate(log) if seed == 0]
    assert old[-1] < len(log) - 1
    assert max(b - a for a, b in pairwise(old)) <= 7


def test_what_is_given_up_ends_and_tells_nothing(made):
    turns, gate, log = made
    runs = [turns.add(settings(seed), lambda event: True) for seed in range(3)]
    for run in runs[:2]:
        turns.cancel(run)
    gate.set()
    emptied(turns)
    assert {seed for seed, number in log if number > 0} == {2}


def test_what_is_given_up_lets_go_of_its_data_at_once(monkeypatch):
    closed, begun = [], threading.Event()

    def steps(settings):
        try:
            while True:
                begun.set()
                yield {"kind": "epochs"}
        finally:
            closed.append(settings.seed)

    monkeypatch.setattr(module, "events", steps)
    turns = Turns()
    try:
        for seed in range(20):
            begun.clear()
            run = turns.add(settings(seed), lambda event: True)
            assert begun.wait(10)
            turns.cancel(run)
        emptied(turns)
        end = time.monotonic() + 10
        while len(closed) < 20:
            assert time.monotonic() < end
            time.sleep(0.005)
    finally:
        turns.stop()


def test_mistakes_are_told_and_do_not_end_the_thread(made, caplog):
    turns, gate, _ = made
    gate.set()
    told = []
    for seed in (666, 667, 1):
        turns.add(settings(seed), lambda event: told.append(event) or True)
    emptied(turns)
    errors = [event["error"] for event in told if event["kind"] == "error"]
    assert errors[0] == "out of luck"
    assert "terminal" in errors[1]
    assert "ZeroDivisionError" in caplog.text
    assert told[-1]["kind"] == "done"


def test_who_takes_no_news_is_waited_for_and_then_given_up(made, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    turns, gate, log = made
    gate.set()
    turns.add(settings(0), lambda event: False)
    turns.add(settings(1), lambda event: True)
    emptied(turns)
    assert (1, 5) in log
    assert (0, 5) not in log


def test_memory_of_all_experiments_has_a_bound(made, monkeypatch):
    monkeypatch.setattr(module, "HELD", 2 * SMALL.numbers)
    turns, gate, log = made
    for seed in range(5):
        turns.add(settings(seed), lambda event: True)
    gate.set()
    emptied(turns)
    alive = set()
    for seed, number in log:
        alive.add(seed)
        assert len(alive) <= 2
        if number == 5:
            alive.discard(seed)

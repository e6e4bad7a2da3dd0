"""When things go wrong in a bank: NaN, no memory, errors, Ctrl-C. Nothing finished is lost."""

import contextlib
import copy
import logging
import signal
import subprocess
import sys
import time

import pytest
import torch
from bank_data import assert_same, blobs

import fissile
from fissile import FissileError
from fissile.bank import Bank, Progress, Spec, cpu, engines
from fissile.bank.loop import Recipe
from fissile.bank.stack import Stack


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_a_diverging_network_is_frozen_and_harms_no_other(engine, caplog):
    data = blobs(0, 1)
    specs = [Spec([8, 6, 1], data, seed=s, recipe=Recipe(lr=1e-2, batch=16)) for s in range(4)]
    wild = Spec([8, 6, 1], data, seed=9, recipe=Recipe(lr=1e38, batch=16))
    mixed = Bank([*specs[:2], wild, *specs[2:]], engine=engine)
    healthy = Bank(specs, engine=engine)
    with caplog.at_level(logging.WARNING, "fissile"):
        mixed.train(until=3)
    healthy.train(until=3)
    assert mixed.diverged == [2]
    assert "1 of 5 networks diverged" in caplog.text
    assert all(p.isfinite().all() for p in mixed.take(2)[0].parameters())
    for ours, theirs in zip((0, 1, 3, 4), range(4), strict=True):
        assert_same(mixed.take(ours)[0], healthy.take(theirs)[0], 1e-6)
    assert healthy.diverged == []


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_what_diverges_late_stays_frozen_at_its_last_finite_epoch(engine):
    data = blobs(0, 1)
    specs = [Spec([8, 6, 1], data, seed=0), Spec([8, 6, 1], data, seed=1, recipe=Recipe(lr=3e18))]
    bank = Bank(specs, engine=engine)
    epoch = 0
    while not bank.diverged:
        before = copy.deepcopy(bank.take(1)[0].state_dict())
        epoch += 1
        bank.train(until=epoch)
    assert 1 < epoch < 200, "it was to have some finite epochs"
    bank.train(until=epoch + 3)
    assert bank.diverged == [1]
    for key, value in bank.take(1)[0].state_dict().items():
        assert torch.equal(value, before[key])
    curve = bank.accuracy[1]
    assert torch.isnan(curve[epoch - 1 :]).all()
    assert not torch.isnan(curve[: epoch - 1]).any()
    assert bank.last[1] == curve[epoch - 2]
    assert not torch.isnan(bank.accuracy[0]).any()


def test_out_of_memory_halves_the_stack_and_says_so(monkeypatch, caplog):
    specs = [Spec([8, 6, 1], blobs(0, 1), seed=s) for s in range(10)]
    expected = Bank(specs, engine="plain")
    expected.train(until=2)
    real = engines.run_torch

    def scarce(stacks, *rest, **options):
        if len(stacks[0]) > 3:
            raise torch.OutOfMemoryError("not enough memory: you tried to allocate too much")
        real(stacks, *rest, **options)

    monkeypatch.setattr(engines, "run_torch", scarce)
    bank = Bank(specs, engine="plain")
    with caplog.at_level(logging.WARNING, "fissile"):
        bank.train(until=2)
    assert "out of memory with 10 networks at once: going on with 5 and 5" in caplog.text
    for i in range(10):
        assert_same(bank.take(i)[0], expected.take(i)[0], 1e-6)

    def none(*_, **__):
        raise MemoryError

    monkeypatch.setattr(engines, "run_torch", none)
    with pytest.raises(FissileError, match="not even one network"):
        bank.train(until=3)
    monkeypatch.setattr(engines, "run_torch", real)
    bank.train(until=3)  # nothing was lost
    assert bank.accuracy.shape == (10, 3)


SCARCE = """
import resource, torch
from fissile.bank import Bank, Data, Spec
from fissile.bank.loop import Recipe
from fissile.bank.stack import Stack
x, y = torch.rand(512, 1000), torch.randint(0, 2, (512,))
data, recipe = Data(x, y, x[:8], y[:8]), Recipe(batch=512)
small = Bank([Spec([1000, 2, 1], data, recipe=recipe)], engine="plain")
small.train(until=1)  # so that everything is loaded and every thread is there
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20, resource.RLIM_INFINITY))
bank = Bank([Spec([1000, 2, 1], data, seed=s, recipe=recipe) for s in range(200)], engine="plain")
bank.train(until=2)
assert not torch.isnan(bank.accuracy).any() and bank.accuracy.shape == (200, 2)
print("trained")
"""


@pytest.mark.slow
def test_memory_that_really_runs_out():
    """A batch of all networks at once would need some 400 MB; the process may take less."""
    run = subprocess.run([sys.executable, "-c", SCARCE], capture_output=True, text=True)
    assert run.stdout == "trained\n", run.stderr
    assert "out of memory with 200 networks at once: going on with 100 and 100" in run.stderr


def test_out_of_memory_in_the_pool_goes_on_in_parts(monkeypatch, caplog):
    specs = [Spec([8, 6, 1], blobs(0, 1), seed=s) for s in range(3)]
    bank = Bank(specs)

    def none(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(cpu, "read", none)
    with caplog.at_level(logging.WARNING, "fissile"):
        bank.train(until=2)
    assert "out of memory, going on in smaller parts" in caplog.text
    assert bank.accuracy.shape == (3, 2)


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_an_error_costs_no_network(engine, monkeypatch):
    """Whatever raises, wherever: the bank keeps what it has finished and can go on."""
    specs = [Spec([8, 6, 1], blobs(0, 1), seed=s) for s in range(3)]
    whole, bank = Bank(specs, engine=engine), Bank(specs, engine=engine)
    whole.train(until=4), bank.train(until=1)
    places = {
        "auto": [(cpu, "read"), (cpu._Job, "train"), (cpu, "wait")],
        "plain": [
            (engines._TorchEngine, "_step"),
            (Stack, "_finite"),
            (engines._TorchEngine, "accuracy"),
        ],
    }
    for place, name in places[engine]:
        for error in (ValueError, KeyboardInterrupt):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, raiser(getattr(place, name), 2, error))
                with contextlib.suppress(error):
                    bank.train(until=4)
            assert sorted(i for s in bank._stacks for i in s.members.tolist()) == [0, 1, 2]
    bank.train(until=4)
    assert torch.equal(bank.accuracy, whole.accuracy)
    for i in range(3):
        assert_same(bank.take(i)[0], whole.take(i)[0], 1e-6)


def raiser(function, count, error):
    """The function, but its count-th call raises after it has done its work."""
    calls = []

    def wrapped(*arguments, **options):
        result = function(*arguments, **options)
        calls.append(1)
        if len(calls) == count:
            raise error
        return result

    return wrapped


INTERRUPTED = """
import signal, sys, torch
from fissile.bank import Bank, Data, Spec
samples = int(sys.argv[3])
x, y = torch.randn(samples, 64), torch.randint(0, 2, (samples,))
data = Data(x, y, x[:5000], y[:5000])
specs = [Spec([64, h, 1], data, seed=h) for h in (100, 101, 101)]
bank = Bank(specs, engine=sys.argv[1])
bank.train(until=1)
signal.signal(signal.SIGINT, lambda *_: None)  # only what reaches train() is to count
print("begun", flush=True)
while True:
    try:
        bank.train(until=int(sys.argv[2]))
        break
    except KeyboardInterrupt:
        counted = [len(curve) for curve in bank._accuracy]
        epochs = {i: s.epoch for s in bank._stacks for i in s.members.tolist()}
        assert counted == [epochs[i] for i in range(3)], (counted, epochs)
        print("stopped at", counted, flush=True)
whole = Bank(specs, engine=sys.argv[1])
while True:
    try:
        whole.train(until=int(sys.argv[2]))
        break
    except KeyboardInterrupt:
        pass
assert torch.equal(whole.accuracy, bank.accuracy)
print("same")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "epochs", "samples"), [("auto", "14", "40000"), ("plain", "3", "10000")]
)  # most of a second for either, longer than it takes to send the signals
def test_real_signals_twice_in_a_row(engine, epochs, samples):
    command = [sys.executable, "-c", INTERRUPTED, engine, epochs, samples]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "begun\n"
        for pause in (0.1, 0.05, 0.2, 0.05):
            time.sleep(pause)
            run.send_signal(signal.SIGINT)
        try:
            out, _ = run.communicate(timeout=100)
        finally:
            run.kill()  # one that does not stop is not waited for
    assert run.returncode == 0, out
    assert "stopped at" in out
    assert out.endswith("same\n")


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_an_interruption_leaves_the_last_finished_epoch_and_can_be_resumed(engine):
    specs = [Spec([8, h, 1], blobs(0, 1), seed=h) for h in (4, 5, 5, 6)]
    whole = Bank(specs, engine=engine)
    whole.train(until=6)

    class Impatient(Progress):
        def __init__(self):
            self.calls = 0

        of = fissile.bank.bank.Quiet.of

        def advance(self, epochs, steps):
            self.calls += 1
            if self.calls == 4:
                raise KeyboardInterrupt

    bank = Bank(specs, engine=engine)
    with pytest.raises(KeyboardInterrupt):
        bank.train(until=6, progress=Impatient())
    assert not torch.isnan(bank.accuracy).all()
    bank.train(until=6)
    assert torch.equal(bank.accuracy, whole.accuracy)
    for i in range(len(specs)):
        assert_same(bank.take(i)[0], whole.take(i)[0], 1e-6)

"""Everything that once broke something, in numbers: the table of docs/reliability.md.

    python tests/attack.py [ROW ...] [--minutes 5]

Each row attacks in a process of its own and prints how many cases there were and what went wrong;
a process that ends in any other way is wrong too. All rows take about half an hour on two idle
cores; ``--minutes`` ends each row earlier.
"""

import argparse
import contextlib
import copy
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import fake_stores
import fuzz
import torch
from data_files import feature_table, features
from networks import DTYPES, _roughen, splits_for
from torch import nn

import fissile
from fissile.data import read_features
from fissile.lab.batching import Local
from fissile.lab.run import run
from fissile.lab.store import Store
from fissile.lab.trial import Sampling
from fissile.layers import SparseLinear

TESTS = Path(__file__).parent
PROCESSES = multiprocessing.get_context("fork")  # nothing is imported anew
COMMAND = "import fissile_command; print('begun', flush=True); fissile_command.main()"
RUN = ("run", "theory", "--scale", "paper", "--trials", "2", "--set", "networks=150", "--every")
RUN += ("0",)
#: When to end, in seconds of the clock that never goes back.
END = [math.inf]


def tries(cases):
    """Count the cases, until the time is up."""
    return itertools.takewhile(lambda _: time.monotonic() < END[0], range(cases))


def matrices(model, kinds=nn.Linear | SparseLinear):
    """Return the weights of a model as it answers to unit vectors: nothing of ours is asked."""
    found = []
    for layer in model.modules():
        if isinstance(layer, kinds):
            plain = copy.deepcopy(layer).double().eval()
            if plain.bias is not None:
                nn.init.zeros_(plain.bias)
            found.append(plain(torch.eye(plain.in_features, dtype=torch.float64)).detach())
    return found


def count(model, kinds=nn.Linear | SparseLinear):
    return sum(int(matrix.count_nonzero()) for matrix in matrices(model, kinds))


def budgets(cases):
    """Expand networks of random shapes, splits, dtypes and ties, and count from outside."""
    wrong, tally, folder = [], Counter(), tempfile.mkdtemp()
    for case in tries(cases):
        rng = random.Random(case)
        torch.manual_seed(case)
        alpha, depth = rng.randint(2, 8), rng.randint(1, 4)
        inputs = alpha * rng.randint(1, 4)
        # Equal hidden fan-ins keep one split valid for every layer.
        hidden = [inputs if i % 2 else rng.randint(1, 6) for i in range(depth)]
        norm = rng.random() < 0.5
        model = fissile.MLP([inputs, *hidden, rng.randint(1, 6)], layer_norm=norm)
        _roughen(model, rng.choice([None, 1, 0]))
        dense = model.to(rng.choice(DTYPES))
        split, budget = rng.choice(splits_for(inputs, alpha)), rng.choice(["weights", "all"])
        before = count(dense)
        try:
            wide = fissile.expand(dense, alpha, split, budget=budget, seed=case)
        except fissile.FissileError:
            tally["refused"] += 1
            continue
        tally["expanded"] += 1
        then = count(wide)
        good = then == before if budget == "weights" else then <= before
        how = rng.choice(["deepcopy", "state_dict", "save", "train", "move"])
        how = "compile" if case % 1000 == 0 else how  # which takes long
        after = changed(wide, how, Path(folder, "model"))
        pairs = zip(matrices(wide, SparseLinear), matrices(after, SparseLinear), strict=True)
        if how == "train":  # may bring a weight to zero, and none back
            good &= all(not new[old == 0].any() for old, new in pairs)
        elif how == "move":
            good &= count(after, SparseLinear) <= count(wide, SparseLinear)
        else:
            good &= all(torch.equal(old, new) for old, new in pairs) and count(after) == then
        tally[how] += 1
        if not good:
            wrong.append(f"draw {case}: {before} became {then}, by {how} {count(after)}")
    return case + 1, f"{tally['expanded']:,} expanded, {tally['refused']:,} refused", wrong


def changed(wide, how, path):
    """Return what becomes of an expanded model in one of the ways that models are handled."""
    if how == "save":
        fissile.save(wide, path)
        return fissile.load(path)
    other = fissile.to_masked(wide) if how == "move" else copy.deepcopy(wide)
    if how == "state_dict":
        for tensor in other.state_dict().values():
            tensor.zero_()
        other.load_state_dict(wide.state_dict())
    if how in ("train", "move"):
        adam = torch.optim.AdamW(other.float().train().parameters(), 0.1, weight_decay=0.1)
        rewire = fissile.Rewire(other, adam, every=1, fraction=0.3) if how == "move" else None
        for _ in range(2):
            adam.zero_grad()
            other(torch.randn(4, other.sizes[0])).square().sum().backward()
            adam.step()
            if rewire:
                rewire.step()
    return torch.compile(other, backend="eager") if how == "compile" else other


def files(cases):
    """Damage files of every format."""
    return fuzzed(list(fuzz.FORMATS), -(-cases // len(fuzz.FORMATS)))


def folders(cases):
    """Damage folders that `save_pretrained` wrote."""
    return fuzzed(list(fuzz.FOLDER), cases)


def fuzzed(names, each):
    told = [fuzz.spawn([names[at]], first=10**6, cases=each)[names[at]] for at in tries(len(names))]
    counts = sum((Counter(counts) for counts, _ in told), Counter())
    note = ", ".join(f"{counts[key]:,} {key}" for key in ("read", "same", "refused"))
    return counts.total(), note, [one for _, found in told for one in found]


def bombs(cases):
    """Read the files that once took all memory, all time or the interpreter."""
    ((counts, found),) = fuzz.spawn(["kept"]).values()
    return sum(counts.values()) + len(found), "all refused" if not found else "", found


def footer(cases):
    """Change one byte in the footer of a Parquet file."""
    fuzz.watch()
    with tempfile.TemporaryDirectory() as folder:
        path = feature_table(Path(folder, "f.parquet"), features())
        data, tally, wrong = path.read_bytes(), Counter(), []
        read_features(path)
        begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        for case in tries(cases):
            rng = random.Random(case)
            spoilt = bytearray(data)
            spoilt[begin + case % (len(data) - begin)] = rng.randrange(256)
            path.write_bytes(spoilt)
            with fuzz.limited():
                tally[found := fuzz.outcome(read_features, path)] += 1
            if found not in ("read", "refused"):
                wrong.append(f"edit {case}: {found}")
    return tally.total(), f"{tally['read']:,} read, {tally['refused']:,} refused", wrong


def store_bytes(cases):
    """Change a store's bytes, and look at it through commands."""
    return looked_at(cases, lambda file, rng: file.write_bytes(fuzz.torn(file.read_bytes(), rng)))


def store_rows(cases):
    """Change values in a store's rows, and look at it through commands."""
    from test_hostile_stores import BAD, PLACES, changed

    def change(file, rng):
        table, column = rng.choice(PLACES)
        which = rng.choice(["rowid = 1", "rowid > 0"])
        with contextlib.closing(sqlite3.connect(file)) as db:
            (now,) = db.execute(f"SELECT {column} FROM {table} WHERE rowid = 1").fetchone()
        value = rng.choice(BAD)
        if rng.random() < 0.5 and str(now)[:1] in ("{", "["):
            value = fuzz.bent_text(now, rng)
        elif rng.random() < 0.5:
            value = rng.choice([one for one in fuzz.ODD if isinstance(one, int | float | str)])
        with contextlib.suppress(sqlite3.IntegrityError, OverflowError):
            changed(file.parent, f"UPDATE {table} SET {column} = ? WHERE {which}", (value,))

    return looked_at(cases, change)


def looked_at(cases, change):
    from test_hostile_stores import ended, invented

    fuzz.watch()
    with tempfile.TemporaryDirectory() as folder:
        store, there = Path(folder, "store"), Path(folder, "there")
        file = invented(store) / "trials.sqlite"
        whole, tally, wrong = file.read_bytes(), Counter(), []
        commands = [("status",), ("results", "codes-1"), ("results", "codes"), ("take", store)]
        for command in commands:  # and everything is imported
            ended(*command, "--out", there if command[0] == "take" else store)
        for case in tries(cases):
            rng = random.Random(case)
            change(file, rng)
            command = rng.choice(commands)
            out = Path(folder, f"there-{case}") if command[0] == "take" else store

            def look(_, command=command, out=out):
                return ended(*command, "--out", out)

            with fuzz.limited():
                found = fuzz.outcome(look, store, str, "0")
            tally[found] += 1
            if found not in ("same", "other"):
                wrong.append(f"change {case}, {command[0]}: {found}")
            for name in ("-wal", "-shm"):
                file.with_name(file.name + name).unlink(missing_ok=True)
            file.write_bytes(whole)
    return tally.total(), f"{tally['other']:,} refused, {tally['same']:,} read", wrong


def works(run_of=0):
    return [Sampling(networks=20, number=run_of * 1000 + number) for number in range(40)]


def work(folder, run_of):
    with Store(folder) as store:
        run(works(run_of), store, Local(every=0.0))


def rows(folder, run_of):
    with Store(folder, create=False) as store:
        return {row.key: row.measures for row in store.rows(one.key for one in works(run_of))}


def kills(cases):
    """Kill a run at random moments until it is done, and look for every row, to the bit."""
    rng, wrong, killed = random.Random(0), [], 0
    with tempfile.TemporaryDirectory() as folder:
        run_of = -1
        while killed < cases and time.monotonic() < END[0]:
            run_of += 1
            place, alone, before = Path(folder, str(run_of)), Path(folder, "alone"), {}
            begin = time.monotonic()
            work(alone, run_of)
            expected, lasts = rows(alone, run_of), time.monotonic() - begin
            while len(before) < len(expected):
                process = PROCESSES.Process(target=work, args=(place, run_of))
                process.start()
                process.join(rng.uniform(0, 1.2 * lasts))
                killed += process.is_alive()
                process.kill()
                process.join()
                now = rows(place, run_of) if (place / "trials.sqlite").exists() else {}
                if any(now.get(key) != expected[key] for key in {*before, *now}):
                    wrong.append(f"run {run_of}: rows are lost or others")
                before = now
    return killed, f"{run_of + 1} runs", wrong


def processes(cases):
    """Let 2 and 4 processes run the same trials; open a store over and over beside two writers."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        work(Path(folder, "alone"), 0)
        for number in (2, 4):
            together = Path(folder, str(number))
            running = [PROCESSES.Process(target=work, args=(together, 0)) for _ in range(number)]
            for step in ("start", "join"):
                for process in running:
                    getattr(process, step)()
            if rows(together, 0) != rows(Path(folder, "alone"), 0):
                wrong.append(f"{number} processes: other rows")
        place = fake_stores.filled(Path(folder, "open"), 1)
        writers = [PROCESSES.Process(target=write, args=(place, k), daemon=True) for k in (0, 1)]
        for one in writers:
            one.start()
        for opened in tries(cases):
            try:
                with Store(place, create=False) as store:
                    store.count()
            except Exception as error:
                wrong.append(f"opening {opened}: {error}")
        for one in writers:
            one.kill()
    return opened + 3, f"2 and 4 processes; {opened + 1:,} openings beside 2 writers", wrong


def write(folder, who):
    """Open, write and close without an end: whoever closes last removes the log."""
    for number in itertools.count():
        fake_stores.filled(folder, 2 + (2 * number + who) % 500)


def faults(cases):
    """Run the tests of full disks, limits, rights, left logs, other versions and failing calls."""
    where = ["lab/store/test_faults.py", "lab/store/test_processes.py", "lab/store/test_files.py"]
    where += ["cli/test_hostile_stores.py", "_common/test_files.py"]
    ask = [sys.executable, "-m", "pytest", "-q", *(str(TESTS / "unit" / one) for one in where)]
    done = subprocess.run(ask, capture_output=True, text=True)
    found = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed)", done.stdout)}
    wrong = [] if done.returncode == 0 else [done.stdout[-500:]]
    return sum(found.values()), "tests; `test_faults.py` repeats a run for each call", wrong


def signals(cases):
    """Send SIGINT once to thrice, or SIGTERM, to the command at random moments."""
    wrong, tally = [], Counter()
    with tempfile.TemporaryDirectory() as folder:
        for case in tries(cases):
            rng = random.Random(case)
            what = rng.choice([signal.SIGINT] * 3 + [signal.SIGTERM])
            command = [*RUN, "--jobs", str(rng.choice([1, 2])), "--out", f"{folder}/{case}"]
            process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, *command], text=True, start_new_session=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            process.stdout.readline()
            for _ in range(rng.randint(1, 3) if what == signal.SIGINT else 1):
                time.sleep(rng.choice([rng.uniform(0.01, 0.3), rng.uniform(0.01, 6)]))
                process.send_signal(what)
            try:
                _, told = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                told = "Traceback: it hangs"
            good = (130, 0) if what == signal.SIGINT else (-15, 0)
            tally[process.returncode] += 1
            until = time.monotonic() + 30
            with contextlib.suppress(ProcessLookupError):
                while (
                    time.monotonic() < until
                ):  # processes that see that nobody is waiting for them
                    os.killpg(process.pid, 0)
                    time.sleep(0.1)
                os.killpg(process.pid, signal.SIGKILL)
            left = time.monotonic() >= until
            if process.returncode not in good or "Traceback" in told or left:
                wrong.append(f"{case}: {process.returncode}, left {left}, {told[-300:]!r}")
    return tally.total(), ", ".join(f"{n} ended with {code}" for code, n in tally.items()), wrong


ROWS = {
    budgets: 32_000, files: 18_000, footer: 1_300, folders: 600, store_bytes: 500,
    store_rows: 1_200, bombs: 0, kills: 300, processes: 200_000, faults: 0, signals: 66,
}  # fmt: skip


def main():
    options = argparse.ArgumentParser(description=__doc__)
    names = {row.__name__: row for row in ROWS}
    options.add_argument("rows", nargs="*", choices=[*names, []])
    options.add_argument("--minutes", type=float, default=math.inf)
    options.add_argument("--here", action="store_true", help="one row, in this process, as JSON")
    given = options.parse_args()
    bad = 0
    if given.here:
        fuzz.ring_after()
        warnings.simplefilter("ignore")
        END[0] = time.monotonic() + 60 * given.minutes
        row = names[given.rows[0]]
        print(json.dumps(row(ROWS[row])))
        return
    print("| row | attack | cases | what came of them | wrong |\n|---|---|---|---|---|", flush=True)
    for name in given.rows or names:
        ask = [sys.executable, __file__, name, "--minutes", str(given.minutes), "--here"]
        path = os.pathsep.join([str(TESTS), str(TESTS / "unit" / "cli"), *sys.path])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(ask, capture_output=True, text=True, env=environment)
        try:
            cases, note, wrong = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            cases, note, wrong = 0, f"ended with {done.returncode}", [done.stderr[-2000:]]
        about = names[name].__doc__.strip().rstrip(".")
        print(f"| `{name}` | {about} | {cases:,} | {note} | {len(wrong)} |", flush=True)
        bad += len(wrong)
        for one in wrong[:20]:
            print(one, file=sys.stderr, flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

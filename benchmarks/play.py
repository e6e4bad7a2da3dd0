"""How soon `fissile play` answers a moved slider, and what an hour of dragging costs in memory.

    python benchmarks/play.py --moves 500

It starts the command, and asks it as a page does. Beside wall time stands the processor time of the
server, which others on the machine change less.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from datetime import date

import psutil
import websocket

#: Each moved slider of the default experiment: what it changes.
SLIDERS = {"neurons": "9", "alpha": "4", "splits": "random", "clauses": "9", "samples": "21000"}
TABS = 10


class Page:
    """An open page of a running `fissile play`."""

    def __init__(self, address):
        host = re.match(r"http://([^/]+)", address)[1]
        self.socket = websocket.create_connection(
            f"{address.replace('http', 'ws')}run", origin=f"http://{host}", timeout=600
        )
        self.number = 0

    def ask(self, **settings):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "settings": settings}))

    def until(self, kind):
        """Wait for news of a kind about the latest experiment."""
        while True:
            event = json.loads(self.socket.recv())
            if event["id"] == self.number and event["kind"] == kind:
                return event


def processor(process):
    times = process.cpu_times()
    return times.user + times.system


def timed(process, act):
    """Return the seconds of wall and of the server's processors that something takes."""
    wall, busy = time.perf_counter(), processor(process)
    act()
    return time.perf_counter() - wall, processor(process) - busy


def median(rows):
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def told(what, row):
    print(f"{what:40}  {row[0]:6.3f} s, {row[1]:6.3f} s of a processor", flush=True)


def first_curves(page, process, repeats, running):
    """Return, for each slider, the time from its move to the first curve."""
    found = {}
    for name, value in SLIDERS.items():
        rows = []
        for repeat in range(repeats):
            seed = {"seed": str(1000 * (repeat + 1))}  # samples that were not drawn before
            if name in ("neurons", "alpha", "splits"):  # a slider that needs no new samples
                page.ask(**seed)
                page.until("done")
            if running:
                page.ask(**seed)
                page.until("begin")

            def act(change={name: value} | seed):
                page.ask(**change)
                page.until("epochs")

            rows.append(timed(process, act))
        found[name] = median(rows)
        told(f"first curve: {name}, {'running' if running else 'idle'}", found[name])
    return found


def whole(page, process, repeats):
    """Return the time of the default experiment, with samples that were not drawn before."""
    rows = []
    for repeat in range(repeats):

        def act(seed=str(50_000 + 1000 * repeat)):
            page.ask(seed=seed)
            page.until("done")

        rows.append(timed(process, act))
    return median(rows)


def tabs(address):
    """Return when each of ten tabs has its first curve, and when it is done."""
    firsts, lasts = [], []

    def one(number):
        page = Page(address)
        since = time.perf_counter()
        page.ask(seed=str(90_000 + 1000 * number))
        page.until("epochs")
        firsts.append(time.perf_counter() - since)
        page.until("done")
        lasts.append(time.perf_counter() - since)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(TABS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(firsts), max(lasts)


def dragged(page, process, moves):
    """Return the server's memory after a tenth of some moves of sliders, and after all of them."""
    memory = []
    for move in range(moves):
        settings = {"seed": str(200_000 + 7 * move), "neurons": str(4 + move % 20)}
        page.ask(**settings, clauses=str(4 + move % 13), alpha=str(2 + move % 3))
        page.until("done" if move % 10 == 0 else "epochs")
        memory.append(process.memory_info().rss)
    tenth = max(1, moves // 10)
    return max(memory[:tenth]) / 2**20, max(memory[-tenth:]) / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--moves", type=int, default=300)
    asked = parser.parse_args()
    command = [sys.executable, "-m", "fissile.cli", "play", "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = server.stdout.readline().split()[-1]
        process, page = psutil.Process(server.pid), Page(address)
        page.ask()
        page.until("done")
        load = os.getloadavg()[0]
        curves = {
            state: first_curves(page, process, asked.repeats, state == "running")
            for state in ("idle", "running")
        }
        default = whole(page, process, asked.repeats)
        told("the whole default experiment", default)
        page.socket.close()
        first, last = tabs(address)
        print(f"{TABS} tabs: the last first curve after {first:.2f} s, all done after {last:.2f} s")
        early, late = dragged(Page(address), process, asked.moves)
    finally:
        server.terminate()
        server.wait()
    print(f"memory: {early:.0f} MB after {asked.moves // 10} moves, {late:.0f} after {asked.moves}")
    result = {
        "date": date.today().isoformat(), "cores": os.cpu_count(), "load": load,
        "first_curve": curves, "default": default, "tabs": [first, last], "memory": [early, late],
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""How fast Boolean samples are drawn: the vectorised generator against algorithm A2 as it stands.

    PYTHONPATH=src python benchmarks/dnf.py

Prints seconds for 100,000 samples of 128 literals and, as its last line, one JSON object.
"""

import datetime
import json
import random
import time

from bank import commit, machine

from fissile.data import dnf


def plain(clauses, size, samples):
    """Algorithm A2 in plain Python, row by row; only its speed matters here."""
    literals = clauses * size
    least, spread = literals // 4, literals // 8
    rows = []
    for i in range(samples):
        ones = random.randint(least, least + spread)
        while True:
            clause = random.randrange(clauses)
            block = range(clause * size, (clause + 1) * size)
            if i % 4 == 3:
                on = set(random.sample(range(literals), ones))
            else:
                others = [j for j in range(literals) if j not in block]
                on = {*block, *random.sample(others, max(0, ones - size))}
                if i % 4 == 2:
                    on.remove(random.choice(block))
            true = any(all(c * size + k in on for k in range(size)) for c in range(clauses))
            if true == (i % 4 < 2):
                break
        rows.append([3 * (j in on) + random.random() / 2 for j in range(literals)])
    return rows


def main():
    dnf(32, samples=1_000)
    begin = time.perf_counter()
    dnf(32, samples=100_000)
    fast = time.perf_counter() - begin
    begin = time.perf_counter()
    plain(32, 4, 2_000)
    slow = (time.perf_counter() - begin) * 50
    print(f"{fast:.2f} s for 100,000 samples of 128 literals; in plain Python {slow:.1f} s")
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": machine("cpu"),
        "commit": commit(),
        "seconds": round(fast, 3),
        "plain_seconds": round(slow, 2),
        "plain/fissile": round(slow / fast, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

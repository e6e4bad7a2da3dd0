"""Features of ImageNet's size, trained on without holding them: time, and memory at its peak.

    PYTHONPATH=src python benchmarks/stream.py [--samples 1281167] [--networks 2]

Generated features (float16, 512 wide, 1,000 classes) are written to a folder and found through the
catalogue, as `fissile run imagenet1k` would find real ones. The same networks are then trained for
one epoch, first mapped from the file and then held in memory, each in a process of its own.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from bank import commit, machine

WIDTH, CLASSES, TEST = 512, 1000, 50_000


def write(folder, samples, chunk=65_536):
    """Clouds around random means, written piece by piece."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    means = rng.standard_normal((CLASSES, WIDTH), dtype=np.float32)
    for name, count in (("train", samples), ("test", TEST)):
        y = np.arange(count) % CLASSES
        np.save(folder / f"y_{name}.npy", y)
        shape = (count, WIDTH)
        x = np.lib.format.open_memmap(folder / f"x_{name}.npy", "w+", np.float16, shape)
        for start in range(0, count, chunk):
            labels = y[start : start + chunk]
            x[start : start + chunk] = means[labels] + rng.standard_normal(
                (len(labels), WIDTH), dtype=np.float32
            )
        x.flush()


def memory():
    """The memory of its own that this process has, in GiB: pages of files do not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 2**20
    return float("nan")


def child(networks, streamed):
    """Train for one epoch and print what it took."""
    from fissile.lab import classifier
    from fissile.lab.compute import compute
    from fissile.lab.trial import Features, Trial

    classifier._STREAMED = 0 if streamed else float("inf")
    most, before, done = 0.0, memory(), threading.Event()

    def watch():
        nonlocal most
        while not done.wait(0.05):
            most = max(most, memory())

    threading.Thread(target=watch, daemon=True).start()
    task = Features("imagenet1k-clip", fingerprint=classifier.fingerprint("imagenet1k-clip"))
    trials = [
        Trial(task, 8, depth=5, layer_norm=True, warm_up=0, fine_tune=1, number=number)
        for number in range(networks)
    ]
    begin = time.perf_counter()
    found = compute(trials)
    seconds = time.perf_counter() - begin
    done.set()
    accuracy = [round(one.measures["accuracy"], 6) for one in found]
    print(json.dumps({"seconds": seconds, "gib": most - before, "accuracy": accuracy}))


def measured(folder, networks, streamed):
    command = [sys.executable, __file__, "--child", "--networks", str(networks)]
    command += ["--streamed"] if streamed else []
    environment = {**os.environ, "FISSILE_DATA": str(folder)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--samples", type=int, default=1_281_167)
    options.add_argument("--networks", type=int, default=2)
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--streamed", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.child:
        child(given.networks, given.streamed)
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "imagenet1k-clip-vit-b-16", given.samples)
        streamed = measured(folder, given.networks, True)
        held = measured(folder, given.networks, False)
    steps = given.networks * -(-given.samples // 64)
    print(f"{given.samples:,} x {WIDTH} float16 on {machine('cpu')}, {given.networks} networks")
    for name, one in (("mapped from the file", streamed), ("held in memory", held)):
        per_step = 1e6 * one["seconds"] / steps
        print(f"{name}: {one['seconds']:.1f} s, {per_step:.0f} us per step, {one['gib']:.2f} GiB")
    # Mapped float16 goes through batched PyTorch, float32 in memory through the compiled kernel:
    # over many steps rounding leads such networks apart, over few it must not.
    apart = float(np.abs(np.subtract(streamed["accuracy"], held["accuracy"])).max())
    assert apart < 0.01 or given.samples > 50_000, "both must train the same networks"
    print(
        json.dumps(
            {
                "date": str(datetime.date.today()),
                "commit": commit(),
                "machine": machine("cpu"),
                "samples": given.samples,
                "features_gib": given.samples * WIDTH * 2 / 2**30,
                "streamed": streamed,
                "held": held,
                "memory_ratio": streamed["gib"] / held["gib"],
                "time_ratio": streamed["seconds"] / held["seconds"],
            }
        )
    )


if __name__ == "__main__":
    main()

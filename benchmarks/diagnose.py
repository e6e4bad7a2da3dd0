"""How long `diagnose`, `experiment` and `fissile try` take on 10,000 samples of 500 features.

    OMP_NUM_THREADS=1 python benchmarks/diagnose.py     (a minute or two on two cores)

The experiment is compared, inside this run, with the bare loop over as many steps. Its last line is
one JSON object: seconds by the clock and of the processor, which differ beside other work.
"""

import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from about import made
from typer.testing import CliRunner

import fissile
from fissile.cli.lab import app


def data(samples, inputs=500, classes=50):
    rng = np.random.default_rng(0)
    y = np.arange(samples) % classes
    means = 0.35 * rng.normal(size=(classes, inputs))
    return (means[y] + rng.normal(size=(samples, inputs))).astype(np.float32), y


def timed(call):
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"clock": time.perf_counter() - wall, "processor": time.process_time() - cpu}


def main():
    x, y = data(12_000)
    tensors = torch.from_numpy(x[:10_000]), torch.from_numpy(y[:10_000])

    def make(seed):
        model = fissile.MLP([500, 16, 50])
        return model, torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(model, adam):
        for rows in torch.randperm(10_000).split(64):
            adam.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(tensors[0][rows]), tensors[1][rows])
            loss.backward()
            adam.step()

    def loop():
        for seed in range(3):
            for rounds in (6, 3):  # the warm-up with the dense arm, and the split one
                model, adam = make(seed)
                for _ in range(rounds):
                    fit(model, adam)

    def experiment(folder):
        fissile.experiment(
            make, fit, lambda model: 0.5, arms=(4,), trials=3, warm_up=3, fine_tune=3, store=folder
        )

    found = {}
    found["diagnose"] = timed(lambda: fissile.diagnose(make(0)[0], tensors))
    found["loop"] = timed(loop)
    with tempfile.TemporaryDirectory() as folder:
        found["experiment"] = timed(lambda: experiment(Path(folder) / "store"))
        found["the same call again"] = timed(lambda: experiment(Path(folder) / "store"))
        file = Path(folder) / "features.npz"
        np.savez(file, x_train=x[:10_000], y_train=y[:10_000], x_test=x[10_000:], y_test=y[10_000:])
        words = ["try", str(file), "--to", str(Path(folder) / "page.html")]
        found["try"] = timed(lambda: CliRunner().invoke(app, words, catch_exceptions=False))
    for name, seconds in found.items():
        print(f"{name}: {seconds['clock']:.1f} s, {seconds['processor']:.1f} s of the processor")
    ratio = found["experiment"]["processor"] / found["loop"]["processor"]
    print(f"the experiment takes {ratio:.2f} times the bare loop")
    machine = made() | {"load": os.getloadavg()[0], "threads": torch.get_num_threads()}
    print(json.dumps(machine | {"seconds": found, "ratio": ratio}))


if __name__ == "__main__":
    main()

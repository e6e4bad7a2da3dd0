"""How fast many small networks train: the ordinary loop, torch.func, JAX and the bank, in one run.

    make bench-bank                      # two cores, a few minutes
    python benchmarks/bank.py --device cuda --sizes 100 600 2000
    python benchmarks/bank.py --sizes --real 60   # the shapes of real data alone

Prints microseconds per model and step and, as its last line, one JSON object with the ratios. JAX
takes part where it is installed (`pip install -c constraints.txt '.[bench]'`).
"""

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import time

import torch
from about import commit, machine

import fissile
from fissile.bank import Bank, Data, Spec
from fissile.bank.loop import Recipe

BATCH = 64
SMALL = (32, 8, 1)
#: The shapes of FashionMNIST and of features of CIFAR-100, each in as many networks.
REAL = [(784, 10, 10), (512, 8, 100), (512, 32, 100), (512, 128, 100)]


def make_data(sizes, steps, seed=0):
    """Random data of the task's shape; the arithmetic does not depend on the values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(BATCH * steps, sizes[0], generator=generator)
    y = torch.randint(0, max(2, sizes[-1]), (len(x),), generator=generator)
    return Data(x, y, x[:BATCH], y[:BATCH])


def fastest(runs, synchronize, turns):
    """Return the least time of each of several calls, in seconds, after one to warm up.

    They take turns, so that what else the machine does is no matter of who comes when.
    """
    for run in runs:
        run()
    times = [[] for _ in runs]
    for _ in range(turns):
        for run, taken in zip(runs, times, strict=True):
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            taken.append(time.perf_counter() - start)
    return [min(taken) for taken in times]


def loop(sizes, networks, data, device):
    """What a user would write: a DataLoader, a module, Adam. One network says it all."""
    del networks
    model = fissile.MLP(sizes).to(device)
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    dataset = torch.utils.data.TensorDataset(data.x, data.y)
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True)

    def run():
        for x, y in loader:
            loss = fissile.bank.loop.task_loss(model(x.to(device)), y.to(device))
            loss = loss + 1e-7 * model.layers[0].weight.abs().sum()
            loss = loss + 1e-5 * sum(p.square().sum() for p in model.parameters())
            adam.zero_grad()
            loss.backward()
            adam.step()

    return run, len(loader)


def vmap(sizes, networks, data, device):
    """torch.func: the gradient of one network, vmapped; Adam on the stacked tensors."""
    from torch.func import functional_call, grad, stack_module_state

    models = [fissile.MLP(sizes).to(device) for _ in range(networks)]
    parameters, _ = stack_module_state(models)
    skeleton = models[0]
    parameters = {k: v.detach() for k, v in parameters.items()}
    mean = {k: torch.zeros_like(v) for k, v in parameters.items()}
    square = {k: torch.zeros_like(v) for k, v in parameters.items()}

    def loss(weights, x, y):
        value = fissile.bank.loop.task_loss(functional_call(skeleton, weights, (x,)), y)
        value = value + 1e-7 * weights["layers.0.weight"].abs().sum()
        return value + 1e-5 * sum(p.square().sum() for p in weights.values())

    gradient = torch.func.vmap(grad(loss))
    x, y = data.x.to(device), data.y.to(device)
    steps = len(x) // BATCH

    def run():
        order = torch.rand(networks, len(x), device=device).argsort(1)
        for step in range(steps):
            rows = order[:, step * BATCH : (step + 1) * BATCH]
            found = gradient(parameters, x[rows], y[rows])
            for key, value in found.items():
                mean[key].lerp_(value, 0.1)
                square[key].mul_(0.999).addcmul_(value, value, value=0.001)
                parameters[key].sub_(1e-3 * mean[key] / (square[key].sqrt() + 1e-8))

    return run, steps * networks


def with_jax(sizes, networks, data, device, epochs=1):
    """JAX: vmap over networks, scan over the steps of an epoch, all in one jitted program."""
    import jax
    import jax.numpy as jnp

    del device
    inputs, hidden, outputs = sizes
    x, y = jnp.asarray(data.x.numpy()), jnp.asarray(data.y.numpy())
    steps = len(x) // BATCH

    def init(key):
        a, b = jax.random.split(key)
        return {
            "w1": jax.random.normal(a, (hidden, inputs)) / inputs**0.5,
            "b1": jnp.zeros(hidden),
            "w2": jax.random.normal(b, (outputs, hidden)) / hidden**0.5,
            "b2": jnp.zeros(outputs),
        }

    def loss(p, x, y):
        z = jax.nn.relu(x @ p["w1"].T + p["b1"]) @ p["w2"].T + p["b2"]
        if outputs == 1:
            task = jnp.mean(jax.nn.softplus(z[:, 0]) - y * z[:, 0])
        else:
            task = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1))
        return task + 1e-7 * jnp.abs(p["w1"]).sum() + 1e-5 * sum((v**2).sum() for v in p.values())

    def step(carry, rows):
        p, m, v, t = carry
        g = jax.grad(loss)(p, x[rows], y[rows])
        t = t + 1
        m = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, m, g)
        v = jax.tree.map(lambda a, b: 0.999 * a + 0.001 * b * b, v, g)
        p = jax.tree.map(
            lambda a, b, c: a - 1e-3 * b / (1 - 0.9**t) / (jnp.sqrt(c / (1 - 0.999**t)) + 1e-8),
            p, m, v,
        )  # fmt: skip
        return (p, m, v, t), None

    def epoch(carry, key):
        order = jax.random.permutation(key, len(x)).reshape(steps, BATCH)
        return jax.lax.scan(step, carry, order)[0]

    program = jax.jit(jax.vmap(epoch))
    p = jax.vmap(init)(jax.random.split(jax.random.key(0), networks))
    zeros = jax.tree.map(jnp.zeros_like, p)
    state = [(p, zeros, zeros, jnp.zeros(networks))]
    keys = jax.random.split(jax.random.key(1), networks)

    def run():
        for _ in range(epochs):
            state[0] = program(state[0], keys)
        jax.block_until_ready(state[0])

    return run, epochs * steps * networks


def bank(sizes, networks, data, device, epochs=1):
    specs = [Spec(sizes, data, seed=seed, recipe=Recipe(batch=BATCH)) for seed in range(networks)]
    subject = Bank(specs, device=device)
    until = [0]

    def run():
        until[0] += epochs
        subject.train(until=until[0])

    return run, epochs * (len(data.x) // BATCH) * networks


CONTENDERS = {"loop": loop, "vmap": vmap, "jax": with_jax, "bank": bank}


def contenders():
    try:
        import jax  # noqa: F401
    except ImportError:
        return [name for name in CONTENDERS if name != "jax"]
    return list(CONTENDERS)


def steps_for(networks, device):
    """Fewer steps for more networks, so that a run takes seconds; never fewer than eight."""
    if device == "cuda":
        return 157
    return max(8, min(157, 40_000 // networks))


def epochs_for(sizes, device):
    """Epochs in a call: many, as in the paper's recipe, and fewer where one takes long."""
    if device == "cuda":
        return 25
    return 10 if sizes == SMALL else 2


def memory_per_network(networks=20_000):
    """Resident memory that a trained bank adds to a process of its own, per network."""
    code = (
        f"import sys; sys.path[:0] = {[os.path.dirname(os.path.abspath(__file__)), *sys.path]!r};"
        "from bank import *; data = make_data((32, 8, 1), 4);"
        "make = lambda n: Bank([Spec((32, 8, 1), data, seed=s) for s in range(n)]);"
        "make(1).train(until=1); before = resident();"
        f"subject = make({networks}); subject.train(until=1); print(resident() - before)"
    )
    return int(subprocess.check_output([sys.executable, "-c", code])) / networks


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def floor(sizes, rate):
    """Microseconds that a step's arithmetic alone would take at the rate of a large product."""
    inputs, hidden, outputs = sizes
    operations = 2 * BATCH * (2 * inputs * hidden + 3 * hidden * outputs)
    return 1e6 * operations / rate


def product_rate(device, synchronize):
    """Operations per second of a large float32 matrix product on this device."""
    size = 8192 if device == "cuda" else 2048
    a, b = torch.randn(2, size, size, device=device)
    return 2 * size**3 / fastest([lambda: a @ b], synchronize, turns=10)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 10, 100, 500, 600, 2000, 10000])
    parser.add_argument("--real", type=int, nargs="*", default=[10, 60, 600])
    parser.add_argument("--turns", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--commit", default=None, help="recorded with the result")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    names = contenders()
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(options.device),
        "commit": options.commit or commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "us_per_model_and_step": {},
        "ratios": {},
    }
    rate = product_rate(options.device, synchronize)
    result["product_gflops"] = round(rate / 1e9)
    print(f"{result['machine']}; microseconds per model and step; floor: the arithmetic alone, at")
    print(f"the {rate / 1e9:,.0f} GFLOP/s of a large float32 product here")
    columns = [*names, "floor"]
    print(f"{'task':<18}{'networks':>9}" + "".join(f"{name:>12}" for name in columns))
    cases = [(SMALL, n) for n in options.sizes] + [(s, n) for s in REAL for n in options.real]
    once = {}
    for sizes, networks in cases:
        inputs, hidden, outputs = sizes
        task = f"h={hidden} d={inputs} C={outputs}"
        data = make_data(sizes, steps_for(networks, options.device))
        due = [name for name in names if (sizes, name) not in once]
        made = []
        for name in due:
            arguments = [sizes, networks, data, options.device]
            if name in ("bank", "jax"):  # a call trains many epochs, as the paper's recipe does
                arguments.append(epochs_for(sizes, options.device))
            made.append(CONTENDERS[name](*arguments))
        seconds = fastest([run for run, _ in made], synchronize, options.turns)
        row = {
            name: 1e6 * taken / steps
            for name, taken, (_, steps) in zip(due, seconds, made, strict=True)
        }
        if "loop" in due:  # the loop costs the same for every network
            once[sizes, "loop"] = row["loop"]
        row["loop"] = once[sizes, "loop"]
        row["floor"] = floor(sizes, rate)
        values = "".join(f"{row[name]:>12.4g}" for name in columns)
        print(f"{task:<18}{networks:>9,}" + values, flush=True)
        label = f"{task}, {networks}"
        result["us_per_model_and_step"][label] = {k: float(f"{v:.4g}") for k, v in row.items()}
        result["ratios"][label] = {
            f"{name}/bank": float(f"{row[name] / row['bank']:.4g}")
            for name in columns
            if name != "bank"
        }
    if options.device == "cpu":
        size = memory_per_network()
        result["bytes_per_network"] = round(size)
        result["networks_in_4_GiB"] = int(2**32 / size)
        print(f"memory: {size:,.0f} bytes per network, {int(2**32 / size):,} networks in 4 GiB")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of this run: {peak:.1f} GiB")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

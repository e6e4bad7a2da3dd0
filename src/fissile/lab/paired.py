"""The paired experiment on a user's own training code: dense against split, at equal steps.

Every trial has one warm-up. Its network then goes on in each arm, from the same weights, the same
state of the optimizer and the same random numbers: what differs is the split.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fissile._common.errors import FileError, FissileError, needs, whole
from fissile._common.files import atomic_write, read_bounded
from fissile._common.random import hash32
from fissile.discovery.meta_copy import random_numbers_apart, reseed
from fissile.expansion.budget import nonzeros
from fissile.expansion.expand import expand
from fissile.expansion.optimizer import check_optimizer
from fissile.io.safetensors import opened_file
from fissile.lab.paired_results import DENSE, Experiment
from fissile.layers import SparseLayer

#: From a trial's number, a network and its optimizer.
Make = Callable[[int], tuple[Any, Any]]
#: Alphas, or options of :func:`fissile.expand` by the names of arms.
Arms = Sequence[int] | Mapping[str, Mapping[str, Any]]

_VERSION = 1
_WARM = "warm-up"
_MOST = 2**20  # bytes of a JSON file
_MAKE = "return (model, optimizer), an nn.Module and its SGD, Adam or AdamW"
_Found = dict[str, Any]


def experiment(
    make: Make,
    fit: Callable[[Any, Any], object],
    score: Callable[[Any], Any],
    *,
    arms: Arms = (2, 4),
    trials: int = 5,
    warm_up: int = 5,
    fine_tune: int = 5,
    store: str | os.PathLike[str] | None = None,
    verbose: bool = False,
) -> Experiment:
    """Find out with your own training code whether splitting gains anything.

    >>> def make(seed):
    ...     model = fissile.MLP([32, 8, 1])
    ...     return model, torch.optim.Adam(model.parameters(), lr=1e-2)
    >>> def fit(model, adam):  # one round, such as an epoch
    ...     for x, y in batches:
    ...         adam.zero_grad()
    ...         loss(model(x), y).backward()
    ...         adam.step()
    >>> def score(model):
    ...     return ((model(x_test).squeeze(1) > 0) == y_test).float().mean()
    >>> print(fissile.experiment(make, fit, score, trials=3, store="my-experiment"))

    Random numbers of torch, numpy and Python start anew before ``make`` and before every round,
    alike in all arms: a loader that shuffles brings every arm the same batches. A round must keep
    nothing for the next one but the model and the optimizer.

    Args:
        make: from the number of a trial, returns a fresh model and its SGD, Adam or AdamW.
        fit: trains the model with the optimizer for one round, in place. The model comes in
            training mode.
        score: returns a number, higher is better, from samples that ``fit`` does not see. The
            model comes in evaluation mode, and no gradients are kept.
        arms: alphas, for the random split; or options of :func:`fissile.expand` by the names of
            arms, as ``{"gram-4": {"alpha": 4, "split": "gram"}}``. The dense arm comes by itself.
        trials: how many networks warm up; fewer than three show nothing.
        warm_up: rounds before the split.
        fine_tune: rounds after it, in every arm.
        store: a folder for every finished warm-up and arm. The same call goes on where it was
            stopped; with more trials or arms it does only what is missing.
        verbose: print a line for every finished arm.
    """
    needs("scipy", "lab")
    needs("safetensors", "files")
    wanted = _checked(arms)
    for name, value in (("trials", trials), ("warm_up", warm_up), ("fine_tune", fine_tune)):
        whole(name, value, least=1)
    with ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory()) if store is None else store
        stack.enter_context(random_numbers_apart())
        kept = "" if store is None else f"What was finished is in {path}; the same call goes on."
        run = _Run(make, fit, score, (warm_up, fine_tune), _Folder(Path(path), kept), verbose)
        run.folder.claim(run.about())
        found = []
        for number in range(trials):
            found.append(run.trial(number, wanted))
            if store is None:
                run.folder.warm(number).unlink()
    warm = tuple(tuple(one[_WARM]["scores"]) for one in found)
    scores = {arm: tuple(tuple(one[arm]["scores"]) for one in found) for arm in wanted}
    counts = {arm: tuple(one[arm]["nonzeros"] for one in found) for arm in wanted}
    return Experiment(warm, scores, counts)


def _checked(arms: Arms) -> dict[str, dict[str, Any]]:
    """Return the options of every arm; the first is the dense one's, which has none."""
    given: Mapping[str, Any] = {}
    if isinstance(arms, Mapping):
        given = arms
    elif isinstance(arms, Sequence) and not isinstance(arms, str):
        given = {f"random-{alpha}": {"alpha": alpha} for alpha in arms}
    if not given or not all(isinstance(one, Mapping) and "alpha" in one for one in given.values()):
        raise FissileError(
            f"arms={arms!r} are no arms; give alphas, as (2, 4), or options of fissile.expand by "
            'name, as {"gram-4": {"alpha": 4, "split": "gram"}}'
        )
    for name, options in given.items():
        if name in (DENSE, _WARM) or {*options} & {"seed", "optimizer", "inplace"}:
            raise FissileError(
                f"the arm {name!r} sets what the experiment sets: the names {DENSE!r} and "
                f"{_WARM!r}, seed, optimizer and inplace; leave that out"
            )
        if whole("alpha", options["alpha"], least=1) == 1:
            raise FissileError(
                f"the arm {name!r} has alpha=1, which splits nothing; give 2 or more (the dense "
                "arm comes by itself)"
            )
    return {DENSE: dict[str, Any](), **{name: dict(options) for name, options in given.items()}}


@dataclass
class _Run:
    """The user's code, how often it is called, and where results are kept."""

    make: Make
    fit: Callable[[Any, Any], object]
    score: Callable[[Any], Any]
    rounds: tuple[int, int]
    folder: _Folder
    verbose: bool

    def about(self) -> _Found:
        """Return what tells this experiment from others: its rounds and its first network."""
        tensors, notes = _packed(*self._made(0))
        digest = hashlib.sha256(notes.encode())
        for name in sorted(tensors):
            tensor = tensors[name]
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"version": _VERSION, "rounds": [*self.rounds], "network": digest.hexdigest()}

    def trial(self, number: int, arms: Mapping[str, dict[str, Any]]) -> _Found:
        """Return what came of a trial's warm-up and arms; what is stored is not done again."""
        found = {_WARM: self.folder.result(number, _WARM, {})}
        if found[_WARM] is None or not self.folder.warm(number).exists():
            found[_WARM] = self._warmed(number)
        for arm, options in arms.items():
            kept = self.folder.result(number, arm, options)
            found[arm] = one = kept or self._trained(number, arm, options)
            if one["steps"] != found[DENSE]["steps"]:  # type: ignore[index]
                raise FissileError(
                    f"fit made {one['steps']} steps in the arm {arm!r} of trial {number}, and "
                    f"{found[DENSE]['steps']} in {DENSE!r}; let it train all arms equally long"  # type: ignore[index]
                )
        return found

    def _warmed(self, number: int) -> _Found:
        model, optimizer = self._made(number)
        at = f"the warm-up of trial {number}"
        scores, steps = [], 0
        for index in range(self.rounds[0]):
            steps += self._round(model, optimizer, number, index, at)
            scores.append(self._scored(model, at))
        self.folder.keep_warm(number, *_packed(model, optimizer))
        return self._kept(number, _WARM, {}, scores, steps, model)

    def _trained(self, number: int, arm: str, options: dict[str, Any]) -> _Found:
        model, optimizer = self._made(number)
        self.folder.restore(number, model, optimizer)
        budget = options.get("budget", "weights")
        before = nonzeros(model).under(budget)
        if options:
            # A copy: a config that all networks of `make` share must not widen with this one.
            model = expand(model, seed=number, optimizer=optimizer, **options)
        at = f"the arm {arm!r} of trial {number}"
        if (now := nonzeros(model).under(budget)) != before:
            raise FissileError(f"{at} has {now} non-zeros after the split, and had {before}")
        existing = _existing(model)
        scores, steps = [self._scored(model, at)], 0
        for index in range(self.rounds[1]):
            steps += self._round(model, optimizer, number, self.rounds[0] + index, at)
            scores.append(self._scored(model, at))
        if _existing(model) != existing:
            raise FissileError(f"fit changed the number of weights that exist in {at}")
        return self._kept(number, arm, options, scores, steps, model)

    def _kept(
        self, number: int, arm: str, options: dict[str, Any], scores: list[float], steps: int,
        model: nn.Module,
    ) -> _Found:  # fmt: skip
        found = {"scores": scores, "steps": steps, "nonzeros": nonzeros(model).weights}
        self.folder.keep(number, arm, options, found)
        if self.verbose:
            print(f"trial {number}, {arm}: score {scores[-1]:.4g}")
        return found

    def _made(self, number: int) -> tuple[nn.Module, Optimizer]:
        reseed(int(hash32(number, 0)))
        made: Any = self.make(number)
        pair = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        model, optimizer = pair
        if not isinstance(model, nn.Module) or optimizer is None:
            kinds = [type(one).__name__ for one in (made if isinstance(made, tuple) else (made,))]
            raise FissileError(f"make returned {' and '.join(kinds) or 'nothing'}; let it {_MAKE}")
        return model, check_optimizer(optimizer, model)

    def _round(
        self, model: nn.Module, optimizer: Optimizer, number: int, index: int, at: str
    ) -> int:
        """Let the user's code train for a round; return how many steps that was."""
        before, steps = dict(model.named_parameters()), [0]

        def count(*_: object) -> None:
            steps[0] += 1

        counted = optimizer.register_step_post_hook(count)
        reseed(int(hash32(number, index + 1)))
        try:
            self.fit(model.train(), optimizer)
        except BaseException as error:
            error.add_note(f"This was in {at}. {self.folder.kept}")
            raise
        finally:
            counted.remove()
        after = dict(model.named_parameters())
        for name in before | after:
            if before.get(name) is not after.get(name):
                raise FissileError(
                    f"fit changed the architecture in {at}: the parameter {name!r} is not the one "
                    "that it was given; let fit change values in place"
                )
        if not steps[0]:
            raise FissileError(
                f"fit made no step with its optimizer in {at}; let it train with the one it is "
                "given, whose state goes across the split"
            )
        return steps[0]

    def _scored(self, model: nn.Module, at: str) -> float:
        with torch.no_grad():
            found = self.score(model.eval())
        try:
            value = math.nan if isinstance(found, str) else float(found)
        except (TypeError, ValueError, RuntimeError):
            value = math.nan
        if not math.isfinite(value):
            shown = repr(found)[:80]
            raise FissileError(f"score returned {shown} in {at}; let it return one finite number")
        return value


def _existing(model: nn.Module) -> int:
    return sum(one.nonzeros() for one in model.modules() if isinstance(one, SparseLayer))


# --- what is kept


def _packed(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a model and its optimizer, and the rest of its state as text."""
    state = optimizer.state_dict()
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    rest: dict[str, dict[str, Any]] = {}
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
            else:
                rest.setdefault(str(index), {})[name] = value
    notes = json.dumps({"groups": state["param_groups"], "rest": rest}, default=float)
    if odd := [name for name, value in tensors.items() if not isinstance(value, Tensor)]:
        raise FissileError(f"the model's state_dict has {odd[0]!r}, which is no tensor")
    # Cloned: no two may lie in the same memory, as tied weights do.
    return {
        name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()
    }, notes


class _Folder:
    """The files of an experiment: one for each finished warm-up and arm, written whole or not."""

    def __init__(self, path: Path, kept: str) -> None:
        self.path, self.kept = path, kept

    def claim(self, about: _Found) -> None:
        """Refuse a folder of another experiment."""
        file = self.path / "experiment.json"
        if file.exists() and (held := _read(file)) != about:
            other = "its rounds" if held.get("rounds") != about["rounds"] else "what make returns"
            raise FissileError(
                f"{self.path} holds another experiment: {other} differs; give another folder, or "
                "let make depend on its seed alone"
            )
        self._write(file, about)

    def result(self, number: int, arm: str, options: dict[str, Any]) -> _Found | None:
        """Return what came of an arm, or None."""
        file = self._file(number, arm)
        if not file.exists():
            return None
        held = _read(file)
        if held.get("options") != _told(options):
            raise FissileError(
                f"{file} has an arm {arm!r} of other options; name this one otherwise"
            )
        numbers = held.get("scores"), [held.get("steps"), held.get("nonzeros")]
        if not all(
            isinstance(n, list) and all(type(v) in (int, float) for v in n) for n in numbers
        ):
            raise FileError(f"{file} is damaged; delete it, and it is made again")
        return held

    def keep(self, number: int, arm: str, options: dict[str, Any], found: _Found) -> None:
        self._write(self._file(number, arm), {"options": _told(options), **found})

    def warm(self, number: int) -> Path:
        """Return where the state after a warm-up lies."""
        return self._file(number, _WARM).with_suffix(".safetensors")

    def keep_warm(self, number: int, tensors: dict[str, Tensor], notes: str) -> None:
        from safetensors.torch import save_file

        self.warm(number).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.warm(number)) as file:
            save_file(tensors, file.name, {"notes": notes})

    def restore(self, number: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Give a fresh model and optimizer the state after a warm-up."""
        with opened_file(self.warm(number)) as file:
            notes = json.loads(file.metadata()["notes"])
            held = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        mine = {name[6:]: value for name, value in held.items() if name.startswith("model.")}
        sizes = {name: value.shape for name, value in model.state_dict().items()}
        if sizes != {name: value.shape for name, value in mine.items()}:
            raise FissileError(f"make({number}) does not always return the same architecture")
        model.load_state_dict(mine)
        state: dict[int, dict[str, Any]] = {int(k): v for k, v in notes["rest"].items()}
        for name, value in held.items():
            kind, _, key = name.partition(".")
            if kind == "optimizer":
                index, _, moment = key.partition(".")
                state.setdefault(int(index), {})[moment] = value
        # JSON has lists for tuples, such as Adam's betas.
        groups = [
            {
                key: tuple(v) if isinstance(v, list) and key != "params" else v
                for key, v in g.items()
            }
            for g in notes["groups"]
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _file(self, number: int, arm: str) -> Path:
        return self.path / f"trial-{number}" / f"{quote(arm, safe=' ')}.json"

    def _write(self, file: Path, found: _Found) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"cannot make {file.parent}: {error.strerror}") from None
        with atomic_write(file, "w") as open_file:
            json.dump(found, open_file)


def _read(file: Path) -> _Found:
    try:
        found = json.loads(read_bounded(file, _MOST))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise FileError(f"{file} is damaged; delete it, and it is made again")
    return found


def _told(options: Mapping[str, Any]) -> _Found:
    """Return options as JSON has them; a split or another object as its class and its fields."""
    text = json.dumps(options, default=lambda one: [type(one).__qualname__, repr(vars(one))])
    found: _Found = json.loads(text)
    return found

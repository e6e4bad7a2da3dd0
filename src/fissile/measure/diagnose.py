"""Diagnosing a model: how the neurons of every place share the features of real data.

A feature is a direction in what a layer reads. Seen by the layer, it is a vector of one number for
each neuron: the weights times the direction. Where such vectors overlap, features interfere.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fissile._common.errors import FissileError, needs, whole
from fissile._common.progress import aligned, number_of
from fissile._common.shapes import Bool, Float, Int
from fissile.measure import interference
from fissile.measure.passing import Seen, passed
from fissile.measure.weights import rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Of the capacity a feature can reach: above the first there is little interference, below the
#: second much.
LITTLE, MUCH = 0.8, 0.4
_SHARE = 0.5  # of a feature's samples on which an edge must carry it, as in `collisions`
_ALIKE = 0.99  # cosine of two neurons that are called duplicates
_STILL = 1e-6  # of the liveliest neuron's range, or of a neuron's own size
_EDGES = 2**22  # that are looked at in all draws of the bootstrap: else those of some neurons
_COLUMNS = (
    "place",
    "features",
    "neurons",
    "capacity",
    "|cosine|",
    "collisions",
    "dead",
    "duplicate",
)


@dataclass(frozen=True)
class PlaceDiagnosis:
    """What was found at one place; errors are NaN where nothing was estimated from samples.

    >>> row = fissile.diagnose(model, (x, y))[0]
    >>> row.place, row.neurons, row.features
    ('layers.0', 8, 1)

    ``capacity`` has a number for each feature, ``total`` is their sum, which is at most ``most``.
    ``load`` is features per neuron; ``rank`` is the effective rank (the exponential of the entropy
    of the singular values) of the features as the neurons see them, ``demand`` that of the features
    themselves. ``dead`` neurons say the same for every sample; ``duplicates`` have the weights and
    bias of an earlier neuron but for their length. ``vectors`` are the features, a column each.
    """

    place: str
    kind: str
    inputs: int
    neurons: int
    capacity: tuple[float, ...]
    total: float
    total_error: float
    most: int
    cosine: float
    collisions: float
    collisions_error: float
    dead: tuple[int, ...]
    duplicates: tuple[int, ...]
    rank: float
    demand: float
    vectors: Float[Tensor, "neurons features"] = field(repr=False, compare=False)

    @property
    def features(self) -> int:
        """Count the features."""
        return len(self.capacity)

    @property
    def load(self) -> float:
        """Return the features per neuron."""
        return self.features / self.neurons

    @property
    def sentence(self) -> str:
        """Return in words what the numbers mean."""
        own, count = self.total / self.features, self.features
        given = math.isnan(self.total_error)  # directions, which no sample decides
        if len(self.dead) == self.neurons and not (given and own):
            return "Every neuron says the same for all samples: there is nothing to measure."
        if count == 1:
            text = "One feature cannot interfere; two classes differ in one direction."
        else:
            # Class means around their common mean span a dimension less than there are classes.
            reached = self.total / (count if math.isnan(self.total_error) else count - 1)
            much = "much" if reached < MUCH else "little" if reached > LITTLE else "some"
            text = (
                f"{count} features share {number_of(self.neurons, 'neuron')}, and each has "
                f"{own:.0%} of a dimension to itself: {much} interference."
            )
        idle = [f"{len(self.dead)} dead"] * bool(self.dead)
        idle += [f"{len(self.duplicates)} alike another"] * bool(self.duplicates)
        return f"{text} Neurons wasted: {', '.join(idle)}." if idle else text

    def to_dict(self) -> dict[str, Any]:
        """Return all but the vectors as plain values; None stands for what is not known."""
        found: dict[str, Any] = {k: v for k, v in vars(self).items() if k != "vectors"}
        found = {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}
        found |= {"features": self.features, "load": self.load, "sentence": self.sentence}
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in found.items()}


@dataclass(frozen=True)
class Diagnosis:
    """The places of a model with what was found there, in the order in which data flows.

    >>> print(fissile.diagnose(model, (x, y)))
    """

    rows: tuple[PlaceDiagnosis, ...]
    what: str
    samples: int
    left_out: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Count the places."""
        return len(self.rows)

    def __iter__(self) -> Iterator[PlaceDiagnosis]:
        """Go through the places."""
        return iter(self.rows)

    def __getitem__(self, place: int) -> PlaceDiagnosis:
        """Return a place by its number."""
        return self.rows[place]

    def __repr__(self) -> str:
        """Show the counts; printed, it is the whole table."""
        return f"Diagnosis(places: {len(self)}, features: {self.what})"

    def __str__(self) -> str:
        """Show the table, then a sentence for each place."""
        lines = aligned([_COLUMNS, *map(_cells, self.rows)], right=range(1, len(_COLUMNS)))
        lines += ["", *(f"{row.place}: {row.sentence}" for row in self.rows)]
        return "\n".join([*lines, self.note])

    def _repr_html_(self) -> str:
        cells: list[tuple[str, tuple[str, ...]]] = [("th", (*_COLUMNS, "in words"))]
        cells += [("td", (*_cells(row), row.sentence)) for row in self.rows]
        rows = (
            "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) for tag, texts in cells
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table>{body}</table><p>{html.escape(self.note)}</p>"

    @property
    def note(self) -> str:
        """Return what the features are, what was left out, and what the numbers do not tell."""
        told = f"Features: {self.what}; {number_of(self.samples, 'sample')}."
        if self.left_out:
            told += f" Not measured: {', '.join(self.left_out)}."
        return (
            f"{told} This does not foretell the gain from a split; fissile.experiment measures it."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        rows = [row.to_dict() for row in self.rows]
        return {"features": self.what, "samples": self.samples, "rows": rows}

    def plot(self) -> Figure:
        """Draw, for every place, the capacity of each feature and the cosines between features.

        >>> fissile.diagnose(model, (x, y)).plot().savefig("diagnosis.png")
        """
        needs("matplotlib", "lab")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 2.6 * len(self)), layout="constrained")
        for row, (left, right) in zip(
            self.rows, figure.subplots(len(self), 2, squeeze=False), strict=True
        ):
            left.bar(range(row.features), sorted(row.capacity), width=1.0)
            left.set(ylim=(0, 1), xlabel="features, sorted", ylabel="capacity", title=row.place)
            unit = nn.functional.normalize(row.vectors, dim=0)
            image = right.imshow((unit.mT @ unit).numpy(), vmin=-1, vmax=1, cmap="RdBu_r")
            right.set(title="cosines between features")
            figure.colorbar(image, ax=right)
        return figure


def diagnose(
    model: nn.Module,
    data: Any,
    *,
    features: Any = None,
    groups: Any = None,
    example_inputs: Any = None,
    draws: int = 50,
    samples: int = 10_000,
) -> Diagnosis:
    """Measure how the neurons of every place of a model share the features of some data.

    >>> fissile.diagnose(model, (x, y)).rows[0].total <= 8
    True
    >>> found = fissile.diagnose(model, x, groups=torch.arange(32) // 4)

    The model is left as it is. Places are those of :func:`fissile.discover`, and layers that
    :func:`fissile.expand` has made. Positions of a sequence or an image are averaged. Measures are
    those of :mod:`fissile.measure`; of collisions, a sample shows the feature that it points along
    most (its class; with groups, those that are on), and an input is on above its mean (with
    groups, in the upper half of its range).

    Args:
        model: any module, dense or expanded.
        data: what the model reads, with labels: ``(x, y)``, a Dataset, a DataLoader or other
            batches, ``(inputs, labels)`` or a dict with ``"labels"``. With ``features`` or
            ``groups`` it needs no labels.
        features: directions, a row for each, instead of the means of the classes around their
            common mean (of two classes, one direction): a dictionary, the decoder rows of a sparse
            autoencoder, concept vectors; for several layers a dict by the names of places.
        groups: instead, the number of the group of each input, as the paper's clauses.
        example_inputs: as in :func:`fissile.discover`.
        draws: samples of the bootstrap that errors come from.
        samples: no more samples than this are looked at.
    """
    if not isinstance(model, nn.Module):
        raise FissileError(f"a model is an nn.Module, not a {type(model).__name__}")
    if features is not None and groups is not None:
        raise FissileError("features= and groups= both say what a feature is; give one of them")
    whole("draws", draws, least=2)
    most = whole("samples", samples, least=1)
    labelled = features is None and groups is None
    seen, labels = passed(model, data, example_inputs, most, labelled=labelled)
    if labelled:
        names, labels = labels.unique(return_inverse=True)
        if len(names) < 2:
            raise FissileError(f"all samples are of one class, {int(names[0])}; give two or more")
        what = f"means of {len(names)} classes"
        ways: dict[str, _Features] = {s.place.name: _class_means(s, labels) for s in seen}
    else:
        what = "given directions" if groups is None else "groups of inputs"
        made = _directions(seen, features) if groups is None else _groups(seen, groups)
        ways = made
    rows = [
        _diagnosed(model, one, ways[one.place.name], draws)
        for one in seen
        if one.place.name in ways
    ]
    left = tuple(one.place.name for one in seen if one.place.name not in ways)
    return Diagnosis(tuple(rows), what, len(labels), left)


# --- what a feature is


@dataclass(frozen=True)
class _Features:
    """Directions in what a place reads, which inputs are on, and which sample shows which."""

    directions: Float[Tensor, "features inputs"]
    on: Bool[Tensor, "samples inputs"]
    shows: Bool[Tensor, "samples features"]
    labels: Int[Tensor, " samples"] | None = None
    groups: Int[Tensor, " inputs"] | None = None

    def vectors(self, weight: Tensor) -> Tensor:
        """Return the features as neurons with these weights see them."""
        if self.groups is not None:
            return interference.features(weight, self.groups.to(weight.device))
        return weight @ self.directions.to(weight).mT


def _centred(
    means: Float[Tensor, "*batch classes width"],
) -> Float[Tensor, "*batch features width"]:
    """Return the means around their common mean; of two classes, the difference."""
    around = means - means.mean(-2, keepdim=True)
    return around[..., 1:, :] if means.shape[-2] == 2 else around


def _class_means(seen: Seen, labels: Tensor) -> _Features:
    classes = int(labels.max()) + 1
    belongs = nn.functional.one_hot(labels, classes)
    means = belongs.to(seen.x).mT @ seen.x / belongs.sum(0).unsqueeze(-1)
    on = seen.x > seen.x.mean(0)
    return _Features(_centred(means), on, belongs.bool(), labels)


def _directions(seen: list[Seen], features: Any) -> dict[str, _Features]:
    found: dict[str, _Features] = {}
    named = features if isinstance(features, Mapping) else {s.place.name: features for s in seen}
    places = {one.place.name: one for one in seen}
    for name, value in named.items():
        if name not in places:
            raise FissileError(f"features name {name!r}, and places are {', '.join(places)}")
        x = places[name].x
        rows = torch.as_tensor(value).detach().cpu()
        if rows.ndim != 2 or not rows.is_floating_point():
            raise FissileError(
                f"features are {rows.dtype} of shape {list(rows.shape)}; give floating point "
                "numbers, a row for each direction"
            )
        if not torch.isfinite(rows).all() or not rows.any(-1).all():
            raise FissileError("features hold NaN, infinity or a direction of zeros; take them out")
        if rows.shape[1] == x.shape[1]:
            along = (x - x.mean(0)) @ nn.functional.normalize(rows.to(x), dim=-1).mT
            shows = nn.functional.one_hot(along.argmax(-1), len(rows)).bool()
            found[name] = _Features(rows.to(x), x > x.mean(0), shows)
        elif features is named:
            raise FissileError(_misfit(f"features[{name!r}] have {rows.shape[1]}", [places[name]]))
    if not found:
        raise FissileError(_misfit(f"features have {rows.shape[1]}", seen))
    return found


def _groups(seen: list[Seen], groups: Any) -> dict[str, _Features]:
    ids = torch.as_tensor(groups).cpu()
    fits = [one for one in seen if ids.shape == (one.x.shape[1],)]
    if not fits:
        raise FissileError(_misfit(f"groups are of {ids.numel()}", seen))
    found = {}
    for place, x, _ in fits:
        on = x > (x.amin(0) + x.amax(0)) / 2
        members = interference.membership(ids, x)
        shows = (~on).to(x) @ members.to(x) == 0
        found[place.name] = _Features(members.mT.to(x), on, shows, groups=ids)
    return found


def _misfit(what: str, seen: list[Seen]) -> str:
    read = ", ".join(f"{one.place.name!r} reads {one.x.shape[1]}" for one in seen)
    return f"{what} inputs, and {read}; give directions in what the layer reads"


# --- measuring


def _diagnosed(model: nn.Module, seen: Seen, ways: _Features, draws: int) -> PlaceDiagnosis:
    place = seen.place
    weight, bias = rows_of(model, place)
    if not place.neurons:
        raise FissileError(f"{place.name!r} has no neurons, so there is nothing to measure")
    parts = len(weight) // place.neurons
    every, bias = (one.cpu() if one.itemsize > 2 else one.cpu().float() for one in (weight, bias))
    # The mean over positions meets every weight of a kernel.
    weight = every.unflatten(-1, (place.inputs, -1)).sum(-1) if place.kind == "conv" else every
    vectors = ways.vectors(weight)
    capacity = interference.capacity(vectors)
    once = torch.ones(1, len(seen.x))
    active = (seen.said > 0).repeat(1, parts)
    again = _drawn(ways, draws)
    some = slice(0, max(1, _EDGES // (weight.shape[1] * draws)))
    rates = _collisions(weight[some], active[:, some], ways, again)
    error = math.nan
    if ways.labels is not None:
        read = seen.x.to(weight) @ weight.mT
        totals = [interference.total_capacity(_means(read, ways.labels, t).mT) for t in again]
        error = float(torch.stack(totals).std())
    neurons = torch.cat([every, bias.unsqueeze(-1)], -1).unflatten(0, (parts, -1))
    reach = seen.said.amax(0) - seen.said.amin(0)
    dead = reach <= _STILL * seen.said.abs().amax(0).maximum(reach.max())
    return PlaceDiagnosis(
        place=place.name,
        kind=place.kind,
        inputs=place.inputs,
        neurons=place.neurons,
        capacity=tuple(capacity.tolist()),
        total=float(capacity.sum()),
        total_error=error,
        most=min(*weight.shape, len(capacity) - (ways.labels is not None and len(capacity) > 1)),
        cosine=float(interference.cosine(every, absolute=True)),
        collisions=float(_collisions(weight, active, ways, once)),
        collisions_error=float(rates.std()),
        dead=tuple(dead.nonzero().flatten().tolist()),
        duplicates=_duplicates(neurons.transpose(0, 1).flatten(1), dead),
        rank=effective_rank(vectors),
        demand=effective_rank(ways.directions),
        vectors=vectors,
    )


def _drawn(ways: _Features, draws: int) -> Float[Tensor, "draws samples"]:
    """Draw samples anew, within each class where there are classes; return how often each comes."""
    kinds = torch.zeros(len(ways.shows)).long() if ways.labels is None else ways.labels
    order, sizes = kinds.argsort(stable=True), kinds.bincount()
    start = (sizes.cumsum(0) - sizes)[kinds[order]]
    draw = torch.Generator().manual_seed(0)
    times = []
    for _ in range(draws):
        pick = start + (torch.rand(len(order), generator=draw) * sizes[kinds[order]]).long()
        times.append(order[pick].bincount(minlength=len(order)).float())
    return torch.stack(times)


def _means(read: Tensor, labels: Tensor, times: Tensor) -> Tensor:
    """Return the features of samples that count so many times, as the neurons see them."""
    sizes = labels.bincount().to(read)
    sums = torch.zeros(len(sizes), read.shape[1], dtype=read.dtype)
    sums.index_add_(0, labels, read * times.to(read).unsqueeze(-1))
    return _centred(sums / sizes.unsqueeze(-1))


def _collisions(
    weight: Tensor, active: Tensor, ways: _Features, times: Float[Tensor, "draws samples"]
) -> Float[Tensor, " draws"]:
    """Return the edge collision rate, as `measure.collisions`, of samples that count so often."""
    single = ways.shows.sum(-1) == 1
    users = torch.zeros(len(times), *weight.shape, dtype=torch.int32)
    for shown in ways.shows.mT:
        rows = (shown & single).nonzero().flatten()
        literals, count = ways.on[rows].to(weight), times[:, rows].to(weight)
        fired = count.unsqueeze(-1) * active[rows].to(weight)  # (draws, samples, neurons)
        share = fired.mT @ literals / (count @ literals).clamp(min=1).unsqueeze(1)
        users += share * (weight > 0) > _SHARE
    used, shared = ((users >= least).sum((-2, -1)) for least in (1, 2))
    return shared.to(weight.dtype) / used.clamp(min=1)


def _duplicates(neurons: Float[Tensor, "neurons numbers"], dead: Tensor) -> tuple[int, ...]:
    unit = nn.functional.normalize(neurons.double(), dim=-1)
    found = []
    for start in range(0, len(unit), 1024):  # all cosines at once would take much memory
        alike = unit[start : start + 1024] @ unit.mT > _ALIKE
        earlier = alike.tril(start - 1) & ~dead
        found.append(earlier.any(-1))
    return tuple((torch.cat(found) & ~dead).nonzero().flatten().tolist())


def effective_rank(matrix: Tensor) -> float:
    """Return the exponential of the entropy of the singular values (Roy and Vetterli, 2007)."""
    sizes = torch.linalg.svdvals(matrix.double())
    share = sizes / sizes.sum().clamp(min=1e-300)
    return float(torch.exp(torch.special.entr(share).sum()))


def _cells(row: PlaceDiagnosis) -> tuple[str, ...]:
    texts = (
        f"{row.total:.3g}{_error(row.total_error)} of {row.most}",
        f"{row.cosine:.3f}",
        f"{row.collisions:.2f}{_error(row.collisions_error)}",
    )
    counts = map(str, (row.features, row.neurons))
    return row.place, *counts, *texts, str(len(row.dead)), str(len(row.duplicates))


def _error(value: float) -> str:
    return "" if math.isnan(value) else f" ± {value:.2g}"

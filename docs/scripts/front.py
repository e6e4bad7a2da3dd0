"""Write what the README says in numbers: claims, gains, speed; and its picture of the claims.

    python docs/scripts/front.py && python docs/scripts/include.py

Everything comes from results/ and benchmarks/results/; the same results give the same bytes.
"""

import csv
import json
from collections import Counter
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS, RESULTS = ROOT / "docs" / "parts", ROOT / "results"
BENCHMARKS = ROOT / "benchmarks" / "results"
#: What became of a claim: its word, its class in the picture and its sign, in the picture's order.
VERDICTS = {
    "holds": ("hold", "yes", "✓"),
    "not significant": ("are not significant", "open", "○"),
    "fails": ("came out differently", "no", "✗"),
    "no data": ("have no data yet", "none", "–"),
    "not tested here": ("are not tested here", "none", "–"),
}
#: The machines of the speed table, and the networks of the task whose times it shows.
MACHINES = {"bank-epyc-2-cores": (1, 500, 10_000), "bank-h200": (100, 2_000, 10_000)}
SPEEDS = "2026-11-15"
TASK = "h=8 d=32 C=1"
#: Where the README says what a split is worth: study, its widths, what it is called.
GAINS = {
    "fashionmnist": ((3, 10), "FashionMNIST"),
    "cifar100": ((4, 128), "CIFAR-100 features (EfficientNet-Lite2, not CLIP)"),
    "clinc150": ((4, 8), "CLINC150 sentence embeddings"),
}


def rows(name):
    """Return the rows of a table in results/."""
    with open(RESULTS / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def markdown(head, body):
    """Return a table."""
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def counted(claims):
    """Return how many claims came to what, as one half of a sentence."""
    found = Counter(claim["verdict"] for claim in claims)
    parts = [f"{found[key]} {words}" for key, (words, *_) in VERDICTS.items() if found[key]]
    return ", ".join(parts)


def claims():
    """Return the claims in one line."""
    every = rows("claims.csv")
    own = [claim for claim in every if claim["claim"].startswith("Ours: ")]
    paper = [claim for claim in every if claim not in own]
    kinds = Counter(claim["kind"] for claim in rows("multiverse-claims.csv"))
    return (
        f"Of {len(paper)} claims of the paper, {counted(paper)}. We added "
        f"{len(own)} of our own: {counted(own)}. "
        f"Under other readings of what the paper leaves open, {kinds['robust']} of "
        f"{kinds.total()} claims are robust.\n"
    )


def gains():
    """Return what a split at random is worth in the narrowest and in a wide network."""
    body = []
    for study, (widths, title) in GAINS.items():
        ours = {(row["place"], row["arm"]): row for row in rows(f"tables/{study}.csv")}
        for width in widths:
            dense, wide = (ours[str(width), arm] for arm in ("dense", "random-4"))
            cells = [
                f"{float(row['ours']):.1f} ± {float(row['ours_error']):.1f}"
                for row in (dense, wide)
            ]
            gain = float(wide["ours"]) - float(dense["ours"])
            body.append([title, width, *cells, f"{gain:+.1f}"])
    return markdown(["data", "hidden neurons", "dense %", "split (alpha 4) %", "gain"], body)


def speeds():
    """Return the table of speeds."""
    body = []
    for machine, counts in MACHINES.items():
        text = (BENCHMARKS / f"{SPEEDS}-{machine}.txt").read_text("utf-8")
        result = json.loads(text.splitlines()[-1])
        for count in counts:
            found = result["us_per_model_and_step"][f"{TASK}, {count}"]
            cells = [rounded(found[name]) for name in ("loop", "vmap", "jax", "bank")]
            cells[-1] = f"**{cells[-1]}**"
            body.append([result["machine"], f"{count:,}", *cells])
    head = ["machine", "networks", "PyTorch loop", "`torch.func.vmap`", "JAX, vmap + scan", "bank"]
    return markdown(head, body)


def rounded(number):
    """Return three digits of a number, as a person writes them."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


# --- the picture


STYLE = (
    "text{font-family:system-ui,sans-serif;fill:#1f2933;font-size:13px}.b{fill:#fff}"
    ".s{font-size:12px;text-anchor:middle;fill:#fff}.yes{fill:#0072b2}.open{fill:#d9dee3}"
    ".no{fill:#c04e00}.none{fill:#fff;stroke:#8a97a3}.d{fill:#1f2933}.r{stroke:#1f2933;stroke-width:2.5}"
    "@media (prefers-color-scheme:dark){text{fill:#e4e9ee}.b{fill:#16202a}.none{fill:#16202a}"
    ".r{stroke:#fff}.s.d{fill:#1f2933}.s.n{fill:#e4e9ee}}.n{fill:#1f2933}"
)
SIDE, LEFT, TOP, WIDTH = 22, 140, 66, 860


def picture():
    """Return the claims as SVG: a square each, a line for each study, framed where robust."""
    kinds = {(row["study"], row["claim"]): row["kind"] for row in rows("multiverse-claims.csv")}
    studies = {}
    for claim in rows("claims.csv"):
        studies.setdefault(claim["study"], []).append(claim)
    column = -(-len(studies) // 2)
    parts, counts = [], Counter(claim["verdict"] for claim in rows("claims.csv"))
    for number, (study, found) in enumerate(studies.items()):
        x, y = (number // column) * WIDTH // 2, TOP + (number % column) * (SIDE + 6)
        parts.append(
            f'<text x="{x + LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(study)}</text>'
        )
        for place, claim in enumerate(
            sorted(found, key=lambda one: list(VERDICTS).index(one["verdict"]))
        ):
            kind = kinds.get((study, claim["claim"]))
            parts.append(square(x + LEFT + place * SIDE, y, claim, kind))
    legend, x = [], 20
    for key, (_, look, sign) in VERDICTS.items():
        if counts[key]:
            legend.append(box(x, 18, look, sign, False))
            legend.append(f'<text x="{x + SIDE + 6}" y="34">{key}: {counts[key]}</text>')
            x += 56 + 8 * len(f"{key}: {counts[key]}")
    legend.append(box(x, 18, "open", "", True))
    legend.append(f'<text x="{x + SIDE + 6}" y="34">framed: robust or refuted</text>')
    height = TOP + column * (SIDE + 6) + 10
    told = f"{len(studies)} studies with {counts.total()} claims: " + ", ".join(
        f"{counts[key]} {key}" for key in VERDICTS if counts[key]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="t d">\n<title id="t">What became of every claim</title>\n'
        f'<desc id="d">{told}.</desc>\n<style>{STYLE}</style>\n'
        f'<rect class="b" width="{WIDTH}" height="{height}" rx="10"/>\n'
        + "\n".join([*legend, *parts])
        + "\n</svg>\n"
    )


def square(x, y, claim, kind):
    """Return a claim's square; a pointer on it shows the sentence."""
    _, look, sign = VERDICTS[claim["verdict"]]
    told = escape(f"{claim['claim']} {claim['verdict']}: {claim['numbers']}")
    return f"<g><title>{told}</title>{box(x, y, look, sign, kind in ('robust', 'refuted'))}</g>"


def box(x, y, look, sign, framed):
    """Return a square with its sign, framed where nearly all readings agree."""
    word = {"open": " d", "none": " n"}.get(look, "")
    frame = " r" if framed else ""
    return (
        f'<rect class="{look}{frame}" x="{x + 1}" y="{y + 1}" width="{SIDE - 4}" '
        f'height="{SIDE - 4}" rx="3"/><text class="s{word}" x="{x + SIDE / 2 - 1:g}" y="{y + 15}">'
        f"{sign}</text>"
    )


FILES = {
    "front-claims.md": claims,
    "front-gains.md": gains,
    "front-speed.md": speeds,
    "front-claims.svg": picture,
}

if __name__ == "__main__":
    for name, make in FILES.items():
        (PARTS / name).write_text(make(), "utf-8")

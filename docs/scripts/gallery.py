"""The pages that mkdocs makes anew at every build: the gallery of studies, and the command line.

A study's page has its figure, a card for each claim, and its tables, all from results/.
"""

import csv
import re
from collections import Counter
from pathlib import Path

import typer.cli
from typer.main import get_command

from fissile.cli.lab import app
from fissile.lab.studies import STUDIES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
SIGNS = {"holds": "✓", "fails": "✗", "not significant": "○", "no data": "–", "not tested here": "–"}
#: Features that stand in for CLIP's, as `--set data=` names them.
STAND_IN = "cifar100-efficientnet-lite2"
#: Words of a table that gets a page of its own.
LONG = 500


def rows(name):
    """Return the rows of a table in results/ by study."""
    found = {}
    with open(RESULTS / name, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["study"], []).append(row)
    return found


def pages():
    """Return the text of every page, by its path in the docs."""
    claims, readings = rows("claims.csv"), rows("multiverse-claims.csv")
    made = {"gallery/index.md": index(claims)}
    for name, found in claims.items():
        shares = {row["claim"]: row for row in readings.get(name, [])}
        made |= of_study(STUDIES[name], found, shares)
    return made | command_line()


def nav(made):
    """Return what the navigation lists of these pages, by section."""
    gallery = [{"All figures": "gallery/index.md"}]
    gallery += [{Path(page).stem: page} for page in made if re.match(r"gallery/(?!index)", page)]
    command = [{f"fissile {Path(page).stem}": page} for page in made if "cli/" in page]
    command[0] = {"Commands": "reference/cli/index.md"}
    return {"Gallery": gallery, "Command line": command}


# --- the gallery


def index(claims):
    """Return the page with all figures."""
    parts = [
        "# Gallery\n\nEvery study that was run: its figure, and what became of its claims. A "
        "study's page has a card for each claim, with its verdict and the command that checks it.\n"
    ]
    for name, found in claims.items():
        study, counts = STUDIES[name], Counter(row["verdict"] for row in found)
        told = " · ".join(f"{sign} {counts[v]} {v}" for v, sign in SIGNS.items() if counts[v])
        parts.append(f"## [{study.title}]({name}.md)\n\n`{name}` · {study.artefact} · {told}\n")
        parts.append(f"[![{alt(study, found)}]({figure(name)}){{ loading=lazy }}]({name}.md)\n")
    rest = [study for name, study in STUDIES.items() if name not in claims]
    parts.append(
        "## Without figures here\n\nThe studies `frontier` and `ablation` have "
        "[their own page](../frontier.md). The others need data that cannot be redistributed, or "
        "have no published trials yet.\n"
    )
    parts += [f"- `{study.id}`: {study.title}; {study.artefact}" for study in rest]
    return "\n".join(parts) + "\n"


def of_study(study, found, shares):
    """Return the page of a study, and one of its table where that is long."""
    made = {}
    is_own = study.artefact == "not in the paper"
    numbers = "Numbers" if is_own else "Ours beside the paper's"
    command = f"fissile run {study.id} --scale paper{changes(study, found[0])}"
    parts = [
        f"# {study.title}\n\n`{study.id}` · {study.artefact}\n\n{study.about}\n",
        f"[![{alt(study, found)}]({figure(study.id)})]({figure(study.id)})\n",
    ]
    if apart := " and ".join(filter(None, (found[0]["features"], found[0]["settings"]))):
        trends = "" if is_own else ": compare trends with the paper's, not values"
        parts.append(f"These numbers are of {apart}{trends}.\n")
    parts.append(f"```sh\n{command}\nfissile report {study.id}\n```\n")
    parts.append(f"## Claims\n\nOf {found[0]['trials']} trials.\n")
    parts += [card(row, shares.get(row["claim"])) for row in found]
    path = RESULTS / "tables" / f"{study.id}.md"
    table = path.read_text("utf-8") if path.exists() else ""
    if len(table.split()) > LONG:
        made[f"gallery/{study.id}-table.md"] = f"# {study.title}, in numbers\n\n{table}"
        parts.append(f"## {numbers}\n\nIn [a table]({study.id}-table.md).\n")
    elif table:
        parts.append(f"## {numbers}\n\n{table}")
    if study.differs:
        parts.append(
            "## What differs from the paper\n\n" + "\n".join(f"- {d}" for d in study.differs)
        )
    return {f"gallery/{study.id}.md": "\n".join(parts) + "\n"} | made


def card(row, share):
    """Return a claim: its sentence, the verdict, the numbers, and how it fares under readings."""
    said = plain(row["claim"])
    lines = [f"### {SIGNS[row['verdict']]} {said}\n", f"**{row['verdict'].capitalize()}**"]
    lines.append(f": {plain(row['numbers'])}. Source: {plain(row['source'])}.")
    if share is not None:
        held = round(float(share["share"]) * int(share["readings"]))
        lines.append(
            f" It holds in {held} of {share['readings']} readings of what the paper leaves "
        )
        lines.append(f"open: **{share['kind']}**{decided(share['decides'])}.")
    return "".join(lines) + "\n"


def decided(by):
    """Return which answer decides the verdict, if one does."""
    return "" if by == "none" else f", decided by `{by.split(':')[0]}`"


def changes(study, row):
    """Return the options that lead to these numbers."""
    told = f" --set data={STAND_IN}" if study.data("paper") == "cifar100-clip" else ""
    if row["settings"]:
        told += " --set " + row["settings"].split(", ")[0].replace(" = ", "=")
    return told


def figure(name):
    """Return the path of a study's figure, as pages in gallery/ see it."""
    return f"../results/figures/{name}.png"


def alt(study, found):
    """Return what a study's figure shows, in words."""
    held = sum(row["verdict"] == "holds" for row in found)
    return plain(f"{study.title}: {study.artefact}. {held} of {len(found)} claims hold.")


def plain(text):
    """Return a text that Markdown shows as it is."""
    return re.sub(r"([\\*_\[\]|])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;")


# --- the command line


def command_line():
    """Return a page for every command, and one that lists them."""
    command = get_command(app)
    context = command.make_context("fissile", [], resilient_parsing=True)
    text = typer.cli.get_docs_for_click(obj=command, ctx=context, name="fissile")
    first, *rest = re.split(r"^(?=## )", text, flags=re.M)
    names = [re.match(r"## `fissile ([\w-]+)`", each)[1] for each in rest]
    listed = re.sub(r"^\* `(\w[\w-]*)`:", r"* [`\1`](\1.md):", first, flags=re.M)
    made = {"reference/cli/index.md": listed.replace("# `fissile`", "# The command `fissile`")}
    for name, each in zip(names, rest, strict=True):
        made[f"reference/cli/{name}.md"] = re.sub(r"^#(#+) ", r"\1 ", each, flags=re.M)
    return made

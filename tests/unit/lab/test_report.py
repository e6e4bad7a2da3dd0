"""The report: what it says, that it says it safely, and that it never costs the one before."""

import csv
import errno
import html
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch

import fissile
from fissile.lab import report
from fissile.lab.claims import counts
from fissile.lab.compute import TrialResult
from fissile.lab.results import load, nearest
from fissile.lab.run import run
from fissile.lab.store import Provenance, Run, Store
from fissile.lab.studies import STUDIES

pytestmark = pytest.mark.slow  # together: make quick leaves them out

IDS = ("codes", "capacity", "theory")
MADE_BY = Provenance("0.1.0", "0123abcd", "2.11.0", "a processor, 2 cores", "3.11.2")


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """Three small studies, trained and measured."""
    with Store(tmp_path_factory.mktemp("report") / "store") as store:
        for name in IDS:
            run(STUDIES[name].works("smoke"), store)
            store.note_run(Run(name, "smoke", None, {}, f"fissile run {name} --scale smoke"))
        yield store


@pytest.fixture(scope="session")
def folder(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "folder"
    assert report.write(store, folder) == folder / "index.html"
    return folder


@pytest.fixture(scope="session")
def page(folder):
    return Page((folder / "index.html").read_text("utf-8"))


class Page(HTMLParser):
    """A page as its readers get it: its tags, its text, the rows of its tables."""

    def __init__(self, source):
        super().__init__()
        self.source, self.tags, self.text, self.rows, self.ids = source, [], "", [], set()
        self.cell = self.hidden = False
        self.feed(source)
        self.text = " ".join(self.text.split())
        self.rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self.ids.add(attributes.get("id"))
        self.hidden |= tag in ("style", "title")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.cell &= tag not in ("td", "th")
        self.hidden &= tag not in ("style", "title")

    def handle_data(self, data):
        if not self.hidden:
            self.text += data
        if self.cell:
            self.rows[-1][-1] += data

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def invented(
    folder,
    name="capacity",
    value=lambda work: {},
    works=None,
    keep=lambda work: True,
    scale="smoke",
    trials=None,
    **changes,
):
    """A store of one study whose numbers are known: ``value(work)`` gives its measures."""
    store = Store(folder)
    usual = {"accuracy": 0.5, "nonzeros": 264.0, "capacity": 1.0, "diverged": 0.0}
    works = [w for w in STUDIES[name].works(scale, trials, changes)[:works] if keep(w)]
    store.add([TrialResult(work, usual | value(work), seconds=0.5) for work in works], MADE_BY)
    store.note_run(Run(name, scale, trials, changes, "fissile"))
    return store


def written(store, folder):
    with store:
        return Page(report.write(store, folder).read_text("utf-8"))


def bytes_of(folder):
    """Everything in a folder, so that nothing can be left over unseen."""
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# --- what it says


@pytest.mark.slow
def test_everything_is_written(folder):
    figures = {f"figures/{name}.{kind}" for name in IDS for kind in ("svg", "png")}
    numbers = {"figures/capacity.csv", "figures/theory.csv"}  # codes shows pictures
    tables = {f"tables/{name}.{kind}" for name in ("codes", "capacity") for kind in ("csv", "md")}
    found = {path.as_posix() for path, content in bytes_of(folder).items() if content}
    assert found == figures | numbers | tables | {"claims.csv", "claims.md", "index.html"}


def test_every_claim_is_there_with_its_verdict_and_numbers(store, folder, page):
    found = [
        (results.study.id, claim, verdict)
        for results in (load(store, run) for run in nearest(store))
        for claim, verdict in results.verdicts
    ]
    assert len(found) == sum(len(STUDIES[name].claims) for name in IDS)
    for _, claim, verdict in found:
        told = f"{report.SYMBOLS[verdict.status]} {verdict.status} {verdict.numbers}"
        assert [claim.text, claim.source, told] in page.rows
    held = counts(verdict for *_, verdict in found)
    told = sum(held.values())
    assert told == len(found)
    assert f"{held['holds']} of {told} claims" in page.text
    for status, count in held.items():
        assert re.search(rf"\b{count} {report.SYMBOLS[status]} {status}", page.text)
    kept = [list(row.values())[:5] for row in read_csv(folder / "claims.csv")]
    assert kept == [[name, c.text, c.source, v.status, v.numbers] for name, c, v in found]


def test_every_study_says_what_it_asks_and_how_it_was_made(store, page):
    for run_ in nearest(store):
        results = load(store, run_)
        study, made = results.study, results.provenances[0]
        texts = [study.title, study.about, *study.differs, run_.command, made.version, made.commit]
        texts += [made.torch, made.device, f"{len(results.works)} of {len(results.works)} trials"]
        for text in texts:
            assert " ".join(text.split()) in page.text, text
        assert study.artefact.lower() in page.text.lower()
        assert study.id in page.ids
    assert "Where a claim tests several cells, their p-values are corrected" in page.text
    assert "All 3 studies were run at scale smoke, which is smaller than the paper’s." in page.text
    assert not any(word in page.text for word in ("Incomplete", "Scales are mixed", "changed for"))
    assert f"fissile {fissile.__version__}" in page.text
    assert ["Training samples", "256", "50,000"] in page.rows
    assert ["Other false samples", "matched", "matched"] in page.rows
    assert ["Networks drawn", "200", "1,000"] in page.rows


def test_our_numbers_stand_beside_the_papers(tmp_path):
    values = {
        (12, "dense"): (1.5, 2.5), (12, "clause-4"): (4.0, 4.2), (12, "random-4"): (2.78, 2.78),
        (32, "dense"): (4.8, 4.8), (32, "clause-4"): (7.8, 7.8),
    }  # fmt: skip

    def value(work):
        pair = values.get((work.task.literals, work.arm.name), (1.0, 2.0))
        return {"capacity": pair[work.number]}

    def keep(work):
        return work.task.literals in (12, 32)

    store = invented(tmp_path / "store", value=value, keep=keep, scale="paper", trials=2)
    page = written(store, tmp_path / "report")
    ours = {row[0]: row[1:] for row in page.rows if len(row) == 10}
    assert ours["12"] == [
        "2.00 ± 0.50", "1.896 ± 0.377", "+0.10",
        "4.10 ± 0.10", "2.740 ± 0.114", "+1.36 ◆",
        "2.78 ± 0.00", "2.780 ± 0.133", "+0.00",
    ]  # fmt: skip
    assert ours["32"][2:6:3] == ["+0.86 ◆", "+0.82"]  # of 0.409 and of 0.426
    assert ours["24"][1:5:3] == ["2.907 ± 0.370", "5.479 ± 0.400"]
    assert ours["100"][6:] == ["–", "15.00 ± 0.727", "–"]
    assert "combined spreads (the root of the sum of both squares): 3 of 6." in page.text
    assert "– stands where this run has no trials" in page.text
    rows = read_csv(tmp_path / "report" / "tables" / "capacity.csv")
    assert len(rows) == 24
    texts = ("measure", "along", "place", "arm", "trials", "ours", "paper", "paper_spread", "far")
    assert [rows[1][name] for name in texts] == [
        "capacity", "literals", "12", "clause-4", "2", "4.1", "2.74", "0.114", "True",
    ]  # fmt: skip
    assert float(rows[1]["ours_error"]) == pytest.approx(0.1)
    assert float(rows[1]["difference"]) == pytest.approx(1.36)
    assert (rows[-1]["trials"], rows[-1]["ours"], rows[-1]["far"]) == ("0", "", "False")


def test_a_difference_without_spreads_is_not_judged(tmp_path):
    page = written(invented(tmp_path / "store", "codes", scale="paper"), tmp_path / "report")
    assert any(row[0] == "8" and row[2::3] == ["78.7", "99.4", "88.7"] for row in page.rows if row)
    assert "No difference is judged, because a spread is missing on one side." in page.text


def test_a_part_of_the_papers_grid_is_the_papers(tmp_path):
    page = written(invented(tmp_path / "store", scale="quick"), tmp_path / "report")
    assert "Not the paper’s settings" not in page.text
    assert "1.896 ± 0.377" in page.text


@pytest.mark.parametrize(
    ("scale", "changes", "apart"),
    [
        ("smoke", {}, "warm_up = 2, fine_tune = 2, train = 256, test = 128"),
        ("paper", {"neurons": 16}, "neurons = 16"),
        ("paper", {"lr": 0.003}, "lr = 0.003"),
    ],
)
def test_other_settings_never_stand_beside_the_papers_numbers(tmp_path, scale, changes, apart):
    store = invented(tmp_path / "store", "codes", scale=scale, **changes)
    found = load(store, store.runs()[0])
    assert found.apart == apart
    page = written(store, tmp_path / "report")
    assert f"Not the paper’s settings: this run has {apart}." in page.text
    assert f"Ours: mean ± standard error of the trials, with {apart}." in page.text
    rows = [row for row in page.rows if row and row[0] == str(changes.get("neurons", 8))]
    assert [len(row) for row in rows] == [4]  # a place and three arms, which have numbers
    assert all(text.startswith("50.0") for text in rows[0][1:])
    assert "78.7" not in page.text
    assert "beside the paper’s" not in page.text
    table = (tmp_path / "report" / "tables" / "codes.md").read_text()
    assert f"ours with {apart}; not the paper’s settings." in table
    kept = read_csv(tmp_path / "report" / "tables" / "codes.csv")
    assert [(one["ours"], one["paper"], one["difference"]) for one in kept] == [
        ("50.0", "", "")
    ] * 3
    assert {one["settings"] for one in read_csv(tmp_path / "report" / "claims.csv")} == {apart}


@pytest.mark.parametrize("changes", [{"negatives": "clause"}, {"reading": "negatives=clause"}])
def test_what_the_paper_leaves_open_is_a_reading_and_no_other_setting(tmp_path, changes):
    """However it was asked for, its name stands beside the numbers, and the paper's may too."""
    store = invented(tmp_path / "store", "codes", scale="paper", **changes)
    found = load(store, store.runs()[0])
    assert (found.reading, found.apart) == ({"negatives": "clause"}, "")
    assert found.note == "Another reading of the paper: negatives=clause."
    page = written(store, tmp_path / "report")
    assert "Another reading of the paper: negatives=clause." in page.text
    assert "Not the paper’s settings" not in page.text
    assert "Ours: mean ± standard error of the trials, with negatives=clause." in page.text
    assert "78.7" in page.text
    both = invented(tmp_path / "both", "codes", scale="paper", lr=0.003, **changes)
    found = load(both, both.runs()[0])
    assert (found.answers, found.apart) == ("negatives=clause", "lr = 0.003")
    assert "78.7" not in written(both, tmp_path / "apart").text


def test_claims_about_a_changed_axis_are_not_tested_here(tmp_path):
    store = invented(tmp_path / "store", "codes", scale="paper", clauses=16)
    verdicts = load(store, store.runs()[0]).verdicts
    about = [verdict.status for claim, verdict in verdicts if not claim.own]
    assert set(about) == {"not tested here"}
    page = written(store, tmp_path / "report")
    assert "□ not tested here run with clauses=16" in page.text
    assert "□ Not tested here: 5" in (tmp_path / "report" / "claims.md").read_text()


def test_other_data_are_not_judged_by_the_papers_numbers(tmp_path):
    store = invented(tmp_path / "store", "fashionmnist", scale="paper", trials=2, data="generated")
    results = load(store, store.runs()[0])
    assert results.apart == ""
    cells = report.table(results.study.published[0], results).cells
    assert not any(cell.far or cell.judged for cell in cells)
    assert {cell.texts[2] for cell in cells} == {report.MISSING}
    page = written(store, tmp_path / "report")
    assert "No difference is judged, because the data are not the paper’s." in page.text


def test_an_incomplete_run_is_called_incomplete(tmp_path):
    page = written(invented(tmp_path / "store", works=5), tmp_path / "report")
    assert "Incomplete. capacity has 5 of 12 trials." in page.text
    assert "Incomplete: 5 of 12 trials are there." in page.text
    assert "Splitting raises feature capacity (incomplete)" in page.text


def test_a_run_without_any_result_is_reported_as_such(tmp_path):
    page = written(invented(tmp_path / "store", "codes", works=0), tmp_path / "report")
    assert "There is no result yet." in page.text
    assert "There is no figure: nothing has run yet." in page.text
    assert "0 of 6 trials" in page.text
    assert page.text.count("nothing has run yet") == 2 * len(STUDIES["codes"].claims) + 1


def test_mixed_scales_are_named_and_settings_set_against_the_papers(tmp_path):
    store = invented(tmp_path / "store")
    store.note_run(Run("cosine", "quick", 1, {"lr": 0.003}, "fissile run cosine --set lr=0.003"))
    page = written(store, tmp_path / "report")
    assert "Settings were changed for cosine; see there." in page.text
    assert "Scales are mixed. At scale smoke: capacity. At scale quick: cosine." in page.text
    assert ["Cells of the grid", "2", "8"] in page.rows
    assert ["Trials of each cell", "1", "5"] in page.rows
    assert "Changed with --set: lr=0.003." in page.text
    assert "Changed with --set: nothing." in page.text


def test_the_papers_own_scale_is_called_so_unless_it_was_changed(tmp_path):
    own = "at scale paper, the paper’s own grid, epochs and trials."
    with Store(tmp_path / "store") as store:
        for number, (trials, told) in enumerate(((None, own), (5, own), (2, "at scale paper."))):
            store.note_run(Run("capacity", "paper", trials, {}, "fissile"))
            page = report.write(store, tmp_path, ids=[f"capacity-{number + 1}"])
            assert told in Page(page.read_text("utf-8")).text


def test_dates_are_those_of_results(tmp_path):
    with invented(tmp_path / "store", value=lambda work: {"diverged": work.number}) as store:
        found = load(store, store.runs()[0])
    times = [f"2031-02-03T04:{minute:02}:06.789+00:00" for minute in range(12)]
    rows = [replace(row, finished=at) for row, at in zip(found.rows, times, strict=True)]
    report._fill(tmp_path, [replace(found, rows=rows)])
    page = Page((tmp_path / "index.html").read_text("utf-8"))
    assert "12 of 12 trials; 6 diverged" in page.text
    assert "The newest result is from 2031-02-03." in page.text
    assert re.search("Finished ?2031-02-03 04:00 to 2031-02-03 04:11 UTC", page.text)
    assert "6.0 s" in page.text


def test_the_newest_run_of_the_studies_and_scale_asked_for(store, tmp_path):
    page = Page(report.write(store, tmp_path, ids=["theory"]).read_text("utf-8"))
    assert "theory" in page.ids
    assert not {"codes", "capacity"} & page.ids
    with pytest.raises(fissile.FissileError, match="fissile run"):
        report.write(store, tmp_path, scale="paper")
    with pytest.raises(fissile.FissileError, match="no study 'codec'"):
        report.write(store, tmp_path, ids=["codec"])


def test_a_store_without_runs_asks_for_one(tmp_path):
    with (
        Store(tmp_path / "store") as store,
        pytest.raises(fissile.FissileError, match="`fissile run` first"),
    ):
        report.write(store, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_claims_as_markdown(store):
    found = [load(store, run) for run in nearest(store)]
    text = report.claims_markdown(report.claim_rows(found))
    every = [(one, *both) for one in found for both in one.verdicts]
    for one, claim, verdict in every:
        where = f"{one.study.id} ({one.apart})"
        assert text.count(f"| {where} | {claim.text} | {verdict.numbers} |") == 1
    assert text.count("\n| ") == len(every) + 2 * text.count("<details")
    parts = [
        (text.index(title), status) for status, title in report._FIRST.items() if title in text
    ]
    # What came out differently is said first, and is open to be read.
    assert sorted(parts) == parts
    assert {status for _, status in parts} == {verdict.status for _, _, verdict in every}
    assert text.count("<details open>") == any(v.status == "fails" for _, _, v in every)
    assert report._markdown("a|b\n<i>*c*\\") == "a\\|b &lt;i>\\*c\\*\\\\"


def curved(tmp_path, changes=None):
    """Results of the study of times, with invented curves: 1 % in every epoch, 2 % in trial 1."""
    works = STUDIES["timing"].works("smoke", changes={"data": "generated", **(changes or {})})
    outcomes = [
        TrialResult(work, {"accuracy": 0.5, "nonzeros": 9.0}, 1.0, {"curve": torch.full(
            (work.warm_up + work.fine_tune,), 0.01 * (1 + work.number))})
        for work in works
    ]  # fmt: skip
    with Store(tmp_path) as store:
        store.add(outcomes, MADE_BY)
        wanted = Run("timing", "smoke", None, {"data": "generated", **(changes or {})}, "run")
        return load(store, wanted, pictures=True)


def test_the_dense_network_is_one_network_whenever_others_split(tmp_path):
    pictures = curved(tmp_path).pictures
    assert pictures["dense"].tolist() == [[1.0, 1.0], [2.0, 2.0]]  # a row for each trial
    assert {name: len(rows) for name, rows in pictures.items()} == {
        "dense": 2, "random-4 after 0": 2, "random-4 after 1": 2,
    }  # fmt: skip


def test_curves_of_several_lengths_are_padded(tmp_path):
    results = curved(tmp_path, {"fine_tune": 2})  # in all two epochs, or three
    assert results.pictures["random-4 after 1"].shape == (2, 3)
    assert report._figure(results, tmp_path / "figures") is not None


def test_what_the_networks_saw_is_named_if_it_is_not_the_paper_s(tmp_path):
    results = curved(tmp_path)
    assert results.foreign == "generated"
    assert "generated" in results.note
    encoded = curved(tmp_path / "other", {"encoder": "timm:resnet18"})
    assert encoded.foreign == "generated through timm:resnet18"
    assert encoded.run.told == {"data": "generated"}


def test_an_incomplete_run_proves_nothing_yet(tmp_path):
    results = curved(tmp_path)
    partly = replace(results, rows=results.rows[:-1])
    assert partly.done == "7 of 8 trials"
    for (_, whole), (_, part) in zip(results.verdicts, partly.verdicts, strict=True):
        assert part.status in ("not significant", "no data")
        assert whole.status == "no data" or part.numbers.startswith("so far (7 of 8 trials)")
    text = report.claims_markdown(report.claim_rows([partly]))
    assert f"timing (generated, {partly.apart}, 7 of 8 trials)" in text
    assert "fine_tune = " in partly.apart


def test_tables_as_markdown(tmp_path):
    def value(work):
        return {"capacity": work.number}

    def keep(work):
        return work.task.literals > 12

    with invented(tmp_path, value=value, keep=keep, scale="quick") as store:
        text = report.tables_markdown(load(store, nearest(store, ["capacity"])[0]))
    assert "| 32 | 1.00 ± 0.58 (" in text
    assert "| 12 | – (1.896 ± 0.377) |" in text  # not in this run


# --- that it says it safely


def test_what_a_user_typed_is_text(tmp_path):
    evil = "<script>alert('x')</script>"
    command = f'fissile run capacity --set lr="{evil}" && <img src=x onerror=alert(1)>'
    made_by = replace(MADE_BY, commit=evil, device="<b>mine</b>")
    with invented(tmp_path / "store") as store:
        found = load(store, store.runs()[0])
    found = replace(
        found,
        run=replace(found.run, command=command, changes={"lr": evil, "<i>": "&amp;"}),
        rows=[replace(row, provenance=made_by, finished="<time>") for row in found.rows],
    )
    report._fill(tmp_path, [found])
    page = Page((tmp_path / "index.html").read_text("utf-8"))
    for text in (command, f"lr={evil}", "<i>=&amp;", f"commit {evil}", "<b>mine</b>"):
        assert text in page.text
    assert html.escape(evil).replace("&#x27;", "&#39;") in page.source
    assert not any(page.all(tag) for tag in ("script", "i"))
    assert {one["src"][:11] for one in page.all("img")} == {"data:image/"}


def test_a_name_from_data_is_neither_markup_nor_a_formula(tmp_path):
    evil = (
        r"$\frac$ <script>alert(1)</script> [x](javascript:1) `a` _b_ *c* ~~d~~ | &lt; e_f \x1b[31m"
    )
    changes = {"data": "generated", "encoder": evil}
    works = STUDIES["fashionmnist"].works("smoke", changes=changes)
    with Store(tmp_path / "lab") as store:
        came_to = {"accuracy": 0.5, "nonzeros": 9.0}
        store.add([TrialResult(work, came_to, 1.0) for work in works], MADE_BY)
        found = load(store, Run("fashionmnist", "smoke", None, changes, ""))
    for text in (report.tables_markdown(found), report.claims_markdown(report.claim_rows([found]))):
        assert "<script" not in text
        assert (
            r"\$\\frac\$ &lt;script>alert(1)&lt;/script> [x\](javascript:1) \`a\` \_b\_ \*c\* "
            r"\~\~d\~\~ \| &amp;lt; e_f"
        ) in text
        assert "\x1b" not in text
    report._fill(tmp_path, [found])  # figures included
    assert (tmp_path / "tables" / "fashionmnist.md").read_text() == report.tables_markdown(found)


def test_nothing_is_loaded_and_nothing_runs(page):
    assert "http://" not in page.source
    assert "https://" not in page.source
    style = page.source.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert not any(page.all(tag) for tag in ("script", "iframe", "object", "embed", "base", "form"))
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), tag
            if name in ("src", "href", "srcset", "data"):
                files = ("figures/",) if tag == "a" else ()  # followed by a reader alone
                assert value.startswith(("data:", "#", *files)), tag


def test_it_can_be_read_without_eyes(page):
    assert page.all("html")[0]["lang"] == "en"
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert all(cell["scope"] in ("row", "col", "rowgroup", "colgroup") for cell in page.all("th"))
    assert len(page.all("img")) == len(IDS)
    assert all(len(image["alt"]) > 40 for image in page.all("img"))
    links = [link["href"] for link in page.all("a")]
    contents = [link[1:] for link in links if link.startswith("#")]
    assert contents == ["claims", *IDS, *IDS]  # at the side, then in the table of all claims
    assert set(contents) <= page.ids
    assert [link for link in links if link[0] != "#"] == [f"figures/{name}.svg" for name in IDS]
    for _, attributes in page.tags:
        assert attributes.get("aria-labelledby") in page.ids


# --- that it never costs the one before


def test_the_same_results_make_the_same_bytes(store, folder, tmp_path):
    (tmp_path / "index.html").write_text("an older one")
    report.write(store, tmp_path)
    assert bytes_of(tmp_path) == bytes_of(folder)


def test_other_files_in_the_folder_are_left_alone(store, tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "mine.svg").write_text("mine")
    report.write(store, tmp_path, ids=["theory"])
    assert (tmp_path / "figures" / "mine.svg").read_text() == "mine"


def test_a_report_that_fails_in_the_middle_leaves_the_first_whole(store, tmp_path, monkeypatch):
    with invented(tmp_path / "store") as first:
        report.write(first, tmp_path / "report")
    before = bytes_of(tmp_path / "report")
    draw = report.plots.draw

    def drawn(study, frame, pictures, note):
        if study.id == "theory":
            raise KeyboardInterrupt
        return draw(study, frame, pictures, note)

    monkeypatch.setattr(report.plots, "draw", drawn)
    with pytest.raises(KeyboardInterrupt):
        report.write(store, tmp_path / "report", ids=["capacity", "theory"])
    assert bytes_of(tmp_path / "report") == before


def test_a_place_that_cannot_be_written_is_an_error_of_ours(store, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(fissile.FileError, match=r"could not write the report to .*file"):
        report.write(store, tmp_path / "file")
    with pytest.raises(fissile.FileError, match=r"Not a directory; .* give another folder"):
        report.write(store, tmp_path / "file" / "report")


def test_figures_that_find_no_room_leave_the_first_report_whole(store, folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with limited(20_000), pytest.raises(fissile.FileError, match="could not write the figure"):
        report.write(store, tmp_path, ids=["theory"])
    assert bytes_of(tmp_path) == bytes_of(folder)


def test_a_page_that_finds_no_room_leaves_the_first_report_whole(
    store, folder, tmp_path, monkeypatch
):
    def no_room(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(report, "_page", no_room)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with pytest.raises(fissile.FileError, match="No space left on device; free some space"):
        report.write(store, tmp_path, ids=["theory"])
    assert bytes_of(tmp_path) == bytes_of(folder)


@contextmanager
def limited(size):
    """Let larger files fail, as they do on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

"""The tables of pack_accuracy.py: statistics over all trials, as Markdown."""

from fissile.lab.stats import interval

TITLES = {"fashionmnist": "FashionMNIST", "cifar100": "CIFAR-100"}
DTYPES = ("float32", "float16", "bfloat16")
NARROW = ("float16", "bfloat16")
TRIAL = ["neurons", "trial"]
NETWORK = ["arm", *TRIAL]


def page(frame, about):
    """Return the page as text, and the statistics it shows."""
    lines, found = [], []
    for study, title in TITLES.items():
        checks = about["checks"][study]
        share = 100 / checks["test_rows"]
        rows = frame[frame.study == study].assign(share=share)  # of one test sample, in percent
        rows["accuracy"] = rows.correct * share
        for alpha in sorted(set(rows.alpha) - {1}):
            cells = compared(rows, alpha)
            found += [{"study": study, "alpha": int(alpha), **cell} for cell in cells]
            lines += [heading(title, alpha, rows, checks), "", *accuracy_table(cells, rows), ""]
            lines += [*width_table(rows, alpha), "", *size_table(rows, alpha), ""]
        lines += [*verdicts(rows, checks), ""]
    lines.append(
        f"{about['machine']}; {about['date']}, commit {about['commit']}, fissile "
        f"{about['fissile']}, torch {about['torch']}: `{about['command']}`"
    )
    return "\n".join(lines) + "\n", found


def heading(title, alpha, rows, checks):
    """Say what was measured."""
    networks = len(rows[rows.alpha == alpha].drop_duplicates(NETWORK))
    trials = len(rows[rows.alpha == alpha].drop_duplicates(TRIAL))
    seen = "" if checks["features"] == "none" else f" on features of {checks['features']}"
    return (
        f"{title}{seen}: {networks} networks expanded with alpha {alpha}, of {trials} trials, "
        f"tested on {checks['test_rows']:,} samples; differences in percentage points of test "
        "accuracy, with the 95 % interval of their mean over trials."
    )


# --- accuracy


def of_form(rows, dtype, layout):
    """Return the networks in one form, by arm, width and trial."""
    chosen = rows[(rows.dtype == dtype) & (rows.layout == layout)]
    return chosen.set_index(NETWORK).sort_index()


def differences(form, base):
    """Return by how many points a form is better, network by network and trial by trial.

    The arms of a trial come from one warm-up: they are averaged, so that trials are independent.
    """
    each = form.accuracy - base.accuracy
    return each, each.groupby(level=TRIAL).mean()


def compared(rows, alpha):
    """Compare every form with the unpacked network in the same dtype and in float32."""
    wide = rows[rows.alpha == alpha]
    found = []
    for layout in ("unpacked", "inline", "plane"):
        for dtype in DTYPES:
            form = of_form(wide, dtype, layout)
            cell = {"layout": layout, "dtype": dtype}
            for name in ("accuracy", "owner_bits", "place_bits", "rounding"):
                cell[name] = float(form[name].mean())
            cell["most_rounded"] = float(form.most_rounded.max())
            cell["pattern_apart"] = int(form.pattern_apart.sum())
            for name, other in (("same", dtype), ("float32", "float32")):
                each, trials = differences(form, of_form(wide, other, "unpacked"))
                column = "changed" if name == "same" else "changed_from_float32"
                cell |= {
                    f"{name}_difference": float(trials.mean()),
                    f"{name}_interval": list(interval(trials)),
                    f"{name}_largest_drop": float(max(0.0, -each.min())),
                    f"{name}_changed": float((form[column] * form.share).mean()),
                    f"{name}_most_changed": float((form[column] * form.share).max()),
                }
            found.append(cell)
    return found


def signed(cell, name):
    """Write a difference with its interval."""
    low, high = cell[f"{name}_interval"]
    return f"{cell[f'{name}_difference']:+.3f} ({low:+.3f} to {high:+.3f})"


def accuracy_table(cells, rows):
    """Return what every form costs, a row for each, below the dense networks of the same budget."""
    names = (
        "form", "bits given away", "rounding", "most of one weight", "accuracy in %",
        "against unpacked, same dtype", "largest drop", "predictions changed",
        "against unpacked float32", "largest drop", "predictions changed",
    )  # fmt: skip
    lines = table_head(names)
    dense = of_form(rows[rows.alpha == 1], "float32", "unpacked").accuracy.mean()
    lines.append(f"| not split: dense, float32 | | | | {dense:.2f} | | | | | | |")
    for cell in cells:
        bits = cell["owner_bits"] + cell["place_bits"]
        values = [f"{cell['dtype']}, {cell['layout']}", f"{bits:.1f}" if bits else "none"]
        values += [f"{100 * cell[name]:.2g} %" for name in ("rounding", "most_rounded")]
        values.append(f"{cell['accuracy']:.2f}")
        for name in ("same", "float32"):
            drop, changed = cell[f"{name}_largest_drop"], cell[f"{name}_changed"]
            values += [signed(cell, name), f"{drop:.2f}", f"{changed:.3f} %"]
        if cell["layout"] == "unpacked":
            values[5:8] = ["", "", ""]
        lines.append("| " + " | ".join(values) + " |")
    return lines


def table_head(names):
    """Return the first two lines of a table."""
    return ["| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]


# --- by width, and on disk


def ratios(rows, alpha, dtype, layout, part="file"):
    """Return how much larger a form is than the dense network of its trial, in percent."""
    form = of_form(rows[rows.alpha == alpha], dtype, layout)[part]
    dense = of_form(rows[rows.alpha == 1], dtype, "unpacked")[part].droplevel("arm")
    return 100 * (form / form.index.droplevel("arm").map(dense) - 1)


def width_table(rows, alpha):
    """Return what inline packing costs at each width, and the size of its files."""
    names = ["neurons", "empty places in W1"]
    for dtype in NARROW:
        names += [f"{dtype}: difference", "largest drop"]
    names += ["dense file, float16", "packed, inline", "tensors alone", "packed, plane"]
    lines = table_head(names)
    for neurons, group in rows.groupby("neurons"):
        wide = group[group.alpha == alpha]
        values = [str(neurons), f"{100 * wide['empty'].mean():.1f} %"]
        for dtype in NARROW:
            base = of_form(wide, dtype, "unpacked")
            each, trials = differences(of_form(wide, dtype, "inline"), base)
            values += [f"{trials.mean():+.3f}", f"{max(0.0, -each.min()):.2f}"]
        dense = of_form(group[group.alpha == 1], "float16", "unpacked")
        values.append(f"{dense.file.mean():,.0f} B")
        for layout, part in (("inline", "file"), ("inline", "tensors"), ("plane", "file")):
            values.append(f"{ratios(group, alpha, 'float16', layout, part).mean():+.1f} %")
        lines.append("| " + " | ".join(values) + " |")
    return lines


def size_table(rows, alpha):
    """Return how the files of packed networks compare with the dense networks' of their trials."""
    lines = table_head(
        ("files against the dense network's, same dtype", "mean", "largest", "at most 1 % larger",
         "tensors alone", "largest", "at most 1 % larger", "in memory", "largest")
    )  # fmt: skip
    for layout in ("inline", "plane"):
        for dtype in DTYPES:
            values = [f"{dtype}, {layout}"]
            for part in ("file", "tensors", "memory"):
                more = ratios(rows, alpha, dtype, layout, part)
                values += [f"{more.mean():+.1f} %", f"{more.max():+.1f} %"]
                values += [] if part == "memory" else [f"{(more <= 1).sum()} of {len(more)}"]
            lines.append("| " + " | ".join(values) + " |")
    return lines


# --- can one believe it


def verdicts(rows, checks):
    """Say how the networks compare with the lab's, and the packed modules with the arithmetic."""
    if checks["in_lab"]:
        off = checks["furthest_from_lab"]
        end = "" if off == 0 else f"; the furthest is {off:.2f} points off"
        yield (
            f"- As trained here, {checks['as_in_lab']} of {checks['in_lab']} networks have the "
            f"test accuracy of the lab's results to the last digit{end}."
        )
    else:
        yield f"- The lab's results hold none of these {checks['networks']} networks."
    yield (
        f"- Unpacked in float32, no network is right here on more than "
        f"{checks['furthest_from_bank_in_rows']} samples more or fewer than where it was trained."
    )
    packed = rows[rows.layout != "unpacked"]
    if apart := int(packed.pattern_apart.sum()):
        yield f"- Of {apart} networks and forms, the places did not fit into the weights."
    other = (packed.called_correct - packed.correct).abs() * packed.share
    yield (
        f"- Called as modules, the packed networks predict otherwise than their weights written "
        f"out, with sums in float32, on {(packed.called_differently * packed.share).mean():.4f} % "
        f"of the samples, and their accuracy is at most {other.max():.2f} points off "
        f"({len(packed):,} networks and forms)."
    )

"""How numbers and settings are written in the tables of frontier.md."""

from fissile.lab.budget_methods import OURS


def rows(head, body):
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


def text(lines):
    """Return lines as a file."""
    return "\n".join(lines) + "\n"


def signed(difference, digits=2):
    """Write a difference in points, zero without a minus."""
    return f"{round(difference, digits) + 0.0:+.{digits}f}"


def chance(p):
    """Write a p-value."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def tried(cell):
    """Say what a setting was, in a few words."""
    beside = cell["method"] == OURS and cell["plan"]["direct"]
    return setting(cell["plan"], "neurons beside a linear classifier" if beside else "neurons")


def setting(plan, neurons="neurons"):
    """Say what a plan is; the usual decay goes without saying."""
    parts = [f"{plan['hidden']:,} {neurons}" if plan["hidden"] else "linear"]
    parts += [f"rate {plan['lr']:g}"]
    parts += [f"decay {plan['decay']:g}"] if plan["decay"] not in (0, 0.3) else []
    parts += [f"dropout {plan['dropout']:g}"] if plan["dropout"] else []
    parts += [f"smoothing {plan['smooth']:g}"] if plan["smooth"] else []
    return ", ".join(parts)

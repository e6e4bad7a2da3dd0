"""Fill the marked parts of the README and of the pages in docs with the files they name.

    python docs/scripts/include.py

A part begins with a comment `include: results/claims.md` and ends with a comment `end`; what is
between them is replaced by the file. The tests compare the two, so no number is typed in by hand.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PART = re.compile(r"(<!-- include: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text, root=ROOT):
    """Return a text with every marked part as the file it names has it, if there is one."""

    def part(found):
        path = root / found[2]
        return found[1] + path.read_text("utf-8") + found[3] if path.exists() else found[0]

    return PART.sub(part, text)


def pages(root=ROOT):
    """List the texts that may have such parts."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text("utf-8")), "utf-8")

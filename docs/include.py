"""Fill the marked parts of README.md with the files they name.

    python docs/include.py

A part begins with a comment `include: results/claims.md` and ends with a comment `end`; what is
between them is replaced by the file. The tests compare the two, so no number is typed in by hand.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PART = re.compile(r"(<!-- include: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text, root=ROOT):
    """Return a text with every marked part as the file it names has it."""
    return PART.sub(lambda part: part[1] + (root / part[2]).read_text("utf-8") + part[3], text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text("utf-8")), "utf-8")

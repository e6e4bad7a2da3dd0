"""How the reference reads docstrings: examples as code, roles of Sphinx as plain code.

Docstrings here show an example as lines that begin with `>>>`, without a heading; Markdown would
take them for quotations.
"""

import re

import griffe

EXAMPLE = re.compile(r"(?:^|(?<=\n))>>> .*?(?=\n\s*\n|\Z)", re.DOTALL)
ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`")


class Docstrings(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_object(self, *, obj, **_):
        """Fence the examples and drop the roles."""
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text):
    """Return a docstring as the Markdown it stands for.

    >>> rewritten("See :func:`expand`.")
    'See `expand`.'
    """
    fenced = EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```", text)
    return ROLE.sub("`", fenced).replace("<BLANKLINE>", "")

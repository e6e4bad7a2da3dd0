"""Files that a user names: they are run, their errors name a line, their code has a hash.

A file runs only where its path was given; none is ever run because a store names it.
"""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from fissile._common.errors import FissileError
from fissile.lab.key import hashed

_MODULES: dict[Path, tuple[str, ModuleType]] = {}  # each with the text that was run


class Misnamed(FissileError):
    """A study names what it does not have; ``word`` is what the file has in quotes."""

    def __init__(self, word: str, message: str) -> None:
        super().__init__(message)
        self.word = word


def executed(path: str | Path) -> ModuleType:
    """Run a file as a module, and again only once it has changed; modules beside it are found."""
    file = Path(path).resolve()
    if not file.is_file():
        raise FissileError(f"there is no file {path}; write one with: fissile new-study {path}")
    with pointing(file):
        text = file.read_text("utf-8")
        known, module = _MODULES.get(file, ("", ModuleType("")))
        if known != text:
            module = ModuleType(f"study_in_{file.stem}")
            module.__file__ = str(file)
            sys.modules[module.__name__] = module  # where a dataclass looks for its own module
            if str(file.parent) not in sys.path:
                sys.path.append(str(file.parent))
            exec(compile(text, file, "exec"), vars(module))
            _MODULES[file] = text, module
    return module


@contextmanager
def pointing(file: str | Path, word: str = "", doing: str = "") -> Iterator[None]:
    """Turn an error into one that names the line of a file; without a file it stays as it is.

    Where no line of the file raised it, the line is that of the quoted ``word``.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if not file:
            raise
        if isinstance(error, SyntaxError) and error.filename == str(file):
            lines, text = [error.lineno or 1], error.msg
        else:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [one.lineno for one in frames if one.filename == str(file) and one.lineno]
            lines = lines or _lines_of(Path(file), getattr(error, "word", word))
            named = type(error).__name__
            text = str(error) if isinstance(error, FissileError) else f"{named}: {error}"
        where = f"{_short(Path(file))}, line {lines[-1]}" if lines else _short(Path(file))
        raise FissileError(f"{where}: {doing}{text}") from None


def _short(file: Path) -> str:
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def _lines_of(file: Path, word: str) -> list[int]:
    """Return the first line of a file that has this text in quotes, if one has."""
    try:
        nodes = ast.walk(ast.parse(file.read_text("utf-8")))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return []
    found = [n.lineno for n in nodes if isinstance(n, ast.Constant) and word and n.value == word]
    return sorted(found)[:1]


def code_of(file: Path, name: str) -> str:
    """Return a hash of a function and of everything in its file that it uses.

    >>> code_of(Path("my_study.py"), "trial")

    Comments and layout are left out, and so is what the function does not use, such as claims.
    Modules beside the file count as a whole. What it reads from elsewhere does not.
    """
    return hashed("\n".join(_parts(file, [name], {file})))[:16]


def _parts(file: Path, names: Sequence[str], seen: set[Path]) -> Iterator[str]:
    """Yield the statements of a file that these names depend on; without names, all of them."""
    body = ast.parse(file.read_text("utf-8")).body
    body = [one for one in body if not (isinstance(one, ast.Expr) and ast.unparse(one)[0] in "'\"")]
    bound = [_bound(node) for node in body]
    todo = [place for place, own in enumerate(bound) if not own or own & {*names, "*"} or not names]
    used = set[int]()
    while todo:
        used.add(place := todo.pop())
        read = {one.id for one in ast.walk(body[place]) if isinstance(one, ast.Name)}
        todo += [at for at, own in enumerate(bound) if own & read and at not in used]
    for place in sorted(used):
        yield ast.unparse(body[place])
        for module in _imported(body[place]):
            beside = file.parent.joinpath(*module.split("."))
            for path in (beside.with_suffix(".py"), beside / "__init__.py"):
                if path.is_file() and path not in seen:
                    seen.add(path)
                    yield from _parts(path, (), seen)


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement gives a value to, or changes a part of."""
    found = set[str]()
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            while isinstance(node, ast.Attribute | ast.Subscript):
                node = node.value
            if isinstance(node, ast.Name):
                found.add(node.id)
    return found


def _imported(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)

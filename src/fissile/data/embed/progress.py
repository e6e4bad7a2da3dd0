"""A progress bar over images or texts: how many, how fast, and the time that is left."""

from __future__ import annotations

from types import TracebackType

from fissile._common.errors import needs

__all__ = ["Bar", "Watcher"]


class Watcher:
    """Is told how far the encoding is; this one does not mind."""

    def begin(self, items: int, done: int) -> None:
        """Hear how many items there are, and how many an earlier run has finished."""

    def advance(self, items: int) -> None:
        """Hear that so many more are finished."""


class Bar(Watcher):
    """Shows how far the encoding is, in the terminal (needs rich).

    >>> with Bar() as bar:
    ...     embed("cifar100", "open_clip:ViT-B-16/openai", "cifar100-clip.npz", watcher=bar)
    """

    def __enter__(self) -> Bar:
        needs("rich", "lab")
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left:"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar.live.is_started:  # else it would leave an empty line above an error
            self._bar.stop()

    def begin(self, items: int, done: int) -> None:
        """Show the bar, filled by what is there already."""
        self._bar.start()
        self._task = self._bar.add_task("encoding", total=items, completed=done, rate="")

    def advance(self, items: int) -> None:
        """Fill it further."""
        self._bar.advance(self._task, items)
        speed = self._bar.tasks[self._task].speed
        self._bar.update(self._task, rate=f"{speed:,.0f}/s" if speed else "")

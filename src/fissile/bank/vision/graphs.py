"""Networks on a GPU, side by side: each step of each is one CUDA graph on a stream of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from fissile.bank.loop import Recipe
from fissile.bank.vision.images import Images, image_order
from fissile.bank.vision.job import Job, Outcome
from fissile.bank.vision.step import Resident, Step, batch_sizes

__all__ = ["GraphRunner", "Graphs"]

#: How many steps the processor may be ahead: enough never to wait, few enough for Ctrl-C.
_AHEAD = 64


class Graphs:
    """Trains jobs on a GPU, up to ``together`` of them at once.

    >>> runner = Graphs(images, Recipe(), torch.device("cuda"), torch.bfloat16, 5).start(job)
    """

    def __init__(
        self, images: Images, recipe: Recipe, device: torch.device, dtype: torch.dtype,
        together: int, *, mirror: bool = False,
    ) -> None:  # fmt: skip
        self.recipe, self.device, self.mirror = recipe, device, mirror
        self.data = Resident(images, device, dtype)
        self.streams = [torch.cuda.Stream(device) for _ in range(together)]
        self.known: set[int] = set()
        torch.cuda.synchronize(device)

    def start(self, job: Job) -> GraphRunner:
        """Bring a job to the device; its stream is free again once the runner is closed."""
        if job.model.projection not in self.known:
            self._rehearse(job)
            self.known.add(job.model.projection)
        return GraphRunner(self, job, self.streams.pop())

    def _rehearse(self, job: Job) -> None:
        """Make steps with a copy on every stream: kernels are compiled and convolutions chosen.

        What is recorded into a graph must not do so for the first time there.
        """
        model, adam = copy.deepcopy((job.model, job.adam))
        for stream in self.streams:
            with torch.cuda.stream(stream), exact_and_tuned():
                step = Step(replace(job, model=model, adam=adam), self.data, self.recipe)
                step.order.copy_(torch.arange(len(step.order)))
                for count in set(batch_sizes(len(self.data.y), self.recipe.batch)):
                    step.counters.zero_()
                    step.train(count)
                step.evaluate()
            stream.synchronize()


class GraphRunner:
    """One job at work on one stream."""

    def __init__(self, engine: Graphs, job: Job, stream: torch.cuda.Stream) -> None:
        self.engine, self.job, self.stream = engine, job, stream
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.sizes = batch_sizes(len(engine.data.y), engine.recipe.batch)
        with torch.cuda.stream(stream):
            self.step = Step(job, engine.data, engine.recipe)
            self.before = [tensor.clone() for tensor in self.step.state()]
        stream.synchronize()
        for count in set(self.sizes):
            self.graphs[count] = self._recorded(count)

    def _recorded(self, count: int) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph would also collect garbage and stop all other streams.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream), exact_and_tuned():
            graph.capture_begin()
            self.step.train(count)
            graph.capture_end()
        return graph

    def steps(self, epoch: int) -> Iterator[None]:
        """Launch one epoch and the evaluation after it."""
        with torch.cuda.stream(self.stream):
            self._begin(epoch)
        marks: list[torch.cuda.Event] = []
        for number, count in enumerate(self.sizes):
            with torch.cuda.stream(self.stream):
                self.graphs[count].replay()
            if number % _AHEAD == 0:
                marks.append(self.stream.record_event())
                if len(marks) > 1:
                    marks.pop(0).synchronize()
            yield
        with torch.cuda.stream(self.stream), exact_and_tuned():
            self.step.evaluate()

    def _begin(self, epoch: int) -> None:
        step = self.step
        torch._foreach_copy_(self.before, step.state())
        seed = torch.tensor(self.job.seed, device=self.engine.device)
        rows = image_order(seed, epoch, len(step.order), mirror=self.engine.mirror)
        step.order.copy_(rows)
        step.counters[0].zero_()
        step.loss.zero_()

    def outcome(self) -> Outcome | None:
        """Wait for the epoch to end and return what it came to, or go back to its start."""
        step = self.step
        with torch.cuda.stream(self.stream):
            found: Tensor = torch.stack(
                [step.finite().double(), step.loss.double(), step.right.double()]
            )
            finite, loss, right = found.tolist()
            if not finite:
                torch._foreach_copy_(step.state(), self.before)
                return None
        return Outcome(loss, right / len(self.engine.data.y_test))

    def close(self) -> None:
        """Bring the job home and give the stream back."""
        with torch.cuda.stream(self.stream):
            self.step.home()
        self.stream.synchronize()
        self.graphs.clear()
        self.engine.streams.append(self.stream)


def exact_and_tuned() -> AbstractContextManager[None]:
    """Let cuDNN time its convolutions and keep the best, and float32 be float32."""
    flags: Callable[..., AbstractContextManager[None]] = torch.backends.cudnn.flags
    return flags(enabled=True, benchmark=True, allow_tf32=False)

"""The first layer: every weight is read once and added to the child that owns it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from fissile._common.llvm import BIT, BYTE, FLOAT, WHOLE, WORD, compiled
from fissile.packed.cpu.instructions import BYTES, SOURCE, Emit, instructions, signature, together

__all__ = ["owned_rows"]


class _Owners(Emit):
    """Reads weights and who owns them."""

    def owners(self, codes: Any, slots: int) -> list[Any]:
        """Return for every child a mask of its weights, read from their lowest bits."""
        low = self.builder.and_(codes, self.all(self.code(), slots - 1))
        return self._masks(low, slots)

    def plane_owners(self, planes: list[Any], j: Any, end: Any, slots: int) -> list[Any]:
        """Return for every child a mask of its weights, read from planes of bits."""
        b = self.builder
        # A mask has a register of its own on wide processors, elsewhere it is a vector of numbers.
        kind = BYTE if self.width == 16 else WORD
        owner = self.all(kind, 0)
        for t, plane in enumerate(planes):
            mask = self._mask(self._bits(plane, j, end), kind)
            owner = b.or_(owner, b.select(mask, self.all(kind, 1 << t), self.all(kind, 0)))
        return self._masks(owner, slots)

    def _mask(self, bits: Any, kind: Any) -> Any:
        b = self.builder
        if kind == BYTE:
            return b.bitcast(bits, self.vector(BIT))
        places = ir.Constant(self.vector(kind), [kind(1 << i) for i in range(self.width)])
        own = b.and_(self.copies(b.zext(bits, kind)), places)
        return b.icmp_unsigned("!=", own, self.all(kind, 0))

    def _masks(self, owner: Any, slots: int) -> list[Any]:
        equal, kind = self.builder.icmp_unsigned, owner.type.element
        return [equal("==", owner, self.all(kind, k)) for k in range(slots)]

    def _bits(self, plane: Any, j: Any, end: Any) -> Any:
        """Return the bits of a vector; where a row may end, no byte beyond it is touched."""
        b, kind = self.builder, ir.IntType(self.width)
        at = b.lshr(j, WHOLE(3))
        if end is None or self.width == 8:
            return b.load(self.address(plane, at, kind), align=1)
        last = b.lshr(b.sub(end, WHOLE(1)), WHOLE(3))
        after = b.add(at, WHOLE(1))
        after = b.select(b.icmp_signed("<", after, last), after, last)
        low, high = (b.load(self.address(plane, i, BYTE)) for i in (at, after))
        return b.or_(b.zext(low, kind), b.shl(b.zext(high, kind), kind(8)))

    def add(self, total: Any, mask: Any, product: Any) -> None:
        """Add where a mask says so: an infinite input must not reach the other children."""
        b = self.builder
        old = b.load(total)
        b.store(b.select(mask, b.fadd(old, product), old), total)


@instructions
def _parent(
    typing: Any, kind: Any, slots: Any, tile: Any, plane: Any, w: Any, planes: Any, step: Any,
    bias: Any, x: Any, y: Any, d: Any, first: Any, batch: Any, child: Any, alpha: Any,
    outputs: Any, relu: Any,
) -> Any:  # fmt: skip
    """Write y[first + t, child + k] = sum of w[j] * x[first + t, j] over child k's inputs j."""
    known = [one.literal_value for one in (kind, slots, tile, plane)]

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, children, samples, layered = known
        w, planes, step, bias, x, y, d, first, batch, child, alpha, outputs, relu = args[4:]
        on = _Owners(context, builder, name)
        # Two children alone would leave the adders waiting for each other.
        unrolled = 2 if children == 2 else 1
        numbers = on.tile(first, batch, samples)
        rows = on.rows(x, numbers, d)
        totals = on.totals(unrolled, samples * children)
        count = (children - 1).bit_length() if layered else 0
        bits = [builder.add(planes, builder.mul(step, WHOLE(t))) for t in range(count)]

        def add(j: Any, copy: list[Any], end: Any = None) -> None:
            inside = None if end is None else on.first(builder.sub(end, j))
            codes = on.load(w, j, on.code(), inside)
            values = on.values(codes)
            masks = on.plane_owners(bits, j, end, children) if bits else on.owners(codes, children)
            # What was pruned is zero and belongs to nobody, though its bits say child 0.
            live = builder.icmp_unsigned("!=", codes, on.all(on.code(), 0))
            masks[0] = builder.and_(masks[0], live)
            for t, row in enumerate(rows):
                product = builder.fmul(values, on.load(row, j, FLOAT, inside))
                for k, mask in enumerate(masks):
                    on.add(copy[t * children + k], mask, product)

        whole = builder.sub(d, builder.urem(d, WHOLE(on.width * unrolled)))
        with on.loop(WHOLE(0), whole, on.width * unrolled) as j:
            for u, copy in enumerate(totals):
                add(builder.add(j, WHOLE(u * on.width)), copy)
        with on.loop(whole, d, on.width) as j:
            add(j, totals[0], d)
        for k in range(children):
            with builder.if_then(builder.icmp_signed("<", WHOLE(k), alpha)):
                for t, row in enumerate(on.rows(y, numbers, outputs)):
                    copies = [copy[t * children + k] for copy in totals]
                    on.write(copies, bias, row, builder.add(child, WHOLE(k)), relu)
        return context.get_dummy_value()

    return signature(kind, slots, tile, plane, numbers=13), emit


@cache
def owned_rows(kind: str, slots: int, tile: int, plane: bool) -> Callable[..., None]:
    """Return a kernel for some parents: addresses, sizes, then the first parent and the end.

    Args:
        kind: the dtype of the weights; inputs, biases and results are float32.
        slots: 2, 4 or 8 children, of which alpha exist.
        tile: samples that share one reading of the weights.
        plane: whether owners are kept apart from the weights.
    """
    size, layered, source = BYTES[kind], int(plane), SOURCE

    @compiled
    def rows(
        w: int, planes: int, bias: int, x: int, y: int,
        h: int, d: int, batch: int, alpha: int, relu: int, lo: int, hi: int,
    ) -> None:  # fmt: skip
        assert source >= 0
        stride, span = (d + 7) // 8, together(d, tile)
        for begin in range(0, batch, span):
            end = min(begin + span, batch)
            for i in range(lo, hi):
                for first in range(begin, end, tile):
                    _parent(
                        kind, slots, tile, layered, w + i * d * size, planes + i * stride,
                        h * stride, bias, x, y, d, first, end, i * alpha, alpha, h * alpha, relu,
                    )  # fmt: skip

    return rows

"""LLVM IR for `rows @ kernel`: rows [M, K] and the result [M, N] float32, the kernel in panels.

A *panel* is the kernel's columns for 16 outputs, [K, 16]: an output's weights are in one lane of a
register all along K. Panels lie one after another, [N / 16, K, 16], each a straight line of memory.

Every output is summed over K in order, in blocks: its value depends neither on how many rows there
are, nor on how the work is cut up.

A *tile* multiplies a few rows with a few panels and keeps all their sums in registers: many panels
for one row, few for many. Its panels lie far apart, because the processor reads ahead in each of
several places, and one place alone does not keep the memory busy. The processor stops at the end of
every page, so the tile itself asks for what lies a page ahead.

Dimensions: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import dataclasses

from llvmlite import ir

from speculative.kernels import call_frame, sharing
from speculative.kernels.llvm import F32, I64, PTR, Code, Machine, function

# Outputs of a panel: a cache line of float32.
PANEL = 16
# K must be a multiple of so many values, of which a tile takes as many before it counts on.
STEP = 4
# Lines that are asked for ahead of their time: a page of float32.
_AHEAD = 64
# Values of K that are added up before their sum is added to the others'.
_BLOCK = 512
# Weights that one thread multiplies in the time that it takes to wake another, and how many rows
# take as long again.
_WORTH_SHARING = 128 * 1024
_ROWS = 16
# Of weights in bfloat16 so many times as many: they are half as long, and those of a draft stay in
# the second cache. With its output matrix shared, whole decodes of the shipped pair took longer.
_BFLOAT16 = 5


@dataclasses.dataclass(frozen=True)
class _Builder:
    """The functions of one machine in one module."""

    module: ir.Module
    machine: Machine

    @property
    def _vectors(self) -> int:
        """Registers of a panel's outputs."""
        return PANEL // self.machine.lanes

    @property
    def _most_rows(self) -> int:
        """Of a tile of one panel, or of two where there are registers for it."""
        return 12 if self.machine.registers * self.machine.lanes >= 512 else 6

    def _panels(self, rows: int) -> list[int]:
        """Panels of the tiles with so many rows: the most there are registers for, in 8 places of
        memory; and fewer, for what is left."""

        def needed(panels: int) -> int:
            vectors = panels * self._vectors
            return rows * vectors + min(rows, vectors) + 1

        most = next(p for p in (8, 6, 4, 3, 2, 1) if p == 1 or needed(p) <= self.machine.registers)
        return [most, *(p for p in (4, 2, 1) if p < most)]

    def tile(self, rows: int, panels: int) -> ir.Function:
        """tile(w, x, y, K, N, apart, count, more): adds up `count` values of K.

        y[m, panel p] = (0, or y[m, panel p] if `more`) + the sum of x[m, k] * w[p, k], the panels
        being `apart` panels from one another.
        """
        name = f"tile_{rows}_{panels}"
        if name in self.module.globals:
            return self.module.globals[name]
        machine, lanes = self.machine, self.machine.lanes
        kinds = (PTR, PTR, PTR, I64, I64, I64, I64, ir.IntType(1))
        made, code = function(self.module, name, *kinds, inlined=False)
        w, x, y, size, width, apart, count, more = made.args
        panel_size = code.mul(size, I64(PANEL))
        w_panels = [
            code.variable(
                code.address(w, machine.element, code.mul(code.mul(apart, I64(p)), panel_size))
            )
            for p in range(panels)
        ]
        x_rows = [code.variable(code.address(x, F32, code.mul(size, I64(m)))) for m in range(rows)]
        vectors = [(p, v) for p in range(panels) for v in range(self._vectors)]
        sums = [[code.variable(machine.constant(0.0)) for _ in vectors] for _ in range(rows)]
        with code.loop(I64(0), count, I64(STEP)):
            w_at_k = [code.get(place, PTR) for place in w_panels]
            x_at_k = [code.get(place, PTR) for place in x_rows]
            for k in range(STEP):
                for panel in w_at_k:
                    code.ask_for(code.address(panel, machine.element, I64((k + _AHEAD) * PANEL)))

                def weights(p, v, w_at_k=w_at_k, k=k):
                    at = I64(k * PANEL + v * lanes)
                    return code.kept(machine, code.address(w_at_k[p], machine.element, at))

                def value(m, x_at_k=x_at_k, k=k):
                    return code.splat(
                        code.load(code.address(x_at_k[m], F32, I64(k)), typ=F32), lanes
                    )

                # What is loaded first stays in registers: the fewer of the two.
                if rows < len(vectors):
                    values = [value(m) for m in range(rows)]
                    pairs = (
                        (m, i, values[m], w_at)
                        for i, w_at in ((i, weights(*one)) for i, one in enumerate(vectors))
                        for m in range(rows)
                    )
                else:
                    w_all = [weights(*one) for one in vectors]
                    pairs = (
                        (m, i, x_at, w_all[i])
                        for m, x_at in ((m, value(m)) for m in range(rows))
                        for i in range(len(vectors))
                    )
                for m, i, x_at, w_at in pairs:
                    before = code.get(sums[m][i], machine.vector())
                    code.store(code.fma(w_at, x_at, before), sums[m][i])
            for places, ats, kind, step in (
                (w_panels, w_at_k, machine.element, STEP * PANEL),
                (x_rows, x_at_k, F32, STEP),
            ):
                for place, at in zip(places, ats, strict=True):
                    code.store(code.address(at, kind, I64(step)), place)
        for m in range(rows):
            for (p, v), place in zip(vectors, sums[m], strict=True):
                at = code.mul(code.mul(apart, I64(p)), I64(PANEL))
                at = code.add(code.add(at, I64(v * lanes)), code.mul(width, I64(m)))
                out = code.address(y, F32, at)
                total = code.get(place, machine.vector())
                with code.if_else(more) as (adds, sets):
                    with adds:
                        before = code.load(out, align=4, typ=machine.vector())
                        code.store(code.fadd(before, total), out, align=4)
                    with sets:
                        code.store(total, out, align=4)
        code.ret_void()
        return made

    def _blocks(self, code: Code, given, over_rows) -> None:
        """For every block of K: `over_rows(w, x, count, more)` for the panel `n`."""
        w, x, size, n = given
        panel = code.mul(n, code.mul(size, I64(PANEL)))
        with code.loop(I64(0), size, I64(_BLOCK)) as k:
            at = code.add(panel, code.mul(k, I64(PANEL)))
            over_rows(
                code.address(w, self.machine.element, at),
                code.address(x, F32, k),
                code.least(I64(_BLOCK), code.sub(size, k)),
                code.icmp_signed(">", k, I64(0)),
            )

    def few(self, rows: int) -> ir.Function:
        """few(w, x, y, K, N, begin, end): panels begin .. end-1, for rows that fit in one tile."""
        made, code = function(self.module, f"few_{rows}", PTR, PTR, PTR, I64, I64, I64, I64)
        w, x, y, size, width, begin, end = made.args
        for panels in self._panels(rows):
            apart = code.sdiv(code.sub(end, begin), I64(panels))
            with code.loop(begin, code.add(begin, apart), I64(1)) as n:
                out = code.address(y, F32, code.mul(n, I64(PANEL)))

                def one(w_at, x_at, count, more, panels=panels, apart=apart, out=out):
                    given = (w_at, x_at, out, size, width, apart, count, more)
                    code.call(self.tile(rows, panels), given)

                self._blocks(code, (w, x, size, n), one)
            begin = code.add(begin, code.mul(apart, I64(panels)))
        code.ret_void()
        return made

    def many(self) -> ir.Function:
        """many(w, x, y, M, K, N, begin, end): the same for rows that need several passes."""
        most = self._most_rows
        sizes = range((most + 1) // 2, most + 1)
        made, code = function(self.module, "many", PTR, PTR, PTR, I64, I64, I64, I64, I64)
        w, x, y, rows, size, width, begin, end = made.args
        for panels in self._panels(most):
            cases = {m: self.tile(m, panels) for m in sizes}
            apart = code.sdiv(code.sub(end, begin), I64(panels))
            with code.loop(begin, code.add(begin, apart), I64(1)) as n:
                out = code.mul(n, I64(PANEL))

                def passes(w_at, x_at, count, more, cases=cases, apart=apart, out=out):
                    def given(first):
                        return (
                            w_at,
                            code.address(x_at, F32, code.mul(first, size)),
                            code.address(y, F32, code.add(out, code.mul(first, width))),
                            size, width, apart, count, more,
                        )  # fmt: skip

                    code.in_passes(rows, most, cases, given)

                self._blocks(code, (w, x, size, n), passes)
            begin = code.add(begin, code.mul(apart, I64(panels)))
        code.ret_void()
        return made

    def product(self) -> ir.Function:
        """product(w, x, y, M, K, N, begin, end): panels begin .. end-1 of y [M, N]."""
        few = {rows: self.few(rows) for rows in range(1, self._most_rows + 1)}
        many = self.many()
        made, code = function(self.module, "product", PTR, PTR, PTR, I64, I64, I64, I64, I64)
        w, x, y, rows, size, width, begin, end = made.args
        fits = code.icmp_signed("<=", rows, I64(self._most_rows))
        with code.if_else(fits) as (in_one, otherwise):
            with in_one:
                code.choose(rows, few, [w, x, y, size, width, begin, end])
            with otherwise:
                code.call(many, list(made.args))
        code.ret_void()
        return made


def write(module: ir.Module, machine: Machine) -> None:
    """Adds the handler of (rows [M, K], panels [N / 16, K, 16]) -> [M, N]."""
    product = _Builder(module, machine).product()

    def unpack(code: Code, call: call_frame.Call) -> sharing.Work:
        x, w, y = call.argument(0), call.argument(1), call.result(0)
        rows, size, panels = x.dimension(0), x.dimension(1), w.dimension(0)
        width = code.mul(panels, I64(PANEL))
        weights = code.mul(width, size)
        extra = code.sdiv(code.mul(weights, rows), I64(_ROWS))
        least = I64(_WORTH_SHARING * (_BFLOAT16 if machine.bfloat16 else 1))
        shared = code.icmp_signed(">=", code.add(weights, extra), least)
        return sharing.Work((w.data, x.data, y.data, rows, size, width), panels, shared)

    call_frame.handler(module, product, unpack)

"""LLVM IR for `rows @ kernel.T`: rows [M, K] and the result [M, N] float32, the kernel [N, K].

Every output is one sum over K, kept in the lanes of one vector register and added up across lanes
at the end: its value depends neither on how many rows there are, nor on how the work is cut up.

From inside out: a *tile* multiplies a few rows with a few kernel rows and keeps all their sums in
registers. Its kernel rows lie far apart, because the processor reads ahead in each of several
places, and one place alone does not keep the memory busy. Where the rows need several tiles, a
*group* of kernel rows is multiplied with all of them while it is in the first two caches, and
meanwhile the next group is asked for.

Dimensions: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from llvmlite import ir

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32, PTR = ir.FloatType(), ir.PointerType()
NULL = ir.Constant(PTR, None)

# Values of K are taken so many at a time, a cache line of float32. K must be a multiple.
LINE = 16
# Kernel rows in a group: a multiple of every tile's.
GROUP = 12
# With more tiles of rows than this there is so much arithmetic that asking ahead only costs.
_ASKING_PASSES = 4


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the code is made for.

    Attributes:
      lanes: floats in a vector register.
      outputs: kernel rows of a tile by its rows, from 1: a register for every sum, for a vector of
        every kernel row, and one more.
      bfloat16: whether the kernel is bfloat16; otherwise it is float32.
    """

    lanes: int
    outputs: tuple[int, ...]
    bfloat16: bool = False

    @property
    def tile_rows(self) -> int:
        """Most rows of a tile."""
        return len(self.outputs)

    @property
    def vector(self) -> ir.Type:
        """A register of floats."""
        return ir.VectorType(F32, self.lanes)

    @property
    def element(self) -> ir.Type:
        """A value of the kernel, as it is in memory."""
        return I16 if self.bfloat16 else F32


AVX2 = Machine(lanes=8, outputs=(4, 4, 3, 3))
AVX512 = Machine(lanes=16, outputs=(4,) * 6)
NEON = Machine(lanes=4, outputs=(4,) * 6)


class Code(ir.IRBuilder):
    """An IR builder with variables, loops and addresses."""

    def room(self, kind: ir.Type) -> ir.Value:
        """Memory for one `kind`, as long as the function runs."""
        with self.goto_entry_block():
            place = self.alloca(kind)
        place.type = PTR  # llvmlite still gives it the type of what it points to.
        return place

    def variable(self, value: ir.Value) -> ir.Value:
        """A place for a value that changes, set to `value`."""
        place = self.room(value.type)
        self.store(value, place)
        return place

    def get(self, place: ir.Value, kind: ir.Type = I64) -> ir.Value:
        """What is there."""
        return self.load(place, typ=kind)

    def address(self, base: ir.Value, kind: ir.Type, *indices: ir.Value) -> ir.Value:
        """`&base[indices]`, `base` pointing to `kind`."""
        return self.gep(base, indices, source_etype=kind)

    def field(self, base: ir.Value, offset: int) -> ir.Value:
        """The address `offset` bytes behind `base`."""
        return self.address(base, ir.IntType(8), I64(offset))

    def least(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The smaller of two integers."""
        return self.select(self.icmp_signed("<", a, b), a, b)

    def ceil_div(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """`a / b`, rounded up."""
        return self.sdiv(self.add(a, self.sub(b, I64(1))), b)

    @contextlib.contextmanager
    def loop(self, begin: ir.Value, end: ir.Value, step: ir.Value) -> Iterator[ir.Value]:
        """`for i in range(begin, end, step)`, i being what it yields."""
        at = self.variable(begin)
        head, body, done = (self.append_basic_block(name) for name in ("head", "body", "done"))
        self.branch(head)
        self.position_at_end(head)
        i = self.get(at)
        self.cbranch(self.icmp_signed("<", i, end), body, done)
        self.position_at_end(body)
        yield i
        self.store(self.add(i, step), at)
        self.branch(head)
        self.position_at_end(done)

    def choose(
        self, value: ir.Value, cases: Mapping[int, ir.Function], given: Sequence[ir.Value]
    ) -> None:
        """Call `cases[value]`; nothing, if there is none."""
        after = self.append_basic_block("after")
        choice = self.switch(value, after)
        for number, target in cases.items():
            case = self.append_basic_block(f"case_{number}")
            choice.add_case(I64(number), case)
            self.position_at_end(case)
            self.call(target, given)
            self.branch(after)
        self.position_at_end(after)


def function(
    module: ir.Module, name: str, result: ir.Type, *arguments: ir.Type, public: bool = False
) -> tuple[ir.Function, Code]:
    """A new function, and the builder at its entry."""
    made = ir.Function(module, ir.FunctionType(result, arguments), name)
    if not public:
        made.linkage = "internal"
    return made, Code(made.append_basic_block("entry"))


def external(module: ir.Module, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
    """A function from elsewhere, declared once: an intrinsic, or one of the C library's."""
    found = module.globals.get(name)
    return found or ir.Function(module, ir.FunctionType(result, arguments), name)


@dataclasses.dataclass(frozen=True)
class _Builder:
    """The functions of one machine in one module."""

    module: ir.Module
    machine: Machine

    def _kernel(self, code: Code, base: ir.Value, index: ir.Value) -> ir.Value:
        """The address of the kernel's value `index` behind `base`."""
        return code.address(base, self.machine.element, index)

    def _kernel_vector(self, code: Code, place: ir.Value) -> ir.Value:
        """A register of the kernel's values, as float32."""
        machine = self.machine
        if not machine.bfloat16:
            return code.load(place, align=4, typ=machine.vector)
        # The upper half of the float32 that it stands for.
        halves = code.load(place, align=2, typ=ir.VectorType(I16, machine.lanes))
        words = ir.VectorType(I32, machine.lanes)
        shift = ir.Constant(words, [16] * machine.lanes)
        return code.bitcast(code.shl(code.zext(halves, words), shift), machine.vector)

    def _fma(self, code: Code, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        vector, lanes = self.machine.vector, self.machine.lanes
        target = external(self.module, f"llvm.fma.v{lanes}f32", *[vector] * 4)
        return code.call(target, [a, b, c])

    def _add_up(self, code: Code, value: ir.Value) -> ir.Value:
        """The sum of the lanes: two halves are added, until one is left."""
        vector, lanes = self.machine.vector, self.machine.lanes
        name = f"llvm.vector.reduce.fadd.v{lanes}f32"
        target = external(self.module, name, F32, F32, vector)
        return code.call(target, [F32(-0.0), value], fastmath=["reassoc"])

    def _ask_for(self, code: Code, place: ir.Value) -> None:
        """Have the line at `place` brought into the second cache."""
        target = external(self.module, "llvm.prefetch.p0", ir.VoidType(), PTR, I32, I32, I32)
        code.call(target, [place, I32(0), I32(2), I32(1)])

    def tile(self, rows: int, outputs: int, *, asking: bool) -> ir.Function:
        """tile(w, x, y, K, N, apart, ahead, other): y[m, p] = sum over k of x[m, k] * w[p, k].

        The p-th kernel row is `apart` rows behind the one before it, as is its output.

        Args:
          asking: whether a row each at `ahead` and `other` is asked for meanwhile.
        """
        name = f"tile_{rows}_{outputs}{'_asking' if asking else ''}"
        if name in self.module.globals:
            return self.module.globals[name]
        machine = self.machine
        made, code = function(
            self.module, name, ir.VoidType(), PTR, PTR, PTR, I64, I64, I64, PTR, PTR
        )
        w, x, y, size, width, apart, *asked = made.args
        stride = code.mul(apart, size)
        w_rows = [self._kernel(code, w, code.mul(stride, I64(p))) for p in range(outputs)]
        x_rows = [code.address(x, F32, code.mul(size, I64(m))) for m in range(rows)]
        zero = ir.Constant(machine.vector, [0.0] * machine.lanes)
        sums = [[code.variable(zero) for _ in range(outputs)] for _ in range(rows)]
        with code.loop(I64(0), size, I64(LINE)) as k:
            for row in asked if asking else ():
                self._ask_for(code, self._kernel(code, row, k))
            for offset in range(0, LINE, machine.lanes):
                at = code.add(k, I64(offset))
                w_at = [self._kernel_vector(code, self._kernel(code, row, at)) for row in w_rows]
                for row, row_sums in zip(x_rows, sums, strict=True):
                    x_at = code.load(code.address(row, F32, at), align=4, typ=machine.vector)
                    for one_w, place in zip(w_at, row_sums, strict=True):
                        before = code.get(place, machine.vector)
                        code.store(self._fma(code, one_w, x_at, before), place)
        for m, row_sums in enumerate(sums):
            for p, place in enumerate(row_sums):
                at = code.add(code.mul(width, I64(m)), code.mul(apart, I64(p)))
                total = self._add_up(code, code.get(place, machine.vector))
                code.store(total, code.address(y, F32, at))
        code.ret_void()
        return made

    def few(self, rows: int) -> ir.Function:
        """few(w, x, y, K, N, begin, end): outputs begin .. end-1 of rows that fit in one tile."""
        outputs = self.machine.outputs[rows - 1]
        tile = self.tile(rows, outputs, asking=False)
        single = self.tile(rows, 1, asking=False)
        made, code = function(
            self.module, f"few_{rows}", ir.VoidType(), PTR, PTR, PTR, I64, I64, I64, I64
        )
        w, x, y, size, width, begin, end = made.args
        apart = code.sdiv(code.sub(end, begin), I64(outputs))
        rest = code.add(begin, code.mul(apart, I64(outputs)))
        for first, last, target in ((begin, code.add(begin, apart), tile), (rest, end, single)):
            with code.loop(first, last, I64(1)) as n:
                at = self._kernel(code, w, code.mul(n, size))
                out = code.address(y, F32, n)
                code.call(target, [at, x, out, size, width, apart, NULL, NULL])
        code.ret_void()
        return made

    def many(self) -> ir.Function:
        """many(w, x, y, M, K, N, begin, end): the same for rows that need several tiles."""
        most, outputs = self.machine.tile_rows, self.machine.outputs[-1]
        # Rows are cut as equally as can be, 4 + 3 for 7: into tiles of at least so many.
        sizes = range((most + 1) // 2, most + 1)
        asking = {m: self.tile(m, outputs, asking=True) for m in sizes}
        tiles = {m: self.tile(m, outputs, asking=False) for m in sizes}
        singles = {m: self.tile(m, 1, asking=False) for m in sizes}
        made, code = function(
            self.module, "many", ir.VoidType(), PTR, PTR, PTR, I64, I64, I64, I64, I64
        )
        w, x, y, rows, size, width, begin, end = made.args
        passes = code.ceil_div(rows, I64(most))
        in_group = I64(GROUP // outputs)
        apart = code.mul(code.sdiv(code.sub(end, begin), I64(GROUP)), in_group)
        middle = code.add(begin, apart)
        rest = code.add(begin, code.mul(apart, I64(outputs)))

        def over_rows(cases, n, count, following) -> None:
            """All rows times the kernel rows n .. n+count-1, and those that are `apart`."""
            done = code.variable(I64(0))
            with code.loop(I64(0), passes, I64(1)) as i:
                at = code.get(done)
                m = code.ceil_div(code.sub(rows, at), code.sub(passes, i))
                # Every pass asks for two rows of the next group.
                asked = [
                    code.mul(code.srem(code.add(code.add(i, i), I64(j)), I64(outputs)), apart)
                    for j in (0, 1)
                ]
                with code.loop(n, code.add(n, count), I64(1)) as row:
                    next_row = code.add(row, following)
                    given = [
                        self._kernel(code, w, code.mul(row, size)),
                        code.address(x, F32, code.mul(at, size)),
                        code.address(y, F32, code.add(code.mul(at, width), row)),
                        size,
                        width,
                        apart,
                        *(
                            self._kernel(code, w, code.mul(code.add(next_row, skipped), size))
                            for skipped in asked
                        ),
                    ]
                    code.choose(m, cases, given)
                code.store(code.add(at, m), done)

        few_passes = code.icmp_signed("<=", passes, I64(_ASKING_PASSES))
        with code.if_else(few_passes) as (asks, otherwise):
            with asks, code.loop(begin, middle, in_group) as n:
                # Nothing is asked for behind the last group: that is another thread's.
                last = code.icmp_signed(">=", code.add(n, in_group), middle)
                over_rows(asking, n, in_group, code.select(last, I64(0), in_group))
            with otherwise, code.loop(begin, middle, in_group) as n:
                over_rows(tiles, n, in_group, I64(0))
        with code.loop(rest, end, I64(1)) as n:
            over_rows(singles, n, I64(1), I64(0))
        code.ret_void()
        return made

    def product(self) -> ir.Function:
        """product(w, x, y, M, K, N, begin, end): columns begin .. end-1 of y [M, N]."""
        most = self.machine.tile_rows
        few = {rows: self.few(rows) for rows in range(1, most + 1)}
        many = self.many()
        made, code = function(
            self.module, "product", ir.VoidType(), PTR, PTR, PTR, I64, I64, I64, I64, I64
        )
        w, x, y, rows, size, width, begin, end = made.args
        with code.if_else(code.icmp_signed("<=", rows, I64(most))) as (fits, otherwise):
            with fits:
                code.choose(rows, few, [w, x, y, size, width, begin, end])
            with otherwise:
                code.call(many, list(made.args))
        code.ret_void()
        return made


def product(module: ir.Module, machine: Machine) -> ir.Function:
    """Adds `product` to the module: see `_Builder.product`."""
    return _Builder(module, machine).product()

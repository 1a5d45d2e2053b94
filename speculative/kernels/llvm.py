"""An LLVM IR builder with variables, loops, addresses and vectors of floats."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, PTR = ir.FloatType(), ir.PointerType()
NULL = ir.Constant(PTR, None)


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the code is made for.

    Attributes:
      lanes: floats in a vector register.
      registers: vector registers.
      bfloat16: whether what is kept in memory (weights, caches) is bfloat16; otherwise float32.
    """

    lanes: int
    registers: int
    bfloat16: bool = False

    @property
    def element(self) -> ir.Type:
        """A value as it is kept in memory."""
        return I16 if self.bfloat16 else F32

    def vector(self, kind: ir.Type = F32) -> ir.VectorType:
        """A register's worth of values."""
        return ir.VectorType(kind, self.lanes)

    def constant(self, value: float) -> ir.Constant:
        """A register with one float in every lane."""
        return ir.Constant(self.vector(), [value] * self.lanes)


AVX2 = Machine(lanes=8, registers=16)
AVX512 = Machine(lanes=16, registers=32)
NEON = Machine(lanes=4, registers=32)


class Code(ir.IRBuilder):
    """The builder."""

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
        return self.address(base, I8, I64(offset))

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

    def in_passes(
        self, count: ir.Value, most: int, cases: Mapping[int, ir.Function], given
    ) -> None:
        """Cut `count` into passes of at most `most`, as equal as can be: 4 and 3 for 7 by 6.

        Calls `cases[size]` with `given(first)`, where `first` is the pass's first item.
        """
        passes = self.ceil_div(count, I64(most))
        done = self.variable(I64(0))
        with self.loop(I64(0), passes, I64(1)) as i:
            at = self.get(done)
            size = self.ceil_div(self.sub(count, at), self.sub(passes, i))
            self.choose(size, cases, given(at))
            self.store(self.add(at, size), done)

    # Vectors of floats.

    def intrinsic(self, name: str, result: ir.Type, *given: ir.Value, **settings) -> ir.Value:
        """Call one of LLVM's own functions."""
        target = external(self.module, f"llvm.{name}", result, *(g.type for g in given))
        return self.call(target, given, **settings)

    def splat(self, value: ir.Value, lanes: int) -> ir.Value:
        """The value in every lane."""
        kind = ir.VectorType(value.type, lanes)
        one = self.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """`a * b + c`, rounded once."""
        return self.intrinsic(f"fma.v{a.type.count}f32", a.type, a, b, c)

    def largest(self, value: ir.Value) -> ir.Value:
        """The largest lane; a NaN is passed over."""
        return self.intrinsic(f"vector.reduce.fmax.v{value.type.count}f32", F32, value)

    def add_up(self, value: ir.Value) -> ir.Value:
        """The sum of the lanes: two halves are added, until one is left."""
        name = f"vector.reduce.fadd.v{value.type.count}f32"
        return self.intrinsic(name, F32, F32(-0.0), value, fastmath=["reassoc"])

    def widened(self, value: ir.Value) -> ir.Value:
        """A vector of float32 from one of bfloat16 (as I16), of which it has the upper half."""
        lanes = value.type.count
        words = ir.VectorType(I32, lanes)
        shift = ir.Constant(words, [16] * lanes)
        return self.bitcast(self.shl(self.zext(value, words), shift), ir.VectorType(F32, lanes))

    def kept(self, machine: Machine, place: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """A register of values that are kept in memory, as float32; 0 where the mask is false."""
        kind = machine.vector(machine.element)
        align = 2 if machine.bfloat16 else 4
        if mask is None:
            value = self.load(place, align=align, typ=kind)
        else:
            value = self.masked(place, kind, align, mask)
        return self.widened(value) if machine.bfloat16 else value

    def masked(self, place: ir.Value, kind: ir.VectorType, align: int, mask: ir.Value) -> ir.Value:
        """What is there in the lanes where the mask is true, and 0; the others are not read."""
        names = {F32: "f32", I16: "i16", I8: "i8"}
        name = f"masked.load.v{kind.count}{names[kind.element]}.p0"
        zero = ir.Constant(kind, [0] * kind.count)
        return self.intrinsic(name, kind, place, I32(align), mask, zero)

    def put(self, place: ir.Value, value: ir.Value, mask: ir.Value | None = None) -> None:
        """Store a register of floats: the lanes where the mask is true."""
        if mask is None:
            self.store(value, place, align=4)
            return
        name = f"masked.store.v{value.type.count}f32.p0"
        self.intrinsic(name, ir.VoidType(), value, place, I32(4), mask)

    def lanes_below(self, machine: Machine, count: ir.Value) -> ir.Value:
        """The mask of the first `count` lanes; all from the number of lanes on, none at 0."""
        numbers = ir.Constant(machine.vector(I64), list(range(machine.lanes)))
        return self.icmp_signed("<", numbers, self.splat(count, machine.lanes))

    def ask_for(self, place: ir.Value) -> None:
        """Have the line at `place` brought into the second cache."""
        self.intrinsic("prefetch.p0", ir.VoidType(), place, I32(0), I32(2), I32(1))


def function(
    module: ir.Module,
    name: str,
    *arguments: ir.Type,
    result: ir.Type | None = None,
    inlined: bool = True,
) -> tuple[ir.Function, Code]:
    """A new function of the module's own, and the builder at its entry.

    A large one should not be `inlined`: LLVM takes more than its share of time over the whole.
    """
    made = ir.Function(module, ir.FunctionType(result or ir.VoidType(), arguments), name)
    made.linkage = "internal"
    if not inlined:
        made.attributes.add("noinline")
    return made, Code(made.append_basic_block("entry"))


def external(module: ir.Module, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
    """A function from elsewhere, declared once: an intrinsic, or one of the C library's."""
    found = module.globals.get(name)
    return found or ir.Function(module, ir.FunctionType(result, arguments), name)

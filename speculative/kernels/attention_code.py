"""LLVM IR for the attention of a few queries to keys and values that are kept.

Keys are [B, H, D, T], positions side by side, and values [B, H, T, D], features side by side: in
the logits a register's lanes are positions, in the output features, and no sum runs across lanes
but the softmax's own.

A query's output depends neither on how many others there are, nor on how the work is cut up, as
long as the values are finite: a value that only others see is multiplied with 0.

Dimensions: B batch, M queries of a row, H heads, D features of a head, T positions.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from llvmlite import ir

from speculative.kernels import call_frame, sharing
from speculative.kernels.llvm import F32, I8, I32, I64, PTR, Code, Machine, function

# D must be a multiple, so that registers of features have no rest on any machine.
FEATURES = 16
# Sums over D that are kept apart, so that one addition need not wait for another.
_PARTIAL = 4
# Multiplications that one thread does in the time that it takes to wake another.
_WORTH_SHARING = 2000000

_LOG2_E = 1 / math.log(2)
_LN2_HIGH = float(np.float32(0.693145751953125))  # Ends in zeros: times a small number it is exact.
_LN2_LOW = math.log(2) - _LN2_HIGH
# Added to a small number, and taken off again, it leaves the nearest whole one.
_ROUNDS = 1.5 * 2.0**23
# Below, the exponential is 0: a float32 could not hold it with all its bits.
_LOWEST = -87.0


@dataclasses.dataclass(frozen=True)
class _Builder:
    """The functions of one machine in one module.

    Attributes:
      causal: queries at positions of their own, which see what is at or before them, with a bias by
        distance; otherwise all queries see the positions that a mask names.
      masked: the logit of a position that may not be seen, where a mask says so.
    """

    module: ir.Module
    machine: Machine
    causal: bool
    masked: float

    @property
    def _most_rows(self) -> int:
        return 6 if self.machine.registers >= 32 else 3

    def _exponential(self, code: Code, x: ir.Value) -> ir.Value:
        """e to the x, for x <= 0, to a rounding or two; NaN for NaN."""
        lanes = self.machine.lanes
        shifted = code.fma(x, self.machine.constant(_LOG2_E), self.machine.constant(_ROUNDS))
        power = code.fsub(shifted, self.machine.constant(_ROUNDS))
        rest = code.fma(power, self.machine.constant(-_LN2_HIGH), x)
        rest = code.fma(power, self.machine.constant(-_LN2_LOW), rest)
        # Taylor's series: the rest is at most ln(2) / 2, and the first term left out 5e-9.
        value = self.machine.constant(1 / math.factorial(7))
        for n in range(6, -1, -1):
            value = code.fma(value, rest, self.machine.constant(1 / math.factorial(n)))
        words = ir.VectorType(I32, lanes)
        whole = code.shl(code.bitcast(shifted, words), ir.Constant(words, [23] * lanes))
        scaled = code.bitcast(code.add(code.bitcast(value, words), whole), self.machine.vector())
        too_low = code.fcmp_ordered("<", x, self.machine.constant(_LOWEST))
        value = code.select(too_low, self.machine.constant(0.0), scaled)
        return code.select(code.fcmp_unordered("uno", x, x), x, value)

    def tile(self, rows: int) -> ir.Function:
        """tile(q, keys, values, scratch, out, W, D, T, O, seen, extra): some queries of one head.

        Args of the function:
          q: the first query's features of this head; the next query is W behind.
          keys, values: of this row and head.
          scratch: [rows, T rounded up to a register] float32, for the exponentials.
          out: like q, O apart.
          seen: positions that the first query sees, one more for each after it (causal).
          extra: its bias for position 0, for the next query one before it (causal); or the mask.
        """
        machine, lanes = self.machine, self.machine.lanes
        kinds = (PTR,) * 5 + (I64,) * 5 + (PTR,)
        made, code = function(self.module, f"tile_{rows}", *kinds, inlined=False)
        q, keys, values, scratch, out, q_stride, size, length, out_stride, seen, extra = made.args
        least = self.machine.constant(-math.inf)
        stride = code.mul(code.ceil_div(length, I64(lanes)), I64(lanes))
        limit = length
        if self.causal:
            limit = code.least(code.add(seen, I64(rows - 1)), length)
        highest = [code.variable(least) for _ in range(rows)]
        scores = [code.address(scratch, F32, code.mul(stride, I64(m))) for m in range(rows)]
        queries = [code.address(q, F32, code.mul(q_stride, I64(m))) for m in range(rows)]

        def logits(at: ir.Value, whole: bool) -> None:
            """Of the positions at .. at + lanes - 1, of which the last may not exist."""
            there = None if whole else code.lanes_below(machine, code.sub(length, at))
            zero = self.machine.constant(0.0)
            sums = [[code.variable(zero) for _ in range(_PARTIAL)] for _ in range(rows)]
            with code.loop(I64(0), size, I64(_PARTIAL)) as d:
                for i in range(_PARTIAL):
                    feature = code.add(d, I64(i))
                    place = code.add(code.mul(feature, length), at)
                    key = code.kept(machine, code.address(keys, machine.element, place), there)
                    for m in range(rows):
                        value = code.load(code.address(queries[m], F32, feature), typ=F32)
                        before = code.get(sums[m][i], machine.vector())
                        code.store(code.fma(code.splat(value, lanes), key, before), sums[m][i])
            for m in range(rows):
                a, b, c, d = (code.get(place, machine.vector()) for place in sums[m])
                logit = code.fadd(code.fadd(a, b), code.fadd(c, d))
                if self.causal:
                    place = code.address(extra, F32, code.sub(at, I64(m)))
                    visible = code.lanes_below(machine, code.sub(code.add(seen, I64(m)), at))
                    bias = code.masked(place, machine.vector(), 4, visible)
                    logit = code.select(visible, code.fadd(logit, bias), least)
                else:
                    place, kind = code.address(extra, I8, at), machine.vector(I8)
                    if whole:
                        mask = code.load(place, align=1, typ=kind)
                    else:
                        mask = code.masked(place, kind, 1, there)
                    shown = code.icmp_unsigned("!=", mask, ir.Constant(kind, [0] * lanes))
                    logit = code.select(shown, logit, self.machine.constant(self.masked))
                if not whole:
                    logit = code.select(there, logit, least)
                code.store(logit, code.address(scores[m], F32, at), align=4)
                before = code.get(highest[m], machine.vector())
                name = f"maxnum.v{lanes}f32"
                code.store(code.intrinsic(name, machine.vector(), before, logit), highest[m])

        with code.loop(I64(0), limit, I64(lanes)) as at:
            inside = code.icmp_signed("<=", code.add(at, I64(lanes)), length)
            with code.if_else(inside) as (whole, partly):
                with whole:
                    logits(at, True)
                with partly:
                    logits(at, False)
        shares = []
        for m in range(rows):
            top = code.splat(code.largest(code.get(highest[m], machine.vector())), lanes)
            total = code.variable(self.machine.constant(0.0))
            with code.loop(I64(0), limit, I64(lanes)) as at:
                place = code.address(scores[m], F32, at)
                logit = code.load(place, align=4, typ=machine.vector())
                value = self._exponential(code, code.fsub(logit, top))
                code.store(value, place, align=4)
                code.store(code.fadd(code.get(total, machine.vector()), value), total)
            mass = code.add_up(code.get(total, machine.vector()))
            shares.append(code.splat(code.fdiv(F32(1.0), mass), lanes))

        begin = I64(0)
        for chunk in (c for c in (4, 2, 1) if c == 1 or rows * c + c + 1 <= machine.registers):
            # As many chunks of registers as there are features left for.
            step = I64(chunk * lanes)
            end = code.add(begin, code.mul(code.sdiv(code.sub(size, begin), step), step))
            with code.loop(begin, end, step) as first:
                self._outputs(
                    code, chunk, first, (values, scores, out, size, limit, out_stride), shares
                )
            begin = end
        code.ret_void()
        return made

    def _outputs(self, code: Code, chunk: int, first: ir.Value, given, shares) -> None:
        """Some of a head's features of every query."""
        machine, lanes = self.machine, self.machine.lanes
        values, scores, out, size, limit, out_stride = given
        zero = self.machine.constant(0.0)
        sums = [[code.variable(zero) for _ in range(chunk)] for _ in shares]
        with code.loop(I64(0), limit, I64(1)) as at:
            place = code.add(code.mul(at, size), first)
            held = [
                code.kept(
                    machine,
                    code.address(values, machine.element, code.add(place, I64(c * lanes))),
                )
                for c in range(chunk)
            ]
            for score, row in zip(scores, sums, strict=True):
                weight = code.load(code.address(score, F32, at), typ=F32)
                weight = code.splat(weight, lanes)
                for value, total in zip(held, row, strict=True):
                    before = code.get(total, machine.vector())
                    code.store(code.fma(weight, value, before), total)
        for m, (row, share) in enumerate(zip(sums, shares, strict=True)):
            for c, total in enumerate(row):
                at = code.add(code.mul(out_stride, I64(m)), code.add(first, I64(c * lanes)))
                value = code.fmul(code.get(total, machine.vector()), share)
                code.store(value, code.address(out, F32, at), align=4)

    def attend(self) -> ir.Function:
        """attend(q, keys, values, scratch, out, W, D, T, M, H, seen, extra, X, begin, end).

        Pairs begin .. end-1 of a batch row and a head. `seen` points to [B] int32 (causal), X is
        how far `extra` is from row to row (mask), or from head to head (bias).
        """
        machine = self.machine
        kinds = (PTR,) * 5 + (I64,) * 5 + (PTR, PTR, I64, I64, I64)
        made, code = function(self.module, "attend", *kinds)
        (q, keys, values, scratch, out, q_stride, size, length, queries, heads,
         seen, extra, apart, begin, end) = made.args  # fmt: skip
        tiles = {rows: self.tile(rows) for rows in range(1, self._most_rows + 1)}
        lanes = I64(machine.lanes)
        padded = code.mul(code.ceil_div(length, lanes), lanes)
        out_stride = code.mul(heads, size)
        with code.loop(begin, end, I64(1)) as pair:
            row, head = code.sdiv(pair, heads), code.srem(pair, heads)
            kept = code.mul(code.mul(pair, size), length)
            features = code.mul(head, size)
            first = code.mul(row, queries)
            if self.causal:
                position = code.get(code.address(seen, I32, row), I32)
                before = code.add(code.sext(position, I64), I64(1))
                # Where there is no room for all queries, what is written is moved, too.
                room = code.add(code.sub(length, queries), I64(1))
                before = code.least(before, room)
                before = code.select(code.icmp_signed("<", before, I64(1)), I64(1), before)
                # The bias lies so that position t of a query at p is at T - 1 - p + t.
                start = code.add(code.mul(head, apart), code.sub(length, before))
                beside = code.address(extra, F32, start)
            else:
                before = length
                beside = code.address(extra, I8, code.mul(row, apart))

            def given(m):
                query = code.add(first, m)
                at = code.add(code.mul(query, q_stride), features)
                to = code.add(code.mul(query, out_stride), features)
                own = code.mul(code.add(code.mul(pair, queries), m), padded)
                place = beside
                if self.causal:
                    place = code.address(beside, F32, code.sub(I64(0), m))
                return (
                    code.address(q, F32, at),
                    code.address(keys, machine.element, kept),
                    code.address(values, machine.element, kept),
                    code.address(scratch, F32, own),
                    code.address(out, F32, to),
                    q_stride,
                    size,
                    length,
                    out_stride,
                    code.add(before, m),
                    place,
                )

            code.in_passes(queries, self._most_rows, tiles, given)
        code.ret_void()
        return made


def _write(module: ir.Module, machine: Machine, *, causal: bool, masked: float) -> None:
    builder = _Builder(module, machine, causal, masked)
    attend = builder.attend()

    def unpack(code: Code, call: call_frame.Call) -> sharing.Work:
        q, keys, values, extra = (call.argument(i) for i in (0, 1, 2, 3))
        seen = call.argument(4).data if causal else extra.data
        batch, heads, size, length = (keys.dimension(axis) for axis in range(4))
        queries = q.dimension(1)
        given = (
            q.data, keys.data, values.data, call.result(1).data, call.result(0).data,
            q.dimension(2), size, length, queries, heads, seen, extra.data, extra.dimension(1),
        )  # fmt: skip
        pairs = code.mul(batch, heads)
        work = code.mul(code.mul(pairs, queries), code.mul(size, length))
        return sharing.Work(given, pairs, code.icmp_signed(">=", work, I64(_WORTH_SHARING)))

    call_frame.handler(module, attend, unpack)


def write_causal(module: ir.Module, machine: Machine) -> None:
    """Adds the handler of (queries [B, M, W], keys, values, bias [H, T], lengths [B])
    -> ([B, M, H * D], scratch): head h's queries are at columns h * D of W."""
    _write(module, machine, causal=True, masked=0.0)


def write_masked(module: ir.Module, machine: Machine) -> None:
    """Adds the handler of (queries [B, M, W], keys, values, mask [B, T] bool) -> the same. What the
    mask hides has a logit of -1e10, as in T5X."""
    _write(module, machine, causal=False, masked=-1e10)

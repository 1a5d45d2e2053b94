"""LLVM IR for what is done to every row of [M, N] float32 by itself: argmax, and T5's norm."""

from __future__ import annotations

import math

from llvmlite import ir

from speculative.kernels import call_frame, sharing
from speculative.kernels.llvm import F32, I32, I64, PTR, Code, Machine, function

# Values that one thread goes over in the time that it takes to wake another.
_WORTH_SHARING = 512 * 1024
_EPSILON = 1e-6


def _vectors(code: Code, machine: Machine, row: ir.Value, size: ir.Value, missing: float, body):
    """`body(at, vector, there)` for every register's worth of a row; `there` is None but for the
    last, of which the missing lanes have the value `missing`."""
    lanes = I64(machine.lanes)
    whole = code.mul(code.sdiv(size, lanes), lanes)
    with code.loop(I64(0), whole, lanes) as at:
        body(at, code.load(code.address(row, F32, at), align=4, typ=machine.vector()), None)
    with code.if_then(code.icmp_signed("<", whole, size)):
        there = code.lanes_below(machine, code.sub(size, whole))
        place = code.address(row, F32, whole)
        vector = code.masked(place, machine.vector(), 4, there)
        body(whole, code.select(there, vector, machine.constant(missing)), there)


def _largest(module: ir.Module, machine: Machine) -> ir.Function:
    """largest(x, y, N, begin, end): y[m] = the first place of row m's largest value; N - 1 where it
    has a NaN."""
    made, code = function(module, "largest", PTR, PTR, I64, I64, I64)
    x, y, size, begin, end = made.args
    lanes = machine.lanes
    booleans = ir.VectorType(ir.IntType(1), lanes)
    with code.loop(begin, end, I64(1)) as m:
        row = code.address(x, F32, code.mul(m, size))
        top = code.variable(machine.constant(-math.inf))
        odd = code.variable(ir.Constant(booleans, [0] * lanes))

        def see(at, vector, there, top=top, odd=odd):
            name = f"maxnum.v{lanes}f32"
            highest = code.get(top, machine.vector())
            code.store(code.intrinsic(name, machine.vector(), highest, vector), top)
            is_nan = code.fcmp_unordered("uno", vector, vector)
            code.store(code.or_(code.get(odd, booleans), is_nan), odd)

        _vectors(code, machine, row, size, -math.inf, see)
        mask = ir.IntType(lanes)
        some_nan = code.icmp_unsigned("!=", code.bitcast(code.get(odd, booleans), mask), mask(0))
        best = code.splat(code.largest(code.get(top, machine.vector())), lanes)
        found = code.variable(code.sub(size, I64(1)))
        # From the end, so that the first place is the last to be noted.
        steps = code.ceil_div(size, I64(lanes))
        with code.loop(I64(0), code.select(some_nan, I64(0), steps), I64(1)) as i:
            at = code.mul(code.sub(code.sub(steps, I64(1)), i), I64(lanes))
            there = code.lanes_below(machine, code.sub(size, at))
            vector = code.masked(code.address(row, F32, at), machine.vector(), 4, there)
            equal = code.and_(code.fcmp_ordered("==", vector, best), there)
            bits = code.bitcast(equal, mask)
            with code.if_then(code.icmp_unsigned("!=", bits, mask(0))):
                first = code.intrinsic(f"cttz.i{lanes}", mask, bits, ir.IntType(1)(1))
                code.store(code.add(at, code.zext(first, I64)), found)
        code.store(code.trunc(code.get(found), I32), code.address(y, I32, m))
    code.ret_void()
    return made


def _norm(module: ir.Module, machine: Machine) -> ir.Function:
    """norm(x, scale, y, N, begin, end): y[m] = x[m] / sqrt(mean of x[m]^2 + 1e-6) * scale."""
    made, code = function(module, "norm", PTR, PTR, PTR, I64, I64, I64)
    x, scale, y, size, begin, end = made.args
    with code.loop(begin, end, I64(1)) as m:
        start = code.mul(m, size)
        row, out = code.address(x, F32, start), code.address(y, F32, start)
        squares = code.variable(machine.constant(0.0))

        def add(at, vector, there, squares=squares):
            before = code.get(squares, machine.vector())
            code.store(code.fma(vector, vector, before), squares)

        _vectors(code, machine, row, size, 0.0, add)
        total = code.add_up(code.get(squares, machine.vector()))
        mean = code.fdiv(total, code.sitofp(size, F32))
        root = code.intrinsic("sqrt.f32", F32, code.fadd(mean, F32(_EPSILON)))
        share = code.splat(code.fdiv(F32(1.0), root), machine.lanes)

        def write(at, vector, there, share=share, out=out):
            place = code.address(scale, F32, at)
            factors = code.kept(machine, place, there)
            value = code.fmul(code.fmul(vector, share), factors)
            code.put(code.address(out, F32, at), value, there)

        _vectors(code, machine, row, size, 0.0, write)
    code.ret_void()
    return made


def write_largest(module: ir.Module, machine: Machine) -> None:
    """Adds the handler of (x [M, N]) -> [M] int32."""
    largest = _largest(module, machine)

    def unpack(code: Code, call: call_frame.Call) -> sharing.Work:
        x = call.argument(0)
        rows, size = x.dimension(0), x.dimension(1)
        shared = code.icmp_signed(">=", code.mul(rows, size), I64(_WORTH_SHARING))
        return sharing.Work((x.data, call.result(0).data, size), rows, shared)

    call_frame.handler(module, largest, unpack)


def write_norm(module: ir.Module, machine: Machine) -> None:
    """Adds the handler of (x [M, N], scale [N]) -> [M, N]."""
    norm = _norm(module, machine)

    def unpack(code: Code, call: call_frame.Call) -> sharing.Work:
        x, scale = call.argument(0), call.argument(1)
        rows, size = x.dimension(0), x.dimension(1)
        shared = code.icmp_signed(">=", code.mul(rows, size), I64(_WORTH_SHARING))
        return sharing.Work((x.data, scale.data, call.result(0).data, size), rows, shared)

    call_frame.handler(module, norm, unpack)

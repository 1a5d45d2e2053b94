"""The sharing of a call's work with threads of XLA's pool, in LLVM IR.

To wake one takes as long as half a megabyte of weights does, and a decoding step has dozens of
calls; so a thread that has helped stays a little while and looks whether there is more: for a task
in one of the *slots*, which all handlers of a process share. Whoever has a task first puts it
there, as often as there are threads that look, and asks the pool for the others. What nobody took
is taken back when the work is done.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
from collections.abc import Callable, Sequence
from typing import Protocol

from llvmlite import ir

from speculative.kernels.llvm import I32, I64, PTR, Code, external, function

# Places for tasks, a cache line of them, behind the line with the number of threads that look.
_SLOTS, _SLOT_BYTES, _FIRST_SLOT = 8, 8, 64
_SLOT_MEMORY = ctypes.create_string_buffer(3 * 64)
_LOOKING = -(-ctypes.addressof(_SLOT_MEMORY) // 64) * 64
# Never freed: at exit a thread may still be looking.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_SLOT_MEMORY))
# How often one looks before it goes: 30 microseconds on a Xeon with AVX-512.
_LOOKS = 2000
# Chunks for each thread, so that one that is held up leaves its work to the others.
_CHUNKS = 2
_SPINS = 2000


# What the threads of one call share, before what the work itself needs. `owners` counts those that
# still may look at it.
_HELP, _NEXT, _DONE, _OWNERS, _CHUNK, _UNITS, _COUNT, _GIVEN = range(8)


@dataclasses.dataclass(frozen=True)
class Work:
    """What there is to do.

    Attributes:
      given: the first arguments of the function that does it; behind them it gets two numbers,
        begin and end, of the units that it is to do.
      units: how many there are.
      shared: whether it is worth waking other threads.
    """

    given: Sequence[ir.Value]
    units: ir.Value
    shared: ir.Value


@dataclasses.dataclass(frozen=True)
class _Task:
    """The record that the threads share."""

    given: tuple[ir.Type, ...]

    @property
    def kind(self) -> ir.LiteralStructType:
        return ir.LiteralStructType([PTR] + [I64] * (_GIVEN - 1) + list(self.given))

    def part(self, code: Code, task: ir.Value, number: int) -> ir.Value:
        """The address of one of its fields."""
        return code.address(task, self.kind, I32(0), I32(number))

    def get(self, code: Code, task: ir.Value, number: int) -> ir.Value:
        return code.get(self.part(code, task, number), self.kind.elements[number])

    def add(self, code: Code, task: ir.Value, number: int, value: int) -> ir.Value:
        """Adds to a field; what it was before."""
        return code.atomic_rmw("add", self.part(code, task, number), I64(value), "seq_cst")


def _worker(module: ir.Module, record: _Task, work: ir.Function) -> ir.Function:
    """worker(task): takes chunks until there are none."""
    made, code = function(module, "worker", PTR)
    (task,) = made.args
    take, do, leave = (code.append_basic_block(n) for n in ("take", "do", "leave"))
    code.branch(take)
    code.position_at_end(take)
    taken = record.add(code, task, _NEXT, 1)
    code.cbranch(code.icmp_signed("<", taken, record.get(code, task, _COUNT)), do, leave)
    code.position_at_end(do)
    chunk = record.get(code, task, _CHUNK)
    begin = code.mul(taken, chunk)
    end = code.least(record.get(code, task, _UNITS), code.add(begin, chunk))
    given = [record.get(code, task, _GIVEN + i) for i in range(len(record.given))]
    code.call(work, [*given, begin, end])
    record.add(code, task, _DONE, 1)
    code.branch(take)
    code.position_at_end(leave)
    code.ret_void()
    return made


def _release(module: ir.Module, record: _Task) -> ir.Function:
    """release(task): whoever leaves last frees it."""
    made, code = function(module, "release", PTR)
    (task,) = made.args
    last = code.icmp_signed("==", record.add(code, task, _OWNERS, -1), I64(1))
    with code.if_then(last):
        code.call(external(module, "free", ir.VoidType(), PTR), [task])
    code.ret_void()
    return made


def _help(module: ir.Module, worker: ir.Function, release: ir.Function) -> ir.Function:
    """help(task): another thread's part in it."""
    made, code = function(module, "help", PTR)
    code.call(worker, [made.args[0]])
    code.call(release, [made.args[0]])
    code.ret_void()
    return made


def _shared(code: Code, offset: int) -> ir.Value:
    return code.inttoptr(I64(_LOOKING + offset), PTR)


def _slots(code: Code) -> list[ir.Value]:
    return [_shared(code, _FIRST_SLOT + _SLOT_BYTES * i) for i in range(_SLOTS)]


def _other_cores() -> int:
    """Cores that this process may use beside one, at most as many as there are slots."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(cores - 1, _SLOTS)


def _pause(code: Code) -> None:
    """Leave the core to its other thread, if it has one."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        code.intrinsic("aarch64.hint", ir.VoidType(), I32(1))
    else:
        code.intrinsic("x86.sse2.pause", ir.VoidType())


def _helper(module: ir.Module, help_with: ir.Function) -> ir.Function:
    """helper(task): what the pool runs: helps with the task, and then with others for a while."""
    made, code = function(module, "helper", PTR)
    code.call(help_with, [made.args[0]])
    looking, nothing = _shared(code, 0), I64(0)
    looks = code.variable(I64(0))
    begin, look, leave = (code.append_basic_block(n) for n in ("begin", "look", "leave"))
    code.branch(begin)
    code.position_at_end(begin)
    # More of them than there are other cores would be in the way.
    already = code.atomic_rmw("add", looking, I64(1), "seq_cst")
    code.cbranch(code.icmp_signed("<", already, I64(_other_cores())), look, leave)
    code.position_at_end(look)
    for slot in _slots(code):
        there = code.load_atomic(slot, "monotonic", 8, typ=I64)
        with code.if_then(code.icmp_unsigned("!=", there, nothing)):
            task = code.atomic_rmw("xchg", slot, nothing, "seq_cst")
            with code.if_then(code.icmp_unsigned("!=", task, nothing)):
                code.atomic_rmw("add", looking, I64(-1), "seq_cst")
                place = code.inttoptr(task, PTR)
                target = code.get(place, ir.FunctionType(ir.VoidType(), [PTR]).as_pointer())
                code.call(target, [place])
                code.store(nothing, looks)
                code.branch(begin)
    _pause(code)
    code.store(code.add(code.get(looks), I64(1)), looks)
    code.cbranch(code.icmp_signed("<", code.get(looks), I64(_LOOKS)), look, leave)
    code.position_at_end(leave)
    code.atomic_rmw("add", looking, I64(-1), "seq_cst")
    code.ret_void()
    return made


def _put(module: ir.Module) -> ir.Function:
    """put(task, wanted): offers it to so many of the threads that look; how many it may get."""
    made, code = function(module, "put", PTR, I64, result=I64)
    task, wanted = made.args
    number = code.ptrtoint(task, I64)
    looking = code.load_atomic(_shared(code, 0), "monotonic", 8, typ=I64)
    wanted = code.least(wanted, looking)
    put = code.variable(I64(0))
    for slot in _slots(code):
        with code.if_then(code.icmp_signed("<", code.get(put), wanted)):
            result = code.cmpxchg(slot, I64(0), number, "seq_cst", "seq_cst")
            done = code.zext(code.extract_value(result, 1), I64)
            code.store(code.add(code.get(put), done), put)
    code.ret(code.get(put))
    return made


def _take_back(module: ir.Module, record: _Task) -> ir.Function:
    """take_back(task): out of the slots where it still is."""
    made, code = function(module, "take_back", PTR)
    (task,) = made.args
    number = code.ptrtoint(task, I64)
    for slot in _slots(code):
        result = code.cmpxchg(slot, number, I64(0), "seq_cst", "seq_cst")
        with code.if_then(code.extract_value(result, 1)):
            record.add(code, task, _OWNERS, -1)
    code.ret_void()
    return made


class Pool(Protocol):
    """A pool of threads, as code that calls it."""

    def threads(self) -> ir.Value:
        """How many threads there are, 1 without a pool."""

    def schedule(self, task: ir.Function, data: ir.Value) -> ir.Value:
        """Ask for `task(data)` on another thread; whether that was refused."""


def _wait(code: Code, record: _Task, task: ir.Value, count: ir.Value) -> None:
    """Until all chunks are done: others may still be at those that they took."""
    wait, again, finished = (code.append_basic_block(n) for n in ("wait", "again", "finished"))
    spins = code.variable(I64(0))
    code.branch(wait)
    code.position_at_end(wait)
    done = code.load_atomic(record.part(code, task, _DONE), "acquire", 8, typ=I64)
    code.cbranch(code.icmp_signed("<", done, count), again, finished)
    code.position_at_end(again)
    turn = code.add(code.get(spins), I64(1))
    code.store(turn, spins)
    with code.if_then(code.icmp_signed(">", turn, I64(_SPINS))):
        code.call(external(code.module, "sched_yield", I32), [])
    code.branch(wait)
    code.position_at_end(finished)


def sharer(module: ir.Module, work: ir.Function) -> Callable[[Code, Work, Pool], None]:
    """What writes the code that does the work, alone or with others, until all of it is done.

    Args:
      work: work(*given, begin, end), see `Work`.
    """
    record = _Task(work.function_type.args[:-2])
    worker, release = _worker(module, record, work), _release(module, record)
    help_with = _help(module, worker, release)
    helper, put, take_back = _helper(module, help_with), _put(module), _take_back(module, record)

    def share(code: Code, todo: Work, pool: Pool) -> None:
        one = code.variable(I64(1))
        with code.if_then(todo.shared):
            code.store(pool.threads(), one)
        threads = code.get(one)
        alone = code.icmp_signed("==", threads, I64(1))
        chunks = code.select(alone, I64(1), code.mul(threads, I64(_CHUNKS)))
        chunk = code.ceil_div(todo.units, chunks)
        count = code.ceil_div(todo.units, chunk)
        helpers = code.sub(code.least(threads, count), I64(1))
        malloc = external(module, "malloc", PTR, I64)
        task = code.call(malloc, [I64(8 * len(record.kind.elements))])
        owners = code.add(helpers, I64(1))
        values = (help_with, I64(0), I64(0), owners, chunk, todo.units, count, *todo.given)
        for number, value in enumerate(values):
            code.store(value, record.part(code, task, number))
        given_out = code.variable(I64(0))
        helped = code.icmp_signed(">", helpers, I64(0))
        with code.if_then(helped):
            code.store(code.call(put, [task, helpers]), given_out)
            others = code.loop(code.get(given_out), helpers, I64(1))
            with others, code.if_then(pool.schedule(helper, task)):
                record.add(code, task, _OWNERS, -1)
        code.call(worker, [task])
        with code.if_then(code.icmp_signed(">", code.get(given_out), I64(0))):
            code.call(take_back, [task])
        _wait(code, record, task, count)
        code.call(release, [task])

    return share

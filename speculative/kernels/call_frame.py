"""The handler that XLA calls (its FFI), in LLVM IR: it takes a call apart and shares out the work.

The layouts of the structures are those of `xla/ffi/api/c_api.h`, which jaxlib ships; its promise is
that fields are only ever added at the end. Where in the table of functions those of the thread pool
are is read from that file.
"""

from __future__ import annotations

import pathlib
import re

import jax
from llvmlite import ir

from speculative.kernels.product_code import (
    GROUP,
    I32,
    I64,
    NULL,
    PTR,
    Code,
    external,
    function,
)

# Byte offsets, 64-bit.
_FRAME_EXTENSION, _FRAME_API, _FRAME_CONTEXT = 8, 16, 24
_FRAME_ARGUMENTS, _FRAME_RESULTS = 72, 112
_BUFFER_DATA, _BUFFER_DIMENSIONS = 24, 40
_EXTENSION_METADATA = 24
_METADATA_MAJOR, _METADATA_MINOR = 24, 28
_API_FUNCTIONS = 48
# The version of the interface that this was written for.
_MAJOR, _MINOR = 0, 1

# Weights that one thread reads in the time that it takes to wake another.
_WORTH_SHARING = 64 * 1024
# Chunks for each thread, so that one that is held up leaves its work to the others.
_CHUNKS = 2
_SPINS = 2000


def header() -> str:
    """jaxlib's own `c_api.h`."""
    return (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()


def _function_offset(name: str) -> int:
    names = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\((XLA_FFI_\w+)\)", header())
    return _API_FUNCTIONS + 8 * names.index(name)


# What the threads of one call share. `owners` counts those that still may look at it.
_TASK = ir.LiteralStructType([I64, I64, I64, PTR, PTR, PTR, I64, I64, I64, I64, I64])
_NEXT, _DONE, _OWNERS, _W, _X, _Y, _ROWS, _SIZE, _WIDTH, _CHUNK, _COUNT = range(11)


def _part(code: Code, task: ir.Value, field: int) -> ir.Value:
    return code.address(task, _TASK, I32(0), I32(field))


def _add(code: Code, place: ir.Value, value: int) -> ir.Value:
    return code.atomic_rmw("add", place, I64(value), "seq_cst")


def _worker(module: ir.Module, product: ir.Function) -> ir.Function:
    """worker(task): takes chunks until there are none."""
    made, code = function(module, "worker", ir.VoidType(), PTR)
    (task,) = made.args
    take, work, leave = (code.append_basic_block(n) for n in ("take", "work", "leave"))

    def field(number, kind=I64):
        return code.get(_part(code, task, number), kind)

    code.branch(take)
    code.position_at_end(take)
    taken = _add(code, _part(code, task, _NEXT), 1)
    code.cbranch(code.icmp_signed("<", taken, field(_COUNT)), work, leave)
    code.position_at_end(work)
    begin = code.mul(taken, field(_CHUNK))
    width = field(_WIDTH)
    end = code.least(width, code.add(begin, field(_CHUNK)))
    matrices = [field(number, PTR) for number in (_W, _X, _Y)]
    code.call(product, [*matrices, field(_ROWS), field(_SIZE), width, begin, end])
    _add(code, _part(code, task, _DONE), 1)
    code.branch(take)
    code.position_at_end(leave)
    code.ret_void()
    return made


def _release(module: ir.Module) -> ir.Function:
    """release(task): whoever leaves last frees it."""
    made, code = function(module, "release", ir.VoidType(), PTR)
    (task,) = made.args
    last = code.icmp_signed("==", _add(code, _part(code, task, _OWNERS), -1), I64(1))
    with code.if_then(last):
        code.call(external(module, "free", ir.VoidType(), PTR), [task])
    code.ret_void()
    return made


def _helper(module: ir.Module, worker: ir.Function, release: ir.Function) -> ir.Function:
    made, code = function(module, "helper", ir.VoidType(), PTR)
    code.call(worker, [made.args[0]])
    code.call(release, [made.args[0]])
    code.ret_void()
    return made


class _Pool:
    """XLA's thread pool, as code that calls it."""

    def __init__(self, code: Code, frame: ir.Value):
        self._code = code
        self._api = code.get(code.field(frame, _FRAME_API), PTR)
        self._context = code.get(code.field(frame, _FRAME_CONTEXT), PTR)

    def _call(self, name: str, *fields: ir.Value) -> ir.Value:
        """The error that it returns, or null."""
        code = self._code
        kinds = [I64, PTR, *(f.type for f in fields)]
        record = ir.LiteralStructType(kinds)
        place = code.room(record)
        values = [I64(8 * len(kinds)), NULL, *fields]
        for number, value in enumerate(values):
            code.store(value, code.address(place, record, I32(0), I32(number)))
        kind = ir.FunctionType(PTR, [PTR]).as_pointer()
        target = code.get(code.field(self._api, _function_offset(name)), kind)
        return code.call(target, [place])

    def _failed(self, error: ir.Value) -> ir.Value:
        code = self._code
        failed = code.icmp_unsigned("!=", error, NULL)
        with code.if_then(failed):
            self._call("XLA_FFI_Error_Destroy", error)
        return failed

    def threads(self) -> ir.Value:
        """How many threads there are, 1 without a pool."""
        code = self._code
        count = code.variable(I64(1))
        with code.if_then(
            self._failed(self._call("XLA_FFI_ThreadPool_NumThreads", self._context, count))
        ):
            code.store(I64(1), count)
        return code.get(count)

    def schedule(self, task: ir.Function, data: ir.Value) -> ir.Value:
        """Ask for `task(data)` on another thread; whether that was refused."""
        return self._failed(self._call("XLA_FFI_ThreadPool_Schedule", self._context, task, data))


def handler(module: ir.Module, product: ir.Function) -> ir.Function:
    """handler(frame): (rows [M, K], kernel [N, K]) -> [M, N], an `XLA_FFI_Handler`."""
    worker, release = _worker(module, product), _release(module)
    helper = _helper(module, worker, release)
    made, code = function(module, "handler", PTR, PTR, public=True)
    (frame,) = made.args
    extension = code.get(code.field(frame, _FRAME_EXTENSION), PTR)
    with code.if_then(code.icmp_unsigned("!=", extension, NULL)):
        # Asked for the interface's version, not for work.
        metadata = code.get(code.field(extension, _EXTENSION_METADATA), PTR)
        code.store(I32(_MAJOR), code.field(metadata, _METADATA_MAJOR))
        code.store(I32(_MINOR), code.field(metadata, _METADATA_MINOR))
        code.ret(NULL)

    arguments = code.get(code.field(frame, _FRAME_ARGUMENTS), PTR)
    results = code.get(code.field(frame, _FRAME_RESULTS), PTR)

    def buffer(list_of, number):
        return code.get(code.field(list_of, 8 * number), PTR)

    def data(of):
        return code.get(code.field(of, _BUFFER_DATA), PTR)

    def dimension(of, axis):
        return code.get(code.field(code.get(code.field(of, _BUFFER_DIMENSIONS), PTR), 8 * axis))

    x, w, y = buffer(arguments, 0), buffer(arguments, 1), buffer(results, 0)
    rows, size, width = dimension(x, 0), dimension(x, 1), dimension(w, 0)
    pool = _Pool(code, frame)
    shared = code.icmp_signed(">=", code.mul(width, size), I64(_WORTH_SHARING))
    threads = code.select(shared, pool.threads(), I64(1))
    chunk = code.ceil_div(width, code.mul(threads, I64(_CHUNKS)))
    chunk = code.mul(code.ceil_div(chunk, I64(GROUP)), I64(GROUP))
    chunk = code.select(code.icmp_signed("==", threads, I64(1)), width, chunk)
    chunks = code.ceil_div(width, chunk)
    helpers = code.sub(code.least(threads, chunks), I64(1))
    malloc = external(module, "malloc", PTR, I64)
    task = code.call(malloc, [I64(8 * len(_TASK.elements))])
    values = (
        I64(0), I64(0), code.add(helpers, I64(1)), data(w), data(x), data(y),
        rows, size, width, chunk, chunks,
    )  # fmt: skip
    for number, value in enumerate(values):
        code.store(value, _part(code, task, number))
    with code.loop(I64(0), helpers, I64(1)), code.if_then(pool.schedule(helper, task)):
        _add(code, _part(code, task, _OWNERS), -1)
    code.call(worker, [task])
    # Others may still be at the chunks that they took.
    wait, again, finished = (code.append_basic_block(n) for n in ("wait", "again", "finished"))
    spins = code.variable(I64(0))
    code.branch(wait)
    code.position_at_end(wait)
    done = code.load_atomic(_part(code, task, _DONE), "acquire", 8, typ=I64)
    code.cbranch(code.icmp_signed("<", done, chunks), again, finished)
    code.position_at_end(again)
    count = code.add(code.get(spins), I64(1))
    code.store(count, spins)
    with code.if_then(code.icmp_signed(">", count, I64(_SPINS))):
        code.call(external(module, "sched_yield", I32), [])
    code.branch(wait)
    code.position_at_end(finished)
    code.call(release, [task])
    code.ret(NULL)
    return made

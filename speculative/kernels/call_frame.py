"""The handler that XLA calls (its FFI), in LLVM IR: it takes a call apart.

The work is shared out by `sharing`.

The layouts of the structures are those of `xla/ffi/api/c_api.h`, which jaxlib ships; its promise is
that fields are only ever added at the end. Where in the table of functions those of the thread pool
are is read from that file.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable

import jax
from llvmlite import ir

from speculative.kernels import sharing
from speculative.kernels.llvm import I32, I64, NULL, PTR, Code, function

# Byte offsets, 64-bit.
_FRAME_EXTENSION, _FRAME_API, _FRAME_CONTEXT = 8, 16, 24
_FRAME_ARGUMENTS, _FRAME_RESULTS = 72, 112
_BUFFER_DATA, _BUFFER_DIMENSIONS = 24, 40
_EXTENSION_TYPE, _EXTENSION_METADATA = 8, 24
_METADATA = 1  # The type of extension that asks for it.
_METADATA_MAJOR, _METADATA_MINOR = 24, 28
_API_FUNCTIONS = 48
# The version of the interface that this was written for.
_MAJOR, _MINOR = 0, 1


def header() -> str:
    """jaxlib's own `c_api.h`."""
    return (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()


def _function_offset(name: str) -> int:
    names = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\((XLA_FFI_\w+)\)", header())
    return _API_FUNCTIONS + 8 * names.index(name)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array of the call."""

    code: Code
    place: ir.Value

    @property
    def data(self) -> ir.Value:
        """The address of its first value."""
        return self.code.get(self.code.field(self.place, _BUFFER_DATA), PTR)

    def dimension(self, axis: int) -> ir.Value:
        """Its length along an axis."""
        dimensions = self.code.get(self.code.field(self.place, _BUFFER_DIMENSIONS), PTR)
        return self.code.get(self.code.field(dimensions, 8 * axis))


@dataclasses.dataclass(frozen=True)
class Call:
    """What XLA calls with."""

    code: Code
    frame: ir.Value

    def _buffer(self, offset: int, number: int) -> Buffer:
        buffers = self.code.get(self.code.field(self.frame, offset), PTR)
        return Buffer(self.code, self.code.get(self.code.field(buffers, 8 * number), PTR))

    def argument(self, number: int) -> Buffer:
        """An input."""
        return self._buffer(_FRAME_ARGUMENTS, number)

    def result(self, number: int) -> Buffer:
        """An output."""
        return self._buffer(_FRAME_RESULTS, number)


class Pool:
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


def handler(
    module: ir.Module, work: ir.Function, unpack: Callable[[Code, Call], sharing.Work]
) -> None:
    """Adds handler(frame), an `XLA_FFI_Handler`.

    Args:
      work: work(*given, begin, end), see `sharing.Work`.
      unpack: writes the code that takes a call apart.
    """
    share = sharing.sharer(module, work)
    made, code = function(module, "handler", PTR, result=PTR)
    made.linkage = "external"
    (frame,) = made.args
    extension = code.get(code.field(frame, _FRAME_EXTENSION), PTR)
    asked = code.variable(I32(0))
    with code.if_then(code.icmp_unsigned("!=", extension, NULL)):
        code.store(code.get(code.field(extension, _EXTENSION_TYPE), I32), asked)
    with code.if_then(code.icmp_signed("==", code.get(asked, I32), I32(_METADATA))):
        # Asked for the interface's version, not for work.
        metadata = code.get(code.field(extension, _EXTENSION_METADATA), PTR)
        code.store(I32(_MAJOR), code.field(metadata, _METADATA_MAJOR))
        code.store(I32(_MINOR), code.field(metadata, _METADATA_MINOR))
        code.ret(NULL)

    todo = unpack(code, Call(code, frame))
    share(code, todo, Pool(code, frame))
    code.ret(NULL)

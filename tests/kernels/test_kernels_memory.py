"""Nothing outside the arrays is read or written: behind each begins a page that is no memory."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest
from llvmlite import ir

from speculative.kernels import attention_code, engine, llvm, product_code, rows_code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mmap and mprotect as on Linux")
MACHINES = {"avx2": llvm.AVX2, "avx512": llvm.AVX512, "neon": llvm.NEON}
PAGE, POINTER, NUMBER = 4096, ctypes.c_void_p, ctypes.c_int64
READ, WRITE, PRIVATE, ANONYMOUS = 1, 2, 2, 0x20


class Guarded:
    """A copy of an array, the last byte of which is the last of a page; behind it is no memory.

    An input can only be read.
    """

    def __init__(self, array, *, output=False):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = POINTER
        libc.mmap.argtypes = [POINTER, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mprotect.argtypes = [POINTER, ctypes.c_size_t, ctypes.c_int]
        libc.munmap.argtypes = [POINTER, ctypes.c_size_t]
        self._libc, self._array = libc, np.ascontiguousarray(array)
        pages = -(-self._array.nbytes // PAGE)
        self._size = (pages + 1) * PAGE
        self._base = libc.mmap(None, self._size, READ | WRITE, PRIVATE | ANONYMOUS, -1, 0)
        self.data = self._base + pages * PAGE - self._array.nbytes
        ctypes.memmove(self.data, self._array.ctypes.data, self._array.nbytes)
        if not output:
            assert libc.mprotect(self._base, pages * PAGE, READ) == 0
        assert libc.mprotect(self._base + pages * PAGE, PAGE, 0) == 0

    def value(self):
        """What is there now."""
        out = np.empty_like(self._array)
        ctypes.memmove(out.ctypes.data, self.data, out.nbytes)
        return out

    def release(self):
        self._libc.munmap(self._base, self._size)


def compiled(make):
    """(what keeps it, the address) of the function that `make` adds to a module."""
    module = ir.Module("guarded")
    function = make(module)
    function.linkage = "external"
    owner = engine.compile_ir(str(module))
    return owner, owner.get_function_address(function.name)


def run(address, kinds, arguments):
    """Call it; the values of the outputs afterwards."""
    given = [a.data if isinstance(a, Guarded) else a for a in arguments]
    ctypes.CFUNCTYPE(None, *kinds)(address)(*given)
    values = [a.value() for a in arguments if isinstance(a, Guarded)]
    for argument in arguments:
        if isinstance(argument, Guarded):
            argument.release()
    return values


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("machine", MACHINES)
def test_product(machine):
    owner, address = compiled(lambda m: product_code._Builder(m, MACHINES[machine]).product())
    kinds = [POINTER] * 3 + [NUMBER] * 5
    for rows in (1, 2, 5, 12, 13, 26):
        for size, panels in ((4, 1), (20, 3), (516, 9)):
            x, w = normal(rows, size), normal(panels, size, 16)
            out = Guarded(np.zeros((rows, 16 * panels), np.float32), output=True)
            arguments = [Guarded(w), Guarded(x), out, rows, size, 16 * panels, 0, panels]
            got = run(address, kinds, arguments)[-1]
            wanted = x @ np.swapaxes(w, 1, 2).reshape(-1, size).T
            np.testing.assert_allclose(got, wanted, atol=1e-4)
    del owner


@pytest.mark.parametrize("machine", MACHINES)
def test_rows(machine):
    largest_owner, largest = compiled(lambda m: rows_code._largest(m, MACHINES[machine]))
    norm_owner, norm = compiled(lambda m: rows_code._norm(m, MACHINES[machine]))
    for size in (1, 3, 8, 15, 16, 17, 31, 33, 100):
        x, scale = normal(3, size), normal(size)
        place = Guarded(np.zeros(3, np.int32), output=True)
        kinds = [POINTER] * 2 + [NUMBER] * 3
        got = run(largest, kinds, [Guarded(x), place, size, 0, 3])[-1]
        np.testing.assert_array_equal(got, x.argmax(axis=1))
        out = Guarded(np.zeros((3, size), np.float32), output=True)
        kinds = [POINTER] * 3 + [NUMBER] * 3
        got = run(norm, kinds, [Guarded(x), Guarded(scale), out, size, 0, 3])[-1]
        wanted = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) * scale
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    del largest_owner, norm_owner


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("machine", MACHINES)
def test_attention(machine, causal):
    masked = 0.0 if causal else -1e10
    owner, address = compiled(
        lambda m: attention_code._Builder(m, MACHINES[machine], causal, masked).attend()
    )
    kinds = [POINTER] * 5 + [NUMBER] * 5 + [POINTER] * 2 + [NUMBER] * 3
    heads, size = 2, 16
    for length in (1, 5, 15, 16, 17, 31, 33, 64):
        for count in (1, 3, 7, 13):
            if causal and count > length:
                continue
            # At the last position that there is room for, at the first, and at none.
            for first in (length - count, 0, 2**31 - 1, -(2**31)):
                padded = -(-length // 16) * 16
                arguments = [
                    Guarded(normal(1, count, heads * size)),
                    Guarded(normal(1, heads, size, length)),
                    Guarded(normal(1, heads, length, size)),
                    Guarded(np.zeros((heads, count, padded), np.float32), output=True),
                    Guarded(np.zeros((1, count, heads * size), np.float32), output=True),
                    *(heads * size, size, length, count, heads),
                ]
                if causal:
                    bias = Guarded(normal(heads, length))
                    beside = [Guarded(np.asarray([first], np.int32)), bias]
                else:
                    mask = np.ones((1, length), np.int8)
                    beside = [Guarded(mask), Guarded(mask)]
                got = run(address, kinds, [*arguments, *beside, length, 0, heads])[4]
                assert np.isfinite(got).all()
    del owner

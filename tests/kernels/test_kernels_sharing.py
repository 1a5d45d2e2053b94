"""The sharing of work: who is asked, and who frees the task.

The compiled handler is called with an interface of XLA's that is made here, on one thread: helpers
come when the test says so, `malloc` and `free` are counted.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from llvmlite import binding

from speculative.kernels import call_frame, engine, rows_code, sharing

pytestmark = pytest.mark.skipif(engine.machine() is None, reason="no code for this processor")
POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype, LIBC.malloc.argtypes = POINTER, [ctypes.c_size_t]
ROWS = np.random.default_rng(0).normal(size=(600, 1024)).astype(np.float32)


class Memory:
    """Blocks that are in use, and those that were freed, which really stay."""

    def __init__(self):
        self.used, self.freed = set(), []
        self.allocate = ctypes.CFUNCTYPE(POINTER, NUMBER)(self._allocate)
        self.free = ctypes.CFUNCTYPE(None, POINTER)(self._free)

    def _allocate(self, size):
        place = LIBC.malloc(size)
        self.used.add(place)
        return place

    def _free(self, place):
        self.freed.append(place)
        self.used.remove(place)


@pytest.fixture(scope="module")
def argmax():
    """(the handler of argmax, its memory)."""
    memory = Memory()
    engine._initialize()
    for name in ("allocate", "free"):
        address = ctypes.cast(getattr(memory, name), POINTER).value
        binding.add_symbol(f"counted_{name}", address)
    text = engine.module_ir(rows_code.write_largest, engine.machine())
    assert text.count('@"malloc"') == 2
    assert text.count('@"free"') == 2
    text = text.replace('@"malloc"', '@"counted_allocate"').replace('@"free"', '@"counted_free"')
    owner = engine.compile_ir(text)
    handler = ctypes.CFUNCTYPE(POINTER, POINTER)(owner.get_function_address("handler"))
    handler.owner = owner
    return handler, memory


class Xla:
    """Its interface, with a pool of `threads` that nobody runs but `work`.

    `refuse` is asked at every request for a helper, with its number, from 1.
    """

    def __init__(self, threads, refuse=lambda number: False):
        self.queue, self.asked = [], 0
        kind = ctypes.CFUNCTYPE(POINTER, ctypes.POINTER(POINTER * 6))

        def count(arguments):
            ctypes.cast(arguments.contents[3], ctypes.POINTER(NUMBER))[0] = threads

        def schedule(arguments):
            self.asked += 1
            if refuse(self.asked):
                return 1  # An error.
            self.queue.append((arguments.contents[3], arguments.contents[4]))

        self._functions = {
            "XLA_FFI_ThreadPool_NumThreads": kind(count),
            "XLA_FFI_ThreadPool_Schedule": kind(schedule),
            "XLA_FFI_Error_Destroy": kind(lambda arguments: None),
        }
        self._api = (POINTER * 200)()
        for name, function in self._functions.items():
            place = call_frame._function_offset(name) // 8
            self._api[place] = ctypes.cast(function, POINTER).value

    def call(self, handler, x):
        """[M] int32 that the handler makes of x [M, N]."""
        y = np.full(len(x), -1, np.int32)
        kept = []

        def buffer(array):
            dimensions = (NUMBER * array.ndim)(*array.shape)
            record = (POINTER * 8)()
            record[call_frame._BUFFER_DATA // 8] = array.ctypes.data
            record[call_frame._BUFFER_DIMENSIONS // 8] = ctypes.addressof(dimensions)
            kept.extend((dimensions, record))
            return (POINTER * 1)(ctypes.addressof(record))

        arguments, results = buffer(x), buffer(y)
        frame = (POINTER * 20)()
        frame[call_frame._FRAME_API // 8] = ctypes.addressof(self._api)
        frame[call_frame._FRAME_ARGUMENTS // 8] = ctypes.addressof(arguments)
        frame[call_frame._FRAME_RESULTS // 8] = ctypes.addressof(results)
        assert handler(ctypes.addressof(frame)) is None
        return y

    def work(self):
        """The helpers that were asked for come."""
        queue, self.queue = self.queue, []
        for target, task in queue:
            ctypes.CFUNCTYPE(None, POINTER)(target)(task)


def shared(offset):
    return NUMBER.from_address(sharing._LOOKING + offset)


@pytest.fixture
def looking():
    """Sets how many threads seem to look for work; none comes."""
    place = shared(0)

    def pretend(count):
        place.value = count

    yield pretend
    place.value = 0


def assert_slots_are_empty():
    for slot in range(sharing._SLOTS):
        assert shared(sharing._FIRST_SLOT + sharing._SLOT_BYTES * slot).value == 0


REFUSALS = {
    "none": lambda number: False,
    "all": lambda number: True,
    "every other": lambda number: number % 2 == 1,
}


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 12, 40])
@pytest.mark.parametrize("lookers", [0, 1, 3, 20])
@pytest.mark.parametrize("refused", REFUSALS)
def test_helpers_that_come_late(argmax, looking, threads, lookers, refused):
    handler, memory = argmax
    memory.freed.clear()
    xla = Xla(threads, REFUSALS[refused])
    looking(lookers)
    got = xla.call(handler, ROWS)
    looking(0)
    np.testing.assert_array_equal(got, ROWS.argmax(axis=1))
    assert_slots_are_empty()  # What nobody took was taken back.
    assert xla.asked == threads - 1 - min(threads - 1, lookers, sharing._SLOTS)
    assert len(memory.used) == (1 if xla.queue else 0)  # Whoever comes still looks at it.
    xla.work()
    assert not memory.used
    assert len(memory.freed) == 1
    assert shared(0).value == 0


@pytest.mark.parametrize("threads", [2, 3, 5, 12])
@pytest.mark.parametrize("lookers", [0, 1, 3])
def test_helpers_that_come_at_once(argmax, looking, threads, lookers):
    """Before the caller has begun, and they take from the slots, too."""
    handler, memory = argmax
    memory.freed.clear()

    def at_once(number):
        xla.work()
        return False

    xla = Xla(threads, at_once)
    looking(lookers)
    got = xla.call(handler, ROWS)
    xla.work()
    assert shared(0).value == lookers
    np.testing.assert_array_equal(got, ROWS.argmax(axis=1))
    assert not memory.used
    assert len(memory.freed) == 1
    assert_slots_are_empty()


def test_little_work_wakes_nobody(argmax):
    handler, memory = argmax
    xla = Xla(4)
    got = xla.call(handler, ROWS[:8])
    np.testing.assert_array_equal(got, ROWS[:8].argmax(axis=1))
    assert xla.asked == 0
    assert not memory.used


def test_a_question_is_answered_and_computes_nothing(argmax):
    """XLA asks for the interface's version when a handler is registered."""
    handler, memory = argmax
    version = (ctypes.c_int32 * 16)()
    extension = (POINTER * 4)()
    extension[0] = ctypes.sizeof(extension)
    extension[call_frame._EXTENSION_TYPE // 8] = call_frame._METADATA
    extension[call_frame._EXTENSION_METADATA // 8] = ctypes.addressof(version)
    frame = (POINTER * 20)()
    frame[call_frame._FRAME_EXTENSION // 8] = ctypes.addressof(extension)
    assert handler(ctypes.addressof(frame)) is None
    assert version[call_frame._METADATA_MAJOR // 4] == call_frame._MAJOR
    assert version[call_frame._METADATA_MINOR // 4] == call_frame._MINOR
    assert not memory.used

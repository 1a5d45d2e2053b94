"""The CPU product against float64, for every machine that there is code for.

Code for another vector width runs here too: LLVM takes the vectors apart.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from speculative.kernels import call_frame, product_code
from speculative.kernels import product as kernels

MACHINES = {
    "avx2": product_code.AVX2,
    "avx512": product_code.AVX512,
    "neon": product_code.NEON,
    "avx2_bfloat16": dataclasses.replace(product_code.AVX2, bfloat16=True),
    "avx512_bfloat16": dataclasses.replace(product_code.AVX512, bfloat16=True),
}


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Whatever accelerator there is: XLA knows the product on CPU alone."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(scope="module", params=list(MACHINES))
def product(request):
    """A machine's product, its dtype as attribute."""
    made_for = MACHINES[request.param]
    name = f"test_{request.param}"
    engine = kernels.register(name, made_for)

    def compute(rows, kernel):
        return kernels.call(name, rows, kernel)

    compute.dtype = jnp.bfloat16 if made_for.bfloat16 else jnp.float32
    compute.engine = engine  # kept alive
    return compute


def matrices(rows, outputs, width, dtype, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, width)).astype(np.float32)
    kernel = random.normal(size=(outputs, width)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(kernel).astype(dtype)


def expected(x, kernel):
    return np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T


@pytest.mark.parametrize("outputs", [1, 11, 25, 2050])
def test_against_float64(product, outputs):
    """Rows for one tile to four and for many, outputs that tiles and groups leave a rest of; the
    last are shared among threads."""
    for rows in (*range(1, 10), 13, 19, 40):
        x, kernel = matrices(rows, outputs, 48, product.dtype, seed=rows)
        got = product(x, kernel)
        assert got.shape == (rows, outputs)
        np.testing.assert_allclose(got, expected(x, kernel), atol=2e-5)


def test_a_row_does_not_depend_on_the_others(product):
    x, kernel = matrices(13, 100, 64, product.dtype)
    alone = np.concatenate([np.asarray(product(x[i : i + 1], kernel)) for i in range(13)])
    for rows in (2, 3, 4, 5, 6, 7, 8, 13):
        np.testing.assert_array_equal(np.asarray(product(x[:rows], kernel)), alone[:rows])


def test_nor_does_an_output(product):
    """Nor on where it stands, nor on how the work is cut up among threads."""
    x, kernel = matrices(5, 4096, 32, product.dtype)
    whole = np.asarray(product(x, kernel))
    for begin, end in ((0, 1), (7, 40), (4001, 4096)):
        part = np.asarray(product(x, kernel[begin:end]))
        np.testing.assert_array_equal(part, whole[:, begin:end])


def test_numbers_that_are_none(product):
    x, kernel = matrices(6, 30, 16, product.dtype)
    x = x.at[0, 3].set(jnp.nan).at[1, 0].set(jnp.inf).at[2].set(0.0).at[3].set(1e-40)
    kernel = kernel.at[:, 0].set(1.0)
    got = np.asarray(product(x, kernel))
    assert np.isnan(got[0]).all()
    assert (np.abs(got[3]) < 1e-37).all()  # Subnormal, or 0 where the processor flushes them.
    assert (got[1] == np.inf).all()
    assert (got[2] == 0).all()
    np.testing.assert_allclose(got[4:], expected(x, kernel)[4:], atol=2e-5)


def test_nothing_outside_is_written(product):
    """The outputs of a call lie between others."""
    x, kernel = matrices(7, 1000, 64, product.dtype)

    @jax.jit
    def several(x, kernel):
        parts = [product(x[:m], kernel[:n]) for m in (1, 4, 7) for n in (1, 37, 1000)]
        return [*parts, product(x, kernel)]

    got = several(x, kernel)
    wanted = [(m, n) for m in (1, 4, 7) for n in (1, 37, 1000)] + [(7, 1000)]
    for value, (m, n) in zip(got, wanted, strict=True):
        np.testing.assert_allclose(value, expected(x[:m], kernel[:n]), atol=2e-5)


def test_within_a_compiled_loop(product):
    x, kernel = matrices(4, 512, 512, jnp.float32)
    kernel = (kernel / 30).astype(product.dtype)

    @jax.jit
    def repeat(x, kernel):
        return lax.fori_loop(0, 20, lambda _, y: jnp.tanh(product(y, kernel)), x)

    wanted = np.asarray(x, np.float64)
    for _ in range(20):
        wanted = np.tanh(wanted @ np.asarray(kernel, np.float64).T)
    np.testing.assert_allclose(repeat(x, kernel), wanted, atol=1e-4)


def test_many_calls_at_once(product):
    """From several threads, on several devices: the shared work of one is never another's."""
    devices = jax.devices("cpu")
    jobs = []
    for number in range(24):
        x, kernel = matrices(1 + number % 9, 1500 + number, 64, product.dtype, seed=number)
        jobs.append(jax.device_put((x, kernel), devices[number % len(devices)]))
    compute = jax.jit(product)
    wanted = [expected(*job) for job in jobs]
    started = threading.Barrier(8)

    def work(worker):
        started.wait()
        for _ in range(5):
            for number in range(worker, len(jobs), 8):
                np.testing.assert_allclose(compute(*jobs[number]), wanted[number], atol=2e-5)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, worker) for worker in range(8)]:
            done.result()


@pytest.mark.parametrize(
    "rows, kernel",
    [
        (jnp.zeros((1, 40)), jnp.zeros((8, 40))),  # K is no multiple of a line
        (jnp.zeros((0, 32)), jnp.zeros((8, 32))),
        (jnp.zeros((1, 32), jnp.bfloat16), jnp.zeros((8, 32))),
        (jnp.zeros((1, 32), jnp.float16), jnp.zeros((8, 32), jnp.float16)),
    ],
)
def test_what_is_left_to_xla(rows, kernel):
    assert not kernels.supports(rows, kernel)


def layout(name: str) -> dict[str, int]:
    """Byte offset of every field of a structure in jaxlib's header, on a 64-bit machine."""
    return _offsets(name)[0]


def _offsets(name: str) -> tuple[dict[str, int], int]:
    text = re.sub(r"//[^\n]*", "", call_frame.header())
    body = re.search(rf"struct {name} \{{(.*?)\n\}}", text, re.DOTALL)
    assert body is not None, f"no structure {name}"
    offsets, at, widest = {}, 0, 1
    for field in filter(None, (f.strip() for f in body.group(1).split(";"))):
        macro = re.fullmatch(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", field)
        kind, label = ("*", macro.group(1)) if macro else field.rsplit(maxsplit=1)
        if label.startswith("*") or kind.endswith("*") or kind in ("size_t", "int64_t"):
            size = align = 8
        elif kind in ("int", "int32_t", "uint32_t") or kind in ENUMS:
            size = align = 4
        else:
            size, align = _offsets(kind)[1], 8
        at = -(-at // align) * align
        offsets[label.lstrip("*")] = at
        at, widest = at + size, max(widest, align)
    return offsets, -(-at // widest) * widest


ENUMS = (
    "XLA_FFI_DataType",
    "XLA_FFI_ExecutionStage",
    "XLA_FFI_Extension_Type",
    "XLA_FFI_Handler_Traits",
)


def test_structures_are_laid_out_as_in_the_header():
    """Where jaxlib moved a field, a call would read, or jump, somewhere else."""
    frame, api = layout("XLA_FFI_CallFrame"), layout("XLA_FFI_Api")
    assert frame["extension_start"] == call_frame._FRAME_EXTENSION
    assert frame["api"] == call_frame._FRAME_API
    assert frame["ctx"] == call_frame._FRAME_CONTEXT
    assert frame["args"] + layout("XLA_FFI_Args")["args"] == call_frame._FRAME_ARGUMENTS
    assert frame["rets"] + layout("XLA_FFI_Rets")["rets"] == call_frame._FRAME_RESULTS
    buffer = layout("XLA_FFI_Buffer")
    assert buffer["data"] == call_frame._BUFFER_DATA
    assert buffer["dims"] == call_frame._BUFFER_DIMENSIONS
    assert layout("XLA_FFI_Metadata_Extension")["metadata"] == call_frame._EXTENSION_METADATA
    version = layout("XLA_FFI_Metadata")["api_version"]
    fields = layout("XLA_FFI_Api_Version")
    assert version + fields["major_version"] == call_frame._METADATA_MAJOR
    assert version + fields["minor_version"] == call_frame._METADATA_MINOR
    for name in ("ThreadPool_Schedule", "ThreadPool_NumThreads", "Error_Destroy"):
        name = f"XLA_FFI_{name}"
        assert api[name] == call_frame._function_offset(name)
        # The arguments are a record of pointers behind a size and an extension.
        arguments = list(layout(f"{name}_Args").values())
        assert arguments == list(range(0, 8 * len(arguments), 8))

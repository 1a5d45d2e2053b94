"""`rows @ kernel.T` on a CPU, for few rows at the speed at which the kernel can be read.

Of what XLA makes itself, products and reductions alike, eight rows take two to three times as long
as one (two cores with AVX2). This is compiled by LLVM (`llvmlite`) for the processor at hand when
it is first asked for, which takes a second, and called by XLA through its foreign function
interface.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import platform

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from llvmlite import binding, ir

from speculative.kernels import call_frame, product_code

_TARGETS = {"float32": "speculative_product_f32", "bfloat16": "speculative_product_bf16"}


def machine() -> product_code.Machine | None:
    """What this processor has; None where no code is made for it."""
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return product_code.AVX512
    if features.get("avx2") and features.get("fma"):
        return product_code.AVX2
    if platform.machine().lower() in ("arm64", "aarch64"):
        return product_code.NEON
    return None


def module_ir(made_for: product_code.Machine) -> str:
    """The whole program as LLVM IR."""
    module = ir.Module("speculative_product")
    call_frame.handler(module, product_code.product(module, made_for))
    return str(module)


def compile_ir(text: str) -> binding.ExecutionEngine:
    """Machine code for this processor, as long as the engine lives."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )
    module = binding.parse_assembly(text)
    module.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(target, options)
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, target)
    engine.finalize_object()
    return engine


def register(name: str, made_for: product_code.Machine) -> binding.ExecutionEngine:
    """Compile for a machine, and make the handler known to XLA on CPU by this name.

    The engine that is returned owns the code: it must live as long as XLA may call it.
    """
    engine = compile_ir(module_ir(made_for))
    call = ctypes.CFUNCTYPE(ctypes.c_void_p)(engine.get_function_address("handler"))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(call), platform="cpu")
    return engine


@functools.cache
def _registered(dtype: str) -> binding.ExecutionEngine | None:
    """The engine behind `product` for kernels of a dtype; None where this processor has none."""
    made_for = machine()
    if made_for is None:
        return None
    return register(_TARGETS[dtype], dataclasses.replace(made_for, bfloat16=dtype == "bfloat16"))


def supports(rows, kernel) -> bool:
    """Whether `product` takes these: one dtype, float32 or bfloat16, K a multiple of 16, a CPU
    that there is code for, and at least one row."""
    dtype = str(kernel.dtype)
    return (
        dtype in _TARGETS
        and rows.dtype == kernel.dtype
        and kernel.shape[1] % product_code.LINE == 0
        and 0 not in (*rows.shape, *kernel.shape)
        and jax.default_backend() == "cpu"
        and _registered(dtype) is not None
    )


def product(rows: Float[Array, "M K"], kernel: Float[Array, "N K"]) -> Float[Array, "M N"]:
    """`rows @ kernel.T`, summed in float32, in the dtype of `rows`.

    Every output is the same bits however many rows there are. To be called where `supports` is
    true; not differentiable.
    """
    dtype = str(kernel.dtype)
    _registered(dtype)
    return call(_TARGETS[dtype], rows, kernel)


def call(name: str, rows: Float[Array, "M K"], kernel: Float[Array, "N K"]) -> jax.Array:
    """`product` by the handler of that name (see `register`)."""
    shape = jax.ShapeDtypeStruct((rows.shape[0], kernel.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(name, shape)(rows.astype(jnp.float32), kernel).astype(rows.dtype)

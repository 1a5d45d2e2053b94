"""Machine code for the processor at hand, by LLVM (`llvmlite`), registered with XLA.

Code is compiled when it is first asked for, which takes a second.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import platform
import threading
from collections.abc import Callable

import jax
from llvmlite import binding, ir

from speculative.kernels import llvm
from speculative.kernels.llvm import Machine

# The dtypes of what is kept in memory.
DTYPES = ("float32", "bfloat16")
_ENGINES: list[binding.ExecutionEngine] = []
_LOCK = threading.Lock()


def machine(dtype: str = "float32") -> Machine | None:
    """What this processor has; None where no code is made for it, or none for the dtype."""
    features = binding.get_host_cpu_features()
    if dtype not in DTYPES:
        return None
    if features.get("avx512f") and features.get("avx512bw"):
        found = llvm.AVX512
    elif features.get("avx2") and features.get("fma"):
        found = llvm.AVX2
    elif platform.machine().lower() in ("arm64", "aarch64"):
        found = llvm.NEON
    else:
        return None
    return dataclasses.replace(found, bfloat16=dtype == "bfloat16")


@functools.cache
def _initialize() -> None:
    """Once for a process."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    # That pass keeps a pointer for every row of a tile, and spills what the registers are for.
    binding.set_option("speculative", "-disable-lsr")


def compile_ir(text: str) -> binding.ExecutionEngine:
    """Machine code for this processor, as long as the engine lives."""
    _initialize()
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


def module_ir(write: Callable[[ir.Module, Machine], None], made_for: Machine) -> str:
    """The whole program as LLVM IR.

    Args:
      write: adds a function called `handler` to a module.
      made_for: what it is written for.
    """
    module = ir.Module("speculative")
    write(module, made_for)
    return str(module)


def register(name: str, write: Callable[[ir.Module, Machine], None], made_for: Machine) -> None:
    """Compile for a machine, and make the handler known to XLA on CPU by this name.

    The code is kept until the process ends: a thread may still be in it after XLA's last call.
    """
    engine = compile_ir(module_ir(write, made_for))
    _ENGINES.append(engine)
    call = ctypes.CFUNCTYPE(ctypes.c_void_p)(engine.get_function_address("handler"))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(call), platform="cpu")


def registered(kind: str, write: Callable[[ir.Module, Machine], None], dtype: str) -> str | None:
    """The name by which XLA knows this code for a dtype; None where this processor has no code."""
    with _LOCK:  # Two threads may trace their first programs at the same time.
        return _registered(kind, write, dtype)


@functools.cache
def _registered(kind: str, write: Callable[[ir.Module, Machine], None], dtype: str) -> str | None:
    made_for = machine(dtype)
    if made_for is None:
        return None
    name = f"speculative_{kind}_{dtype}"
    register(name, write, made_for)
    return name

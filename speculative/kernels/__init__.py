"""Machine code of our own, where what XLA makes falls well short of the hardware.

`product`, `attention` and `rows` are what JAX programs call; each has its IR in a `..._code` module.
`call_frame` is what XLA calls, and shares out the work; `engine` compiles and registers; `llvm`
builds IR.
"""

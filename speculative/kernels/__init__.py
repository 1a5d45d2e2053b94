"""Machine code of our own, where what XLA makes falls well short of the hardware.

`product`, `attention` and `rows` are what JAX programs call; the IR of each is in a module of its
own, `..._code`. `call_frame` is what XLA calls, `sharing` gives the work to several threads,
`engine` compiles and registers, `llvm` builds IR.
"""

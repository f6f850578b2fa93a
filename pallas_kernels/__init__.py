"""The DynamiQ wire format: its specification and the backends that implement it.

    codec           the specification, pure functions of rows; see docs/wire_format.md
    operations      the operations on whole messages, each with a choice of backends
    backend         interface of a backend: the operations, and the places where it can run them
    registry        all backends, by name
    choice          choice of the backend that runs an operation
    _xla            backend in pure JAX: available everywhere, and the reference for the others
    pallas_backend  base of the backends with kernels of Pallas
    _native         C++ for CPUs, on all cores
    _triton         fused kernels for NVIDIA GPUs from Ampere on
    _mosaic_gpu     fused kernels for Hopper and newer, the successor of `_triton`
    _mosaic_tpu     fused kernels for TPUs from v5e on
    modes           kernels that are interpreted, or compiled for another machine
    first_use       check of a backend before it is used on a kind of device
    trial           hard inputs of all operations, for comparisons of backends
    differences     bytes in which an output differs from that of the base
    native_blocks   formats with one width in `_native`: MX and block integers
    native_sparse   sparse messages in `_native`
    row_blocks      loops over blocks of rows, for backends without kernels
    copies          copies as one operation, which is one custom call on CPUs
    _jax            base of the whole project: versions of JAX, threads, order of operations

A module whose name starts with an underscore belongs to the package that holds it: nothing outside
imports it, but for `_jax`, which is private to the project. `codec` and `_xla` need no Pallas. The
package imports JAX and NumPy, and nothing of `dynamiq_jax`.
"""

"""What the kernels need of numba: compiling that survives a cache that cannot be written, and looks at 64 items in one operation.

Numba's cache watches only the file a kernel stands in: whoever changes this file clears `__pycache__`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from rollmill.weights.chunk.reference import MAX_CLASSES

Int = Any
"""An integer in a kernel: numba, not the annotation, gives it its width."""
BLOCK = 64
"""Items looked at together: one bit each in a word."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel: compiled at its first call, without the GIL, and kept on disk."""
    try:
        return _outlive_full_disk(numba.njit(nogil=True, cache=True, error_model="numpy")(function))
    except RuntimeError:
        # There is no folder for the cache (a read-only install without a home): compile anew in each process.
        return numba.njit(nogil=True, error_model="numpy")(function)


def _outlive_full_disk(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def call(*args: Any) -> Any:
        try:
            return kernel(*args)
        except OSError:
            # Only storing what was compiled touches a file, and it is stored after it is ready: the second call finds it.
            return kernel(*args)

    return call


def _operation(function: Callable[..., Any]) -> Callable[..., Any]:
    return intrinsic(function)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of kernels, never called from Python; without the wrappers for that it compiles in half the time."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(nogil=True, error_model="numpy", **options)(function)


@_operation
def ctz(typingctx: Any, value: Any) -> Any:
    """Zero bits under the lowest one bit of a uint64; 64 for 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], context.get_constant(numba.types.boolean, 0))

    return numba.types.uint64(numba.types.uint64), codegen


@_operation
def popcount(typingctx: Any, value: Any) -> Any:
    """One bits of a uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return numba.types.uint64(numba.types.uint64), codegen


def _has_deposit() -> bool:
    """Whether the code is compiled for a processor with the one instruction that selects a bit; a named target may be another machine."""
    chosen = getattr(numba.config, "CPU_NAME", None) or getattr(numba.config, "CPU_FEATURES", None)
    return not chosen and llvmlite.binding.get_host_cpu_features().get("bmi2", False)


@_operation
def deposit(typingctx: Any, source: Any, mask: Any) -> Any:
    """The low bits of `source` moved to the places of the one bits of `mask`; only where HAS_DEPOSIT."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(word, [word, word]), "llvm.x86.bmi.pdep.64")
        return builder.call(function, args)

    return numba.types.uint64(numba.types.uint64, numba.types.uint64), codegen


HAS_DEPOSIT = _has_deposit()


def _vector(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> tuple[Any, Any]:
    """A pointer to 64 items from `index` on, and their vector type. LLVM cuts such a vector into what the machine has."""
    data = context.make_array(array_type)(context, builder, array).data
    vector_type = ir.VectorType(ir.IntType(array_type.dtype.bitwidth), BLOCK)
    return builder.bitcast(builder.gep(data, [index]), vector_type.as_pointer()), vector_type


def _splat(vector_type: Any, value: int) -> Any:
    return ir.Constant(vector_type, [value] * BLOCK)


def _broadcast(builder: Any, vector_type: Any, value: Any) -> Any:
    lane = value if value.type == vector_type.element else builder.trunc(value, vector_type.element)
    single = builder.insert_element(ir.Constant(vector_type, ir.Undefined), lane, ir.IntType(32)(0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), [0] * BLOCK)
    return builder.shuffle_vector(single, ir.Constant(vector_type, ir.Undefined), lanes)


@_operation
def prefetch(typingctx: Any, items: Any, index: Any) -> Any:
    """Asks memory for the line of `items[index]`, which need not exist."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
        byte = ir.IntType(8).as_pointer()
        flags = [ir.IntType(32)(value) for value in (0, 3, 1)]
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, *(flag.type for flag in flags)])
        )
        builder.call(function, [builder.bitcast(pointer, byte), *flags])
        return context.get_dummy_value()

    return numba.types.void(items, numba.types.int64), codegen


@_operation
def differ(typingctx: Any, left: Any, right: Any, index: Any) -> Any:
    """Bit j says whether `left[index + j]` and `right[index + j]` differ, for 64 items."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = [_vector(context, builder, signature.args[i], args[i], args[2])[0] for i in range(2)]
        different = builder.icmp_unsigned("!=", *(builder.load(pointer, align=1) for pointer in pointers))
        return builder.bitcast(different, ir.IntType(64))

    return numba.types.uint64(left, right, numba.types.int64), codegen


def _compare(relation: str) -> Callable[..., Any]:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, vector_type = _vector(context, builder, signature.args[0], args[0], args[1])
        result = builder.icmp_unsigned(relation, builder.load(pointer, align=1), _broadcast(builder, vector_type, args[2]))
        return builder.bitcast(result, ir.IntType(64))

    return codegen


@_operation
def equals(typingctx: Any, items: Any, index: Any, value: Any) -> Any:
    """Bit j says whether `items[index + j]` is `value`, for 64 items."""
    return numba.types.uint64(items, numba.types.int64, numba.types.int64), _compare("==")


@_operation
def at_most(typingctx: Any, items: Any, index: Any, value: Any) -> Any:
    """Bit j says whether `items[index + j]` is not more than `value`, for 64 items."""
    return numba.types.uint64(items, numba.types.int64, numba.types.int64), _compare("<=")


@_operation
def classify(typingctx: Any, codes: Any, index: Any, shift: Any, mask: Any, base: Any, classes: Any, to: Any) -> Any:
    """`classes[to + j]` becomes the class of `codes[index + j]`, for 64 items."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, vector_type = _vector(context, builder, signature.args[0], args[0], args[1])
        target, class_type = _vector(context, builder, signature.args[5], args[5], args[6])
        shift, mask, base = (_broadcast(builder, vector_type, args[i]) for i in (2, 3, 4))
        raw = builder.and_(builder.lshr(builder.load(pointer, align=1), shift), mask)
        above = builder.select(builder.icmp_unsigned(">", raw, base), builder.sub(raw, base), _splat(vector_type, 0))
        highest = _splat(vector_type, MAX_CLASSES - 1)
        clamped = builder.select(builder.icmp_unsigned("<", above, highest), above, highest)
        builder.store(clamped if vector_type == class_type else builder.trunc(clamped, class_type), target, align=1)
        return context.get_dummy_value()

    word = numba.types.int64
    return numba.types.void(codes, word, word, word, word, classes, word), codegen

"""Emitter: the vectors, memory and loops that a kernel is written in, as LLVM's intermediate representation.

Values are SSA values of one function, whose body ``b`` is being written. A ``with`` of a loop is its body, and so is a
``for`` over ``each`` and ``tiles``: it may be written more than once, or once and looped over. What changes in a loop
is a ``variable``, which LLVM keeps in a register.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llvmlite import ir

LANES = 16  # of a vector; LLVM splits it if registers are shorter
NEVER = -1e30  # the logit of an absent token: its exponential vanishes in any sum
LOG2_E = math.log2(math.e)
_UNROLL_MAX = 8  # passes of a loop that are written out
_EXP_MIN = -126.0  # 2 to this is the smallest normal number
# 2**r for r in [-0.5, 0.5], highest power first: relative error 2e-8 (Cephes, exp2f).
_EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
_TANH = (-17 / 315, 2 / 15, -1 / 3, 1.0)  # of x squared, times x: for small x, where the other form is imprecise
_TANH_SMALL = 0.2

F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def integer(value: int) -> ir.Constant:
    """A 64-bit integer constant."""
    return ir.Constant(I64, value)


def real(value: float) -> ir.Constant:
    """A float32."""
    return ir.Constant(F32, value)


class Emitter:
    """Writes the body of one new function of ``module``."""

    def __init__(self, name: str, arguments: dict[str, ir.Type]) -> None:
        self.module = ir.Module(name)
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), list(arguments.values())), name)
        self.entry = function.append_basic_block("entry")
        self._body = function.append_basic_block("body")
        self.b = ir.IRBuilder(self._body)
        self.arg = dict(zip(arguments, function.args, strict=True))

    def end(self) -> None:
        """Nothing follows."""
        self.b.ret_void()
        ir.IRBuilder(self.entry).branch(self._body)

    # --- Vectors ---

    def exp2(self, x: ir.Value) -> ir.Value:
        """2 to the ``x``, for ``x <= 0``."""
        b = self.b
        x = self.more(x, self.splat(real(_EXP_MIN), LANES))
        whole = self.call("llvm.rint", x)
        rest = b.fsub(x, whole)
        power = functools.reduce(lambda y, c: self.fma(y, rest, c), [self.splat(real(c), LANES) for c in _EXP2])
        exponent = b.fptosi(whole, ir.VectorType(I32, LANES))
        bits = b.add(b.bitcast(power, exponent.type), b.shl(exponent, ir.Constant(exponent.type, [23] * LANES)))
        return b.bitcast(bits, x.type)

    def capped(self, x: ir.Value) -> ir.Value:
        """``tanh(x / cap) * cap`` as a power of two; an absent token stays absent."""
        b = self.b
        cap = self.splat(self.arg["softcap"], LANES)
        x = b.fdiv(x, cap)
        size = self.call("llvm.fabs", x)
        one = self.splat(real(1.0), LANES)
        # From the absolute value, so that the exponent is never above 0: (1 - e**-2x) / (1 + e**-2x).
        power = self.exp2(b.fmul(size, self.splat(real(-2 * LOG2_E), LANES)))
        large = b.fdiv(b.fsub(one, power), b.fadd(one, power))
        square = b.fmul(x, x)
        small = functools.reduce(lambda y, c: self.fma(y, square, c), [self.splat(real(c), LANES) for c in _TANH])
        tanh = b.select(
            b.fcmp_ordered("<", size, self.splat(real(_TANH_SMALL), LANES)),
            b.fmul(small, x),
            self.call("llvm.copysign", large, x),
        )
        capped = b.fmul(tanh, b.fmul(cap, self.splat(real(LOG2_E), LANES)))
        never = self.splat(real(NEVER), LANES)
        return b.select(b.fcmp_ordered("<", b.fmul(x, cap), self.splat(real(NEVER / 2), LANES)), never, capped)

    def across(self, x: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Reduce a vector to one number: its halves are joined until one is left."""
        b = self.b
        while x.type.count > 1:
            half = x.type.count // 2
            low, high = (
                b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, half), list(range(at, at + half))))
                for at in (0, half)
            )
            x = join(low, high)
        return b.extract_element(x, I32(0))

    def more(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The elementwise maximum."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def least(self, *numbers: ir.Value) -> ir.Value:
        """The minimum of some integers."""
        b = self.b
        return functools.reduce(lambda x, y: b.select(b.icmp_signed("<", x, y), x, y), numbers)

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """``x * y + z``, rounded once."""
        return self.call("llvm.fma", x, y, z)

    def call(self, name: str, *values: ir.Value) -> ir.Value:
        """Call one of LLVM's own functions, on numbers or vectors."""
        kind = values[0].type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        name = f"{name}.{suffix}"
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(kind, [kind] * len(values)), name)
        return self.b.call(function, values)

    # --- Memory and loops ---

    def at(self, base: ir.Value, index: ir.Value) -> ir.Value:
        """The address of element ``index``."""
        return self.b.gep(base, [index], inbounds=True)

    def load(self, where: ir.Value, lanes: int) -> ir.Value:
        """Load a vector of float32."""
        kind = ir.VectorType(F32, lanes)
        return self.b.load(self.b.bitcast(where, kind.as_pointer()), align=4)

    def store(self, where: ir.Value, value: ir.Value) -> None:
        """Store a vector."""
        self.b.store(value, self.b.bitcast(where, value.type.as_pointer()), align=4)

    def load_as(self, dtype: str, where: ir.Value, lanes: int) -> ir.Value:
        """Load a vector of elements of ``dtype``, as float32."""
        b = self.b
        if dtype == "float32":
            return self.load(where, lanes)
        kind = ir.VectorType(ir.HalfType() if dtype == "float16" else I16, lanes)
        value = b.load(b.bitcast(where, kind.as_pointer()), align=2)
        if dtype == "float16":
            return b.fpext(value, ir.VectorType(F32, lanes))
        wide = b.zext(value, ir.VectorType(I32, lanes))  # bfloat16 is the upper half of a float32
        return b.bitcast(b.shl(wide, ir.Constant(wide.type, [16] * lanes)), ir.VectorType(F32, lanes))

    def splat(self, value: ir.Value, lanes: int) -> ir.Value:
        """A vector with all elements equal to one number."""
        kind = ir.VectorType(F32, lanes)
        if isinstance(value, ir.Constant):
            return ir.Constant(kind, [value.constant] * lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

    def array(self, count: int) -> ir.Value:
        """Stack memory for this many float32, until the function returns."""
        with self.b.goto_block(self.entry):
            array = self.b.alloca(F32, count)
            array.align = 64
            return array

    def variable(self, kind: ir.Type, value: ir.Value) -> ir.Value:
        """A variable: ``load`` and ``store`` of ``b`` read and write it."""
        with self.b.goto_block(self.entry):
            place = self.b.alloca(kind)
        self.b.store(value, place)
        return place

    @contextmanager
    def repeat(self, condition: Callable[[], ir.Value]) -> Iterator[None]:
        """Loop while the value that ``condition`` writes is true."""
        b = self.b
        test, body, done = (b.append_basic_block(name) for name in ("test", "body", "done"))
        b.branch(test)
        b.position_at_end(test)
        b.cbranch(condition(), body, done)
        b.position_at_end(body)
        yield
        b.branch(test)
        b.position_at_end(done)

    @contextmanager
    def loop(self, start: ir.Value, stop: ir.Value, step: int = 1) -> Iterator[ir.Value]:
        """Loop over indices from ``start`` on, below ``stop``."""
        at = self.variable(I64, start)
        with self.repeat(lambda: self.b.icmp_signed("<", self.b.load(at), stop)):
            index = self.b.load(at)
            yield index
            self.b.store(self.b.add(index, integer(step)), at)

    def each(self, count: int, step: int = 1) -> Iterator[ir.Value]:
        """Indices ``0, step, ...`` below ``count``: unrolled if there are few, else a loop around the body."""
        if count // step <= _UNROLL_MAX:
            yield from (integer(i) for i in range(0, count, step))
            return
        with self.loop(integer(0), integer(count), step) as index:
            yield index

    def tiles(self, count: int, width: int) -> Iterator[tuple[ir.Value, int]]:
        """``(start, width)`` of tiles that cover ``count``: the body is written twice at most."""
        whole = count - count % width
        if whole:
            with self.loop(integer(0), integer(whole), width) as index:
                yield index, width
        if count > whole:
            yield integer(whole), count - whole

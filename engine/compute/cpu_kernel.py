"""Attention of one token over the pages of its sequence, as machine code that is compiled for one model's shapes.

On a CPU, reading KV bounds the speed of decoding. Tensor operations read pages at half the speed of one contiguous
block: one call per page has too much overhead, and a gather reads everything twice. So this module compiles the loop
itself with LLVM, and pages then cost nothing. numba reaches 0.72 to 0.91 of its speed (``docs/decisions/0018``).

The code takes each pair of sequence and KV head, and reads the tokens once, in blocks that fit in the first-level cache
(``Shape.block``). For a block it computes the scores of all query heads of the group, the exponentials with a running
maximum (online softmax; Milakov and Gimelshein, arXiv:1805.02867), and the weighted sum of values. Partial sums stay in
registers, in tiles of ``_TOKENS`` tokens or ``_DIMS`` vectors by ``_HEADS`` query heads. All numbers are float32,
whatever the dtype of the pages. Logits have base 2, because ``exp2`` needs no multiplication. If a block is not full,
the logits of absent tokens are ``NEVER``, and their values are not read. Compiling a new shape takes 0.1 s.

``Emitter`` writes a function in LLVM's intermediate representation: vectors, memory accesses and loops. ``b`` is the
builder of the function's body, and all values are SSA values. The Python body of a ``with`` around a loop writes the
body of that loop. The Python body of a ``for`` over ``each`` or ``tiles`` may run several times (an unrolled loop) or
once (a real loop). A value that changes in a loop must be a ``variable``, which LLVM keeps in a register.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import llvmlite.binding as llvm
from llvmlite import ir

from engine.compute.omp_threads import torch_library

LANES = 16  # elements of a vector; LLVM splits it if registers are shorter
NEVER = -1e30  # the logit of an absent token: its exponential adds nothing to a sum
LOG2_E = math.log2(math.e)
_UNROLL_MAX = 8  # a loop of at most this many passes is unrolled
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
# tanh(x) / x as a polynomial of x squared, highest power first. It is used for small x, where the other form is
# imprecise.
_TANH = (-17 / 315, 2 / 15, -1 / 3, 1.0)
_TANH_SMALL = 0.2

F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def integer(value: int) -> ir.Constant:
    """Return a 64-bit integer constant."""
    return ir.Constant(I64, value)


def real(value: float) -> ir.Constant:
    """Return a float32 constant."""
    return ir.Constant(F32, value)


class Emitter:
    """The writer of one function, in a new ``module``."""

    def __init__(self, name: str, arguments: dict[str, ir.Type]) -> None:
        self.module = ir.Module(name)
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), list(arguments.values())), name)
        self.entry = function.append_basic_block("entry")
        self._body = function.append_basic_block("body")
        self.b = ir.IRBuilder(self._body)
        self.arg = dict(zip(arguments, function.args, strict=True))

    def end(self) -> None:
        """Finish the function."""
        self.b.ret_void()
        ir.IRBuilder(self.entry).branch(self._body)

    # --- Vectors ---

    def exp2(self, x: ir.Value) -> ir.Value:
        """Compute 2 to the power of ``x``, for ``x <= 0``."""
        b = self.b
        x = self.maximum(x, self.splat(real(_EXP_MIN), LANES))
        whole = self.call("llvm.rint", x)
        rest = b.fsub(x, whole)
        power = functools.reduce(lambda y, c: self.fma(y, rest, c), [self.splat(real(c), LANES) for c in _EXP2])
        exponent = b.fptosi(whole, ir.VectorType(I32, LANES))
        bits = b.add(b.bitcast(power, exponent.type), b.shl(exponent, ir.Constant(exponent.type, [23] * LANES)))
        return b.bitcast(bits, x.type)

    def capped(self, x: ir.Value) -> ir.Value:
        """Compute ``tanh(x / cap) * cap`` in base 2. The logit of an absent token stays ``NEVER``."""
        b = self.b
        cap = self.splat(self.arg["softcap"], LANES)
        x = b.fdiv(x, cap)
        size = self.call("llvm.fabs", x)
        one = self.splat(real(1.0), LANES)
        # tanh(x) = (1 - e**-2x) / (1 + e**-2x). With the absolute value of x, the exponent is never above 0.
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
        """Reduce a vector to one number, by joining its two halves until one element remains."""
        b = self.b
        while x.type.count > 1:
            half = x.type.count // 2
            low, high = (
                b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, half), list(range(at, at + half))))
                for at in (0, half)
            )
            x = join(low, high)
        return b.extract_element(x, I32(0))

    def maximum(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Compute the elementwise maximum."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def minimum(self, *numbers: ir.Value) -> ir.Value:
        """Compute the minimum of some integers."""
        b = self.b
        return functools.reduce(lambda x, y: b.select(b.icmp_signed("<", x, y), x, y), numbers)

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """Compute ``x * y + z``, rounded once."""
        return self.call("llvm.fma", x, y, z)

    def call(self, name: str, *values: ir.Value) -> ir.Value:
        """Call the intrinsic ``name`` of LLVM on numbers or vectors."""
        kind = values[0].type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        name = f"{name}.{suffix}"
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(kind, [kind] * len(values)), name)
        return self.b.call(function, values)

    # --- Memory and loops ---

    def at(self, base: ir.Value, index: ir.Value) -> ir.Value:
        """Return the address of element ``index``."""
        return self.b.gep(base, [index], inbounds=True)

    def load(self, where: ir.Value, lanes: int) -> ir.Value:
        """Load a vector of float32."""
        kind = ir.VectorType(F32, lanes)
        return self.b.load(self.b.bitcast(where, kind.as_pointer()), align=4)

    def store(self, where: ir.Value, value: ir.Value) -> None:
        """Store a vector."""
        self.b.store(value, self.b.bitcast(where, value.type.as_pointer()), align=4)

    def load_as(self, dtype: str, where: ir.Value, lanes: int) -> ir.Value:
        """Load a vector of elements of ``dtype`` and convert it to float32."""
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
        """Return a vector whose elements all equal ``value``."""
        kind = ir.VectorType(F32, lanes)
        if isinstance(value, ir.Constant):
            return ir.Constant(kind, [value.constant] * lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

    def array(self, count: int) -> ir.Value:
        """Allocate memory for ``count`` float32 on the stack. It is freed when the function returns."""
        with self.b.goto_block(self.entry):
            array = self.b.alloca(F32, count)
            array.align = 64
            return array

    def variable(self, kind: ir.Type, value: ir.Value) -> ir.Value:
        """Make a variable with an initial value. Read and write it with ``load`` and ``store`` of ``b``."""
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
        """Loop over the indices ``start, start + step, ...`` below ``stop``."""
        at = self.variable(I64, start)
        with self.repeat(lambda: self.b.icmp_signed("<", self.b.load(at), stop)):
            index = self.b.load(at)
            yield index
            self.b.store(self.b.add(index, integer(step)), at)

    def each(self, count: int, step: int = 1) -> Iterator[ir.Value]:
        """Yield the indices ``0, step, ...`` below ``count``: as constants if they are few, else as a loop's index."""
        if count // step <= _UNROLL_MAX:
            yield from (integer(i) for i in range(0, count, step))
            return
        with self.loop(integer(0), integer(count), step) as index:
            yield index

    def tiles(self, count: int, width: int) -> Iterator[tuple[ir.Value, int]]:
        """Yield ``(start, width)`` of tiles that cover ``count``: a loop of full tiles, then the rest."""
        whole = count - count % width
        if whole:
            with self.loop(integer(0), integer(whole), width) as index:
                yield index, width
        if count > whole:
            yield integer(whole), count - whole


_TOKENS, _HEADS, _DIMS = 4, 4, 4  # tiles: 16 sums and their operands fit in 32 registers
_BLOCK_BYTES = 32 << 10  # of a block of tokens: fits in every first-level data cache
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ADDRESSES = ("pages", "layer", "frames", "first", "low", "high", "query", "sinks", "out")
NO_SINK = NEVER


@dataclass(frozen=True)
class Shape:
    """The shape that code is compiled for. Sizes and strides are in elements.

    Attributes:
        group: the number of query heads per KV head.
        k_dim, v_dim: the size of a head's K and V.
        v_at: the element of a token's content at which V begins.
        content: the size of one token's content in one head.
        layer_stride: the distance between two layers of a page.
        page_stride: the distance between two pages.
        softcap: True if logits are capped.
    """

    dtype: str
    kv_heads: int
    group: int
    k_dim: int
    v_dim: int
    v_at: int
    content: int
    page_tokens: int
    layer_stride: int
    page_stride: int
    softcap: bool

    @property
    def head_stride(self) -> int:
        """The distance between two heads of a page, in elements."""
        return self.page_tokens * self.content

    @property
    def block(self) -> int:
        """The number of tokens in a block: at least one vector of scores."""
        tokens = _BLOCK_BYTES // (self.content * _ELEMENT_BYTES[self.dtype]) // LANES * LANES
        return max(LANES, min(tokens, -(-self.page_tokens // LANES) * LANES))


class KernelWork(ctypes.Structure):
    """The arguments of the compiled code. All but ``next``, ``items``, ``layer`` and the floats are addresses.

    Attributes:
        next: the number of the next item, 0 at first. Each thread takes items by incrementing it.
        items: the number of items. An item is a pair of sequence and KV head.
        pages: the arena.
        layer: the number of the layer in the arena.
        frames: int64: the page tables of all sequences, end to end.
        first: int64 ``[sequences]``: the index in ``frames`` at which the sequence's table begins.
        low, high: int64 ``[sequences]``: the sequence attends to tokens ``[low, high)``, at least one.
        query: float32 ``[sequences, kv_heads, group, k_dim]``.
        sinks: float32 ``[kv_heads, group]``.
        out: float32 ``[sequences, kv_heads, group, v_dim]``, the result.
    """

    _fields_ = (
        ("next", ctypes.c_int64),
        ("items", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in _ADDRESSES),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class HostKernel:
    """The compiled code for a shape. Several threads may run it at once; it runs without the interpreter's lock."""

    def __init__(self, address: int) -> None:
        self._address = address
        self._run_in_one_thread = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def run(self, work: KernelWork, threads: int) -> None:
        """Compute all items with ``threads`` of the OpenMP threads that torch uses.

        These threads are awake between two products of torch. Other threads would have to be woken, and would compete
        with them for the cores. If torch uses a library other than GNU OpenMP, only the caller's thread computes.
        """
        if threads > 1 and (parallel := _parallel()) is not None:
            parallel(self._address, ctypes.addressof(work), threads, 0)
        else:
            self._run_in_one_thread(ctypes.addressof(work))


@functools.cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """Return GNU OpenMP's function ``(function, argument, threads, flags)``; None if torch does not use that library.

    It calls ``function(argument)`` in all threads at once, and returns when all calls have returned.
    """
    function = getattr(torch_library(), "GOMP_parallel", None)
    if function is None:
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return cast(Callable[[int, int, int, int], None], function)


_lock = threading.Lock()
_engines: list[object] = []  # LLVM's engines: the code that an engine compiled is freed with it


def kernel(shape: Shape) -> HostKernel:
    """Return the code for a shape. The first call for a shape compiles it."""
    with _lock:
        return _compiled(shape)


@functools.cache
def _compiled(shape: Shape) -> HostKernel:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    module = llvm.parse_assembly(str(_Writer(shape).module))
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _engines.append(engine)
    return HostKernel(engine.get_function_address("attend"))


class _Writer(Emitter):
    """The writer of the function ``attend`` for a shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.lanes = math.gcd(LANES, math.gcd(shape.k_dim, shape.v_dim))
        element = ir.PointerType(F32 if shape.dtype == "float32" else I16)
        numbers, integers = ir.PointerType(F32), ir.PointerType(I64)
        kinds = {"next": I64, "items": I64, "pages": element, "layer": I64, "frames": integers, "first": integers}
        kinds |= {"low": integers, "high": integers, "query": numbers, "sinks": numbers, "out": numbers}
        kinds |= {"scaling": F32, "softcap": F32}
        assert list(kinds) == [name for name, *_ in KernelWork._fields_]
        super().__init__("attend", {"call": ir.LiteralStructType(list(kinds.values())).as_pointer()})
        fields = {name: self.b.gep(self.arg["call"], [I32(0), I32(at)]) for at, name in enumerate(kinds)}
        self.arg |= {name: self.b.load(where) for name, where in fields.items() if name != "next"}
        g = shape.group
        self.q = self.array(g * shape.k_dim)  # the query of one item, scaled
        self.scores = self.array(g * shape.block)
        self.sums = self.array(g * shape.v_dim)
        self.peaks, self.totals, self.fades = self.array(g), self.array(g), self.array(g)
        take = functools.partial(self.b.atomic_rmw, "add", fields["next"], integer(1), "monotonic")
        item = self.variable(I64, take())
        with self.repeat(lambda: self.b.icmp_signed("<", self.b.load(item), self.arg["items"])):
            self._item(self.b.load(item))
            self.b.store(take(), item)
        self.end()

    # --- The algorithm ---

    def _item(self, item: ir.Value) -> None:
        """Write the code for one sequence and KV head."""
        s, b = self.shape, self.b
        sequence, head = b.udiv(item, integer(s.kv_heads)), b.urem(item, integer(s.kv_heads))
        # With a cap, `capped` converts scores to base 2; without one, the scaling does.
        scaling = self.arg["scaling"] if s.softcap else b.fmul(self.arg["scaling"], real(LOG2_E))
        query = self.at(self.arg["query"], b.mul(item, integer(s.group * s.k_dim)))
        for i in self.each(s.group * s.k_dim, self.lanes):
            self.store(
                self.at(self.q, i), b.fmul(self.load(self.at(query, i), self.lanes), self.splat(scaling, self.lanes))
            )
        for i in self.each(s.group * s.v_dim, self.lanes):
            self.store(self.at(self.sums, i), self.splat(real(0.0), self.lanes))
        for i in self.each(s.group):
            b.store(real(NEVER), self.at(self.peaks, i))
            b.store(real(0.0), self.at(self.totals, i))
        table = self.at(self.arg["frames"], b.load(self.at(self.arg["first"], sequence)))
        inside = b.add(b.mul(self.arg["layer"], integer(s.layer_stride)), b.mul(head, integer(s.head_stride)))
        self._tokens(sequence, table, self.at(self.arg["pages"], inside))
        self._finish(item, head)

    def _tokens(self, sequence: ir.Value, table: ir.Value, pages: ir.Value) -> None:
        """Write the loop over all blocks of tokens that a sequence attends to."""
        s, b = self.shape, self.b
        high = b.load(self.at(self.arg["high"], sequence))
        at = self.variable(I64, b.load(self.at(self.arg["low"], sequence)))
        with self.repeat(lambda: b.icmp_signed("<", b.load(at), high)):
            token = b.load(at)
            page, slot = b.udiv(token, integer(s.page_tokens)), b.urem(token, integer(s.page_tokens))
            count = self.minimum(b.sub(high, token), b.sub(integer(s.page_tokens), slot), integer(s.block))
            frame = b.load(self.at(table, page))
            offset = b.add(b.mul(frame, integer(s.page_stride)), b.mul(slot, integer(s.content)))
            self._block(self.at(pages, offset), count)
            b.store(b.add(token, count), at)

    def _block(self, rows: ir.Value, count: ir.Value) -> None:
        """Write the code that adds ``count`` tokens, whose contents are at ``rows``, to the sums."""
        s, b = self.shape, self.b
        with b.if_then(b.icmp_signed("!=", count, integer(s.block))):
            for i in self.each(s.group * s.block, LANES):
                self.store(self.at(self.scores, i), self.splat(real(NEVER), LANES))
        whole = b.and_(count, integer(-_TOKENS))
        for heads, width in self.tiles(s.group, _HEADS):
            with self.loop(integer(0), whole, _TOKENS) as token:
                self._dots(rows, token, _TOKENS, heads, width)
            with self.loop(whole, count) as token:
                self._dots(rows, token, 1, heads, width)
        for head in self.each(s.group):
            self._soften(head)
        values = self.at(rows, integer(s.v_at))
        for heads, width in self.tiles(s.group, _HEADS):
            for dims, vectors in self.tiles(s.v_dim // self.lanes, _DIMS):
                self._weigh(values, count, heads, width, dims, vectors)

    def _dots(self, rows: ir.Value, token: ir.Value, tokens: int, head: ir.Value, heads: int) -> None:
        """Write the code that computes the scores of a tile of tokens and query heads, one dot product each."""
        s, b = self.shape, self.b
        keys = [self.at(rows, b.mul(b.add(token, integer(i)), integer(s.content))) for i in range(tokens)]
        queries = [self.at(self.q, b.mul(b.add(head, integer(i)), integer(s.k_dim))) for i in range(heads)]
        zero = self.splat(real(0.0), self.lanes)
        dots = [[self.variable(zero.type, zero) for _ in range(heads)] for _ in range(tokens)]
        for dim in self.each(s.k_dim, self.lanes):
            k = [self.load_as(s.dtype, self.at(key, dim), self.lanes) for key in keys]
            q = [self.load(self.at(query, dim), self.lanes) for query in queries]
            for i in range(tokens):
                for j in range(heads):
                    b.store(self.fma(k[i], q[j], b.load(dots[i][j])), dots[i][j])
        for i in range(tokens):
            for j in range(heads):
                where = b.add(b.mul(b.add(head, integer(j)), integer(s.block)), b.add(token, integer(i)))
                b.store(self.across(b.load(dots[i][j]), b.fadd), self.at(self.scores, where))

    def _soften(self, head: ir.Value) -> None:
        """Write the code that turns the scores of a query head into weights, relative to the highest score so far."""
        s, b = self.shape, self.b
        scores = self.at(self.scores, b.mul(head, integer(s.block)))
        parts = [self.at(scores, integer(i)) for i in range(0, s.block, LANES)]
        values = [self.load(part, LANES) for part in parts]
        if s.softcap:
            values = [self.capped(value) for value in values]
        before = b.load(self.at(self.peaks, head))
        peak = self.maximum(before, self.across(functools.reduce(self.maximum, values), self.maximum))
        fade = b.extract_element(self.exp2(self.splat(b.fsub(before, peak), LANES)), I32(0))
        weights = [self.exp2(b.fsub(value, self.splat(peak, LANES))) for value in values]
        for part, weight in zip(parts, weights, strict=True):
            self.store(part, weight)
        added = self.across(functools.reduce(b.fadd, weights), b.fadd)
        total = self.at(self.totals, head)
        b.store(self.fma(b.load(total), fade, added), total)
        b.store(peak, self.at(self.peaks, head))
        b.store(fade, self.at(self.fades, head))

    def _weigh(
        self, values: ir.Value, count: ir.Value, head: ir.Value, heads: int, dim: ir.Value, vectors: int
    ) -> None:
        """Write the code that scales down a tile of the sums and adds the weighted values of a block."""
        s, b = self.shape, self.b
        start = b.mul(dim, integer(self.lanes))
        weights = [self.at(self.scores, b.mul(b.add(head, integer(j)), integer(s.block))) for j in range(heads)]
        where = [
            [
                self.at(
                    self.sums,
                    b.add(b.mul(b.add(head, integer(j)), integer(s.v_dim)), b.add(start, integer(i * self.lanes))),
                )
                for i in range(vectors)
            ]
            for j in range(heads)
        ]
        fades = [self.splat(b.load(self.at(self.fades, b.add(head, integer(j)))), self.lanes) for j in range(heads)]
        sums = [
            [self.variable(fades[0].type, b.fmul(self.load(x, self.lanes), f)) for x in xs]
            for xs, f in zip(where, fades, strict=True)
        ]
        with self.loop(integer(0), count) as token:
            row = self.at(values, b.add(b.mul(token, integer(s.content)), start))
            v = [self.load_as(s.dtype, self.at(row, integer(i * self.lanes)), self.lanes) for i in range(vectors)]
            for j in range(heads):
                weight = self.splat(b.load(self.at(weights[j], token)), self.lanes)
                for i in range(vectors):
                    b.store(self.fma(v[i], weight, b.load(sums[j][i])), sums[j][i])
        for j in range(heads):
            for i in range(vectors):
                self.store(where[j][i], b.load(sums[j][i]))

    def _finish(self, item: ir.Value, head: ir.Value) -> None:
        """Write the code that adds the sinks to the totals and divides the sums by them."""
        s, b = self.shape, self.b
        out = self.at(self.arg["out"], b.mul(item, integer(s.group * s.v_dim)))
        for i in self.each(s.group):
            sink = b.load(self.at(self.arg["sinks"], b.add(b.mul(head, integer(s.group)), i)))
            sink = b.fmul(sink, real(LOG2_E))
            before = b.load(self.at(self.peaks, i))
            peak = self.maximum(before, sink)
            fade, extra = (
                b.extract_element(self.exp2(self.splat(b.fsub(x, peak), LANES)), I32(0)) for x in (before, sink)
            )
            total = self.fma(b.load(self.at(self.totals, i)), fade, extra)
            share = self.splat(b.fdiv(fade, total), self.lanes)
            for dim in self.each(s.v_dim, self.lanes):
                where = b.add(b.mul(i, integer(s.v_dim)), dim)
                self.store(self.at(out, where), b.fmul(self.load(self.at(self.sums, where), self.lanes), share))

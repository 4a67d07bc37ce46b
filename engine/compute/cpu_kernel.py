"""Attention of one token over the pages of its sequence, as machine code that is made for the shapes of one model.

On a CPU, decoding is bound by how fast KV is read. Attention over pages in tensor operations reads it at half the speed
of one contiguous block: a call per page is too small to pay for itself, and a gather reads everything twice. So this
module writes the loop itself, with LLVM's vectors, where pages cost nothing. numba reaches 0.72 to 0.91 of its speed
(``docs/decisions/0018``).

For each sequence and KV head, the code visits blocks of tokens (``Shape.block``: what stays in the first-level cache)
once. It computes the scores of all query heads of the group, their exponentials with a running maximum (online softmax;
Milakov and Gimelshein, arXiv:1805.02867), and the sum of values. Sums are kept in registers, in tiles of ``_TOKENS``
tokens or ``_DIMS`` vectors by ``_HEADS`` query heads. All numbers are float32, whatever the pages hold.

Logits are kept as powers of two, because ``exp2`` needs no multiplication. Absent tokens (the rest of a block) are
``NEVER``, and their values are not read. The code for a shape is made when the shape is first met, in 0.1 s.

``Emitter`` has the vectors, memory and loops that a kernel is written in, as LLVM's intermediate representation. Values
are SSA values of one function, whose body ``b`` is being written. The body of a ``with`` around a loop is the loop's
body, and so is that of a ``for`` over ``each`` and ``tiles``: it may be written several times, or written once and
looped over. Whatever changes in a loop is a ``variable``, which LLVM keeps in a register.
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


_TOKENS, _HEADS, _DIMS = 4, 4, 4  # tiles: 16 sums and their operands fit in 32 registers
_BLOCK_BYTES = 32 << 10  # of a block of tokens: less than any first-level data cache
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ADDRESSES = ("pages", "layer", "frames", "first", "low", "high", "query", "sinks", "out")
NO_SINK = NEVER


@dataclass(frozen=True)
class Shape:
    """The shape that the code is made for. In elements, unless noted otherwise.

    Attributes:
        group: query heads per KV head.
        k_dim, v_dim: of a head; ``v_at`` is where V starts in the content of a token.
        content: of a token and head in a page.
        layer_stride, page_stride: between layers and pages.
        softcap: whether logits are capped.
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
        """Elements between two heads of a page."""
        return self.page_tokens * self.content

    @property
    def block(self) -> int:
        """Tokens visited at a time, at least one vector of scores."""
        tokens = _BLOCK_BYTES // (self.content * _ELEMENT_BYTES[self.dtype]) // LANES * LANES
        return max(LANES, min(tokens, -(-self.page_tokens // LANES) * LANES))


class KernelWork(ctypes.Structure):
    """The arguments of the code.

    Attributes:
        next, items: items are pairs of sequence and KV head. Each thread takes the next one: ``next`` begins with 0.
        pages, layer: address of the arena, and the layer's number.
        frames: address of int64 page tables, end to end; ``first``, of int64 per sequence: where its table starts.
        low, high: of int64 per sequence: the tokens ``[low, high)`` that it attends to, at least one.
        query: of float32 ``[sequences, kv_heads, group, k_dim]``; ``sinks``, of float32 ``[kv_heads, group]``.
        out: of float32 ``[sequences, kv_heads, group, v_dim]``, which is written.
    """

    _fields_ = (
        ("next", ctypes.c_int64),
        ("items", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in _ADDRESSES),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class HostKernel:
    """The code for a shape. Threads may share it; it runs without the interpreter's lock."""

    def __init__(self, address: int) -> None:
        self._address = address
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def run(self, work: KernelWork, threads: int) -> None:
        """Do all items with this many of the OpenMP threads that torch computes with. Those are awake between two
        products; threads of our own would have to be woken, and would compete with them. If torch uses another library,
        only the caller's thread computes."""
        if threads > 1 and (parallel := _parallel()) is not None:
            parallel(self._address, ctypes.addressof(work), threads, 0)
        else:
            self._alone(ctypes.addressof(work))


@functools.cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """Calls a function of one argument from this many threads at once, and returns when all have returned."""
    function = getattr(torch_library(), "GOMP_parallel", None)
    if function is None:
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return cast(Callable[[int, int, int, int], None], function)


_lock = threading.Lock()
_keep: list[object] = []  # engines own the code that they made


def kernel(shape: Shape) -> HostKernel:
    """The code for a shape, made when it is first asked for."""
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
    _keep.append(engine)
    return HostKernel(engine.get_function_address("attend"))


class _Writer(Emitter):
    """Writes the function ``attend`` of a shape into ``module``."""

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
        # With a cap, scores become powers of two after it.
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
            count = self.least(b.sub(high, token), b.sub(integer(s.page_tokens), slot), integer(s.block))
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
        """Scores of some tokens and query heads: a dot product each."""
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
        """Turn scores of a query head into weights relative to the highest score so far."""
        s, b = self.shape, self.b
        scores = self.at(self.scores, b.mul(head, integer(s.block)))
        parts = [self.at(scores, integer(i)) for i in range(0, s.block, LANES)]
        values = [self.load(part, LANES) for part in parts]
        if s.softcap:
            values = [self.capped(value) for value in values]
        before = b.load(self.at(self.peaks, head))
        peak = self.more(before, self.across(functools.reduce(self.more, values), self.more))
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
        """Add the weighted values of a block to a tile of the sums, and scale down what they were before."""
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
        """Add the sinks to the total, and divide the sums by it."""
        s, b = self.shape, self.b
        out = self.at(self.arg["out"], b.mul(item, integer(s.group * s.v_dim)))
        for i in self.each(s.group):
            sink = b.load(self.at(self.arg["sinks"], b.add(b.mul(head, integer(s.group)), i)))
            sink = b.fmul(sink, real(LOG2_E))
            before = b.load(self.at(self.peaks, i))
            peak = self.more(before, sink)
            fade, extra = (
                b.extract_element(self.exp2(self.splat(b.fsub(x, peak), LANES)), I32(0)) for x in (before, sink)
            )
            total = self.fma(b.load(self.at(self.totals, i)), fade, extra)
            share = self.splat(b.fdiv(fade, total), self.lanes)
            for dim in self.each(s.v_dim, self.lanes):
                where = b.add(b.mul(i, integer(s.v_dim)), dim)
                self.store(self.at(out, where), b.fmul(self.load(self.at(self.sums, where), self.lanes), share))

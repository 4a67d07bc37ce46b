"""Attention of one token over the pages of its sequence, as machine code that is made for one model's shapes.

On a CPU, decoding is bound by how fast KV is read, and every way to say "attention over pages" in tensor operations
reads it at half the speed of one contiguous block: a call per page is too small to pay for itself, and a gather reads
everything twice. So this writes the loop itself, in the vectors of LLVM, where pages cost nothing.

For each sequence and KV head, blocks of tokens (``_Shape.block``: what stays in the first-level cache) are visited
once: scores of all query heads of the group, their exponentials with a running maximum (online softmax; Milakov and
Gimelshein, arXiv:1805.02867), and the sum of values. Sums are kept in registers in tiles of ``_TOKENS`` tokens or
``_DIMS`` vectors by ``_HEADS`` query heads. All is float32, whatever pages hold.

Logits are kept as powers of two: ``exp2`` needs no multiplication. What is not there (the rest of a block) is
``_NEVER``: its exponential is small enough to vanish in a sum, and its value is never read.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import llvmlite.binding as llvm
from llvmlite import ir

_LANES = 16  # of a vector of scores; LLVM divides it where registers are shorter
_TOKENS, _HEADS, _DIMS = 4, 4, 4  # tiles: 16 sums, and what they are made of, fit into 32 registers
_BLOCK_BYTES = 32 << 10  # of a block of tokens: less than any first-level cache of data
_UNROLL_MAX = 8  # vectors of a head that are written out; more are looped over
_NEVER = -1e30
_EXP_MIN = -126.0  # 2 to this is the smallest normal number
# 2**r for r in [-0.5, 0.5], highest power first: relative error 2e-8 (Cephes, exp2f).
_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1)
_EXP2 += (6.931472028550421e-1, 1.0)
_TANH = (-17 / 315, 2 / 15, -1 / 3, 1.0)  # of x squared, times x: for small x, where 1 - 2 / (e**2x + 1) is imprecise
_TANH_SMALL = 0.2

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_ELEMENTS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """What the code is made for. Elements, unless it says otherwise.

    Attributes:
        group: query heads per KV head.
        k_dim, v_dim: of a head; ``v_at`` is where V starts in the content of a token.
        content: of a token and head in a page.
        head_stride, layer_stride, page_stride: between heads, layers and pages.
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
        tokens = _BLOCK_BYTES // (self.content * _ELEMENTS[self.dtype]) // _LANES * _LANES
        return max(_LANES, min(tokens, -(-self.page_tokens // _LANES) * _LANES))


# pages, layer, frames, first, low, high, query, sinks, out, scaling, softcap, items from, to
Kernel = Callable[[int, int, int, int, int, int, int, int, int, float, float, int, int], None]
_PROTOTYPE = ctypes.CFUNCTYPE(None, *[ctypes.c_size_t] * 9, *[ctypes.c_float] * 2, *[ctypes.c_int64] * 2)
_lock = threading.Lock()
_keep: list[object] = []  # engines own the code that they made


def kernel(shape: Shape) -> Kernel:
    """A function ``(pages, layer, frames, first, low, high, query, sinks, out, scaling, softcap, start, stop)``.

    Numbers from ``pages`` to ``out`` but ``layer`` are addresses: of the arena; of int64 page tables, end to end; per
    sequence int64 where its table starts, and the tokens ``[low, high)`` it attends to (at least one); of float32
    ``[sequences, kv_heads, group, k_dim]``; of float32 ``[kv_heads, group]``; of float32 ``[sequences, kv_heads,
    group, v_dim]``, which is written. Items are pairs of sequence and KV head; those from ``start`` to ``stop`` are
    done. It runs without the interpreter's lock.
    """
    with _lock:
        return _compiled(shape)


@functools.cache
def _compiled(shape: Shape) -> Kernel:
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
    return _PROTOTYPE(engine.get_function_address("attend"))


class _Writer:
    """Writes the function ``attend`` of a shape into ``module``."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.lanes = math.gcd(_LANES, math.gcd(shape.k_dim, shape.v_dim))
        self.module = ir.Module("attend")
        pointer = ir.PointerType(_F32)
        numbers = ir.PointerType(_I64)
        element = _F32 if shape.dtype == "float32" else ir.IntType(16)
        arguments = [ir.PointerType(element), _I64, *[numbers] * 4, *[pointer] * 3, _F32, _F32, _I64, _I64]
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), arguments), "attend")
        self.entry = function.append_basic_block("entry")
        self.b = ir.IRBuilder(function.append_basic_block("body"))
        names = "pages layer frames first low high query sinks out scaling softcap start stop"
        self.arg = dict(zip(names.split(), function.args, strict=True))
        self.arg["out"].add_attribute("noalias")
        g = shape.group
        self.q = self._array(g * shape.k_dim)  # of one item, scaled
        self.scores = self._array(g * shape.block)
        self.sums = self._array(g * shape.v_dim)
        self.peak, self.total, self.fade = self._array(g), self._array(g), self._array(g)
        with self._loop(self.arg["start"], self.arg["stop"]) as item:
            self._item(item)
        self.b.ret_void()
        ir.IRBuilder(self.entry).branch(function.basic_blocks[1])

    # --- The algorithm ---

    def _item(self, item: ir.Value) -> None:
        """One sequence and KV head."""
        s, b = self.shape, self.b
        sequence, head = b.udiv(item, _int(s.kv_heads)), b.urem(item, _int(s.kv_heads))
        # With a cap, scores are made into powers of two after it.
        scaling = self.arg["scaling"] if s.softcap else b.fmul(self.arg["scaling"], _real(math.log2(math.e)))
        query = self._at(self.arg["query"], b.mul(item, _int(s.group * s.k_dim)))
        for i in self._each(s.group * s.k_dim, self.lanes):
            self._store(self._at(self.q, i), b.fmul(self._load(self._at(query, i)), self._splat(scaling, self.lanes)))
        for i in self._each(s.group * s.v_dim, self.lanes):
            self._store(self._at(self.sums, i), self._splat(_real(0.0), self.lanes))
        for i in self._each(s.group):
            b.store(_real(_NEVER), self._at(self.peak, i))
            b.store(_real(0.0), self._at(self.total, i))
        table = self._at(self.arg["frames"], b.load(self._at(self.arg["first"], sequence)))
        inside = b.add(b.mul(self.arg["layer"], _int(s.layer_stride)), b.mul(head, _int(s.head_stride)))
        self._tokens(sequence, table, self._at(self.arg["pages"], inside))
        self._finish(item, head)

    def _tokens(self, sequence: ir.Value, table: ir.Value, pages: ir.Value) -> None:
        """All blocks of the tokens that a sequence attends to."""
        s, b = self.shape, self.b
        high = b.load(self._at(self.arg["high"], sequence))
        at = self._variable(_I64, b.load(self._at(self.arg["low"], sequence)))
        with self._while(lambda: b.icmp_signed("<", b.load(at), high)):
            token = b.load(at)
            page, slot = b.udiv(token, _int(s.page_tokens)), b.urem(token, _int(s.page_tokens))
            count = self._least(b.sub(high, token), b.sub(_int(s.page_tokens), slot), _int(s.block))
            frame = b.load(self._at(table, page))
            offset = b.add(b.mul(frame, _int(s.page_stride)), b.mul(slot, _int(s.content)))
            self._block(self._at(pages, offset), count)
            b.store(b.add(token, count), at)

    def _block(self, rows: ir.Value, count: ir.Value) -> None:
        """Adds ``count`` tokens, whose contents are at ``rows``, to the sums."""
        s, b = self.shape, self.b
        with b.if_then(b.icmp_signed("!=", count, _int(s.block))):
            for i in self._each(s.group * s.block, _LANES):
                self._store(self._at(self.scores, i), self._splat(_real(_NEVER), _LANES))
        whole = b.and_(count, _int(-_TOKENS))
        for heads, width in self._tiles(s.group, _HEADS):
            with self._loop(_int(0), whole, _TOKENS) as token:
                self._dots(rows, token, _TOKENS, heads, width)
            with self._loop(whole, count) as token:
                self._dots(rows, token, 1, heads, width)
        for head in self._each(s.group):
            self._soften(head)
        values = self._at(rows, _int(s.v_at))
        for heads, width in self._tiles(s.group, _HEADS):
            for dims, vectors in self._tiles(s.v_dim // self.lanes, _DIMS):
                self._weigh(values, count, heads, width, dims, vectors)

    def _dots(self, rows: ir.Value, token: ir.Value, tokens: int, head: ir.Value, heads: int) -> None:
        """Scores of some tokens and query heads: a dot product each."""
        s, b = self.shape, self.b
        keys = [self._at(rows, b.mul(b.add(token, _int(i)), _int(s.content))) for i in range(tokens)]
        queries = [self._at(self.q, b.mul(b.add(head, _int(i)), _int(s.k_dim))) for i in range(heads)]
        zero = self._splat(_real(0.0), self.lanes)
        dots = [[self._variable(zero.type, zero) for _ in range(heads)] for _ in range(tokens)]
        for dim in self._each(s.k_dim, self.lanes):
            k = [self._load_page(self._at(key, dim), self.lanes) for key in keys]
            q = [self._load(self._at(query, dim)) for query in queries]
            for i in range(tokens):
                for j in range(heads):
                    b.store(self._fma(k[i], q[j], b.load(dots[i][j])), dots[i][j])
        for i in range(tokens):
            for j in range(heads):
                where = b.add(b.mul(b.add(head, _int(j)), _int(s.block)), b.add(token, _int(i)))
                b.store(self._sum(b.load(dots[i][j])), self._at(self.scores, where))

    def _soften(self, head: ir.Value) -> None:
        """Scores of a query head become weights relative to the highest score so far."""
        s, b = self.shape, self.b
        scores = self._at(self.scores, b.mul(head, _int(s.block)))
        parts = [self._at(scores, _int(i)) for i in range(0, s.block, _LANES)]
        values = [self._load(part, _LANES) for part in parts]
        if s.softcap:
            values = [self._capped(value) for value in values]
        before = b.load(self._at(self.peak, head))
        peak = self._more(before, self._peak(functools.reduce(self._more, values)))
        fade = b.extract_element(self._exp2(self._splat(b.fsub(before, peak), _LANES)), _I32(0))
        weights = [self._exp2(b.fsub(value, self._splat(peak, _LANES))) for value in values]
        for part, weight in zip(parts, weights, strict=True):
            self._store(part, weight)
        added = self._sum(functools.reduce(b.fadd, weights))
        total = self._at(self.total, head)
        b.store(self._fma(b.load(total), fade, added), total)
        b.store(peak, self._at(self.peak, head))
        b.store(fade, self._at(self.fade, head))

    def _weigh(
        self, values: ir.Value, count: ir.Value, head: ir.Value, heads: int, dim: ir.Value, vectors: int
    ) -> None:
        """Adds the weighted values of a block to a tile of the sums, and fades what they were before."""
        s, b = self.shape, self.b
        start = b.mul(dim, _int(self.lanes))
        weights = [self._at(self.scores, b.mul(b.add(head, _int(j)), _int(s.block))) for j in range(heads)]
        where = [
            [
                self._at(self.sums, b.add(b.mul(b.add(head, _int(j)), _int(s.v_dim)), b.add(start, _int(i * self.lanes))))
                for i in range(vectors)
            ]
            for j in range(heads)
        ]
        fades = [self._splat(b.load(self._at(self.fade, b.add(head, _int(j)))), self.lanes) for j in range(heads)]
        sums = [[self._variable(fades[0].type, b.fmul(self._load(x), f)) for x in xs] for xs, f in zip(where, fades, strict=True)]
        with self._loop(_int(0), count) as token:
            row = self._at(values, b.add(b.mul(token, _int(s.content)), start))
            v = [self._load_page(self._at(row, _int(i * self.lanes)), self.lanes) for i in range(vectors)]
            for j in range(heads):
                weight = self._splat(b.load(self._at(weights[j], token)), self.lanes)
                for i in range(vectors):
                    b.store(self._fma(v[i], weight, b.load(sums[j][i])), sums[j][i])
        for j in range(heads):
            for i in range(vectors):
                self._store(where[j][i], b.load(sums[j][i]))

    def _finish(self, item: ir.Value, head: ir.Value) -> None:
        """Sinks join the total; the sums, divided by it, are the result."""
        s, b = self.shape, self.b
        out = self._at(self.arg["out"], b.mul(item, _int(s.group * s.v_dim)))
        for i in self._each(s.group):
            sink = b.load(self._at(self.arg["sinks"], b.add(b.mul(head, _int(s.group)), i)))
            sink = b.fmul(sink, _real(math.log2(math.e)))
            before = b.load(self._at(self.peak, i))
            peak = self._more(before, sink)
            fade, extra = (
                b.extract_element(self._exp2(self._splat(b.fsub(x, peak), _LANES)), _I32(0)) for x in (before, sink)
            )
            total = self._fma(b.load(self._at(self.total, i)), fade, extra)
            share = self._splat(b.fdiv(fade, total), self.lanes)
            for dim in self._each(s.v_dim, self.lanes):
                where = b.add(b.mul(i, _int(s.v_dim)), dim)
                self._store(self._at(out, where), b.fmul(self._load(self._at(self.sums, where)), share))

    # --- Functions of vectors ---

    def _exp2(self, x: ir.Value) -> ir.Value:
        """2 to the ``x``, for ``x <= 0``."""
        b = self.b
        x = self._more(x, self._splat(_real(_EXP_MIN), _LANES))
        whole = self._call("llvm.rint", x)
        rest = b.fsub(x, whole)
        power = functools.reduce(lambda y, c: self._fma(y, rest, c), [self._splat(_real(c), _LANES) for c in _EXP2])
        exponent = b.fptosi(whole, ir.VectorType(_I32, _LANES))
        bits = b.add(b.bitcast(power, exponent.type), b.shl(exponent, ir.Constant(exponent.type, [23] * _LANES)))
        return b.bitcast(bits, x.type)

    def _capped(self, x: ir.Value) -> ir.Value:
        """``tanh(x / cap) * cap`` as a power of two; what was never there stays so."""
        b = self.b
        cap = self._splat(self.arg["softcap"], _LANES)
        x = b.fdiv(x, cap)
        size = self._call("llvm.fabs", x)
        two, one = (self._splat(_real(n), _LANES) for n in (2.0, 1.0))
        # Of the size, so that the exponent is never above 0: (1 - e**-2x) / (1 + e**-2x).
        power = self._exp2(b.fmul(size, self._splat(_real(-2 * math.log2(math.e)), _LANES)))
        large = b.fdiv(b.fsub(one, power), b.fadd(one, power))
        square = b.fmul(x, x)
        small = functools.reduce(lambda y, c: self._fma(y, square, c), [self._splat(_real(c), _LANES) for c in _TANH])
        tanh = b.select(
            b.fcmp_ordered("<", size, self._splat(_real(_TANH_SMALL), _LANES)),
            b.fmul(small, x),
            self._call("llvm.copysign", large, x),
        )
        del two
        capped = b.fmul(tanh, b.fmul(cap, self._splat(_real(math.log2(math.e)), _LANES)))
        never = self._splat(_real(_NEVER), _LANES)
        return b.select(b.fcmp_ordered("<", b.fmul(x, cap), self._splat(_real(_NEVER / 2), _LANES)), never, capped)

    def _sum(self, x: ir.Value) -> ir.Value:
        return self._halve(x, self.b.fadd)

    def _peak(self, x: ir.Value) -> ir.Value:
        return self._halve(x, self._more)

    def _halve(self, x: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """One number out of a vector, joining its halves until one is left."""
        b = self.b
        while x.type.count > 1:
            half = x.type.count // 2
            low, high = (
                b.shuffle_vector(x, x, ir.Constant(ir.VectorType(_I32, half), list(range(at, at + half))))
                for at in (0, half)
            )
            x = join(low, high)
        return b.extract_element(x, _I32(0))

    def _more(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def _least(self, *numbers: ir.Value) -> ir.Value:
        b = self.b
        return functools.reduce(lambda x, y: b.select(b.icmp_signed("<", x, y), x, y), numbers)

    def _fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return self._call("llvm.fma", x, y, z)

    def _call(self, name: str, *values: ir.Value) -> ir.Value:
        kind = values[0].type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        name = f"{name}.{suffix}"
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(kind, [kind] * len(values)), name)
        return self.b.call(function, values)

    # --- Memory and loops ---

    def _at(self, base: ir.Value, index: ir.Value) -> ir.Value:
        return self.b.gep(base, [index], inbounds=True)

    def _load(self, where: ir.Value, lanes: int = 0) -> ir.Value:
        kind = ir.VectorType(_F32, lanes or self.lanes)
        return self.b.load(self.b.bitcast(where, kind.as_pointer()), align=4)

    def _store(self, where: ir.Value, value: ir.Value) -> None:
        self.b.store(value, self.b.bitcast(where, value.type.as_pointer()), align=4)

    def _load_page(self, where: ir.Value, lanes: int) -> ir.Value:
        """Elements of a page, as float32."""
        b = self.b
        if self.shape.dtype == "float32":
            return self._load(where, lanes)
        kind = ir.VectorType(ir.HalfType() if self.shape.dtype == "float16" else ir.IntType(16), lanes)
        value = b.load(b.bitcast(where, kind.as_pointer()), align=2)
        if self.shape.dtype == "float16":
            return b.fpext(value, ir.VectorType(_F32, lanes))
        wide = b.zext(value, ir.VectorType(_I32, lanes))  # bfloat16 is the upper half of a float32
        return b.bitcast(b.shl(wide, ir.Constant(wide.type, [16] * lanes)), ir.VectorType(_F32, lanes))

    def _splat(self, value: ir.Value, lanes: int) -> ir.Value:
        kind = ir.VectorType(_F32, lanes)
        if isinstance(value, ir.Constant):
            return ir.Constant(kind, [value.constant] * lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))

    def _array(self, count: int) -> ir.Value:
        with self.b.goto_block(self.entry):
            array = self.b.alloca(_F32, count)
            array.align = 64
            return array

    def _variable(self, kind: ir.Type, value: ir.Value) -> ir.Value:
        """A place that LLVM keeps in a register."""
        with self.b.goto_block(self.entry):
            place = self.b.alloca(kind)
        self.b.store(value, place)
        return place

    @contextmanager
    def _while(self, condition: Callable[[], ir.Value]) -> Iterator[None]:
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
    def _loop(self, start: ir.Value, stop: ir.Value, step: int = 1) -> Iterator[ir.Value]:
        at = self._variable(_I64, start)
        with self._while(lambda: self.b.icmp_signed("<", self.b.load(at), stop)):
            index = self.b.load(at)
            yield index
            self.b.store(self.b.add(index, _int(step)), at)

    def _each(self, count: int, step: int = 1) -> Iterator[ir.Value]:
        """Indices ``0, step, ...`` below ``count``: written out where they are few, else a loop around the body."""
        if count // step <= _UNROLL_MAX:
            yield from (_int(i) for i in range(0, count, step))
            return
        with self._loop(_int(0), _int(count), step) as index:
            yield index

    def _tiles(self, count: int, width: int) -> Iterator[tuple[ir.Value, int]]:
        """``(start, width)`` of tiles that cover ``count``: the body is written twice at most."""
        whole = count - count % width
        if whole:
            with self._loop(_int(0), _int(whole), width) as index:
                yield index, width
        if count > whole:
            yield _int(whole), count - whole


def _int(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _real(value: float) -> ir.Constant:
    return ir.Constant(_F32, value)


__all__: Sequence[str] = ["Kernel", "Shape", "kernel"]

"""Compiles the Triton kernels for GPUs that are not here; a line of JSON for each: what for, and its shared memory.

Apart from the process that tests run in: there, Triton interprets.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.compute import triton_kernel

# group, kv_heads, k_dim, v_dim, v_at, content, page_tokens, type
SHAPES = {
    "llama": (4, 8, 128, 128, 128, 256, 64, "bf16"),
    "deepseek": (128, 1, 576, 512, 0, 576, 64, "bf16"),
    "float32": (128, 1, 576, 512, 0, 576, 16, "fp32"),
    "odd": (5, 1, 7, 7, 7, 14, 24, "fp16"),
}
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
POINTERS = {"sinks": "*fp32", "sums": "*fp32"}
SCALARS = {"scaling": "fp32", "softcap": "fp32", "page_stride": "i64", "head_stride": "i32"}


def compiled(kernel: Any, kind: str, constants: dict[str, Any], arch: int, **options: int) -> Any:
    names = kernel.arg_names
    signature = {}
    for name in names:
        data = f"*{kind}" if name in ("query", "pages", "out") else POINTERS.get(name, "*i64")
        signature[name] = "constexpr" if name in constants else SCALARS.get(name, data)
    fixed = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def main(arch: int) -> None:
    for name, only_steps, full in itertools.product(SHAPES, (True, False), (True, False)):
        group, kv_heads, k_dim, v_dim, v_at, content, page_tokens, kind = SHAPES[name]
        shape = triton_kernel.block_shape(group, k_dim, v_dim, BYTES[kind], only_steps)
        same = triton_kernel.head_shape(group * kv_heads, v_dim, full, 8 if only_steps and full else 1)
        own = {"GROUP": group, "PAGE_TOKENS": page_tokens, "CONTENT": content, "K_DIM": k_dim, "V_AT": v_at}
        own |= {"WINDOW": 40 if full else 0, "SOFTCAP": full}
        options = triton_kernel.options_of(shape, v_dim, BYTES[kind])
        made = compiled(triton_kernel._attend, kind, {**shape, **same, **own}, arch, **options)
        assert made.asm["cubin"]
        print(json.dumps({"name": name, "steps": only_steps, "full": full, "shared": made.metadata.shared}))
        if same["SPLITS"] > 1:
            assert compiled(triton_kernel._join, kind, same, arch).asm["cubin"]


if __name__ == "__main__":
    main(int(sys.argv[1]))

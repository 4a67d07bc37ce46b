"""Triton's interpreter: kernels as NumPy, on a machine without a device.

``TRITON_INTERPRET=1`` turns it on, and has to be there before anybody imports Triton, as torch does. ``make kernels``
has both.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import torch

ON = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
# Where there is a device, kernels are tried there; Triton comes with a torch that has devices.
DEVICE = "cuda:0" if torch.cuda.is_available() and not ON else "cpu"
ABSENT = "" if ON or DEVICE != "cpu" else "Triton's interpreter is not here: make kernels"

if ON:
    import triton.language as tl
    from triton.runtime import interpreter

    _patched = interpreter._patch_lang_tensor

    def _patch(tensor: Any, scope: Any) -> None:
        """Bounds of loops are arrays of one element, which NumPy from 2.4 on does not take for integers."""
        _patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch

    _dot = interpreter.InterpreterBuilder.create_dot

    def _wide(handle: Any) -> Any:
        """NumPy has no bfloat16: the interpreter keeps its bits as integers, and would multiply those."""
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def _create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return _dot(self, _wide(a), _wide(b), *rest)

    interpreter.InterpreterBuilder.create_dot = _create_dot

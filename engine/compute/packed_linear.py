"""Packed linear layers: weights in the order in which oneDNN reads them, on CPUs.

torch gives a product in float32 to MKL, and one in a short type to oneDNN with the weights as they are. With weights
that are reordered once, the products of a step take half the time in float32 on an AMD EPYC, for one sequence or many,
and so do those of a chunk; in bfloat16 they take three quarters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# oneDNN compiles code for each number of rows that it meets, a millisecond per shape: small layers do not earn it back.
ELEMENTS_MIN = 1 << 16
ROWS = 512  # the order is chosen for this; one that suits many rows suits one row as well
# Attention reads the weights themselves, see ``engine.compute.attention``.
NOT_PACKED = ("kv_b_proj",)


class PackedLinear(nn.Module):
    """A linear layer without its plain weights. It is never changed: a copy of it is the same object."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., out_features]`` of ``rows [..., in_features]``."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return out

    @property
    def weight(self) -> torch.Tensor:
        """The layer's weights as they were, unpacked at each access: some models look at those of a router."""
        plain: torch.Tensor = self._packed.to_dense()
        return plain

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        return self

    def extra_repr(self) -> str:
        """Its parameters, in the form that ``nn.Linear`` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._bias is not None}"


def pack(net: nn.Module) -> None:
    """Replace the linear layers of ``net`` that are worth it, on a CPU with the needed instructions. Plain weights that
    nothing else refers to are freed."""
    for parent in list(net.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and name not in NOT_PACKED and _worth(layer.weight):
                setattr(parent, name, PackedLinear(layer))


def _worth(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.numel() < ELEMENTS_MIN or not torch.backends.mkldnn.is_available():
        return False
    known = torch.ops.mkldnn
    if weight.dtype == torch.bfloat16:
        return bool(known._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(known._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32

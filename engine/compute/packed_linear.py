"""Linear layers for CPUs whose weights are stored in the order in which oneDNN reads them.

By default torch computes float32 products with MKL. It computes products of shorter types with oneDNN, from weights in
the plain order. Here the weights are reordered once, and oneDNN computes all products. On an AMD EPYC, the products of
a step (of one sequence or many) and of a chunk then take half the time in float32, and three quarters in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# oneDNN compiles code for each new number of rows, in about a millisecond. Smaller layers do not save that much.
ELEMENTS_MIN = 1 << 16
ROWS = 512  # oneDNN chooses the order for this number of rows; the order also suits a single row
# Attention reads these plain weights itself, see ``engine.compute.attention``.
NOT_PACKED = ("kv_b_proj",)


class PackedLinear(nn.Module):
    """A linear layer that stores only the packed weights. It is immutable, so a deep copy returns the same object."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``rows [..., in_features]`` to ``[..., out_features]``."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return out

    @property
    def weight(self) -> torch.Tensor:
        """The plain weights, for models that read the weights of a router. Each access unpacks them."""
        plain: torch.Tensor = self._packed.to_dense()
        return plain

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        return self

    def extra_repr(self) -> str:
        """Return the layer's description in the form of ``nn.Linear``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._bias is not None}"


def pack(net: nn.Module) -> None:
    """Replace the linear layers of ``net`` that become faster, if the CPU has the instructions for their dtype.

    The memory of plain weights is freed unless something else refers to them.
    """
    for parent in list(net.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and name not in NOT_PACKED and _can_pack(layer.weight):
                setattr(parent, name, PackedLinear(layer))


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.numel() < ELEMENTS_MIN or not torch.backends.mkldnn.is_available():
        return False
    mkldnn = torch.ops.mkldnn
    if weight.dtype == torch.bfloat16:
        return bool(mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32

"""Plain transformers, as a reference that holds in every version."""

from __future__ import annotations

from transformers import PreTrainedModel


def as_reference(net: PreTrainedModel) -> PreTrainedModel:
    """The same model, attending by its formula where it caps scores: sdpa of transformers 5.17 leaves that out."""
    if getattr(net.config, "attn_logit_softcapping", None):
        net.set_attn_implementation("eager")
    return net

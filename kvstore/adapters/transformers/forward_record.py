"""What the model was really given while a cache was filled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from transformers import DynamicCache

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu", "maia", "privateuseone")
# Inputs of a forward pass beside the cache, the tokens, their places and the mask, that change no key and no value.
FREE_INPUTS = frozenset(("use_cache", "logits_to_keep", "return_dict", "cache_position"))


def autocast_device() -> str:
    """A device type for which autocast is on; "" without one."""
    return next((device for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device)), "")


class ForwardRecord:
    """The inputs of the forward passes that fill one cache: a forward pre-hook of the model for one ``generate``.

    The tokens of pages are those recorded here. What ``generate`` returns may differ from them: a logits processor, a
    stopping criterion or a streamer can write into the sequence.

    Args:
        past: the cache; passes with another one, those of other threads for example, are not recorded.
        tokens: what it holds already, ``[tokens]``.
    """

    def __init__(self, past: DynamicCache, tokens: torch.Tensor) -> None:
        self._past = past
        self._loaded = len(tokens)
        self._tokens = [tokens]
        self._places: list[torch.Tensor] = []
        self._masks: list[torch.Tensor] = []
        self._unknown = ""

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        """Called before each forward pass of the model. Changes nothing."""
        if inputs.get("past_key_values") is not self._past:
            return
        given = {name: value for name, value in inputs.items() if value is not None and name not in FREE_INPUTS}
        given.pop("past_key_values")
        tokens, places = given.pop("input_ids", None), given.pop("position_ids", None)
        mask = given.pop("attention_mask", None)
        if args or given:
            self._unknown = f"the model is given {', '.join(given) or 'arguments without names'}"
        elif tokens is None or tokens.ndim != 2 or len(tokens) != 1:
            self._unknown = "the model is not given one sequence of tokens"
        elif module.training or autocast_device():
            self._unknown = "training mode or autocast was switched on"
        else:
            self._tokens.append(tokens[0].to(self._tokens[0].device, copy=True))
            if places is not None:
                self._places.append(places.flatten())
            if mask is not None:
                self._masks.append((mask == 1).all() if mask.ndim == 2 else mask.new_zeros((), dtype=torch.bool))

    def tokens(self) -> torch.Tensor:
        """The tokens whose keys and values the cache holds.

        Raises:
            ValueError: they are not what the same tokens have in every other call, and says why.
        """
        tokens = torch.cat(self._tokens)
        if self._places and not self._unknown:
            places = torch.cat(self._places)
            if not torch.equal(places, torch.arange(self._loaded, len(tokens), device=places.device)):
                self._unknown = "tokens have other places"
        if not all(bool(mask) for mask in self._masks):
            self._unknown = "tokens are hidden from others"
        for layer in self._past.layers:
            if type(layer) is not DynamicLayer or layer.keys is None or layer.keys.shape[::2] != (1, len(tokens)):
                self._unknown = self._unknown or "the cache does not hold the tokens that were computed"
        if self._unknown:
            raise ValueError(self._unknown)
        return tokens

"""``prefix_cache`` returns a ``PromptCache``, whose ``generate`` loads pages before, and stores pages after, the
model's ``generate``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvstore.adapters.transformers.models import ForwardRecord, ModelStamp, check_call, check_kind, probe
from kvstore.errors import LeaseBroken, Unavailable
from kvstore.model.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.match import Match
    from kvstore.client.store import Store

_log = logging.getLogger(__name__)


def prefix_cache(model: PreTrainedModel, store: Store, *, salt: str = "", page_tokens: int = 64) -> PromptCache:
    """Return a ``PromptCache``, through which ``model`` reuses the KV of prompts in ``store``. Runs the model on a few
    tokens, and reads all its weights once.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        salt: the tenant. Callers with another salt never find these pages.
        page_tokens: tokens of a page; only full pages are stored.

    Raises:
        InvalidRequest: the field is "model" if the model is not served. It may have layers with a sliding window, a
            state or no cache of their own, an encoder, quantised weights, adapters, hooks, or unknown modules. The
            field is "autocast" if autocast is on. Otherwise it names the invalid argument.
    """
    return PromptCache(model, store, salt, page_tokens)


class PromptCache:
    """A model and its pages in a store. Changes neither the model nor its config.

    Each call first checks the model. If weights, config or modules have changed since the last call, for example by a
    training step, the model has different pages from then on.

    Attributes:
        layout: the layout of the pages.
        last: the match of the last prompt; None if the store did not answer.
    """

    def __init__(self, model: PreTrainedModel, store: Store, salt: str = "", page_tokens: int = 64) -> None:
        self.last: Match | None = None
        self._model = model
        self._store = store
        self._salt = salt
        self._page_tokens = page_tokens
        self._refresh()

    def generate(self, input_ids: torch.Tensor, **settings: Any) -> Any:
        """Load the stored prefix of a prompt, call ``model.generate``, and store new full pages of prompt and answer.

        If the store is not responding, is full or has lost a page, the model computes more. The result is the same.

        Args:
            input_ids: ``[1, tokens]``, without padding.
            settings: arguments of ``model.generate``.

        Raises:
            InvalidRequest: an argument, or a field of the generation config that ``generate`` would use, may change the
                KV of the prompt; the error names it. The field is "model" if the model has become one that is not
                served, and "autocast" if autocast is on.
        """
        check_call(self._model, input_ids, settings)
        if ModelStamp(self._model) != self._stamp:
            self._refresh()
        arguments = {name: value for name, value in settings.items() if name != "past_key_values"}
        past, prompt = DynamicCache(config=self._model.config), input_ids.clone()
        self.last = match = self._load(prompt[0], past)
        record = ForwardRecord(past, prompt[0, : past.get_seq_length()].clone())
        hook = self._model.register_forward_pre_hook(record, with_kwargs=True)
        try:
            output = self._model.generate(input_ids=prompt, past_key_values=past, **arguments)  # type: ignore[operator]
        finally:
            hook.remove()
        self._save(record, past.layers, match.pages if match else 0)
        return output

    def _load(self, tokens: torch.Tensor, past: DynamicCache) -> Match | None:
        """Load the stored prefix of a prompt into ``past``, and return its match. The prefix never contains the last
        token, which the model must compute. Return None if the store is not responding."""
        try:
            match = self._cache.get(tokens)
        except Unavailable as error:
            _log.warning("the store is not responding, so the whole prompt is computed: %s", error)
            return None
        if match:
            pages = torch.from_numpy(match.data).view(self._dtype).view(-1, *self.layout.shape)
            for layer, device in enumerate(self._devices):
                packed = pages[:, layer].to(device).transpose(0, 1).flatten(1, 2)[None]  # [1, heads, tokens, content]
                past.update(*packed.split(self._dims, dim=-1), layer)
        return match

    def _save(self, record: ForwardRecord, layers: Sequence[Any], pages_loaded: int) -> None:
        """Store the full pages of ``layers`` that are not stored yet. Log a warning, and store nothing, if the record
        shows unusual inputs or the model has changed."""
        try:
            tokens = record.tokens()
        except ValueError as error:
            _log.warning("new pages are not stored: %s", error)
            return
        if len(tokens) // self._page_tokens <= pages_loaded:
            return
        if ModelStamp(self._model) != self._stamp:
            _log.warning("new pages are not stored: the model was changed while it generated")
            return
        try:
            with self._cache.writer(tokens) as writer:
                for page in writer.pages_new:
                    positions = slice(page * self._page_tokens, (page + 1) * self._page_tokens)
                    keys_and_values = [(layer.keys[0, :, positions], layer.values[0, :, positions]) for layer in layers]
                    writer.write_page(page, torch.stack([torch.cat(pair, dim=-1).cpu() for pair in keys_and_values]))
        except (Unavailable, LeaseBroken) as error:
            _log.warning("new pages are not stored: %s", error)

    def _refresh(self) -> None:
        """Check whether the model is served, and determine the shape of its cache and its identity."""
        check_kind(self._model)
        ModelStamp(self._model)  # refuses unknown modules before `probe` runs them
        layers = probe(self._model)
        stamp = ModelStamp(self._model)
        first = layers[0]
        assert first.keys is not None and first.values is not None
        heads, dims = first.keys.shape[1], (first.keys.shape[3], first.values.shape[3])
        self._dims, self._dtype = dims, first.keys.dtype
        self._devices = [layer.keys.device for layer in layers if layer.keys is not None]
        config = self._model.config
        is_mla = dims[0] != dims[1]
        self.layout = Layout(
            model=Path(config._name_or_path).name or config.model_type,
            weights_digest=stamp.digest(),
            dtype=str(self._dtype).removeprefix("torch."),
            layers=len(layers),
            kv_heads=heads,
            head_dim=0 if is_mla else dims[0],
            mla_latent=dims[0] if is_mla else 0,
            mla_rope=dims[1] if is_mla else 0,
            page_tokens=self._page_tokens,
            group="transformers",
        )
        self._cache = self._store.cache(self.layout, salt=self._salt)
        self._stamp = stamp

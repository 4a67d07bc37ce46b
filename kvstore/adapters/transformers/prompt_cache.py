"""``prefix_cache``: a model around which ``generate`` loads and stores pages."""

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
    """Return a ``PromptCache`` with which ``model`` reuses the KV cache of prompts in ``store``. Runs the model on a
    few tokens, and reads all its weights once.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        salt: the tenant. Other salts never see these pages.
        page_tokens: tokens of a page; only full pages are stored.

    Raises:
        InvalidRequest: "model", and why it is not served: layers with a sliding window, a state or no own cache, an
            encoder, quantised weights, adapters, hooks, or unknown modules; "autocast"; or an invalid number.
    """
    return PromptCache(model, store, salt, page_tokens)


class PromptCache:
    """A model and its pages in a store. Changes neither the model nor its config.

    Checks the model before each call. If weights, config or modules have changed since the last call (by a training
    step, for example), the model has different pages.

    Attributes:
        layout: the layout of the pages.
        last: how much of the last prompt was found; None if the store did not answer.
    """

    def __init__(self, model: PreTrainedModel, store: Store, salt: str = "", page_tokens: int = 64) -> None:
        self.last: Match | None = None
        self._model = model
        self._store = store
        self._salt = salt
        self._page_tokens = page_tokens
        self._refresh()

    def generate(self, input_ids: torch.Tensor, **settings: Any) -> Any:
        """Call ``model.generate`` for one prompt, with its stored prefix loaded; store full pages of prompt and answer.

        A store that does not answer, is full, or has lost a page costs only computation.

        Args:
            input_ids: ``[1, tokens]``, without padding.
            settings: as ``model.generate`` takes them.

        Raises:
            InvalidRequest: names the argument, or the field of the generation config that ``generate`` would use, which
                may change the KV of the prompt; "model" if it is not served any more; "autocast" if it is on.
        """
        check_call(self._model, input_ids, settings)
        if ModelStamp(self._model) != self._stamp:
            self._refresh()
        given = {name: value for name, value in settings.items() if name != "past_key_values"}
        past, prompt = DynamicCache(config=self._model.config), input_ids.clone()
        self.last = found = self._load(prompt[0], past)
        record = ForwardRecord(past, prompt[0, : past.get_seq_length()].clone())
        watching = self._model.register_forward_pre_hook(record, with_kwargs=True)
        try:
            output = self._model.generate(input_ids=prompt, past_key_values=past, **given)  # type: ignore[operator]
        finally:
            watching.remove()
        self._save(record, past.layers, found.pages if found else 0)
        return output

    def _load(self, tokens: torch.Tensor, past: DynamicCache) -> Match | None:
        """Load the stored part of a prompt, but never its last token, into ``past``. Returns None if the store does not
        answer."""
        try:
            found = self._cache.get(tokens)
        except Unavailable as error:
            _log.warning("the store does not answer, so the whole prompt is computed: %s", error)
            return None
        if found:
            pages = torch.from_numpy(found.data).view(self._dtype).view(-1, *self.layout.shape)
            for layer, device in enumerate(self._devices):
                packed = pages[:, layer].to(device).transpose(0, 1).flatten(1, 2)[None]  # [1, heads, tokens, content]
                past.update(*packed.split(self._dims, dim=-1), layer)
        return found

    def _save(self, record: ForwardRecord, layers: Sequence[Any], pages_loaded: int) -> None:
        """Store the full pages that ``layers`` hold and that are not stored yet; none if anything was unusual."""
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
                    part = slice(page * self._page_tokens, (page + 1) * self._page_tokens)
                    both = [(layer.keys[0, :, part], layer.values[0, :, part]) for layer in layers]
                    writer.write_page(page, torch.stack([torch.cat(pair, dim=-1).cpu() for pair in both]))
        except (Unavailable, LeaseBroken) as error:
            _log.warning("new pages are not stored: %s", error)

    def _refresh(self) -> None:
        """Check the model: whether it is served, the shape of its cache, and its identity."""
        check_kind(self._model)
        ModelStamp(self._model)  # may refuse, so that nothing unknown is run
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

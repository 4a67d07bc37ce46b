"""``generate`` for Hugging Face transformers that loads the KV of a prompt's stored prefix, and stores the rest::

    from kvstore.adapters.transformers import prefix_cache

    cached = prefix_cache(model, kvstore.connect())
    output = cached.generate(**inputs, max_new_tokens=64)  # like model.generate

Pages hold the keys and values of ``DynamicCache``, so the adapter serves models whose layers all keep the keys and
values of all tokens. Two processes share pages if they run the same model: a digest of the weights, the config and the
modules is part of every page's key.

If wrong KV were stored, every later caller would load it. So the adapter serves a model or a call only if it knows
everything that could change the KV. ``models`` checks the model before each call, the arguments of the call, and the
inputs that the model receives. ``prompt_cache`` loads and stores the pages.
"""

from kvstore.adapters.transformers.prompt_cache import PromptCache, prefix_cache

__all__ = ["PromptCache", "prefix_cache"]

"""Hugging Face transformers: ``generate`` that loads the KV cache of a prompt's stored prefix, and stores the rest.

::

    from kvstore.adapters.transformers import prefix_cache

    cached = prefix_cache(model, kvstore.connect())
    output = cached.generate(**inputs, max_new_tokens=64)  # as model.generate

Pages hold what ``DynamicCache`` holds, so a model is served if all its layers keep the keys and values of all tokens.
Two processes share pages if they run the same model: a digest of the weights, the config and the modules is part of
every page's key.

Every later caller would load wrong KV from the store, so a model or a call is served only if everything about it is
known: ``models`` checks the model before each call, ``calls`` checks the arguments, and ``forward_record`` checks the
inputs that the model actually receives.
"""

from kvstore.adapters.transformers.prompt_cache import PromptCache, prefix_cache

__all__ = ["PromptCache", "prefix_cache"]

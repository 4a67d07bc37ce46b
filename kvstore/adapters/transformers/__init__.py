"""Hugging Face transformers: ``generate`` that loads the KV cache of a prompt's stored prefix, and stores the rest.

::

    from kvstore.adapters.transformers import prefix_cache

    cached = prefix_cache(model, kvstore.connect())
    output = cached.generate(**inputs, max_new_tokens=64)  # as model.generate

Pages hold what ``DynamicCache`` holds, so every model is served whose layers all keep the keys and values of all
tokens. Two processes share pages where they run the same model: a digest of the weights, the config and the modules is
part of the name of every page.

Wrong KV in the store would be loaded by every later caller, so a model or a call is served only where everything about
it is known: ``models`` looks at the model before each call, ``calls`` at the arguments, and ``forward_record`` at the
inputs that the model really gets.
"""

from kvstore.adapters.transformers.prompt_cache import PromptCache, prefix_cache

__all__ = ["PromptCache", "prefix_cache"]

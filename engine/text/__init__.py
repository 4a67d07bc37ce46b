"""Tokenizers, and the text of answers."""

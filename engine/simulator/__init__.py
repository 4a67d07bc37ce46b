"""Request traces: read, generated, measured; and the product's own decision code run over them.

Nothing is imported here: every part is imported by whoever needs it.
"""

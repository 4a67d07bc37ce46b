"""Request traces: read, generated, measured; and the product's own decision code run over them.

Nothing is imported here: each user imports the part it needs.
"""

"""The nouns of the store, without I/O: the shape of a page (layout), its key (prefix), its place (replica), and so
on."""

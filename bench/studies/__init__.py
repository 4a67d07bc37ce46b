"""Studies: rows that the docs quote, measured by hand with the harness of ``kvstore bench``."""

"""bench: compares the store with the limits of its machine, one row per measurement.

``harness`` alternates a limit and ours and turns seconds into ratios; ``stage`` starts real daemons and writer
processes; ``get``, ``put``, ``lookup``, ``memory`` and ``restart`` hold the rows, which ``rows`` lists and runs.
Every row checks the bytes that it moved: a benchmark that reads wrong bytes fails.
"""

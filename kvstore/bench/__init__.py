"""bench: compares the store with the limits of its machine, one row per measurement.

``harness`` alternates the limit and the store, and computes ratios of their times. ``stage`` starts real daemons and
writer processes. ``rows`` lists the rows and runs them; the other modules measure them. Every row checks the bytes that
it moved, and fails if they are wrong.
"""

"""The attention kernel for CPUs."""

"""Rows of `kvstore bench` style about engines: what is measured, and against which limit of this machine."""

"""Rows of ``kvstore bench`` about engines."""

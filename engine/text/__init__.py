"""Tokens and text."""

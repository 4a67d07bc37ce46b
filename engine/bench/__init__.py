"""The rows of ``kvstore bench`` that measure engines."""

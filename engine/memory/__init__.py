"""Memory for KV in an engine: the arena, staging buffers, lossy codecs."""

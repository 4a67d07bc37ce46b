"""Where KV lies in an engine: the arena, staging buffers, lossy codecs."""

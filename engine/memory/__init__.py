"""The memory of an engine for KV: arenas, copies between host and device, and lossy codecs."""

"""The kernels of an engine on CUDA devices. Imported only if there is one, or if a test stands in for it."""

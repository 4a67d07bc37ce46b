"""What an engine computes with on CUDA devices. Imported only where there is one, or where a test stands in for it."""

"""Memory of devices: allocations, copies, streams and kernels, for GPUs and for their peer in host memory."""

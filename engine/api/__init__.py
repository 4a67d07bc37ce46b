"""The interfaces of an engine to other processes: gRPC calls, data connections for KV, and metrics."""

"""Every byte format: the local socket, data connections, gRPC. Without sockets."""

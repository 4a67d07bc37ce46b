"""Codecs and channels: the local socket protocol, errors over gRPC, data messages."""

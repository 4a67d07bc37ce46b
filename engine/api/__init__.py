"""The gRPC Engine: service, resumed answers, metrics."""

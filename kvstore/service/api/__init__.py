"""The gRPC API of a node: ``server`` listens, ``gate`` admits, ``identities`` knows who calls, the others serve."""

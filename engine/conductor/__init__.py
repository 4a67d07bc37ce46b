"""The conductor sends each request to the engines that answer it soonest.

``state`` decides without I/O or a clock, and ``shell`` performs the decisions. ``links`` and ``backends`` connect to
engines and nodes, and ``grpc_api`` and ``http`` serve clients.
"""

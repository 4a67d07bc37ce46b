"""The node's decisions against a naive model, any order of events, the daemon and its clients dying anywhere."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.helpers.worlds.node_machine import NodeMachine

TestNode = NodeMachine.TestCase
TestNode.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)

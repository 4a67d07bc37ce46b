"""Waits for a device: where a module has them, and how it fares without one."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest

from kvstore.client.device_link import DeviceLink
from kvstore.device.host_device import HostEvent, HostStream


class WaitSite(NamedTuple):
    """One call of ``DeviceEvent.wait``, ``DeviceStream.wait`` or ``DeviceLink.wait``."""

    path: str
    function: str
    first: int  # lines
    last: int

    def __str__(self) -> str:
        return self.function


def wait_sites(*modules: ModuleType) -> list[WaitSite]:
    """All that wait for an event or let a stream wait for one, in the order of their lines."""
    found = []
    for module in modules:
        path = inspect.getsourcefile(module)
        assert path is not None
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.FunctionDef):
                found += [WaitSite(path, node.name, call.lineno, call.end_lineno or 0) for call in _waits(node)]
    return found


def _waits(function: ast.FunctionDef) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "wait"
        and ast.unparse(node.func.value).endswith(("event", "stream", "link"))
    ]


def forget(monkeypatch: pytest.MonkeyPatch, site: WaitSite) -> list[int]:
    """From now that one call does nothing. A list that grows with each call that was left out."""
    left_out: list[int] = []

    def patched(whole: Callable[..., None]) -> Callable[..., None]:
        def wait(*args: object) -> None:
            caller = sys._getframe(1)
            if caller.f_code.co_filename == site.path and site.first <= caller.f_lineno <= site.last:
                left_out.append(caller.f_lineno)
            else:
                whole(*args)

        return wait

    for kind in (HostEvent, HostStream, DeviceLink):
        monkeypatch.setattr(kind, "wait", patched(kind.wait))
    return left_out

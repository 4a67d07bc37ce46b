"""etcd's messages, out of the etcd3 package's files.

The package cannot be imported together with protobuf 4 and later: its generated modules make descriptors in the old
way. Their serialized file descriptors are sound, though. So this module reads those bytes out of the files with
``ast``, runs none of their code, and makes classes in a descriptor pool of its own, where names like ``kv.proto``
collide with no other."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from kvstore.errors import InvalidRequest

_FILES: Final = ("kv_pb2.py", "auth_pb2.py", "rpc_pb2.py")  # each after those it imports
_REMEDY: Final = "needs the etcd3 package: pip install 'kvstore[etcd]'"


class Messages:
    """One class per message of ``etcdserverpb`` and ``mvccpb``, as attributes made when first asked for."""

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        for package in ("etcdserverpb", "mvccpb"):
            try:
                found = self._pool.FindMessageTypeByName(f"{package}.{name}")
            except KeyError:
                continue
            made = message_factory.GetMessageClass(found)
            setattr(self, name, made)
            return made
        raise AttributeError(name)


@cache
def messages() -> Messages:
    """Loads them once.

    Raises:
        InvalidRequest: the package is not installed.
    """
    package = importlib.util.find_spec("etcd3")
    if package is None or package.origin is None:
        raise InvalidRequest("catalog", f"etcd:// {_REMEDY}")
    pool = descriptor_pool.DescriptorPool()
    for name in _FILES:
        file = descriptor_pb2.FileDescriptorProto.FromString(
            _serialized(Path(package.origin).parent / "etcdrpc" / name)
        )
        pool.Add(file)
    return Messages(pool)


def _serialized(path: Path) -> bytes:
    """The bytes that the module gives to ``FileDescriptor(serialized_pb=...)``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            value = node.value
            # Old generators write `_b('...')`: text that stands for latin-1 bytes.
            literal = value.args[0] if isinstance(value, ast.Call) else value
            if isinstance(literal, ast.Constant):
                return literal.value if isinstance(literal.value, bytes) else str(literal.value).encode("latin-1")
    raise InvalidRequest("catalog", f"{path} holds no descriptor; the etcd3 package is not the one we know (0.12)")

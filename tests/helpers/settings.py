"""What the settings of a program say of themselves."""

from __future__ import annotations

import ast
import inspect
import textwrap

from kvstore.config.reading import Settings


def docstrings(kind: type[Settings]) -> dict[str, str]:
    """What stands below each field of a config dataclass, and of those that it is a subclass of."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                found[field.target.id] = " ".join(str(text.value.value).split())
    return found

"""What the settings of a program say of themselves."""

from __future__ import annotations

import ast
import inspect
import textwrap

from kvstore.cli.settings import default_text
from kvstore.config.reading import Settings, declared


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


def settings_table(kind: type[Settings]) -> str:
    """All of them as a table of the docs."""
    about = docstrings(kind)
    rows = [
        f"| `{name}` | {f'`{default}`' if default else ''} | {about[name]} |"
        for name, setting in declared(kind).items()
        for default in [default_text(setting, getattr(kind, name))]
    ]
    return "\n".join(["| setting | default | |", "|---|---|---|", *rows])


def table_in(page: str, name: str) -> str:
    """The table between the marks of that name in a page of the docs."""
    _, begin, rest = page.partition(f"<!-- {name} -->\n")
    assert begin
    return rest.partition("\n<!-- end -->")[0]


def with_table(page: str, name: str, table: str) -> str:
    """The page with this table between the marks of that name."""
    before, begin, rest = page.partition(f"<!-- {name} -->\n")
    return before + begin + table + "\n<!-- end -->" + rest.partition("<!-- end -->")[2]

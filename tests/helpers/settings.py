"""What the settings of a program say of themselves."""

from __future__ import annotations

from kvstore.cli.settings import default_text
from kvstore.config.reading import Settings, declarations


def settings_table(kind: type[Settings]) -> str:
    """All of them as a table of the docs."""
    rows = [
        f"| `{name}` | {f'`{default}`' if default else ''} | {setting.help} |"
        for name, setting in declarations(kind).items()
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

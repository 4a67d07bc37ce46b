"""Settings of a conductor: what is refused, and that docs/conductor.md tells of every one.

``python -m tests.conductor.test_config`` writes the tables of docs/conductor.md anew.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.conductor.config import ConductorConfig, load
from engine.conductor.shell.metrics import METRICS
from engine.conductor.state.conductor_state import ConductorRules
from kvstore import config as node_config
from kvstore.errors import InvalidRequest
from kvstore.server.metrics import table_text
from tests.helpers.settings import settings_table, table_in, with_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conductor.md"
TABLES = {"settings": partial(settings_table, ConductorConfig), "metrics": partial(table_text, METRICS)}
GIVEN = {"engine": "a:1"}


def test_settings_become_rules(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text('[conductor]\ncatalog = "file:/x"\npolicy = "dualmap"\nqueue = "1MiB"\nroles_floor = 1\n')
    env = {"KVSTORE_CONDUCTOR_SPLIT": "never", "KVSTORE_ENGINE_ROLE": "prefill", "KVSTORE_DRAM": "2GiB"}
    config, sources = load(path, env=env, flags={"window_s": "2"})
    assert sources["split"] == "env KVSTORE_CONDUCTOR_SPLIT" and sources["window_s"] == "flag --window-s"
    rules = ConductorRules(policy="dualmap", split="never", window_s=2.0, queue_bytes=1 << 20, roles_floor=1)
    assert config.rules == rules
    assert load(env={}, flags=GIVEN)[0].rules == ConductorRules(), "defaults are those of the decisions"
    assert node_config.load(path, env=env).node.dram == 2 << 30


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine": ()},
        {"engine": "nowhere"},
        {"policy": "best"},
        {"split": "sometimes"},
        {"window_s": 0},
        {"first_token_s": -1},
        {"rpcs_max": 0},
        {"listen": ()},
        {"quue": "1GiB"},
    ],
    ids=str,
)
def test_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        load(env={}, flags={**GIVEN, **wrong})
    assert refused.value.field == next(iter(wrong))


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_every_setting_and_metric(name: str) -> None:
    assert table_in(PAGE.read_text(), name) == TABLES[name](), "run `python -m tests.conductor.test_config`"


if __name__ == "__main__":
    page = PAGE.read_text()
    for name, make in TABLES.items():
        page = with_table(page, name, make())
    PAGE.write_text(page)

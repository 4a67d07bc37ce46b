"""Settings of an engine: where they come from, what is refused, and that docs/engines.md tells of every one.

``python -m tests.engine.test_config`` writes the tables of docs/engines.md anew.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.api.metrics import METRICS
from engine.config import EngineConfig, load
from engine.model.request import Role
from kvstore import config as node_config
from kvstore.errors import InvalidRequest
from kvstore.server.metrics import table_text
from tests.helpers.settings import settings_table, table_in, with_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
TABLES = {"settings": partial(settings_table, EngineConfig), "metrics": partial(table_text, METRICS)}


def test_flags_go_before_the_environment_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text(
        '[node]\ndram = "1GiB"\n[engine]\nmodel = "f"\nrole = "decode"\narena = "2MiB"\nprefill = ["a:1", "unix:/b"]\n'
    )
    env = {"KVSTORE_ENGINE_ROLE": "prefill", "KVSTORE_ENGINE_SEED": "3", "KVSTORE_DRAM": "2GiB", "KVSTORE_NODE": "n"}
    config, sources = load(path, env=env, flags={"role": "both", "seed": None})
    assert config == EngineConfig(model="f", role=Role.BOTH, arena=2 << 20, seed=3, prefill=("a:1", "unix:/b"))
    assert sources["role"] == "flag --role" and sources["seed"] == "env KVSTORE_ENGINE_SEED"
    assert sources["arena"] == f"file {path}" and sources["http"] == "default"
    node = node_config.load(path, env={**env, "KVSTORE_ENGINE_ANYTHING": "1"}).node  # that is the engine's to refuse
    assert node.dram == 2 << 30


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": ""},
        {"role": "cook"},
        {"device": "gpu"},
        {"dtype": "int4"},
        {"page_tokens": 0},
        {"batch_max": 0},
        {"threads": -1},
        {"listen": ()},
        {"prefill": "nowhere"},
        {"prefill": "a:0"},
        {"link": "string"},
        {"compress": "zip"},
        {"compress": "fp8"},  # which there was once
        {"hold_s": 0},
        {"drain_s": -1},
        {"tls_key": "/key"},
        {"tls_client_ca": "/ca"},
        {"log_format": "xml"},
        {"arean": "1GiB"},
    ],
    ids=str,
)
def test_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        load(env={}, flags={"model": "m", **wrong})
    assert refused.value.field == next(iter(wrong))


@pytest.mark.parametrize(
    ("text", "env", "said"),
    [
        ("[engine]\nrol = 1", {}, "engine.rol: is not a known setting; did you mean role?"),
        ("[engin]", {}, "engin: is not a known setting; did you mean engine?"),
        (
            "",
            {"KVSTORE_ENGINE_ROL": "x"},
            "KVSTORE_ENGINE_ROL: is not a known setting; did you mean KVSTORE_ENGINE_ROLE?",
        ),
        ('[engine]\nrole = "x"', {}, "role: must be one of prefill, decode, both (got 'x') (from file"),
    ],
)
def test_names_nobody_knows(tmp_path: Path, text: str, env: dict[str, str], said: str) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as refused:
        load(path, env=env, flags={"model": "m"})
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_every_setting_and_metric(name: str) -> None:
    assert table_in(PAGE.read_text(), name) == TABLES[name](), "run `python -m tests.engine.test_config`"


if __name__ == "__main__":
    page = PAGE.read_text()
    for name, make in TABLES.items():
        page = with_table(page, name, make())
    PAGE.write_text(page)

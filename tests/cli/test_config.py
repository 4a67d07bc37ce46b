"""The configuration: what is accepted, what wins, and what a mistake is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import (
    GIB,
    MIB,
    NodeConfig,
    NvmeTarget,
    format_size,
    load,
    node_config,
    parse_address,
    parse_nvme,
    parse_size,
)
from kvstore.errors import InvalidRequest
from kvstore.state.eviction import POLICY_DEFAULT


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(text)
    return path


# --- Sizes and addresses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "size_bytes"),
    [
        ("512MiB", 512 * MIB),
        ("4GiB", 4 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("2TiB", 2048 * GIB),
        ("64KB", 64_000),
        ("1GB", 10**9),
        ("1048576", MIB),
        (" 7B ", 7),
        (4096, 4096),
    ],
)
def test_size(given_: object, size_bytes: int) -> None:
    assert parse_size(given_, "dram") == size_bytes


NO_SIZES = ["", "MiB", "-1", "-4GiB", "4 G", "4gib", "4GiBs", "1e9", "1_000", "٣MiB", "0.3KiB", "nan", "1\n2", "0"]


@pytest.mark.parametrize("given_", [*NO_SIZES, "9000000TiB", 0, -1, 1 << 63, True, 1.5, None, b"4GiB", []])
def test_size_refused(given_: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_size(given_, "dram")
    assert refused.value.field == "dram"
    assert "\n" not in str(refused.value)


@given(st.integers(1, (1 << 63) - 1))
def test_size_round_trip(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("given_", "address"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("host:0", ("host", 0)), ("[::1]:7070", ("::1", 7070))],
)
def test_address(given_: str, address: tuple[str, int]) -> None:
    assert parse_address(given_) == address


@pytest.mark.parametrize(
    "given_", ["", "host", ":80", "host:", "host:65536", "::1:80", "[::1:80", "a b:1", "h:-1", 80, None]
)
def test_address_refused(given_: object) -> None:
    with pytest.raises(InvalidRequest, match="^http: must be HOST:PORT .got .*"):
        parse_address(given_, "http")


# --- NVMe targets --------------------------------------------------------------------------------------------------

A, B = NvmeTarget(Path("/a/kv"), 4 * GIB), NvmeTarget(Path("/dev/nvme:0"), 512 * MIB)


@pytest.mark.parametrize(
    ("given_", "targets"),
    [
        ("/a/kv:4GiB", (A,)),
        ("/a/kv:4GiB,/dev/nvme:0:512MiB", (A, B)),
        (" /a/kv:4GiB , /dev/nvme:0:512 MiB ", (A, B)),
        (["/a/kv:4GiB", "/dev/nvme:0:512MiB"], (A, B)),
        (("/a/kv:4294967296", B), (A, B)),
        (["/a,b:1GiB"], (NvmeTarget(Path("/a,b"), GIB),)),
        (A, (A,)),
        ("", ()),
        (None, ()),
        ([], ()),
    ],
)
def test_nvme_targets(given_: object, targets: tuple[NvmeTarget, ...]) -> None:
    assert parse_nvme(given_) == targets
    assert parse_nvme([str(target) for target in targets]) == targets, "their text is what is read"


def test_nvme_relative_path_is_completed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    node = node_config(nvme="kv:1GiB")
    assert node.nvme == (NvmeTarget(tmp_path / "kv", GIB),)
    for given_ in (f"kv:1GiB,./kv:1GiB,{tmp_path}/x:1GiB", [f"{tmp_path}/kv:1GiB", "kv:2GiB"]):
        with pytest.raises(InvalidRequest, match="^nvme: must not name a path twice"):
            node_config(nvme=given_)


NO_TARGETS = ["kv", "/a/kv", ":4GiB", "/a:", "/a:lots", "/a:0", "/a:-1", "/a:4096", "/a:1GiB,", ",", "\0:1GiB", 7, True]


@pytest.mark.parametrize("given_", [*NO_TARGETS, {"path": "/a"}, [["/a:1GiB"]], [None], ["/a:1GiB", 3], [b"/a:1GiB"]])
def test_nvme_refused(given_: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        node_config(nvme=given_)
    assert refused.value.field == "nvme"
    assert "\n" not in str(refused.value)


def test_nvme_from_everywhere(tmp_path: Path) -> None:
    path = write(tmp_path, '[node]\nnvme = ["/a/kv:4GiB", "/b:1GiB"]\nnvme_admission = "reused"\ndemote_at = 1\n')
    assert load(path, env={}).node.nvme == (A, NvmeTarget(Path("/b"), GIB))
    env = {"KVSTORE_NVME": "/a/kv:4GiB,/dev/nvme:0:512MiB", "KVSTORE_NVME_WRITE_BYTES_PER_DAY": "1TB"}
    config = load(path, env=env)
    assert config.node.nvme == (A, B)
    assert (config.node.nvme_admission, config.node.demote_at) == ("reused", 1.0)
    assert config.node.nvme_write_bytes_per_day == 10**12
    assert config.sources["node.nvme"] == "env KVSTORE_NVME"
    flags = {"nvme": ("/a/kv:4GiB",), "nvme_format": True, "eviction": "s3-fifo_2"}
    node = load(path, env=env, flags=flags).node
    assert (node.nvme, node.nvme_format, node.eviction) == ((A,), True, "s3-fifo_2")
    assert load(path, env={"KVSTORE_NVME": ""}).node.nvme == ()
    with pytest.raises(InvalidRequest, match=r"^nvme: must be PATH:SIZE.*'x'.*\(from env KVSTORE_NVME\)$"):
        load(env={"KVSTORE_NVME": "x"})


def test_nvme_extent_fits_each_target() -> None:
    assert node_config(nvme="/a:4MiB,/b:8MiB", nvme_extent="4MiB").nvme_extent == 4 * MIB
    with pytest.raises(InvalidRequest, match="^nvme_extent: must fit in /a:4MiB"):
        node_config(nvme="/b:8MiB,/a:4MiB", nvme_extent="8MiB")


def test_default_policy_is_the_node_s() -> None:
    """Config may not look at the state's policies, so that the two defaults are kept equal here."""
    assert NodeConfig().eviction == POLICY_DEFAULT


# --- A node's settings ---------------------------------------------------------------------------------------------


REFUSED: dict[str, list[object]] = {
    "name": ["a/b", "", "..", "x" * 49, 7],
    "dram": [0, "0", "lots", 4095],
    "http": ["nowhere", 80],
    "shm_dir": ["relative/folder", 3],
    "group": ["perhaps", 1],
    "extent": [4097, "1GiB"],
    "scrub_bytes_per_s": [-1],
    "reserve_ttl_s": [0, "soon", float("nan"), True],
    "lease_ttl_s_max": [float("inf"), 29],
    "sessions_max": [0, 65536, 2.5],
    "log_level": ["loud"],
    "eviction": ["LRU", "", 1],
    "nvme_format": [True, "perhaps"],
    "nvme_extent": [4097, -4096],
    "nvme_admission": ["some"],
    "nvme_write_bytes_per_day": [-1],
    "demote_at": [1.01, -0.1, "half", float("nan")],
    "promote_after": [0, 1.5],
    "checkpoint_s": [0, True],
    "nvme_answer_s": [0],
    "dramm": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_node_refused_naming_the_field(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        node_config(**{name: value})
    assert refused.value.field == name
    assert "\n" not in str(refused.value)


def test_node_is_checked_however_it_is_made() -> None:
    wrong: list[dict[str, Any]] = [
        {"dram": 0},
        {"nvme_write_bytes_per_day": -1},
        {"nvme": (NvmeTarget(Path("relative"), GIB),)},
    ]
    for arguments in wrong:
        with pytest.raises(InvalidRequest, match=f"^{next(iter(arguments))}: "):
            NodeConfig(**arguments)


# --- Where values come from ----------------------------------------------------------------------------------------


def test_precedence_and_sources(tmp_path: Path) -> None:
    path = write(tmp_path, '[node]\nname = "f"\ndram = "1GiB"\nextent = "1MiB"\nverify_reads = true\n')
    env = {"KVSTORE_DRAM": "2GiB", "KVSTORE_EXTENT": "2MiB", "HOME": "/"}
    config = load(path, env=env, flags={"extent": "4MiB", "http": None})
    assert config.node == NodeConfig(name="f", dram=2 * GIB, extent=4 * MIB, verify_reads=True)
    assert config.sources["node.name"] == f"file {path}"
    assert config.sources["node.dram"] == "env KVSTORE_DRAM"
    assert config.sources["node.extent"] == "flag --extent"
    assert config.sources["node.http"] == "default"
    assert len(config.sources) == len(dataclasses.fields(NodeConfig))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[node]\ndramm = 1", "node.dramm: is not a known setting; did you mean dram? (from file {path})"),
        ("[nodes]\n", "nodes: is not a known setting; did you mean node? (from file {path})"),
        ("node = 3", "node: must be a table, [node] (from file {path})"),
        ("[node]\ndram = 0", "dram: must be more than zero bytes (got 0) (from file {path})"),
        ("[node]\ndram = [1]", "dram: must be a size, in bytes or as text such as 512MiB (got [1]) (from file {path})"),
        ("[node]\nname = 7", "name: must be text (got 7) (from file {path})"),
    ],
)
def test_file_refused(tmp_path: Path, text: str, line: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidRequest) as refused:
        load(path, env={})
    assert str(refused.value) == line.format(path=path)


def test_file_that_is_no_toml(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="^config: .* is not TOML"):
        load(write(tmp_path, "[node"), env={})


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="^config: .*/none.toml: No such file"):
        load(tmp_path / "none.toml", env={})


def test_environment_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        load(env={"KVSTORE_DRAMM": "1GiB"})
    assert str(refused.value) == "KVSTORE_DRAMM: is not a known setting; did you mean KVSTORE_DRAM?"
    with pytest.raises(InvalidRequest, match=r"^dram: must be a size .*got 'x'. \(from env KVSTORE_DRAM\)$"):
        load(env={"KVSTORE_DRAM": "x"})


def test_flag_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"\(from flag --lease-ttl-s-max\)$"):
        load(env={}, flags={"lease_ttl_s_max": "x"})
    with pytest.raises(InvalidRequest, match="^nvmee: is not a known setting; did you mean nvme?"):
        load(env={}, flags={"nvmee": None})

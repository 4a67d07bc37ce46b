"""The rules of `docs/architecture.md`, checked over the source tree.

Each rule is a function from (path, source) to the complaints it has; the tests below run it over every file, and feed
it bad snippets, so that a rule that has stopped biting is noticed too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import nursery

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvstore", "engine")

Rule = Callable[[str, str], list[str]]

# --- What is allowed -----------------------------------------------------------------------------------------------

BASE = ("about", "errors", "failpoint", "boundary", "safe_files", "model")
BELOW_CLUSTER = (*BASE, "config", "limits", "logs", "pb", "state", "shm", "device", "tier", "wire")
BELOW_NODE = (*BELOW_CLUSTER, "cluster", "client", "server")

# Which parts of the store a part may import; itself is understood. Imports point down only, so two parts side by side
# do not see each other: what both need is in a part below. `config` is read by daemons and the command line only.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "about": (),
    "errors": (),
    "config": ("errors",),
    "logs": ("config",),
    "pb": (),
    "__main__": ("cli",),
    "boundary": ("errors", "failpoint"),  # how far an unexpected error reaches
    "failpoint": (),  # a test's hand on a process: for the parts that act, never for nouns and decisions
    "safe_files": ("errors",),
    "limits": ("errors",),
    "model": ("errors",),
    "state": ("errors", "model"),
    "shm": BASE,  # files that processes of one machine share
    "device": BASE,  # memory of GPUs, and its peer in host memory
    "tier": (*BASE, "shm", "device"),
    "wire": (*BASE, "pb"),  # byte formats: no socket
    "cluster": BELOW_CLUSTER,  # below `client`, which reads pages of other nodes itself
    "client": (*BASE, "pb", "state", "shm", "device", "tier", "wire", "cluster"),
    "server": (*BELOW_CLUSTER, "cluster"),  # what every daemon needs: it knows no node
    "node": BELOW_NODE,  # its gRPC API is a client of the node
    "addresses": (*BASE, "client", "shm", "cluster"),
    "adapters": (*BASE, "pb", "shm", "device", "tier", "wire", "cluster", "client", "addresses", "kvstore"),
    "bench": (*BELOW_NODE, "node", "addresses", "kvstore"),
    "cli": (*BELOW_NODE, "node", "addresses", "kvstore", "bench"),
    # kvstore/__init__.py: `open` joins a node to a client.
    "kvstore": (*BELOW_NODE, "node", "addresses"),
    # An engine serves as a node does, and knows a node only as a client does.
    "engine": (*BELOW_NODE, "addresses", "kvstore", "bench", "cli", "adapters"),
}

ENGINE_BELOW_COMPUTE = ("model", "state", "memory", "text")
ENGINE_BELOW_SHELL = (*ENGINE_BELOW_COMPUTE, "compute", "pool", "transfer")

# Inside a part, which folders a folder may import; itself is understood. Modules next to the folders that are not named
# here may import all of them: they put a process together.
FOLDERS: dict[str, dict[str, tuple[str, ...]]] = {
    "engine": {
        "model": (),
        "state": ("model",),
        "memory": ("model",),
        "text": ("model",),
        "compute": ENGINE_BELOW_COMPUTE,
        "pool": (*ENGINE_BELOW_COMPUTE, "compute"),
        "transfer": (*ENGINE_BELOW_COMPUTE, "compute", "pool"),
        "shell": (*ENGINE_BELOW_SHELL, "config"),
        "api": (*ENGINE_BELOW_SHELL, "shell", "config"),
        "config": ("model", "pool", "transfer"),
        "client": ("model", "api"),
        "conductor": (*ENGINE_BELOW_COMPUTE, "api", "client", "config"),
        "simulator": ("model", "state"),
        "demo": (*ENGINE_BELOW_COMPUTE, "compute", "client"),
        "bench": (*ENGINE_BELOW_SHELL, "shell", "config", "simulator", "client", "conductor"),
    },
}

# Kinds of stores behind the interfaces of `kvstore.client`.
STORE_KINDS = ("local", "remote")

# Nouns and decisions are pure: no I/O, no clock, no threads, no chance but from a seed. So they may import this much.
PURE_PARTS = ("model", "state")
# Decisions about the directory of a pool.
PURE_MODULES_OF_CLUSTER = tuple(
    f"kvstore/cluster/{name}.py" for name in ("directory", "directory_owner", "lookup_plan", "announce_plan")
)
# Of the store they know its nouns and errors; and a conductor keeps what nodes tell as an owner of the directory does.
PURE_FOLDERS = ("engine/model/", "engine/state/", "engine/conductor/state/")
STORE_FOR_PURE_FOLDERS = ("kvstore.model.", "kvstore.errors.", "kvstore.cluster.directory.")
# fmt: off
PURE_MODULES = frozenset((
    "__future__", "abc", "array", "base64", "bisect", "binascii", "collections", "contextlib", "copy",
    "dataclasses", "enum", "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math", "numbers",
    "operator", "random", "re", "string", "struct", "types", "typing", "numpy", "xxhash", "kvstore", "engine",
))
# fmt: on

# What `engine.state` alone writes of a sequence; other names of it are also those of what the shell has.
SEQUENCE_FIELDS = frozenset(
    ("phase", "cached", "holds", "loading", "moving", "aside", "pulled", "engines", "attempt", "attempts", "passing")
)

# Where unexpected errors are caught: nothing else may name ``Exception`` in an ``except``.
BOUNDARY = "kvstore/boundary.py"

GENERATED = "kvstore/pb/"  # not ours to style
MAY_PRINT = re.compile(r"kvstore/(cli|bench)/|kvstore/bench\.py|engine/(demo|cli)\b|engine/.*/cli\b")

FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
# "path" or "path:function" -> why it is better long than divided.
LONG_FOR_A_REASON = {
    "engine/compute/triton_kernel.py:_attend": "a kernel: its arguments are half of it, and its loop is one piece",
}

# What reads the wall clock, which steps, and why. No lease, no deadline and no age that decides anything is among it:
# those are counted by the clocks since the machine started.
WALL_CLOCK = re.compile(r"(time\.(time|time_ns)|(datetime\.)?(datetime\.(now|utcnow)|date\.today))")
MAY_READ_WALL_CLOCK = {
    "engine/conductor/http/server.py": "OpenAI's replies say when they were made",
    "kvstore/cli/pin.py": "shows when a pin ends",
    "kvstore/server/identities.py": "a token expires on a date",
    "kvstore/node/kv_events.py": "stamps events; numbers that a later daemon goes on from",
    "kvstore/node/event_log.py": "the same",
    "kvstore/node/book.py": "when pins end that a version without the other clock wrote down",
    "kvstore/node/on_stop.py": "systemd tells by it whether the machine is going down",
    "kvstore/node/operator/explain_lookup.py": "tells how long ago an event was, by its stamp",
    "kvstore/node/operator/tenant_calls.py": "tells when a pin ends",
    "kvstore/tier/nvme/devices.py": "a day's writes to a device are counted by the day",
}


# --- The rules -----------------------------------------------------------------------------------------------------


def imports_point_down(path: str, source: str) -> list[str]:
    """Each import of our own names a part that the table allows."""
    part = part_of(path)
    allowed = {part, *MAY_IMPORT.get(part, ())}
    return [
        f"{path}:{line}: {part} may not import {module}"
        for line, module in imported(path, source)
        if module.partition(".")[0] in PACKAGES and part_of_module(module) not in allowed
    ]


def folders_point_down(path: str, source: str) -> list[str]:
    """As ``imports_point_down``, inside a part with a table of folders. A module in that table counts as a folder."""
    complaints = []
    for part, folders in FOLDERS.items():
        mine = folder_of(module_of(path), part, folders)
        if mine is not None and mine not in folders:
            complaints += [f"{path}: {part}.{mine} is missing from the table of folders"]
        elif mine is not None:
            complaints += [
                f"{path}:{line}: {mine} may not import {module}"
                for line, module in imported(path, source)
                if module.startswith(f"{part}.")
                and module.split(".")[part.count(".") + 1] not in (mine, *folders[mine])
            ]
    return complaints


def kinds_of_stores_are_peers(path: str, source: str) -> list[str]:
    """No kind of store knows another; the interfaces know none of them. `connect` alone chooses."""
    name = module_of(path)
    if not name.startswith("kvstore.client") or name == "kvstore.addresses":
        return []
    mine = name.split(".")[2] if name.count(".") > 1 else ""
    others = [f"kvstore.client.{kind}." for kind in STORE_KINDS if kind != mine]
    return [
        f"{path}:{line}: may not import {module}, another kind of store"
        for line, module in imported(path, source)
        if f"{module}.".startswith(tuple(others))
    ]


def nouns_and_decisions_are_pure(path: str, source: str) -> list[str]:
    """`model` and `state` import nothing that touches the world, call no I/O, and draw nothing without a seed."""
    if part_of(path) not in PURE_PARTS and not path.startswith((*PURE_FOLDERS, *PURE_MODULES_OF_CLUSTER)):
        return []
    complaints = [
        f"{path}:{line}: {module} is no import for pure code"
        for line, module in imported(path, source)
        if module.partition(".")[0] not in PURE_MODULES
        or module.startswith(("random.", "numpy.random"))
        or (path.startswith(PURE_FOLDERS) and f"{module}.".startswith("kvstore.") and not stored_noun(module))
    ]
    for call in (node for node in ast.walk(parsed(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        seeded = name in ("random.Random", "np.random.default_rng", "numpy.random.default_rng") and call.args
        if name in ("open", "input", "print") or (re.match(r"(random|(np|numpy)\.random)\.", name) and not seeded):
            complaints.append(f"{path}:{call.lineno}: {name}() in pure code")
    return complaints


def stored_noun(module: str) -> bool:
    """Whether it is one of the store's nouns or errors."""
    return f"{module}.".startswith(STORE_FOR_PURE_FOLDERS)


def state_alone_writes_sequences(path: str, source: str) -> list[str]:
    """Threads and the shell of an engine post events; what they say of a sequence is written by its decisions."""
    if not path.startswith("engine/") or path.startswith(("engine/state/", "engine/conductor/")):
        return []
    return [
        f"{path}:{target.lineno}: {ast.unparse(target)} is written by engine/state alone"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for targets in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in (targets.elts if isinstance(targets, ast.Tuple) else [targets])
        if isinstance(target, ast.Attribute)
        and target.attr in SEQUENCE_FIELDS
        and ast.unparse(target.value) != "self"  # of another class
    ]


def lengths_are_readable(path: str, source: str) -> list[str]:
    """Files and functions keep to the guides, or are listed with the reason."""
    return [
        f"{where}: {lines} lines, guide is {guide}"
        for where, lines, guide in too_long(path, source)
        if where not in LONG_FOR_A_REASON
    ]


def too_long(path: str, source: str) -> Iterator[tuple[str, int, int]]:
    """(place, lines, guide) of what exceeds a guide, listed or not; a function's decorators count, nested ones too."""
    if (lines := len(source.splitlines())) > FILE_LINES_MAX:
        yield path, lines, FILE_LINES_MAX
    for name, node in definitions(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if (lines := (node.end_lineno or first) - first + 1) > FUNCTION_LINES_MAX:
                yield f"{path}:{name}", lines, FUNCTION_LINES_MAX


def only_the_edge_prints(path: str, source: str) -> list[str]:
    """`print(` belongs to the command line, the demo and the benchmarks; a library has no stdout."""
    if MAY_PRINT.match(path):
        return []
    return [
        f"{path}:{node.lineno}: print() outside the command line"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def exceptions_are_named(path: str, source: str) -> list[str]:
    """Nothing is swallowed unnamed: no bare or broad `except` unless it ends in `raise`, no broad `suppress`."""
    if path == BOUNDARY:
        return []
    complaints = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ExceptHandler):
            ends_in_raise = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            broad = (node.type is None or is_broad(node.type)) and not ends_in_raise
        else:
            broad = (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("suppress")
                and any(is_broad(argument) for argument in node.args)
            )
        if broad:
            complaints.append(f"{path}:{node.lineno}: name the exceptions that are expected here")
    return complaints


def is_broad(node: ast.expr) -> bool:
    """Whether an except clause's expression contains Exception or BaseException."""
    return any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in ast.walk(node))


def public_names_are_described(path: str, source: str) -> list[str]:
    """Every public class, function and method has a docstring (setters share their getter's)."""
    return [
        f"{path}:{node.lineno}: {name} has no docstring"
        for name, node in definitions(parsed(source), into_functions=False)
        if not any(word.startswith("_") for word in name.split("."))
        and not ast.get_docstring(node)
        and not any(re.search(r"overload$|\.(setter|deleter)$", ast.unparse(mark)) for mark in node.decorator_list)
    ]


def folders_are_packages(path: str, source: str) -> list[str]:
    """Each folder with modules has an `__init__.py`: without it an installed package would lack the folder."""
    return [] if (ROOT / path).with_name("__init__.py").exists() else [f"{path}: no __init__.py beside it"]


def nothing_waits_by_the_wall_clock(path: str, source: str) -> list[str]:
    """It is read only where the table says what for. Benchmarks stamp what they measure."""
    if path in MAY_READ_WALL_CLOCK or re.match(r"(kvstore|engine)/bench/", path):
        return []
    return [
        f"{path}:{node.lineno}: reads the wall clock: use time.monotonic(), or say in the table what for"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Attribute) and WALL_CLOCK.fullmatch(ast.unparse(node))
    ] + [f"{path}:{line}: {name} under another name" for line, name in imported(path, source) if WALL_CLOCK.match(name)]


RULES: list[Rule] = [
    imports_point_down,
    folders_point_down,
    kinds_of_stores_are_peers,
    nouns_and_decisions_are_pure,
    state_alone_writes_sequences,
    lengths_are_readable,
    only_the_edge_prints,
    exceptions_are_named,
    public_names_are_described,
    folders_are_packages,
    nothing_waits_by_the_wall_clock,
]


# --- Reading source ------------------------------------------------------------------------------------------------

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def sources() -> dict[str, str]:
    """path -> text of every module of ours, paths relative to the repository."""
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    texts = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}
    return {path: text for path, text in texts.items() if not path.startswith(GENERATED)}


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a source, which every rule looks at."""
    return ast.parse(source)


def part_of(path: str) -> str:
    """The part that a file belongs to: kvstore/model/layout.py -> model, engine/demo.py -> engine."""
    return part_of_module(module_of(path))


def module_of(path: str) -> str:
    """kvstore/model/layout.py -> kvstore.model.layout, kvstore/model/__init__.py -> kvstore.model."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def folder_of(module: str, part: str, folders: Collection[str]) -> str | None:
    """The folder of a part that a module is in, or is; None if it is next to the folders, or in another part."""
    first, *inside = module.removeprefix(f"{part}.").split(".")
    return first if module.startswith(f"{part}.") and (inside or first in folders) else None


def part_of_module(module: str) -> str:
    """The same for a dotted name: kvstore.model.layout -> model, kvstore -> kvstore."""
    package, _, rest = module.partition(".")
    return (rest.partition(".")[0] or "kvstore") if package == "kvstore" else package


def imported(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, anywhere in the file; relative ones made absolute.

    `from a import b` gives a.b, which is right for parts and modules whether b is a module or a name in one. Names of
    the package itself (`from kvstore import open`) give kvstore itself.
    """
    package = path.removesuffix(".py").replace("/", ".").split(".")[:-1]
    parts = set(MAY_IMPORT)
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*(package[: len(package) - node.level + 1] if node.level else []), *filter(None, [node.module])]
            )
            for alias in node.names:
                front_door = base == "kvstore" and alias.name not in parts
                yield node.lineno, base if front_door else f"{base}.{alias.name}"


def circles(texts: dict[str, str]) -> list[set[str]]:
    """Groups of modules each of which imports all others of its group, directly or through them.

    ``texts`` are paths and sources. An import counts wherever it stands, under ``TYPE_CHECKING`` as well.
    """
    below: dict[str, set[str]] = {module_of(path): set() for path in texts}
    for path, source in texts.items():
        for _, name in imported(path, source):
            found = name if name in below else name.rpartition(".")[0]
            if found in below and found != module_of(path):
                below[module_of(path)].add(found)
    reached = {module: reach(module, below) for module in below}
    groups = {
        frozenset({module, *(other for other in reached[module] if module in reached[other])})
        for module in below
        if module in reached[module]
    }
    return [set(group) for group in sorted(groups, key=sorted)]


def namesakes(texts: dict[str, str]) -> dict[str, list[str]]:
    """Classes of one name, by that name, and the modules that have one. A name with ``_`` is its module's own."""
    having: dict[str, list[str]] = {}
    for path, source in texts.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                having.setdefault(node.name, []).append(module_of(path))
    return {name: modules for name, modules in having.items() if len(modules) > 1}


def reach(module: str, below: dict[str, set[str]]) -> set[str]:
    """All that a module imports, through others too."""
    found: set[str] = set()
    waiting = list(below[module])
    while waiting:
        if (other := waiting.pop()) not in found:
            found.add(other)
            waiting += below[other]
    return found


def definitions(tree: ast.AST, into_functions: bool = True, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """(dotted name, node) of every class and function, with what is nested in classes and, if asked, in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef) or into_functions:
                yield from definitions(node, into_functions, f"{prefix}{node.name}.")
        else:
            yield from definitions(node, into_functions, prefix)


# --- The rules hold ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_house(rule: Rule) -> None:
    complaints = [complaint for path, source in sources().items() for complaint in rule(path, source)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_tests_share_helpers_and_import_no_tests() -> None:
    """Tests lie in folders by subject; what two of them need lies in `tests/helpers`, which has no tests."""
    files = {file.relative_to(ROOT).as_posix(): file for file in sorted((ROOT / "tests").rglob("*.py"))}
    complaints = [
        f"{path}:{line}: {module} is a test"
        for path, file in files.items()
        for line, module in imported(path, file.read_text(encoding="utf-8"))
        if module.startswith("tests.") and ".test_" in module
    ]
    for path in files:
        is_test, helps = Path(path).name.startswith("test_"), path.startswith("tests/helpers/")
        if is_test == helps and Path(path).name != "conftest.py":
            complaints.append(f"{path}: tests and helpers lie apart")
    assert not complaints, "\n" + "\n".join(complaints)


def test_nurseries_import_what_there_is() -> None:
    """One that does not, ends, and all that is to be forked of it fails."""
    assert {*nursery.NODES, *nursery.ENGINES} <= set(map(module_of, sources()))


def test_every_part_is_in_the_table() -> None:
    assert {part_of(path) for path in sources()} <= set(MAY_IMPORT)


def test_table_has_no_cycle() -> None:
    above: dict[str, set[str]] = {part: set(below) for part, below in MAY_IMPORT.items()}
    while above:
        ground = {part for part, below in above.items() if not below & set(above)}
        assert ground, f"these import each other: {sorted(above)}"
        above = {part: below for part, below in above.items() if part not in ground}


def test_folders_have_no_cycle() -> None:
    for folders in FOLDERS.values():
        above = {folder: set(below) for folder, below in folders.items()}
        assert set().union(*above.values()) <= set(above)
        assert not [folder for folder in above if folder in reach(folder, above)]


def test_no_circle_of_imports() -> None:
    assert circles(sources()) == []


def test_circles_are_found() -> None:
    texts = {
        "kvstore/tier/__init__.py": "",
        "kvstore/tier/a.py": "import kvstore.tier.b",
        "kvstore/tier/b.py": "if TYPE_CHECKING:\n    from kvstore.tier.c import C\nfrom . import d",
        "kvstore/tier/c.py": "def f():\n    from kvstore.tier import a",
        "kvstore/tier/d.py": "from kvstore.model.layout import Layout",
    }
    assert circles(texts) == [{"kvstore.tier.a", "kvstore.tier.b", "kvstore.tier.c"}]
    assert circles({**texts, "kvstore/tier/c.py": ""}) == []


def test_one_name_is_one_class() -> None:
    found = namesakes(sources())
    assert not found, "\n".join(f"{name}: {', '.join(modules)}" for name, modules in sorted(found.items()))


def test_namesakes_are_found() -> None:
    texts = {
        "kvstore/tier/a.py": "class A: ...\nclass _B: ...\nclass C: ...",
        "engine/b.py": "def f():\n    class A: ...\nclass _B: ...\nclass D: ...",
    }
    assert namesakes(texts) == {"A": ["kvstore.tier.a", "engine.b"]}


def test_exceptions_to_the_guides_are_needed_and_explained() -> None:
    exceeding = {where for path, source in sources().items() for where, _, _ in too_long(path, source)}
    assert set(LONG_FOR_A_REASON) <= exceeding, "stale entries"
    assert all(reason.strip() for reason in LONG_FOR_A_REASON.values())


# --- The rules bite ------------------------------------------------------------------------------------------------

BAD: list[tuple[Rule, str, str]] = [
    (nothing_waits_by_the_wall_clock, "kvstore/cluster/x.py", "until = time.time() + 5"),
    (nothing_waits_by_the_wall_clock, "kvstore/cluster/x.py", "def f(clock=time.time_ns): ..."),
    (nothing_waits_by_the_wall_clock, "engine/x.py", "from time import time"),
    (nothing_waits_by_the_wall_clock, "engine/x.py", "now = datetime.datetime.now(datetime.UTC)"),
    (imports_point_down, "kvstore/state/x.py", "import kvstore.tier.dram"),
    (imports_point_down, "kvstore/state/x.py", "from kvstore.node import node"),
    (imports_point_down, "kvstore/state/x.py", "from kvstore import client"),
    (imports_point_down, "kvstore/state/x.py", "from ..tier import dram"),
    (imports_point_down, "kvstore/state/x.py", "from kvstore import failpoint"),
    (imports_point_down, "kvstore/model/x.py", "from kvstore.state.frames import Frame"),
    (imports_point_down, "kvstore/client/x.py", "def f():\n    from kvstore import addresses"),
    (imports_point_down, "kvstore/client/x.py", "from kvstore.node.node import Node"),
    (imports_point_down, "kvstore/client/x.py", "from kvstore.config import NodeConfig"),
    (imports_point_down, "kvstore/tier/x.py", "from kvstore.config import parse_size"),
    (imports_point_down, "kvstore/cli/x.py", "import engine.demo"),
    (imports_point_down, "kvstore/cli/x.py", "from engine import demo"),
    (imports_point_down, "kvstore/server/x.py", "from kvstore.node.node import Node"),
    (imports_point_down, "engine/x.py", "from kvstore.node.api import wire"),
    (imports_point_down, "kvstore/__init__.py", "from .cli.main import main"),
    (imports_point_down, "kvstore/errors.py", "from kvstore.config import load"),
    (folders_point_down, "engine/somewhere/x.py", ""),
    (kinds_of_stores_are_peers, "kvstore/client/remote/x.py", "from kvstore.client.local.store import LocalStore"),
    (kinds_of_stores_are_peers, "kvstore/client/local/x.py", "from kvstore.client import remote"),
    (kinds_of_stores_are_peers, "kvstore/client/store.py", "def f():\n    from .local import store"),
    (nouns_and_decisions_are_pure, "kvstore/state/x.py", "import os"),
    (nouns_and_decisions_are_pure, "kvstore/state/x.py", "import time"),
    (nouns_and_decisions_are_pure, "kvstore/state/x.py", "from threading import Lock"),
    (nouns_and_decisions_are_pure, "kvstore/state/x.py", "def f():\n    import mmap"),
    (nouns_and_decisions_are_pure, "kvstore/model/x.py", "import lmdb"),
    (nouns_and_decisions_are_pure, "kvstore/state/x.py", "open('x')"),
    (nouns_and_decisions_are_pure, "kvstore/state/x.py", "import random\nrandom.random()"),
    (nouns_and_decisions_are_pure, "kvstore/state/x.py", "import random\nrandom.Random()"),
    (nouns_and_decisions_are_pure, "kvstore/state/x.py", "import numpy as np\nnp.random.rand(3)"),
    (nouns_and_decisions_are_pure, "kvstore/state/x.py", "from numpy import random"),
    (nouns_and_decisions_are_pure, "kvstore/state/x.py", "from random import randint\nrandint(1, 2)"),
    (nouns_and_decisions_are_pure, "engine/state/x.py", "import time"),
    (nouns_and_decisions_are_pure, "engine/state/x.py", "import torch"),
    (nouns_and_decisions_are_pure, "engine/state/x.py", "from kvstore.client.store import Store"),
    (nouns_and_decisions_are_pure, "engine/model/x.py", "import kvstore"),
    (folders_point_down, "engine/state/x.py", "from engine.compute.kv_arrivals import Arrivals"),
    (folders_point_down, "engine/pool/x.py", "from engine.shell.engine import Engine"),
    (folders_point_down, "engine/memory/x.py", "from engine import config"),
    (folders_point_down, "engine/config.py", "from engine.shell.engine import Engine"),
    (folders_point_down, "engine/client.py", "from engine.compute.models import Model"),
    (folders_point_down, "engine/shell/x.py", "from engine.daemon import run"),
    (state_alone_writes_sequences, "engine/shell/x.py", "sequence.phase = Phase.ENDED"),
    (state_alone_writes_sequences, "engine/pool/x.py", "a, sequence.cached = 1, 2"),
    (state_alone_writes_sequences, "engine/shell/x.py", "self.state.sequences[1].cached += 1"),
    (lengths_are_readable, "kvstore/x.py", "x = 1\n" * 801),
    (lengths_are_readable, "engine/x.py", "class A:\n    def f(self):\n" + "        x = 1\n" * 70),
    (only_the_edge_prints, "kvstore/node/x.py", "print('ready')"),
    (only_the_edge_prints, "engine/compute/runner.py", "print('ready')"),
    (exceptions_are_named, "engine/x.py", "try:\n    f()\nexcept:\n    pass"),
    (exceptions_are_named, "engine/x.py", "try:\n    f()\nexcept Exception as e:\n    log(e)"),
    (exceptions_are_named, "engine/x.py", "try:\n    f()\nexcept (OSError, BaseException):\n    g()"),
    (exceptions_are_named, "engine/x.py", "with contextlib.suppress(Exception):\n    f()"),
    (public_names_are_described, "kvstore/x.py", "def f(): ..."),
    (public_names_are_described, "kvstore/x.py", "class A:\n    '''A.'''\n    async def f(self): ..."),
    (public_names_are_described, "kvstore/x.py", "if True:\n    class A: ..."),
    (public_names_are_described, "engine/x.py", "def f(): ..."),
    (folders_are_packages, "kvstore/nowhere/x.py", ""),
]

GOOD: list[tuple[Rule, str, str]] = [
    (nothing_waits_by_the_wall_clock, "kvstore/x.py", "from datetime import timedelta\ntime.monotonic()"),
    (
        imports_point_down,
        "kvstore/state/x.py",
        "import heapq\nfrom kvstore.model import layout\nfrom .x import y",
    ),
    (
        imports_point_down,
        "kvstore/node/x.py",
        "from kvstore.config import NodeConfig\nimport kvstore.tier.dram",
    ),
    (
        imports_point_down,
        "kvstore/cli/x.py",
        "from kvstore import connect\nfrom kvstore.bench import dram",
    ),
    (imports_point_down, "kvstore/__init__.py", "from kvstore.client.store import Store\nfrom .node import node"),
    (imports_point_down, "engine/simulator/x.py", "from kvstore import Layout\nfrom kvstore.state import eviction"),
    (folders_point_down, "engine/daemon.py", "from engine.shell.engine import Engine\nfrom engine.config import load"),
    (folders_point_down, "engine/config.py", "from engine.model.request import Role"),
    (kinds_of_stores_are_peers, "kvstore/client/local/x.py", "from kvstore.client.store import Store\nfrom . import y"),
    (kinds_of_stores_are_peers, "kvstore/addresses.py", "from kvstore.client.local.store import LocalStore"),
    (nouns_and_decisions_are_pure, "kvstore/state/x.py", "import random\nrandom.Random(7)"),
    (nouns_and_decisions_are_pure, "kvstore/state/x.py", "import numpy as np\nnp.random.default_rng(seed)"),
    (nouns_and_decisions_are_pure, "kvstore/tier/x.py", "import os, mmap"),
    (nouns_and_decisions_are_pure, "engine/state/x.py", "from kvstore.errors import KVStoreError"),
    (state_alone_writes_sequences, "engine/state/x.py", "sequence.phase = Phase.ENDED"),
    (state_alone_writes_sequences, "engine/shell/x.py", "work.spent.cached['dram'] = sequence.cached"),
    (lengths_are_readable, "kvstore/x.py", "x = 1\n" * 800),
    (only_the_edge_prints, "kvstore/cli/x.py", "print('ready')"),
    (only_the_edge_prints, "engine/demo.py", "print('ready')"),
    (only_the_edge_prints, "engine/simulator/cli.py", "print('ready')"),
    (exceptions_are_named, "engine/x.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
    (exceptions_are_named, "engine/x.py", "with contextlib.suppress(OSError):\n    f()"),
    (
        public_names_are_described,
        "kvstore/x.py",
        "class _A:\n    def f(self): ...\ndef f():\n    'F.'\n    def g(): ...",
    ),
]


@pytest.mark.parametrize(("rule", "path", "snippet"), BAD)
def test_rule_bites(rule: Rule, path: str, snippet: str) -> None:
    assert rule(path, snippet)


@pytest.mark.parametrize(("rule", "path", "snippet"), GOOD)
def test_rule_lets_pass(rule: Rule, path: str, snippet: str) -> None:
    assert rule(path, snippet) == []

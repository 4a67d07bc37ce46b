"""The rules of `docs/architecture.md`, for the source tree.

`[tool.importlinter]` in `pyproject.toml` has the contracts for imports, and `[tool.ruff.lint]` the rules for prints,
docstrings, packages and the wall clock. `make check` runs both programs, and the tests below ask both. Rules that
neither can express are functions here, from (path, source) to complaints. Every rule is also tried on something bad, so
that a rule that no longer finds anything is noticed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path

import grimp
import pytest
from importlinter.api import read_configuration
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract
from importlinter.domain.contract import Contract

from tests.helpers import nursery

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvstore", "engine")
GENERATED = "kvstore/pb/"

Rule = Callable[[str, str], list[str]]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# --- Imports -------------------------------------------------------------------------------------------------------

PARTS = "the parts of kvstore"
ENGINE_PARTS = "the parts of engine"
CLIENTS = "a client, an adapter and an address know the store as users do"
CALLERS = "what calls engines contains none"
KINDS = "no kind of store knows another, and the interfaces know none of them"
CIRCLES = "folders do not import each other in a circle"
PURE = "nouns and decisions are pure"

# Contract, and an import that breaks it.
BAD_IMPORTS = [
    ("an engine uses the store, and the store knows no engine", "kvstore.cli.main", "engine.demo"),
    (PARTS, "kvstore.state.frames", "kvstore.tier.dram"),
    (PARTS, "kvstore.state.frames", "kvstore"),
    (PARTS, "kvstore.model.layout", "kvstore.state.frames"),
    (PARTS, "kvstore.client.store", "kvstore.addresses"),
    (PARTS, "kvstore.client.store", "kvstore.node.node"),
    (PARTS, "kvstore.tier.dram", "kvstore.config"),
    (PARTS, "kvstore.server.gate", "kvstore.node.node"),
    (PARTS, "kvstore", "kvstore.cli.main"),
    (PARTS, "kvstore.errors", "kvstore.config"),
    (PARTS, "kvstore.nowhere.x", "kvstore.errors"),
    (ENGINE_PARTS, "engine.nowhere.x", "engine.model.request"),
    (ENGINE_PARTS, "engine.state.engine_state", "engine.compute.runner"),
    (ENGINE_PARTS, "engine.pool.store", "engine.shell.engine"),
    (ENGINE_PARTS, "engine.memory.arena", "engine.config"),
    (ENGINE_PARTS, "engine.config", "engine.shell.engine"),
    (ENGINE_PARTS, "engine.shell.engine", "engine.daemon"),
    (CLIENTS, "kvstore.client.store", "kvstore.config"),
    ("an engine knows a node as its client does", "engine.daemon", "kvstore.node.api.server"),
    ("byte formats know messages, nouns and errors", "kvstore.wire.control", "kvstore.shm.folder"),
    (CALLERS, "engine.client", "engine.compute.runner"),
    (CALLERS, "engine.demo", "engine.shell.engine"),
    (KINDS, "kvstore.client.remote.store", "kvstore.client.local.store"),
    (KINDS, "kvstore.client.local.store", "kvstore.client.remote"),
    (KINDS, "kvstore.client.store", "kvstore.client.local.store"),
    (CIRCLES, "kvstore.node.operator.admin", "kvstore.node.socket_server"),
    (PURE, "kvstore.state.frames", "os"),
    (PURE, "kvstore.model.layout", "lmdb"),
    (PURE, "kvstore.state.frames", "kvstore.failpoint"),
    (PURE, "kvstore.cluster.lookup_plan", "kvstore.cluster.peer_links"),
    (PURE, "engine.state.engine_state", "torch"),
    (PURE, "engine.state.engine_state", "kvstore.client.store"),
    (PURE, "engine.model.request", "kvstore"),
    (PURE, "engine.conductor.state.prefixes", "threading"),
]


@cache
def imports() -> grimp.ImportGraph:
    """All imports of our packages. Copy the graph before changing it, or having a contract check it."""
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


@cache
def contracts() -> dict[str, Contract]:
    """The contracts of `pyproject.toml`, by name."""
    kinds = {"layers": LayersContract, "forbidden": ForbiddenContract, "acyclic_siblings": AcyclicSiblingsContract}
    options = read_configuration(str(ROOT / "pyproject.toml"))
    return {
        one["name"]: kinds[one["type"]](one["name"], options["session_options"], one)
        for one in options["contracts_options"]
    }


def test_contracts_hold() -> None:
    broken = [name for name, contract in contracts().items() if not contract.check(deepcopy(imports()), False).kept]
    assert not broken, f"{broken}: run lint-imports, which says where"


@pytest.mark.parametrize(("name", "importer", "imported"), BAD_IMPORTS)
def test_contract_finds_bad_import(name: str, importer: str, imported: str) -> None:
    graph = deepcopy(imports())
    parents = [importer.rsplit(".", count)[0] for count in range(importer.count("."), 0, -1)]
    for module in (*parents, importer):
        graph.add_module(module)
    if imported not in graph.modules:
        graph.add_module(imported, is_squashed=True)  # of another project
    assert not graph.direct_import_exists(importer=importer, imported=imported)
    graph.add_import(importer=importer, imported=imported)
    assert not contracts()[name].check(graph, False).kept


def test_every_contract_has_a_bad_import() -> None:
    assert {name for name, _, _ in BAD_IMPORTS} == set(contracts())


def circles(graph: grimp.ImportGraph) -> list[tuple[str, str]]:
    """Imports that are part of a circle of modules, wherever in its module an import is written."""
    return [
        (importer, imported)
        for importer in sorted(graph.modules)
        for imported in graph.find_modules_directly_imported_by(importer)
        if graph.chain_exists(importer=imported, imported=importer)
    ]


def test_no_circle_of_modules() -> None:
    assert circles(imports()) == []


def test_circles_are_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in ("a", "a.b"), ("a.b", "c"), ("c", "a"), ("c", "d"):
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == [("a", "a.b"), ("a.b", "c"), ("c", "a")]


# --- Ruff ----------------------------------------------------------------------------------------------------------

# Rule, path and source that break it, after a docstring of the module.
BAD_SOURCES = [
    ("T201", "kvstore/node/x.py", "print('ready')"),
    ("T201", "engine/compute/runner.py", "print('ready')"),
    ("D101", "kvstore/x.py", "if True:\n    class A: ..."),
    ("D102", "kvstore/x.py", "class A:\n    '''A.'''\n    async def f(self): ..."),
    ("D103", "engine/x.py", "def f(): ..."),
    ("INP001", "kvstore/nowhere/x.py", ""),
    ("TID251", "kvstore/cluster/x.py", "import time\nuntil = time.time() + 5"),
    ("TID251", "kvstore/cluster/x.py", "import time\ndef f(clock=time.time_ns): ..."),
    ("TID251", "engine/x.py", "from time import time"),
    ("TID251", "engine/x.py", "import datetime\nnow = datetime.datetime.now(datetime.UTC)"),
    ("TID251", "engine/x.py", "from datetime import date as d\nnow = d.today()"),
]

GOOD_SOURCES = [
    ("kvstore/cli/x.py", "print('ready')"),
    ("engine/demo/x.py", "print('ready')"),
    ("engine/simulator/cli.py", "print('ready')"),
    ("kvstore/x.py", "class _A:\n    def f(self): ...\ndef f():\n    'F.'\n    def g(): ..."),
    ("kvstore/cli/pin.py", "import time\ntime.time()"),
    ("kvstore/x.py", "import time\nfrom datetime import timedelta\ntime.monotonic()\ntimedelta()"),
]


def ruff(*arguments: str, source: str = "") -> str:
    """What `ruff check` prints with our configuration."""
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", "--output-format=concise", *arguments]
    answer = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, timeout=60)
    assert answer.returncode in (0, 1), answer.stderr
    return answer.stdout


def test_ruff_finds_nothing() -> None:
    assert ruff(*PACKAGES) == ""


@pytest.mark.parametrize(("rule", "path", "source"), BAD_SOURCES)
def test_ruff_finds_bad_source(rule: str, path: str, source: str) -> None:
    assert f" {rule} " in ruff("--stdin-filename", path, "-", source=f'"""X."""\n{source}\n')


@pytest.mark.parametrize(("path", "source"), GOOD_SOURCES)
def test_ruff_passes_good_source(path: str, source: str) -> None:
    chosen = ("--select", "D100,D101,D102,D103,INP,T20,TID251", "--stdin-filename", path, "-")
    assert ruff(*chosen, source=f'"""X."""\n{source}\n') == ""


# --- Rules of our own ----------------------------------------------------------------------------------------------

# Imports that give what draws without a seed another name.
DICE = re.compile(
    r"from random import|import random as|from numpy\.random|from numpy import .*\brandom\b|import numpy\.random"
)

# What `engine.state` alone writes of a sequence; other names of it are also those of what the shell has.
SEQUENCE_FIELDS = frozenset(
    ("phase", "cached", "holds", "loading", "moving", "aside", "pulled", "engines", "attempt", "attempts", "passing")
)

BOUNDARY = "kvstore/boundary.py"  # catches unexpected errors

FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
# "path" or "path:function" -> why it is better long than divided.
LONG_FOR_A_REASON = {
    "engine/compute/triton_kernel.py:_attend": "a kernel: its arguments are half of it, and its loop is one piece",
}


def pure_code_calls_nothing_impure(path: str, source: str) -> list[str]:
    """Nouns and decisions open no file, print nothing, and draw nothing without a seed: no import shows that."""
    pure = tuple(f"{module}." for module in contracts()[PURE].source_modules)
    if not f"{module_of(path)}.".startswith(pure):
        return []
    complaints = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            seeded = name in ("random.Random", "np.random.default_rng", "numpy.random.default_rng") and node.args
            if name in ("open", "input", "print") or (re.match(r"(random|(np|numpy)\.random)\.", name) and not seeded):
                complaints.append(f"{path}:{node.lineno}: {name}() in pure code")
        elif isinstance(node, ast.Import | ast.ImportFrom) and DICE.match(ast.unparse(node)):
            complaints.append(f"{path}:{node.lineno}: write random.Random(seed) or np.random.default_rng(seed)")
    return complaints


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


def exceptions_are_named(path: str, source: str) -> list[str]:
    """No broad `except` unless it ends in `raise`, and no broad `suppress`.

    BLE001 of Ruff finds less: it accepts a log line or a `raise` under a condition, and does not look at `suppress`.
    """
    if path == BOUNDARY:
        return []
    complaints = []
    for node in ast.walk(parsed(source)):
        caught: list[ast.expr] = []
        if isinstance(node, ast.ExceptHandler) and ast.unparse(node.body[-1]) != "raise":
            caught = [node.type or ast.Name("BaseException")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            caught = node.args
        if any(re.search(r"\b(Base)?Exception\b", ast.unparse(each)) for each in caught):
            complaints.append(f"{path}:{node.lineno}: name the exceptions that are expected here")
    return complaints


RULES: list[Rule] = [
    pure_code_calls_nothing_impure,
    state_alone_writes_sequences,
    lengths_are_readable,
    exceptions_are_named,
]

BAD: list[tuple[Rule, str, str]] = [
    (pure_code_calls_nothing_impure, "kvstore/state/x.py", "open('x')"),
    (pure_code_calls_nothing_impure, "engine/conductor/state/x.py", "print('x')"),
    (pure_code_calls_nothing_impure, "kvstore/state/x.py", "import random\nrandom.random()"),
    (pure_code_calls_nothing_impure, "kvstore/state/x.py", "import random\nrandom.Random()"),
    (pure_code_calls_nothing_impure, "kvstore/cluster/directory.py", "import numpy as np\nnp.random.rand(3)"),
    (pure_code_calls_nothing_impure, "kvstore/state/x.py", "from numpy import random"),
    (pure_code_calls_nothing_impure, "kvstore/state/x.py", "from random import randint\nrandint(1, 2)"),
    (pure_code_calls_nothing_impure, "kvstore/state/x.py", "import random as dice"),
    (state_alone_writes_sequences, "engine/shell/x.py", "sequence.phase = Phase.ENDED"),
    (state_alone_writes_sequences, "engine/pool/x.py", "a, sequence.cached = 1, 2"),
    (state_alone_writes_sequences, "engine/shell/x.py", "self.state.sequences[1].cached += 1"),
    (lengths_are_readable, "kvstore/x.py", "x = 1\n" * 801),
    (lengths_are_readable, "engine/x.py", "class A:\n    def f(self):\n" + "        x = 1\n" * 70),
    (exceptions_are_named, "engine/x.py", "try:\n    f()\nexcept:\n    if a:\n        raise\n    g()"),
    (exceptions_are_named, "engine/x.py", "try:\n    f()\nexcept Exception as e:\n    log(e)"),
    (exceptions_are_named, "engine/x.py", "try:\n    f()\nexcept Exception:\n    logger.exception('x')"),
    (exceptions_are_named, "engine/x.py", "try:\n    f()\nexcept (OSError, BaseException):\n    g()"),
    (exceptions_are_named, "engine/x.py", "with contextlib.suppress(Exception):\n    f()"),
]

GOOD: list[tuple[Rule, str, str]] = [
    (pure_code_calls_nothing_impure, "kvstore/state/x.py", "import random\nrandom.Random(7)"),
    (pure_code_calls_nothing_impure, "kvstore/state/x.py", "import numpy as np\nnp.random.default_rng(seed)"),
    (pure_code_calls_nothing_impure, "kvstore/tier/x.py", "open('x')"),
    (state_alone_writes_sequences, "engine/state/x.py", "sequence.phase = Phase.ENDED"),
    (state_alone_writes_sequences, "engine/shell/x.py", "work.cost.cached['dram'] = sequence.cached"),
    (lengths_are_readable, "kvstore/x.py", "x = 1\n" * 800),
    (exceptions_are_named, "engine/x.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
    (exceptions_are_named, "engine/x.py", "with contextlib.suppress(OSError):\n    f()"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    complaints = [complaint for path, source in sources().items() for complaint in rule(path, source)]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize(("rule", "path", "source"), BAD)
def test_rule_finds_bad_source(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source)


@pytest.mark.parametrize(("rule", "path", "source"), GOOD)
def test_rule_passes_good_source(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source) == []


def test_exceptions_to_the_guides_are_needed_and_explained() -> None:
    exceeding = {where for path, source in sources().items() for where, _, _ in too_long(path, source)}
    assert set(LONG_FOR_A_REASON) <= exceeding, "stale entries"
    assert all(reason.strip() for reason in LONG_FOR_A_REASON.values())


def namesakes(texts: dict[str, str]) -> dict[str, list[str]]:
    """Classes of one name, by that name, and the modules that have one. A name with ``_`` is its module's own."""
    having: dict[str, list[str]] = {}
    for path, source in texts.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                having.setdefault(node.name, []).append(module_of(path))
    return {name: modules for name, modules in having.items() if len(modules) > 1}


def test_one_name_is_one_class() -> None:
    found = namesakes(sources())
    assert not found, "\n".join(f"{name}: {', '.join(modules)}" for name, modules in sorted(found.items()))


def test_namesakes_are_found() -> None:
    texts = {
        "kvstore/tier/a.py": "class A: ...\nclass _B: ...\nclass C: ...",
        "engine/b.py": "def f():\n    class A: ...\nclass _B: ...\nclass D: ...",
    }
    assert namesakes(texts) == {"A": ["kvstore.tier.a", "engine.b"]}


def test_tests_share_helpers_and_import_no_tests() -> None:
    """Tests lie in folders by subject; what two of them need lies in `tests/helpers`, which has no tests."""
    files = {file.relative_to(ROOT).as_posix(): file for file in sorted((ROOT / "tests").rglob("*.py"))}
    complaints = [
        f"{path}: {line.strip()}"
        for path, file in files.items()
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.match(r"\s*(from|import) +(tests\b.*\btest_|\.)", line)
    ]
    for path in files:
        is_test, helps = Path(path).name.startswith("test_"), path.startswith("tests/helpers/")
        if is_test == helps and Path(path).name != "conftest.py":
            complaints.append(f"{path}: tests and helpers lie apart")
    assert not complaints, "\n" + "\n".join(complaints)


def test_nurseries_import_what_there_is() -> None:
    """One that does not, ends, and all that is to be forked of it fails."""
    assert {*nursery.NODES, *nursery.ENGINES} <= set(map(module_of, sources()))


# --- Reading source ------------------------------------------------------------------------------------------------


def sources() -> dict[str, str]:
    """path -> text of every module of ours, paths relative to the repository."""
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    texts = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}
    return {path: text for path, text in texts.items() if not path.startswith(GENERATED)}


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a source, which several rules look at."""
    return ast.parse(source)


def module_of(path: str) -> str:
    """kvstore/model/layout.py -> kvstore.model.layout, kvstore/model/__init__.py -> kvstore.model."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """(dotted name, node) of every class and function, nested ones too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield prefix + node.name, node
            yield from definitions(node, f"{prefix}{node.name}.")
        else:
            yield from definitions(node, prefix)

"""Book: the files in a node's folder that must survive kill -9 of the daemon, but not a reboot.

``names`` has the name of each root, ``pins`` has the pins. The first line of either file has the incarnation, and each
further line has one name or pin. A later line about a pin replaces an earlier line about it. A file is rewritten when
most of it is obsolete. While the node decides, changes are only queued. ``flush`` writes them after the node has
released its mutex and before the change is acknowledged, so that no other caller waits for a file.

``quarantine`` has the positions of the segment that must not be carved, because a client that is still alive may write
there. A start that finds an extent with damaged tables cannot find out which of its frames were granted to which
client. But it knows which sessions there were. Until all of them have released their locks, the position is not
carved. The file tells later daemons about it. So it is written before the tables are removed, and deleted after the
last lock is released.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import xxhash

from kvstore.errors import OutOfSpace
from kvstore.model.replica import KEY_BYTES
from kvstore.safe_files import open_plain, read_plain, remove
from kvstore.shm.folder import NodeFolder
from kvstore.state import events as ev
from kvstore.state import instructions as do

NAMES: Final = "names"
PINS: Final = "pins"
QUARANTINE: Final = "quarantine"
WASTE_BYTES: Final = 64 << 10  # a pins file with fewer obsolete bytes is not rewritten

log = logging.getLogger("kvstore.node")

Quarantine = dict[int, set[int]]
"""Position -> sessions that might still write there."""


class Book:
    """Queues and writes changes. Any thread may call ``flush``; changes are written one at a time, in their order."""

    def __init__(self, folder: NodeFolder, incarnation: int) -> None:
        self._folder, self._incarnation = folder, incarnation
        self._names = folder.path / NAMES
        self._pins = folder.path / PINS
        self._head = _head(incarnation)
        self._queue: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._pin_lines: dict[int, bytes] = {}  # the current line of each pin in the file
        self._pins_bytes: int | None = None  # size of the pins file; None if unknown: the next change rewrites it

    def add_name(self, line: bytes) -> None:
        """Queue another name."""
        self._queue.append(partial(self._append, self._names, line))

    def replace_names(self, lines: list[bytes]) -> None:
        """Queue the replacement of all names."""
        self._queue.append(lambda: _replace(self._names, [self._head, *lines]))

    def add_pin(self, pin: do.WritePin) -> None:
        """Queue a pin. It replaces an earlier pin with its number."""
        self._queue.append(lambda: self._write_pin(pin.number, _pin_line(pin)))

    def replace_pins(self, pins: list[do.WritePin]) -> None:
        """Queue the replacement of all pins. After a kill the file has either all old pins or all new ones."""
        self._queue.append(lambda: self._write_all_pins({pin.number: _pin_line(pin) for pin in pins}))

    def remove_pins(self, numbers: list[int]) -> None:
        """Queue the removal of pins."""
        self._queue.append(lambda: self._erase_pins(numbers))

    def replace_quarantine(self, quarantine: Quarantine) -> None:
        """Queue the replacement of the quarantine. The old file does no harm, because it has more positions."""
        self._queue.append(lambda: write_quarantine(self._folder, self._incarnation, quarantine))

    def flush(self) -> None:
        """Write everything that was queued before this call.

        If a full folder refuses a change, the change is logged. It is in force until the daemon ends, and lost after a
        kill.
        """
        with self._lock:
            while self._queue:
                try:
                    self._queue[0]()
                except OSError as error:
                    log.error("names and pins cannot be written, and would be lost after a kill: %s", error)
                self._queue.popleft()  # only now: until it is written, other callers of ``flush`` must wait for it

    def _append(self, path: Path, line: bytes) -> None:
        if not path.is_file() or path.is_symlink():
            _replace(path, [self._head])
        # The line feed comes first, so that a line that a kill cuts short does not damage the next line.
        with open(open_plain(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0) as file:
            file.write(b"\n" + line)

    def _write_pin(self, number: int, line: bytes) -> None:
        self._pin_lines[number] = line
        self._append_pin_line(line)

    def _write_all_pins(self, lines: dict[int, bytes]) -> None:
        self._pin_lines = lines
        self._rewrite_pins()

    def _erase_pins(self, numbers: list[int]) -> None:
        stored = [number for number in numbers if self._pin_lines.pop(number, None) is not None]
        if stored:
            self._append_pin_line(json.dumps({"over": stored}).encode())

    def _append_pin_line(self, line: bytes) -> None:
        current_bytes = sum(len(line) + 1 for line in self._pin_lines.values())
        size = self._pins_bytes + len(line) + 1 if self._pins_bytes is not None else None
        if size is None or size > 2 * current_bytes + WASTE_BYTES:
            self._rewrite_pins()
        else:
            self._append(self._pins, line)
            self._pins_bytes = size

    def _rewrite_pins(self) -> None:
        self._pins_bytes = None  # in case the next line raises
        _replace(self._pins, [self._head, *self._pin_lines.values()])
        self._pins_bytes = len(self._head) + sum(len(line) + 1 for line in self._pin_lines.values())


# --- Reading, at startup -------------------------------------------------------------------------------------------


def read_names(folder: NodeFolder, incarnation: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each root and its name. Skip lines that cannot be read, and remove a file from another incarnation."""
    path = folder.path / NAMES
    for line in _lines(path, incarnation):
        try:
            name = json.loads(line)
            yield bytes.fromhex(name.pop("root")), {**name, "salt": str(name["salt"])}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.error("a name of a tenant cannot be read and is lost: %s", error)


def read_pins(folder: NodeFolder, incarnation: int, now_ns: int) -> list[ev.Pin]:
    """Return the pins of earlier daemons that have not expired. The caller restores them before any page can be
    evicted."""
    pins: dict[int, dict[str, Any]] = {}
    for line in _lines(folder.path / PINS, incarnation):
        try:
            entry = json.loads(line)
            if "over" in entry:
                for number in entry["over"]:
                    pins.pop(int(number), None)
            else:
                pins[int(entry["pin"])] = entry
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.error("a pin cannot be read and is lost: %s", error)
    return list(_unexpired(pins, now_ns))


def _unexpired(pins: dict[int, dict[str, Any]], now_ns: int) -> Iterator[ev.Pin]:
    for number, pin in pins.items():
        try:
            raw, root, until_s = bytes.fromhex(pin["keys"]), bytes.fromhex(pin["root"]), float(pin["until"])
            keys = [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]
            asked, until_ns = bytes.fromhex(pin["asked"]), int(pin["until_ns"])
        except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
            log.error("a pin cannot be read and is lost: %s", error)
            continue
        if until_ns > now_ns:
            yield ev.Pin(now_ns, number, keys, root, until_ns, until_s, asked)


def _lines(path: Path, incarnation: int) -> Iterator[bytes]:
    """Yield the lines of a file after the first, one by one, since the file may have any size.

    A file from another incarnation is removed.
    """
    try:
        with open(open_plain(path, os.O_RDONLY), "rb") as file:
            head = file.readline().rstrip(b"\n")
            if head != _head(incarnation):
                remove(path)
                return
            yield from filter(None, (line.rstrip(b"\n") for line in file))
    except FileNotFoundError:
        return
    except OSError as error:
        log.error("%s cannot be read and is lost: %s", path, error)


def _head(incarnation: int) -> bytes:
    return f"incarnation {incarnation:016x}".encode()


def _pin_line(pin: do.WritePin) -> bytes:
    identity = {"keys": b"".join(pin.keys).hex(), "root": pin.root.hex(), "asked": pin.asked.hex()}
    return json.dumps({"pin": pin.number, **identity, "until_ns": pin.until_ns, "until": pin.until_s}).encode()


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    remove(fresh)
    descriptor = open_plain(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(b"\n".join(lines))
    except OSError:
        remove(fresh)
        raise
    os.replace(fresh, path)


# --- Quarantine -----------------------------------------------------------------------------------------------------


def read_quarantine(folder: NodeFolder, incarnation: int) -> Quarantine | None:
    """Return the quarantine that an earlier start of this incarnation wrote; None if the file cannot be read."""
    try:
        digest, _, text = read_plain(folder.path / QUARANTINE).partition(b"\n")
    except FileNotFoundError:
        return {}
    try:
        if digest != xxhash.xxh3_64_hexdigest(text).encode():
            return None
        stored = json.loads(text)
        if int(stored["incarnation"], 16) != incarnation:
            return {}
        return {int(at): {int(session, 16) for session in sessions} for at, sessions in stored["positions"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def write_quarantine(folder: NodeFolder, incarnation: int, quarantine: Mapping[int, Iterable[int]]) -> None:
    """Replace the file, or remove it if the quarantine is empty.

    Raises:
        OSError: the file cannot be written. The old file stays.
    """
    if not quarantine:
        remove(folder.path / QUARANTINE)
        return
    positions = {str(at): [f"{session:016x}" for session in sorted(sessions)] for at, sessions in quarantine.items()}
    text = json.dumps({"incarnation": f"{incarnation:016x}", "positions": positions}).encode()
    text = xxhash.xxh3_64_hexdigest(text).encode() + b"\n" + text
    try:
        folder.new_file(folder.path / QUARANTINE, len(text), text)
    except OutOfSpace as error:
        raise OSError(errno.ENOSPC, str(error)) from None

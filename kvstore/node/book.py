"""Book: names of roots, and pins. Two files in the node's folder, gone with a reboot, that outlive kill -9.

What has to be written is queued while the node decides (``name``, ``names``, ``pin``, ``unpin``), and written by
``flush``, which is called before the change is acknowledged, when the node is free again: no other caller waits for a
file. A file is a line that names the incarnation, then a line per name or pin; a later line about a pin takes the place
of an earlier one. It is rewritten when most of it is of no use any more.

Quarantine: positions of the segment that may not be granted yet, because a live writer may store there.

A start that finds an extent's tables beyond belief cannot tell which of its frames were granted to whom. What it can
tell is which sessions there were: until each of them has given up its lock, the position is not carved. The file
``quarantine`` says so to the daemons that follow, so it is there before the tables go, and goes after the last lock.
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

Held = dict[int, set[int]]
"""Position -> sessions that may write there."""

NAME: Final = "quarantine"


def read_quarantine(folder: NodeFolder, incarnation: int) -> Held | None:
    """What an earlier start of this incarnation wrote down. None: something that cannot be read."""
    try:
        digest, _, text = read_plain(folder.path / NAME).partition(b"\n")
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


def write_quarantine(folder: NodeFolder, incarnation: int, held: Mapping[int, Iterable[int]]) -> None:
    """These positions, and no others.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    if not held:
        remove(folder.path / NAME)
        return
    positions = {str(at): [f"{session:016x}" for session in sorted(sessions)] for at, sessions in held.items()}
    text = json.dumps({"incarnation": f"{incarnation:016x}", "positions": positions}).encode()
    text = xxhash.xxh3_64_hexdigest(text).encode() + b"\n" + text
    try:
        folder.new_file(folder.path / NAME, len(text), text)
    except OutOfSpace as error:
        raise OSError(errno.ENOSPC, str(error)) from None


log = logging.getLogger("kvstore.node")

NAMES, PINS = "names", "pins"
WASTE_BYTES: Final = 64 << 10  # of lines about pins that are over: a file with less is not rewritten


class Book:
    """The writing side. ``flush`` may be called by any thread; one writes at a time, in the order of the decisions."""

    def __init__(self, folder: NodeFolder, incarnation: int) -> None:
        self._folder, self._incarnation = folder, incarnation
        self._names = folder.path / NAMES
        self._pins = folder.path / PINS
        self._head = _head(incarnation)
        self._queue: deque[Callable[[], None]] = deque()  # filled, and then written by ``flush``
        self._lock = threading.Lock()
        self._lines: dict[int, bytes] = {}  # of pins, as the file has them
        self._pins_bytes: int | None = None  # of that file; None: it is a former daemon's, and is rewritten

    def name(self, line: bytes) -> None:
        """Queue another name."""
        self._queue.append(partial(self._append, self._names, line))

    def names(self, lines: list[bytes]) -> None:
        """These names, and no others."""
        self._queue.append(lambda: _replace(self._names, [self._head, *lines]))

    def pin(self, pin: do.WritePin) -> None:
        """Queue another pin, or a replacement for one."""
        self._queue.append(lambda: self._pinned(pin.number, _pin_line(pin)))

    def pins(self, pins: list[do.WritePin]) -> None:
        """These pins, and no others: the file is replaced as a whole."""
        self._queue.append(lambda: self._repinned({pin.number: _pin_line(pin) for pin in pins}))

    def unpin(self, numbers: list[int]) -> None:
        """These are over."""
        self._queue.append(lambda: self._unpinned(numbers))

    def quarantine(self, held: Held) -> None:
        """These positions may not be carved, and no others. If it is written late it says too much, which does no
        harm."""
        self._queue.append(lambda: write_quarantine(self._folder, self._incarnation, held))

    def flush(self) -> None:
        """Write what is queued; when this returns, all that was queued before is in the files.

        What a full folder refuses holds as long as this daemon, and is lost to the next one after a kill.
        """
        with self._lock:
            while self._queue:
                try:
                    self._queue[0]()
                except OSError as error:
                    log.error("names and pins cannot be written, and would not outlive a kill: %s", error)
                self._queue.popleft()  # only now: until then others see that it is not written, and wait

    def _append(self, path: Path, line: bytes) -> None:
        if not path.is_file() or path.is_symlink():
            _replace(path, [self._head])
        # Lines begin with their end: one that a kill cut short spoils no other.
        with open(open_plain(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0) as file:
            file.write(b"\n" + line)

    def _pinned(self, number: int, line: bytes) -> None:
        self._lines[number] = line
        self._write_pins(line)

    def _repinned(self, lines: dict[int, bytes]) -> None:
        self._lines = lines
        self._replace_pins()

    def _unpinned(self, numbers: list[int]) -> None:
        gone = [number for number in numbers if self._lines.pop(number, None) is not None]
        if gone:
            self._write_pins(json.dumps({"over": gone}).encode())

    def _write_pins(self, line: bytes) -> None:
        kept = sum(len(line) + 1 for line in self._lines.values())
        size = self._pins_bytes + len(line) + 1 if self._pins_bytes is not None else None
        if size is None or size > 2 * kept + WASTE_BYTES:
            self._replace_pins()
        else:
            self._append(self._pins, line)
            self._pins_bytes = size

    def _replace_pins(self) -> None:
        self._pins_bytes = None  # until it is known what the file has
        _replace(self._pins, [self._head, *self._lines.values()])
        self._pins_bytes = len(self._head) + sum(len(line) + 1 for line in self._lines.values())


# --- Reading, at a start -------------------------------------------------------------------------------------------


def read_names(folder: NodeFolder, incarnation: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Roots and their names, of this incarnation, as far as they can be read; those of another are removed."""
    path = folder.path / NAMES
    for line in _lines(path, incarnation):
        try:
            about = json.loads(line)
            yield bytes.fromhex(about.pop("root")), {**about, "salt": str(about["salt"])}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.error("a name of a tenant cannot be read and is lost: %s", error)


def read_pins(folder: NodeFolder, incarnation: int, now_ns: int) -> list[ev.Pin]:
    """Pins of the daemon before that have not run out by ``now_ns``; to be restored before anything may leave."""
    pins: dict[int, dict[str, Any]] = {}
    for line in _lines(folder.path / PINS, incarnation):
        try:
            said = json.loads(line)
            if "over" in said:
                for number in said["over"]:
                    pins.pop(int(number), None)
            else:
                pins[int(said["pin"])] = said
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.error("a pin cannot be read and is lost: %s", error)
    return list(_granted(pins, now_ns))


def _granted(pins: dict[int, dict[str, Any]], now_ns: int) -> Iterator[ev.Pin]:
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
    """Lines of that incarnation's file but for the first, one by one: an old file may be of any size."""
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
    named = {"keys": b"".join(pin.keys).hex(), "root": pin.root.hex(), "asked": pin.asked.hex()}
    return json.dumps({"pin": pin.number, **named, "until_ns": pin.until_ns, "until": pin.until_s}).encode()


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

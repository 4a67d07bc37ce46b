"""Copies of many pieces: by a device's copy engines, with one call, or by its processors, with a kernel.

Engines copy large pieces at the full speed of the link, and leave the processors to computation. But each piece costs
them a microsecond or two. A kernel is faster for small pieces, and uses processors. The length at which engines become
better is measured when a device is opened (``threshold``).

A kernel may only get addresses that the device can reach: its own memory, and registered host memory. A wrong address
in a kernel costs the process its device, while a copy engine just refuses it. So every address is checked first.

NVRTC compiles the kernel's source for the device, which takes a fraction of a second. The result is cached in a folder
that only this user can write. A cached file is verified before the driver gets it: its name is a digest of what it was
made from, and its first bytes are the digest of the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
import secrets
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.device.base import Addresses
from kvstore.device.cuda_driver import INVALID_VALUE, NOT_SUPPORTED, SUCCESS, DriverError, PrimaryContext, call, fault
from kvstore.errors import Unavailable
from kvstore.safe_files import NotPlain, open_folder, open_plain

PIECES_MAX: Final = 128  # of a launch; they are its arguments, and every device accepts 4 KiB of arguments
TILE_BYTES: Final = 16 << 10  # a block's share of a piece at a time
THREADS: Final = 256  # of a block
CUBIN_BYTES_MAX: Final = 4 << 20
_DIGEST: Final = hashlib.sha256().digest_size

NAME: Final = b"copy_pieces"
SOURCE: Final = f"""
typedef unsigned long long word;
struct Pieces {{ word target[{PIECES_MAX}]; word source[{PIECES_MAX}]; word nbytes[{PIECES_MAX}]; }};

// Copy bytes in units of the widest type for which source and target are equally aligned; both ends byte by byte.
template <class Unit> __device__ void copy_units(char *target, const char *source, word nbytes) {{
    const word head = min(nbytes, (sizeof(Unit) - (word)target % sizeof(Unit)) % sizeof(Unit));
    const word units = (nbytes - head) / sizeof(Unit), tail = head + units * sizeof(Unit);
    Unit *to = (Unit *)(target + head);
    const Unit *from = (const Unit *)(source + head);
    const word step = blockDim.x;
    word at = threadIdx.x;
    for (; at + 3 * step < units; at += 4 * step) {{  // four reads are in flight before the first write
        const Unit a = from[at], b = from[at + step], c = from[at + 2 * step], d = from[at + 3 * step];
        to[at] = a; to[at + step] = b; to[at + 2 * step] = c; to[at + 3 * step] = d;
    }}
    for (; at < units; at += step) to[at] = from[at];
    for (word i = threadIdx.x; i < head; i += blockDim.x) target[i] = source[i];
    for (word i = tail + threadIdx.x; i < nbytes; i += blockDim.x) target[i] = source[i];
}}

// Block b copies tiles b, b + blocks, ... Each piece has `tiles` tiles; those after the end of a short piece are empty.
extern "C" __global__ void __launch_bounds__({THREADS})
copy_pieces(const __grid_constant__ Pieces pieces, const unsigned count, const unsigned tiles) {{
    for (word work = blockIdx.x; work < (word)count * tiles; work += gridDim.x) {{
        const unsigned piece = work / tiles;
        const word begin = work % tiles * {TILE_BYTES}, all = pieces.nbytes[piece];
        if (begin >= all) continue;
        const word nbytes = min(all - begin, (word){TILE_BYTES});
        char *target = (char *)pieces.target[piece] + begin;
        const char *source = (const char *)pieces.source[piece] + begin;
        const word apart = (word)target ^ (word)source;
        if (apart % 16 == 0) copy_units<uint4>(target, source, nbytes);
        else if (apart % 4 == 0) copy_units<unsigned>(target, source, nbytes);
        else copy_units<char>(target, source, nbytes);
    }}
}}
"""


class Launch:
    """The arguments of one launch, for some of a copy's pieces. The launch copies the arguments.

    Attributes:
        blocks: how many blocks share the work; at most one per tile.
        address: of the array of addresses of the arguments.
    """

    __slots__ = ("_arguments", "_numbers", "_pieces", "address", "blocks")

    def __init__(self, targets: Addresses, sources: Addresses, nbytes: Addresses, blocks_max: int) -> None:
        count = len(nbytes)
        tiles = -(-int(nbytes.max()) // TILE_BYTES)
        self._pieces = np.zeros((3, PIECES_MAX), np.uint64)
        for row, each in zip(self._pieces, (targets, sources, nbytes), strict=True):
            row[:count] = each
        self._numbers = np.array([count, tiles], np.uint32)
        at = self._numbers.ctypes.data
        self._arguments = np.array([self._pieces.ctypes.data, at, at + 4], np.uint64)
        self.address = int(self._arguments.ctypes.data)
        self.blocks = min(blocks_max, count * tiles)


def launches(targets: Addresses, sources: Addresses, nbytes: Addresses, blocks_max: int) -> Iterator[Launch]:
    """Divide a copy's pieces into launches. Empty pieces are left out."""
    if not nbytes.all():
        some = nbytes > 0
        targets, sources, nbytes = targets[some], sources[some], nbytes[some]
    for at in range(0, len(nbytes), PIECES_MAX):
        part = slice(at, at + PIECES_MAX)
        yield Launch(targets[part], sources[part], nbytes[part], blocks_max)


# --- Compiling ------------------------------------------------------------------------------------------------------


@cache
def _compiler() -> Any:
    """Return NVRTC's module and version. Raises Unavailable."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError:
        raise Unavailable("cuda-python is not installed") from None
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError:
        raise Unavailable("NVRTC is not installed") from None
    return nvrtc


def compile_kernel(arch: int) -> bytes:
    """Compile the cubin for devices with this compute capability (90 means 9.0). Raises Unavailable."""
    nvrtc = _compiler()
    program = _nvrtc(nvrtc.nvrtcCreateProgram, SOURCE.encode(), b"kvstore.cu", 0, [], [])
    try:
        code, *_ = nvrtc.nvrtcCompileProgram(program, 2, [b"--gpu-architecture=sm_%d" % arch, b"--std=c++17"])
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_nvrtc(nvrtc.nvrtcGetProgramLogSize, program))
            nvrtc.nvrtcGetProgramLog(program, log)
            first = log.rstrip(b"\0").decode(errors="replace").strip().partition("\n")[0]
            raise Unavailable(f"NVRTC: {first or code.name}")
        cubin = bytearray(_nvrtc(nvrtc.nvrtcGetCUBINSize, program))
        _nvrtc(nvrtc.nvrtcGetCUBIN, program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


def _nvrtc(function: Any, *arguments: object) -> Any:
    code, *values = function(*arguments)
    if code.name != "NVRTC_SUCCESS":
        raise Unavailable(f"NVRTC: {function.__name__}: {code.name}")
    return values[0] if values else None


def cubin_for(arch: int, folder: Path) -> bytes:
    """Return the compiled kernels for ``arch``, from the cache in ``folder`` if possible. Raises Unavailable."""
    _, *version = _compiler().nvrtcVersion()
    recipe = f"{version} sm_{arch}\n{SOURCE}"
    path = folder / f"{hashlib.sha256(recipe.encode()).hexdigest()}.cubin"
    cubin = load_file(path)
    if cubin is None:
        cubin = compile_kernel(arch)
        store_file(path, cubin)
    return cubin


# --- The cache of compiled kernels ----------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder of cached cubins: ``kvstore`` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "kvstore"


def load_file(path: Path) -> bytes | None:
    """Return the file that ``store_file`` wrote. Return None if no file can be trusted; then the kernel is compiled
    again."""
    try:
        folder_fd = _private(path.parent)
        try:
            with open(open_plain(path.name, os.O_RDONLY, dir_fd=folder_fd), "rb") as file:
                data = file.read(CUBIN_BYTES_MAX)
        finally:
            os.close(folder_fd)
    except OSError:
        return None
    digest, cubin = data[:_DIGEST], data[_DIGEST:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None


def store_file(path: Path, cubin: bytes) -> None:
    """Store the file atomically. If that fails, the kernel is compiled again next time."""
    temporary = f"{path.name}.{secrets.token_hex(4)}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder_fd = _private(path.parent)
        try:
            with open(open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=folder_fd), "wb") as file:
                file.write(hashlib.sha256(cubin).digest() + cubin)
            os.rename(temporary, path.name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder_fd)
            os.close(folder_fd)
    except OSError:
        return


def _private(folder: Path) -> int:
    """Open the folder. Raises OSError if other users can write to it."""
    fd = open_folder(folder)
    status = os.fstat(fd)
    if status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return fd
    os.close(fd)
    raise NotPlain(f"{folder}: other users may write there")


class Kernel:
    """The kernel, loaded into a device's primary context. That context must be current in all calls."""

    def __init__(self, driver: Any, cubin: bytes) -> None:
        self._driver = driver
        self._module = call(driver.cuModuleLoadData, cubin)
        self._function = call(driver.cuModuleGetFunction, self._module, NAME)

    def launch(self, stream: object, targets: Addresses, sources: Addresses, nbytes: Addresses, blocks: int) -> None:
        """Copy pieces. The device must be able to reach all addresses, and pieces must not overlap."""
        for each in launches(targets, sources, nbytes, blocks):
            grid, block = (each.blocks, 1, 1), (THREADS, 1, 1)
            call(self._driver.cuLaunchKernel, self._function, *grid, *block, 0, stream, each.address, 0)


KERNEL_GAIN_MIN: Final = 1.25  # a kernel has to be this much faster, because it takes processors from computation
HOST_BLOCKS: Final = 32  # blocks of a kernel over the link; with half a megabyte in flight they fill it
DEFAULT_STREAMS: Final = 2  # handles up to this are not created streams
ALLOCATIONS_MAX: Final = 8  # a copy whose pieces are in more of the device's allocations does not use a kernel

BATCH_VERSION: Final = 12080  # the first version of CUDA with a batched call; the call is used in its form
_BATCH: Final = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # targets
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # bytes
    ctypes.c_size_t,  # how many
    ctypes.c_void_p,  # attributes
    ctypes.c_void_p,  # the first piece that each attribute applies to
    ctypes.c_size_t,  # how many attributes
    ctypes.c_void_p,  # receives the number of a refused piece
    ctypes.c_void_p,  # stream
)

Mask = npt.NDArray[np.bool_]


class Way(Enum):
    """The memories between which pieces are copied."""

    TO_DEVICE = "to the device"
    TO_HOST = "to the host"
    WITHIN = "within the device"


ALWAYS: Final[Mapping[Way, int]] = dict.fromkeys(Way, 1 << 62)
"""For ``CudaCopies.by_kernel``: pieces of every length."""


def threshold(lengths: Sequence[int], kernel_s: Sequence[float], engines_s: Sequence[float]) -> int:
    """Return the length below which a kernel should copy pieces; 0 if a kernel should copy none."""
    for length, kernel, engines in zip(lengths, kernel_s, engines_s, strict=True):
        if engines < kernel * KERNEL_GAIN_MIN:
            return length if length > lengths[0] else 0
    return 2 * lengths[-1]


class BatchCall:
    """``cuMemcpyBatchAsync``, called with arrays, so that its cost does not grow with Python objects.

    Later versions of the call lack an argument. All later drivers still offer the form of 12.8.
    """

    def __init__(self, driver: Any, address: int) -> None:
        self._driver = driver
        self._function = _BATCH(address)
        self._attributes = attributes(driver)
        self._first = ctypes.c_size_t(0)

    @classmethod
    def find(cls, driver: Any) -> BatchCall | None:
        """Return the call, or None if the driver is older."""
        code, address, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", BATCH_VERSION, 0)
        return cls(driver, int(address)) if code.name == SUCCESS and address else None

    def copy(self, stream: int, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """Copy one batch. Raises as ``fault``."""
        refused_piece = ctypes.c_size_t(0)
        code = self._function(
            targets.ctypes.data,
            sources.ctypes.data,
            nbytes.ctypes.data,
            len(nbytes),
            int(self._attributes.getPtr()),
            ctypes.addressof(self._first),
            1,
            ctypes.addressof(refused_piece),
            stream,
        )
        if code:
            raise fault(error_name(self._driver, code), "cuMemcpyBatchAsync")


def attributes(driver: Any) -> Any:
    """Return the attributes of every piece. The driver reads a source only when the stream reaches the copy."""
    made = driver.CUmemcpyAttributes()
    made.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    return made


def error_name(driver: Any, code: int) -> str:
    """Return the driver's name of an error."""
    try:
        return str(driver.CUresult(code).name)
    except ValueError:
        return f"error {code}"


# --- Which addresses a device reaches --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegisteredRange:
    """Registered host memory. ``device_address`` is its start, as the device addresses it."""

    start: int
    stop: int
    device_address: int
    writable: bool


class RegisteredRanges:
    """All registered ranges. They do not overlap. Threads may share it.

    A finalizer may remove a range at any moment, even while this thread changes the ranges, because the garbage
    collector runs finalizers at any allocation. Then the running change applies both.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_changing = False  # whether the thread with the lock is making changes
        self._changes: deque[RegisteredRange | int] = deque()  # a new range, or the start of a removed one
        self._all: dict[int, RegisteredRange] = {}
        self._columns = np.zeros((4, 0), np.uint64)  # by address

    def add(self, one: RegisteredRange) -> None:
        """Add a range that was registered."""
        self._changes.append(one)
        self._take_in()

    def remove(self, start: int) -> None:
        """Remove the range from ``start``."""
        self._changes.append(start)
        self._take_in()

    def _take_in(self) -> None:
        with self._lock:
            while self._changes and not self._is_changing:
                self._is_changing = True
                try:
                    self._change(self._changes.popleft())
                finally:
                    self._is_changing = False

    def _change(self, change: RegisteredRange | int) -> None:
        if isinstance(change, int):
            self._all.pop(change, None)
        else:
            self._all[change.start] = change
        rows = [(each.start, each.stop, each.device_address, each.writable) for _, each in sorted(self._all.items())]
        self._columns = np.array(rows, np.uint64).reshape(-1, 4).T.copy()

    def translate(self, at: Addresses, nbytes: Addresses, write: bool) -> tuple[Mask, Addresses]:
        """Return which pieces are in registered ranges (writable ones with ``write``), and their addresses for the
        device."""
        starts, stops, device_starts, writable = self._columns
        if not len(starts):
            return np.zeros(len(at), np.bool_), at
        index = np.searchsorted(starts, at, "right").astype(np.int64) - 1
        first = np.maximum(index, 0)
        inside = (index >= 0) & (at < stops[first]) & (nbytes <= stops[first] - np.minimum(at, stops[first]))
        if write:
            inside &= writable[first] != 0
        return inside, np.where(inside, at - starts[first] + device_starts[first], at)


def in_allocations(at: Addresses, nbytes: Addresses, allocation: Callable[[int], tuple[int, int] | None]) -> bool:
    """Return True if all pieces are in at most ``ALLOCATIONS_MAX`` allocations of the device."""
    for _ in range(ALLOCATIONS_MAX):
        if not len(at):
            return True
        bounds = allocation(int(at[0]))
        if bounds is None:
            return False
        start, stop = np.uint64(bounds[0]), np.uint64(bounds[1])
        inside = (at >= start) & (at < stop) & (nbytes <= stop - np.minimum(at, stop))
        if not inside[0]:
            return False
        at, nbytes = at[~inside], nbytes[~inside]
    return not len(at)


# --- Copying --------------------------------------------------------------------------------------------------------


class CudaCopies:
    """Copies to, from and within one device. Threads may share it; the context must be current in each call.

    Attributes:
        kernel_below: for each way, the length below which a kernel copies pieces.
    """

    def __init__(
        self, primary: PrimaryContext, ranges: RegisteredRanges, batch: BatchCall | None, kernel: Kernel | None
    ) -> None:
        self._driver = primary.driver
        self._ordinal = primary.ordinal
        self._ranges = ranges
        self._batch = batch
        self._kernel = kernel
        self._blocks_within = 4 * primary.attribute("MULTIPROCESSOR_COUNT")
        self.kernel_below: Mapping[Way, int] = dict.fromkeys(Way, 0)

    @property
    def batches(self) -> bool:
        """True if the driver copies many pieces with one call."""
        return self._batch is not None

    def copy(self, stream: Any, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """See ``DeviceStream.copy``."""
        small = nbytes < max(self.kernel_below.values())
        if self._kernel is None or not small.any():
            self.by_engines(stream, targets, sources, nbytes)
        elif small.all():
            self._small(stream, targets, sources, nbytes)
        else:
            self.by_engines(stream, targets[~small], sources[~small], nbytes[~small])
            self._small(stream, targets[small], sources[small], nbytes[small])

    def _small(self, stream: Any, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        if not self.by_kernel(stream, targets, sources, nbytes, self.kernel_below):
            self.by_engines(stream, targets, sources, nbytes)

    def by_kernel(
        self,
        stream: Any,
        targets: Addresses,
        sources: Addresses,
        nbytes: Addresses,
        below: Mapping[Way, int],
    ) -> bool:
        """Copy the pieces with the kernel if the device can reach all of them and they are short enough; otherwise
        return False."""
        to_host, device_targets = self._ranges.translate(targets, nbytes, write=True)
        from_host, device_sources = self._ranges.translate(sources, nbytes, write=False)
        if (to_host & from_host).any():
            return False
        way = Way.TO_HOST if to_host.any() else Way.TO_DEVICE if from_host.any() else Way.WITHIN
        if int(nbytes.max()) >= below[way]:
            return False
        on_device = np.concatenate([targets[~to_host], sources[~from_host]])
        lengths = np.concatenate([nbytes[~to_host], nbytes[~from_host]])
        if self._kernel is None or not in_allocations(on_device, lengths, self.allocation):
            return False
        blocks = self._blocks_within if way is Way.WITHIN else HOST_BLOCKS
        self._kernel.launch(stream, device_targets, device_sources, nbytes, blocks)
        return True

    def by_engines(self, stream: Any, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """Copy the pieces in one batch. Uses a call for each piece if the driver has no batches or refuses one of the
        pieces in a batch, or if the stream is a default stream."""
        if self._batch is not None and int(stream) > DEFAULT_STREAMS:
            some = nbytes > 0  # the driver refuses empty pieces
            if not some.all():
                targets, sources, nbytes = targets[some], sources[some], nbytes[some]
            try:
                if len(nbytes):
                    self._batch.copy(int(stream), *(np.ascontiguousarray(each) for each in (targets, sources, nbytes)))
                return
            except DriverError as error:
                if error.code not in (NOT_SUPPORTED, INVALID_VALUE):
                    raise
                # If a piece is in memory that is not registered, another batch may work. Otherwise this device or
                # system does not support batches, whatever the driver's version.
                if error.code == NOT_SUPPORTED and self._are_registered(targets, sources, nbytes):
                    self._batch = None
        for target, source, length in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
            if length:
                call(self._driver.cuMemcpyAsync, target, source, length, stream)

    def _are_registered(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> bool:
        """Return True if each piece has one end in registered host memory."""
        to_host, _ = self._ranges.translate(targets, nbytes, write=True)
        from_host, _ = self._ranges.translate(sources, nbytes, write=False)
        return bool((to_host | from_host).all())

    def allocation(self, address: int) -> tuple[int, int] | None:
        """Return start and end of the device's allocation that contains the address, or None."""
        if not self.owns(address):
            return None
        start, nbytes = call(self._driver.cuMemGetAddressRange, address)
        return int(start), int(start) + int(nbytes)

    def owns(self, address: int) -> bool:
        """See ``Device.owns``."""
        kinds, driver = self._driver.CUpointer_attribute, self._driver
        try:
            memory = call(driver.cuPointerGetAttribute, kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
            ordinal = call(driver.cuPointerGetAttribute, kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
        except DriverError:  # the driver does not know this address
            return False
        return int(memory) == int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE) and int(ordinal) == self._ordinal

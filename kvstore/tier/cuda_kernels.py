"""Kernels: copies done by a device's processors, for pieces too small for its copy engines.

The source is compiled by NVRTC for the device at hand, which takes a fraction of a second, and kept in a folder of this
user alone. What is found there is proven before the driver sees it: its name says what it was made from, and its first
bytes are the digest of the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import secrets
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore.errors import Unavailable
from kvstore.tier.cuda_driver import call
from kvstore.tier.device import Addresses
from kvstore.tier.plain_files import NotPlain, open_folder, open_plain

PIECES_MAX: Final = 128  # of a launch: they travel as its arguments, of which every device takes 4 KiB
TILE_BYTES: Final = 16 << 10  # a block's share of a piece at a time
THREADS: Final = 256  # of a block
CUBIN_BYTES_MAX: Final = 4 << 20
_DIGEST: Final = hashlib.sha256().digest_size

NAME: Final = b"copy_pieces"
SOURCE: Final = f"""
typedef unsigned long long word;
struct Pieces {{ word target[{PIECES_MAX}]; word source[{PIECES_MAX}]; word nbytes[{PIECES_MAX}]; }};

// Bytes at the same places of both sides, by the widest type that suits both: the ends that do not fill one, singly.
template <class Unit> __device__ void copy_units(char *target, const char *source, word nbytes) {{
    const word head = min(nbytes, (sizeof(Unit) - (word)target % sizeof(Unit)) % sizeof(Unit));
    const word units = (nbytes - head) / sizeof(Unit), tail = head + units * sizeof(Unit);
    Unit *to = (Unit *)(target + head);
    const Unit *from = (const Unit *)(source + head);
    const word step = blockDim.x;
    word at = threadIdx.x;
    for (; at + 3 * step < units; at += 4 * step) {{  // four reads are under way before the first write
        const Unit a = from[at], b = from[at + step], c = from[at + 2 * step], d = from[at + 3 * step];
        to[at] = a; to[at + step] = b; to[at + 2 * step] = c; to[at + 3 * step] = d;
    }}
    for (; at < units; at += step) to[at] = from[at];
    for (word i = threadIdx.x; i < head; i += blockDim.x) target[i] = source[i];
    for (word i = tail + threadIdx.x; i < nbytes; i += blockDim.x) target[i] = source[i];
}}

// Block b copies tiles b, b + blocks, ... of all, `tiles` to a piece; those behind a shorter piece's end are empty.
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
    """The arguments of one launch: some of the pieces of a copy. They are copied when it is launched.

    Attributes:
        blocks: how many blocks share the work, of as many as it has tiles.
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
    """A copy's pieces, as many to a launch as it takes. Pieces without bytes are left out."""
    if not nbytes.all():
        some = nbytes > 0
        targets, sources, nbytes = targets[some], sources[some], nbytes[some]
    for at in range(0, len(nbytes), PIECES_MAX):
        part = slice(at, at + PIECES_MAX)
        yield Launch(targets[part], sources[part], nbytes[part], blocks_max)


# --- Compiling ------------------------------------------------------------------------------------------------------


@cache
def _compiler() -> Any:
    """NVRTC's module and version. Raises Unavailable."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError:
        raise Unavailable("cuda-python is not installed") from None
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError:
        raise Unavailable("NVRTC is not installed") from None
    return nvrtc


def compiled(arch: int) -> bytes:
    """The cubin for devices of that compute capability (90: 9.0). Raises Unavailable."""
    nvrtc = _compiler()
    program = _nvrtc(nvrtc.nvrtcCreateProgram, SOURCE.encode(), b"kvstore.cu", 0, [], [])
    try:
        code, *_ = nvrtc.nvrtcCompileProgram(program, 2, [b"--gpu-architecture=sm_%d" % arch, b"--std=c++17"])
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            said = bytearray(_nvrtc(nvrtc.nvrtcGetProgramLogSize, program))
            nvrtc.nvrtcGetProgramLog(program, said)
            first = said.rstrip(b"\0").decode(errors="replace").strip().partition("\n")[0]
            raise Unavailable(f"NVRTC: {first or code.name}")
        cubin = bytearray(_nvrtc(nvrtc.nvrtcGetCUBINSize, program))
        _nvrtc(nvrtc.nvrtcGetCUBIN, program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


def _nvrtc(function: Any, *arguments: object) -> Any:
    code, *found = function(*arguments)
    if code.name != "NVRTC_SUCCESS":
        raise Unavailable(f"NVRTC: {function.__name__}: {code.name}")
    return found[0] if found else None


def cubin_for(arch: int, folder: Path) -> bytes:
    """The compiled kernels for ``arch``, from ``folder`` where they are there already. Raises Unavailable."""
    _, *version = _compiler().nvrtcVersion()
    made_from = f"{version} sm_{arch}\n{SOURCE}"
    path = folder / f"{hashlib.sha256(made_from.encode()).hexdigest()}.cubin"
    found = kept(path)
    if found is None:
        found = compiled(arch)
        keep(path, found)
    return found


# --- What was compiled before ---------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where cubins are kept: ``kvstore`` in the user's folder for caches."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "kvstore"


def kept(path: Path) -> bytes | None:
    """What ``keep`` put there; None where there is nothing that may be trusted: it is compiled again."""
    try:
        folder_fd = _private(path.parent)
        try:
            with open(open_plain(path.name, os.O_RDONLY, dir_fd=folder_fd), "rb") as file:
                found = file.read(CUBIN_BYTES_MAX)
        finally:
            os.close(folder_fd)
    except OSError:
        return None
    digest, cubin = found[:_DIGEST], found[_DIGEST:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None


def keep(path: Path, cubin: bytes) -> None:
    """Put it there, whole or not at all. Where that cannot be, it is compiled again next time."""
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
    """The folder, open, where nobody but this user can write in it. Raises OSError where somebody can."""
    fd = open_folder(folder)
    about = os.fstat(fd)
    if about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return fd
    os.close(fd)
    raise NotPlain(f"{folder}: others may write there")


class Kernel:
    """The kernel, loaded into a device's primary context, which is current while it is made and launched."""

    def __init__(self, driver: Any, cubin: bytes) -> None:
        self._driver = driver
        self._module = call(driver.cuModuleLoadData, cubin)
        self._function = call(driver.cuModuleGetFunction, self._module, NAME)

    def launch(self, stream: object, targets: Addresses, sources: Addresses, nbytes: Addresses, blocks: int) -> None:
        """Copy pieces, all of which the device can reach at these addresses; they overlap nowhere."""
        for each in launches(targets, sources, nbytes, blocks):
            grid, block = (each.blocks, 1, 1), (THREADS, 1, 1)
            call(self._driver.cuLaunchKernel, self._function, *grid, *block, 0, stream, each.address, 0)

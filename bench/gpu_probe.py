"""``python bench/gpu_probe.py [ITEM...] [--out FOLDER]``: facts about a GPU, its driver and this machine.

They say what works here and how fast, before any test is run. Each item is tried in a process of its own with a
deadline, since one that crashes, hangs or loses the device must not end the rest. What an item found is printed in one
line and kept in ``probe.json``, which is written after each. The exit status is 1 where there is no GPU, or an item
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # of a checkout that is not installed

import numpy as np  # noqa: E402

from kvstore.device import cuda, host_memory  # noqa: E402
from kvstore.device.base import DeviceLost  # noqa: E402
from kvstore.errors import KVStoreError  # noqa: E402

MIB = 1 << 20
PINNED_BYTES = 1 << 30  # that are registered to learn how long that takes
COPIED_BYTES = 256 * MIB  # of one plain copy, and of the memory that pieces are drawn from
PIECES = (4096, 16384, 65536, 262144, 2 * MIB)  # their lengths
TOTALS = (2 * MIB, 64 * MIB)  # of pieces in one copy
REPEATS = 5  # of a copy whose time is taken
CALLS = 1000  # whose time is taken together
WAIT_S = 20.0  # for one copy

Found = dict[str, Any]


class Item(NamedTuple):
    """A thing to be found out, and how long its process may take."""

    ask: Callable[[], Found]
    limit_s: float


ITEMS: dict[str, Item] = {}


def item(limit_s: float) -> Callable[[Callable[[], Found]], Callable[[], Found]]:
    """Add a function to the items."""

    def add(ask: Callable[[], Found]) -> Callable[[], Found]:
        ITEMS[ask.__name__] = Item(ask, limit_s)
        return ask

    return add


# --- Each in a process of its own -----------------------------------------------------------------------------------


def probe(items: Sequence[tuple[str, Sequence[str], float]], out: Path) -> list[str]:
    """Run ``(name, command, limit_s)`` one after the other; the last line that a command prints is what it found.

    Returns the names of those that failed.
    """
    found: Found = {}
    failed = []
    for name, command, limit_s in items:
        begin_s = time.monotonic()
        found[name], well = _answer(command, limit_s)
        if not well:
            failed.append(name)
        took = f"{time.monotonic() - begin_s:.1f} s"
        print(f"{name} ({took}{'' if well else ', FAILED'}) {json.dumps(found[name])[:900]}", flush=True)
        (out / "probe.json").write_text(json.dumps(found, indent=1) + "\n")
    return failed


def _answer(command: Sequence[str], limit_s: float) -> tuple[Any, bool]:
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdout=said, stderr=errors, start_new_session=True)
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"did not end in {limit_s:g} s", False
        finally:
            if child.poll() is None:  # past its limit, or we are interrupted
                os.killpg(child.pid, signal.SIGKILL)  # and what it started
                child.wait()
        said.seek(0)
        errors.seek(0)
        lines, complaint = said.read().decode().splitlines(), errors.read().decode(errors="replace").strip()
    if code:
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        return f"{how}: {' '.join(complaint.split())[-600:]}", False
    try:
        return json.loads(lines[-1]), True
    except (IndexError, ValueError):
        return f"said nothing that is JSON: {lines[-1:]}", False


# --- What the items need --------------------------------------------------------------------------------------------


def first() -> cuda.CudaDevice:
    """The first device. Raises Unavailable as its driver does, AssertionError where there is none."""
    devices, missing = cuda.find()
    assert devices, missing
    return devices[0]


def u64(*numbers: int) -> np.ndarray:
    """Addresses, or lengths."""
    return np.array(numbers, np.uint64)


def done(stream: cuda.CudaStream) -> None:
    """Return when the stream has come to its end."""
    stream.record().wait(time.monotonic() + WAIT_S)


def refused(call: Callable[[], object]) -> str:
    """What a call says that may be refused; "taken" where it is not."""
    try:
        call()
    except KVStoreError as error:
        return str(error)
    return "taken"


def timed(call: Callable[[], object], stream: cuda.CudaStream) -> float:
    """Seconds of the fastest run."""
    best = float("inf")
    for _ in range(REPEATS):
        begin_s = time.perf_counter()
        call()
        done(stream)
        best = min(best, time.perf_counter() - begin_s)
    return best


@contextlib.contextmanager
def shared_memory(nbytes: int) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
    """Pages of /dev/shm as a client maps those of a node: to write, to read, and the seconds that taking them took."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        begin_s = time.perf_counter()
        os.posix_fallocate(file.fileno(), 0, nbytes)
        took_s = time.perf_counter() - begin_s
        maps = [
            mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED, mmap.PROT_READ | more) for more in (mmap.PROT_WRITE, 0)
        ]
        writable, read_only = (np.frombuffer(each, np.uint8) for each in maps)
        yield writable, read_only, took_s


@contextlib.contextmanager
def pinned(device: cuda.CudaDevice, nbytes: int) -> Iterator[np.ndarray]:
    """Such pages, registered."""
    with shared_memory(nbytes) as (memory, _, _):
        device.register(memory)
        try:
            yield memory
        finally:
            device.unregister(memory)


def torch_of_the_device() -> Any:
    """PyTorch, which finds the device as well."""
    import torch

    assert torch.cuda.is_available(), "torch finds no device"
    return torch


# --- The items ------------------------------------------------------------------------------------------------------


@item(60)
def opening() -> Found:
    """Seconds to find the device, and to use it first: context, kernel, measuring of the ways. Versions of all."""
    begin_s = time.perf_counter()
    device = first()
    found_s = time.perf_counter()
    device.allocate(4096).free()
    opened_s = time.perf_counter()
    versions = {}
    for package in ("cuda-bindings", "torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "lmdb"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "find_s": found_s - begin_s,
        "open_s": opened_s - found_s,
        "model": device.model,
        "batches": device.batches,
        "kernel_missing": device.kernel_missing,
        "kernel_below": {way.name: length for way, length in device.kernel_below.items()},
        "driver": int(device._driver.cuDriverGetVersion()[1]),
        "versions": versions,
    }


@item(60)
def attributes() -> Found:
    """READ_ONLY_HOST_REGISTER 0: mappings to read are not pinned. CAN_USE_HOST_POINTER 0: a batch of registered memory
    is a wrong address, and the device is lost."""
    primary = first()._open().primary
    names = (
        "READ_ONLY_HOST_REGISTER_SUPPORTED",
        "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
        "HOST_REGISTER_SUPPORTED",
        "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
        "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
        "HANDLE_TYPE_FABRIC_SUPPORTED",
        "GPU_DIRECT_RDMA_SUPPORTED",
        "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
        "DMA_BUF_SUPPORTED",
        "ASYNC_ENGINE_COUNT",
        "PAGEABLE_MEMORY_ACCESS",
        "MULTIPROCESSOR_COUNT",
        "L2_CACHE_SIZE",
    )
    with primary.current():
        return {name: primary.attribute(name) for name in names}


@item(60)
def answers() -> Found:
    """What the code takes for granted of the driver: its own peer, freed addresses, batches of plain memory."""
    device = first()
    found: Found = {}
    ordinal = device._driver.cuDeviceGet(0)[1]
    found["can_access_itself"] = int(device._driver.cuDeviceCanAccessPeer(ordinal, ordinal)[1])
    found["reach_itself"] = device.reach(device.uuid)
    for name, nbytes in {"small": 10_000, "large": 64 * MIB}.items():
        memory = device.allocate(nbytes)
        address = memory.address
        memory.free()
        found[f"owns_freed_{name}"] = device.owns(address)
    host, memory, stream = host_memory.empty(4 * MIB), device.allocate(4 * MIB), device.stream()
    host[:] = 7
    lengths = np.full(64, 65536, np.uint64)
    steps = np.arange(64, dtype=np.uint64) * lengths
    here, there = steps + np.uint64(host.ctypes.data), steps + np.uint64(memory.address)
    batch = device._open().copies._batch
    for name, (targets, sources) in {"to_device": (there, here), "to_host": (here, there)}.items():

        def copies(targets: np.ndarray = targets, sources: np.ndarray = sources) -> None:
            assert batch is not None
            with device.current():
                batch.copy(stream.handle, targets, sources, lengths)
            done(stream)

        found[f"pageable_batch_{name}"] = refused(copies) if batch is not None else "no batches"
    found["pageable_bytes_right"] = bool((host == 7).all())
    memory.free()
    return found


@item(60)
def pinning() -> Found:
    """Seconds for each GiB of shared memory, by the size of one call; mappings that are read-only."""
    device = first()
    found: Found = {}
    with shared_memory(2 * PINNED_BYTES) as (writable, read_only, took_s):
        gib = PINNED_BYTES / (1 << 30)
        found["fallocate_s_per_gib"] = took_s / 2 / gib
        for step in (PINNED_BYTES // 16, PINNED_BYTES // 4, PINNED_BYTES):
            parts = [writable[at : at + step] for at in range(0, PINNED_BYTES, step)]
            begin_s = time.perf_counter()
            for part in parts:
                device.register(part)
            there_s = time.perf_counter()
            for part in parts:
                device.unregister(part)
            name = f"{step // MIB}m"
            found[f"{name}_s_per_gib"] = (there_s - begin_s) / gib
            found[f"{name}_undone_s_per_gib"] = (time.perf_counter() - there_s) / gib
        part = read_only[PINNED_BYTES:]
        found["read_only"] = refused(lambda: device.register(part))
        if found["read_only"] == "taken":
            device.unregister(part)
        device.register(writable)
        starts, _, there, _ = device._ranges._columns
        found["device_sees_it_elsewhere"] = bool((starts != there).any())
        device.unregister(writable)
    return found


@item(120)
def bandwidth() -> Found:
    """GB/s: one piece to, from and both at once; pieces of one length in no order, by each way."""
    device = first()
    found: Found = {}
    with pinned(device, 2 * COPIED_BYTES) as host:
        memory, stream, back = device.allocate(2 * COPIED_BYTES), device.stream(), device.stream()
        there, here = memory.address, host.ctypes.data

        def out() -> None:
            stream.copy(u64(there), u64(here), u64(COPIED_BYTES))

        def both() -> None:
            out()
            back.copy(u64(here + COPIED_BYTES), u64(there + COPIED_BYTES), u64(COPIED_BYTES))
            done(back)

        found["to_device"] = COPIED_BYTES / timed(out, stream) / 1e9
        found["to_host"] = (
            COPIED_BYTES / timed(lambda: stream.copy(u64(here), u64(there), u64(COPIED_BYTES)), stream) / 1e9
        )
        found["both_ways"] = 2 * COPIED_BYTES / timed(both, stream) / 1e9
        for length in PIECES:
            for total in TOTALS:
                _pieces(found, stream, here, there, length, min(total, COPIED_BYTES))
        memory.free()
    return found


def _pieces(found: Found, stream: cuda.CudaStream, here: int, there: int, length: int, total: int) -> None:
    """GB/s of ``total`` bytes in pieces."""
    count, draw = max(1, total // length), np.random.default_rng(1)
    places = draw.permutation(COPIED_BYTES // length)[:count].astype(np.uint64) * np.uint64(length)
    host, device = places + np.uint64(here), places[::-1] + np.uint64(there)
    lengths = np.full(count, length, np.uint64)
    for way, (targets, sources) in {"to_device": (device, host), "to_host": (host, device)}.items():
        kinds = {"engines": stream.copy_by_engines, "kernel": stream.copy_by_kernel, "chosen": stream.copy}
        for how, copy in kinds.items():
            name = f"{length >> 10}k_of_{total // MIB}m_{way}_{how}"
            try:
                seconds = timed(partial(copy, targets, sources, lengths), stream)
                found[name] = round(count * length / seconds / 1e9, 2)
            except KVStoreError as error:
                found[name] = str(error)


@item(60)
def python_us() -> Found:
    """Microseconds of the host for one call: a get cannot be faster than the sum of its calls."""
    device = first()
    found: Found = {}
    with pinned(device, 8 * MIB) as host:
        stream, memory = device.stream(), device.allocate(8 * MIB)

        def us(call: Callable[[], object], calls: int = CALLS) -> float:
            call()
            begin_s = time.perf_counter()
            for _ in range(calls):
                call()
            return round((time.perf_counter() - begin_s) / calls * 1e6, 1)

        def current() -> None:
            with device.current():
                pass

        event = stream.record()
        event.wait(time.monotonic() + WAIT_S)
        found |= {"current": us(current), "record": us(stream.record), "over": us(event.over)}
        found |= {"wait_event": us(lambda: stream.wait(event)), "owns": us(lambda: device.owns(memory.address))}
        for count in (1, 32, 512):
            steps, lengths = np.arange(count, dtype=np.uint64) * np.uint64(4096), np.full(count, 4096, np.uint64)
            there, here = steps + np.uint64(memory.address), steps + np.uint64(host.ctypes.data)
            for how, copy in {"engines": stream.copy_by_engines, "kernel": stream.copy_by_kernel}.items():
                with contextlib.suppress(KVStoreError):  # there is no kernel
                    found[f"submit_{how}_{count}"] = us(partial(copy, there, here, lengths), CALLS // 20)
                done(stream)
        memory.free()
    return found


_OPENS_ANOTHERS = """
import hashlib, sys, time
import numpy as np
from kvstore.device import cuda
from kvstore.device.base import DeviceExport
uuid, offset, nbytes, handle, length = sys.argv[1:]
device = cuda.find().devices[0]
memory = device.open_export(DeviceExport(bytes.fromhex(uuid), int(offset), int(nbytes), bytes.fromhex(handle)))
host, stream, u64 = np.empty(int(length), np.uint8), device.stream(), lambda number: np.array([number], np.uint64)
stream.copy(u64(host.ctypes.data), u64(memory.address + int(offset)), u64(int(length)))
stream.record().wait(time.monotonic() + 10)
print(hashlib.md5(host).hexdigest())
memory.free()
"""


@item(90)
def sharing() -> Found:
    """Our mapped memory as a tensor of PyTorch; a tensor of PyTorch in another process by its handle."""
    found: Found = {}
    torch, device = torch_of_the_device(), first()
    from engine.memory.mounting import tensor_of

    memory = device.allocate(8 * MIB, shared=True)
    tensor = tensor_of(memory, 8 * MIB, device.name)
    tensor.fill_(5)
    found["mapped_is_a_tensor"] = tensor.data_ptr() == memory.address and int(tensor.sum()) == 5 * 8 * MIB
    found["mapped_has_a_handle"] = memory.handle is not None
    theirs = torch.arange(1 << 20, dtype=torch.int32, device=device.name)[1000:]
    torch.cuda.synchronize()
    export = device.export(theirs.data_ptr())
    found["offset_in_allocation"] = export.offset
    told = [export.device.hex(), str(export.offset), str(export.nbytes), export.handle.hex(), str(theirs.nbytes)]
    child = subprocess.run(
        [sys.executable, "-c", _OPENS_ANOTHERS, *told], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    right = hashlib.md5(theirs.cpu().numpy()).hexdigest()
    found["another_process_reads_it"] = child.stdout.strip() == right or child.stderr[-300:]
    return found


@item(90)
def captures() -> Found:
    """PyTorch records graphs, in both modes, while another thread copies and allocates by our calls."""
    found: Found = {"captures_failed": [], "copies_failed": []}
    torch, device = torch_of_the_device(), first()
    stop = threading.Event()
    with pinned(device, MIB) as host:
        stream, memory = device.stream(), device.allocate(MIB)

        def copies() -> None:
            try:
                while not stop.is_set():
                    stream.copy(u64(memory.address), u64(host.ctypes.data), u64(MIB))
                    done(stream)
                    device.allocate(4096).free()
            except KVStoreError as error:
                found["copies_failed"].append(str(error))

        thread = threading.Thread(target=copies)
        factor = torch.randn(512, 512, device=device.name)
        factor @ factor  # its library is loaded before a recording
        thread.start()
        for mode in ("thread_local", "global") * 5:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode=mode):
                    factor @ factor
                graph.replay()
            except RuntimeError as error:
                found["captures_failed"].append(f"{mode}: {str(error)[:200]}")
        torch.cuda.synchronize()
        stop.set()
        thread.join()
    return found


@item(90)
def store() -> Found:
    """GB/s of get and put of pages from and to a tensor; the first put pins memory."""
    import kvstore

    torch = torch_of_the_device()
    found: Found = {}
    with kvstore.open(dram="6GiB", extent="1GiB") as pool:
        for tokens, layers, pages in ((16, 32, 512), (1, 16, 512)):
            layout = kvstore.Layout(
                model=f"probe-{tokens}", layers=layers, kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=tokens
            )
            cache, name = pool.cache(layout), f"{layout.page_bytes >> 10}k"
            source = torch.randint(0, 255, (pages, layout.page_bytes), dtype=torch.uint8, device="cuda:0")
            target = torch.zeros_like(source)
            prompts = [np.arange(pages * tokens, dtype=np.uint32) + 10_000 * number for number in range(4)]
            puts = []
            for prompt in prompts:
                begin_s = time.perf_counter()
                assert cache.put(cache.keys(prompt), source) == pages
                puts.append(round(source.numel() / (time.perf_counter() - begin_s) / 1e9, 2))
            gets: dict[str, list[float]] = {}
            for count in (pages, 32, 1):
                for _ in range(6):
                    target.zero_()
                    torch.cuda.synchronize()
                    begin_s = time.perf_counter()
                    got = cache.get(cache.keys(prompts[0])[:count], target[:count]).pages
                    seconds = time.perf_counter() - begin_s
                    gets.setdefault(str(count), []).append(round(got * layout.page_bytes / seconds / 1e9, 2))
                    assert got == count and torch.equal(source[:count], target[:count])
            found[name] = {"put_gbs": puts, "get_gbs_by_pages": gets}
    return found


@item(60)
def lost() -> Found:
    """A kernel at a wrong address: the next wait and every later call say DeviceLost, and the process ends well."""
    device, said = first(), []
    stream, memory = device.stream(), device.allocate(4096)
    kernel = device._open().copies._kernel
    assert kernel is not None, device.kernel_missing
    with device.current():
        kernel.launch(stream._handle, u64(64), u64(memory.address), u64(4096), 1)
    for call in (lambda: done(stream), lambda: device.allocate(64), device.stream):
        try:
            call()
            said.append("nothing")
        except DeviceLost:
            said.append("DeviceLost")
        except KVStoreError as error:
            said.append(str(error))
    memory.free()
    return {"said": said, "lost": device.lost, "owns": device.owns(memory.address), "left": cuda.find().missing}


@item(90)
def attention() -> Found:
    """Our Triton kernel in bfloat16: GB/s in steps, TFLOP/s in chunks, by stages; PyTorch's own for chunks."""
    torch = torch_of_the_device()
    found: Found = {}
    from engine.compute import triton_kernel
    from engine.compute.kernel_args import Terms, reading_of

    do_bench = __import__("triton.testing", fromlist=["do_bench"]).do_bench
    place = torch.device("cuda", 0)

    def seconds(call: Callable[[], object]) -> float:
        return float(do_bench(call, warmup=20, rep=80, return_mode="median")) / 1e3

    big = torch.empty(1 << 30, dtype=torch.uint8, device=place)
    found["copy_gbs"] = round(2 * (1 << 30) / seconds(big.clone) / 1e9)
    for name, (heads, group, k, v, v_at, content, context, counts) in {
        "gqa_step_1_of_8192": (8, 4, 128, 128, 128, 256, 8192, [1]),
        "gqa_step_16_of_8192": (8, 4, 128, 128, 128, 256, 8192, [1] * 16),
        "gqa_chunk_512_of_8192": (8, 4, 128, 128, 128, 256, 8192, [512]),
        "gqa_chunk_2048_of_2048": (8, 4, 128, 128, 128, 256, 2048, [2048]),
        "mla_step_16_of_8192": (1, 128, 576, 512, 0, 576, 8192, [1] * 16),
        "mla_chunk_512_of_4096": (1, 128, 576, 512, 0, 576, 4096, [512]),
    }.items():
        each = -(-context // 64)
        pages = torch.randn(each * len(counts) + 1, heads, 64, content, device=place).bfloat16()
        tables = list(torch.randperm(len(pages) - 1).split(each))[: len(counts)]
        query = torch.randn(sum(counts), heads * group, k, device=place).bfloat16()
        reading = reading_of(tables, [context - count for count in counts], counts, 64, place)
        chosen = triton_kernel.stages_of
        for stages in (2, 3):
            triton_kernel.stages_of = lambda *_, stages=stages: stages
            kernel = triton_kernel.TritonKernel()
            try:
                took_s = seconds(partial(kernel.attend, pages, query, reading, Terms(k**-0.5), v, v_at))
            except Exception as error:  # of Triton's compiler or of the driver: the others are tried all the same
                found[f"{name}_stages_{stages}"] = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            flops = sum(4 * count * (context - count / 2) * heads * group * (k + v) / 2 for count in counts)
            read = len(counts) * context * heads * content * 2
            found[f"{name}_stages_{stages}"] = {
                "us": round(took_s * 1e6, 1),
                "gbs": round(read / took_s / 1e9),
                "tflops": round(flops / took_s / 1e12, 1),
            }
        triton_kernel.stages_of = chosen
    query, keys = (torch.randn(1, 32, 2048, 128, device=place).bfloat16() for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    took_s = seconds(lambda: attend(query, keys, keys, is_causal=True))
    found["torch_causal_2048_tflops"] = round(4 * 2048 * 1024 * 32 * 128 / took_s / 1e12, 1)
    return found


@item(60)
def ways() -> Found:
    """What ``kvstore status`` says of the ways to the device. cuFile may hang."""
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        file.write(os.urandom(MIB))
        file.flush()
        command = [sys.executable, "-m", "kvstore.node.operator.device_paths", file.name]
        child = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=ROOT)
    report: Found = json.loads(child.stdout)
    return report


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="Facts about a GPU, each tried in a process of its own.")
    parser.add_argument("items", nargs="*", metavar="ITEM", help=f"of {', '.join(ITEMS)}; none: all")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of probe.json")
    parser.add_argument("--here", action="store_true", help="ask one item in this process")
    options = parser.parse_args()
    unknown = sorted(set(options.items) - set(ITEMS))
    if unknown:
        parser.error(f"items: there is no {unknown[0]}")
    if options.here:
        for name in options.items:
            print(json.dumps(ITEMS[name].ask(), default=str))
        return 0
    _, missing = cuda.find()
    if missing:
        print(f"gpu_probe: no GPU here: {missing}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    this = [sys.executable, str(Path(__file__).resolve()), "--here"]
    chosen = options.items or list(ITEMS)
    failed = probe([(name, [*this, name], ITEMS[name].limit_s) for name in chosen], options.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

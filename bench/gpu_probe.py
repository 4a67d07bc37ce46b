"""``python bench/gpu_probe.py [ITEM...] [--out FOLDER]``: measures a GPU, its driver and this machine.

The probe shows what works on a machine and how fast it is, before any test runs there. Each item runs in its own
process with a deadline, so an item that crashes, hangs or loses the device does not stop the others. The probe prints
one line per item, and rewrites ``probe.json`` after each one. The exit status is 1 if there is no GPU or if an item
fails.
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
sys.path.insert(0, str(ROOT))  # for a checkout that is not installed

import numpy as np  # noqa: E402

from kvstore.device import cuda, host_memory  # noqa: E402
from kvstore.device.base import DeviceLost  # noqa: E402
from kvstore.errors import KVStoreError  # noqa: E402

MIB = 1 << 20
PINNED_BYTES = 1 << 30  # memory that ``pinning`` registers
COPIED_BYTES = 256 * MIB  # size of one plain copy, and of the memory that contains the pieces
PIECES = (4096, 16384, 65536, 262144, 2 * MIB)  # lengths
TOTALS = (2 * MIB, 64 * MIB)  # bytes of all pieces of one copy
REPEATS = 5  # runs of each timed copy; the fastest counts
CALLS = 1000  # calls that are timed together
WAIT_S = 20.0  # deadline of one copy

Facts = dict[str, Any]


class Item(NamedTuple):
    """A measurement, and the time limit of its process."""

    measure: Callable[[], Facts]
    limit_s: float


ITEMS: dict[str, Item] = {}


def item(limit_s: float) -> Callable[[Callable[[], Facts]], Callable[[], Facts]]:
    """Add the decorated function to ``ITEMS``."""

    def add(measure: Callable[[], Facts]) -> Callable[[], Facts]:
        ITEMS[measure.__name__] = Item(measure, limit_s)
        return measure

    return add


# --- One process per item ------------------------------------------------------------------------------------------


def probe(items: Sequence[tuple[str, Sequence[str], float]], out: Path) -> list[str]:
    """Run each ``(name, command, limit_s)``, one after the other, and return the names of the items that failed.

    A command prints its facts as JSON in its last line.
    """
    facts: Facts = {}
    failed = []
    for name, command, limit_s in items:
        start_s = time.monotonic()
        facts[name], succeeded = _run(command, limit_s)
        if not succeeded:
            failed.append(name)
        duration = f"{time.monotonic() - start_s:.1f} s"
        print(f"{name} ({duration}{'' if succeeded else ', FAILED'}) {json.dumps(facts[name])[:900]}", flush=True)
        (out / "probe.json").write_text(json.dumps(facts, indent=1) + "\n")
    return failed


def _run(command: Sequence[str], limit_s: float) -> tuple[Any, bool]:
    """Return the facts that a command prints and True, or the reason of its failure and False."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"did not end in {limit_s:g} s", False
        finally:
            if child.poll() is None:  # the child is past its limit, or this process was interrupted
                os.killpg(child.pid, signal.SIGKILL)  # with the processes that it started
                child.wait()
        output.seek(0)
        errors.seek(0)
        lines, error_text = output.read().decode().splitlines(), errors.read().decode(errors="replace").strip()
    if code:
        ending = signal.Signals(-code).name if code < 0 else f"status {code}"
        return f"{ending}: {' '.join(error_text.split())[-600:]}", False
    try:
        return json.loads(lines[-1]), True
    except (IndexError, ValueError):
        return f"printed no JSON (got {lines[-1:]})", False


# --- Helpers of the items ------------------------------------------------------------------------------------------


def first_device() -> cuda.CudaDevice:
    """Return the first device. Raises AssertionError if there is none, and Unavailable if its driver fails."""
    devices, missing = cuda.find()
    assert devices, missing
    return devices[0]


def u64(*numbers: int) -> np.ndarray:
    """Return addresses or lengths as an array."""
    return np.array(numbers, np.uint64)


def done(stream: cuda.CudaStream) -> None:
    """Wait until all copies on the stream are done."""
    stream.record().wait(time.monotonic() + WAIT_S)


def refusal(call: Callable[[], object]) -> str:
    """Return the error message of a call that may be refused; "taken" if the call succeeds."""
    try:
        call()
    except KVStoreError as error:
        return str(error)
    return "taken"


def timed(call: Callable[[], object], stream: cuda.CudaStream) -> float:
    """Return the seconds of the fastest of several runs."""
    best_s = float("inf")
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        call()
        done(stream)
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s


@contextlib.contextmanager
def shared_memory(nbytes: int) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
    """Yield shared memory mapped as by a client: writable, read-only, and the seconds of its allocation."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        start_s = time.perf_counter()
        os.posix_fallocate(file.fileno(), 0, nbytes)
        allocate_s = time.perf_counter() - start_s
        maps = [
            mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED, mmap.PROT_READ | more) for more in (mmap.PROT_WRITE, 0)
        ]
        writable, read_only = (np.frombuffer(each, np.uint8) for each in maps)
        yield writable, read_only, allocate_s


@contextlib.contextmanager
def pinned(device: cuda.CudaDevice, nbytes: int) -> Iterator[np.ndarray]:
    """Yield shared memory that is registered with the device."""
    with shared_memory(nbytes) as (memory, _, _):
        device.register(memory)
        try:
            yield memory
        finally:
            device.unregister(memory)


def torch_of_the_device() -> Any:
    """Return PyTorch. Raises AssertionError if it finds no device."""
    import torch

    assert torch.cuda.is_available(), "torch finds no device"
    return torch


# --- The items ------------------------------------------------------------------------------------------------------


@item(60)
def opening() -> Facts:
    """Measure the seconds to find the device, and to use it for the first time: create a context, load the kernel, time
    the ways to copy. Report all versions."""
    start_s = time.perf_counter()
    device = first_device()
    found_s = time.perf_counter()
    device.allocate(4096).free()
    opened_s = time.perf_counter()
    versions = {}
    for package in ("cuda-bindings", "torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "lmdb"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "find_s": found_s - start_s,
        "open_s": opened_s - found_s,
        "model": device.model,
        "batches": device.batches,
        "kernel_missing": device.kernel_missing,
        "kernel_below": {way.name: length for way, length in device.kernel_below.items()},
        "driver": int(device._driver.cuDriverGetVersion()[1]),
        "versions": versions,
    }


@item(60)
def attributes() -> Facts:
    """Read the device's attributes.

    If READ_ONLY_HOST_REGISTER is 0, the store does not pin read-only mappings. If CAN_USE_HOST_POINTER is 0, the host
    address of registered memory is not valid on the device, and a batch of copies that uses it loses the device.
    """
    primary = first_device()._open().primary
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
def answers() -> Facts:
    """Check what the code assumes about the driver: a device has access to itself, freed addresses have no owner, and
    batches can copy memory that is not pinned."""
    device = first_device()
    facts: Facts = {}
    ordinal = device._driver.cuDeviceGet(0)[1]
    facts["can_access_itself"] = int(device._driver.cuDeviceCanAccessPeer(ordinal, ordinal)[1])
    facts["reach_itself"] = device.reach(device.uuid)
    for name, nbytes in {"small": 10_000, "large": 64 * MIB}.items():
        memory = device.allocate(nbytes)
        address = memory.address
        memory.free()
        facts[f"owns_freed_{name}"] = device.owns(address)
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

        facts[f"pageable_batch_{name}"] = refusal(copies) if batch is not None else "no batches"
    facts["pageable_bytes_right"] = bool((host == 7).all())
    memory.free()
    return facts


@item(60)
def pinning() -> Facts:
    """Measure the seconds to register 1 GiB of shared memory, per size of one call. Also try read-only mappings."""
    device = first_device()
    facts: Facts = {}
    with shared_memory(2 * PINNED_BYTES) as (writable, read_only, allocate_s):
        gib = PINNED_BYTES / (1 << 30)
        facts["fallocate_s_per_gib"] = allocate_s / 2 / gib
        for step in (PINNED_BYTES // 16, PINNED_BYTES // 4, PINNED_BYTES):
            parts = [writable[at : at + step] for at in range(0, PINNED_BYTES, step)]
            start_s = time.perf_counter()
            for part in parts:
                device.register(part)
            registered_s = time.perf_counter()
            for part in parts:
                device.unregister(part)
            name = f"{step // MIB}m"
            facts[f"{name}_s_per_gib"] = (registered_s - start_s) / gib
            facts[f"{name}_undone_s_per_gib"] = (time.perf_counter() - registered_s) / gib
        part = read_only[PINNED_BYTES:]
        facts["read_only"] = refusal(lambda: device.register(part))
        if facts["read_only"] == "taken":
            device.unregister(part)
        device.register(writable)
        starts, _, there, _ = device._ranges._columns
        facts["device_sees_it_elsewhere"] = bool((starts != there).any())
        device.unregister(writable)
    return facts


@item(120)
def bandwidth() -> Facts:
    """Measure GB/s of one piece in each direction and in both at once, and of pieces in random order, by each way to
    copy."""
    device = first_device()
    facts: Facts = {}
    with pinned(device, 2 * COPIED_BYTES) as host:
        memory, stream, back = device.allocate(2 * COPIED_BYTES), device.stream(), device.stream()
        there, here = memory.address, host.ctypes.data

        def out() -> None:
            stream.copy(u64(there), u64(here), u64(COPIED_BYTES))

        def both() -> None:
            out()
            back.copy(u64(here + COPIED_BYTES), u64(there + COPIED_BYTES), u64(COPIED_BYTES))
            done(back)

        facts["to_device"] = COPIED_BYTES / timed(out, stream) / 1e9
        facts["to_host"] = (
            COPIED_BYTES / timed(lambda: stream.copy(u64(here), u64(there), u64(COPIED_BYTES)), stream) / 1e9
        )
        facts["both_ways"] = 2 * COPIED_BYTES / timed(both, stream) / 1e9
        for length in PIECES:
            for total in TOTALS:
                _pieces(facts, stream, here, there, length, min(total, COPIED_BYTES))
        memory.free()
    return facts


def _pieces(facts: Facts, stream: cuda.CudaStream, here: int, there: int, length: int, total: int) -> None:
    """Measure GB/s of copies of ``total`` bytes in pieces of ``length``."""
    count, random = max(1, total // length), np.random.default_rng(1)
    places = random.permutation(COPIED_BYTES // length)[:count].astype(np.uint64) * np.uint64(length)
    host, device = places + np.uint64(here), places[::-1] + np.uint64(there)
    lengths = np.full(count, length, np.uint64)
    for way, (targets, sources) in {"to_device": (device, host), "to_host": (host, device)}.items():
        kinds = {"engines": stream.copy_by_engines, "kernel": stream.copy_by_kernel, "chosen": stream.copy}
        for how, copy in kinds.items():
            name = f"{length >> 10}k_of_{total // MIB}m_{way}_{how}"
            try:
                seconds = timed(partial(copy, targets, sources, lengths), stream)
                facts[name] = round(count * length / seconds / 1e9, 2)
            except KVStoreError as error:
                facts[name] = str(error)


@item(60)
def python_us() -> Facts:
    """Measure the host's microseconds per call. A get cannot be faster than the sum of its calls."""
    device = first_device()
    facts: Facts = {}
    with pinned(device, 8 * MIB) as host:
        stream, memory = device.stream(), device.allocate(8 * MIB)

        def us(call: Callable[[], object], calls: int = CALLS) -> float:
            call()
            start_s = time.perf_counter()
            for _ in range(calls):
                call()
            return round((time.perf_counter() - start_s) / calls * 1e6, 1)

        def current() -> None:
            with device.current():
                pass

        event = stream.record()
        event.wait(time.monotonic() + WAIT_S)
        facts |= {"current": us(current), "record": us(stream.record), "over": us(event.over)}
        facts |= {"wait_event": us(lambda: stream.wait(event)), "owns": us(lambda: device.owns(memory.address))}
        for count in (1, 32, 512):
            steps, lengths = np.arange(count, dtype=np.uint64) * np.uint64(4096), np.full(count, 4096, np.uint64)
            there, here = steps + np.uint64(memory.address), steps + np.uint64(host.ctypes.data)
            for how, copy in {"engines": stream.copy_by_engines, "kernel": stream.copy_by_kernel}.items():
                with contextlib.suppress(KVStoreError):  # the device has no kernel
                    facts[f"submit_{how}_{count}"] = us(partial(copy, there, here, lengths), CALLS // 20)
                done(stream)
        memory.free()
    return facts


_OPENS_AN_EXPORT = """
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
def sharing() -> Facts:
    """Use our mapped memory as a PyTorch tensor, and read a PyTorch tensor in another process through its handle."""
    facts: Facts = {}
    torch, device = torch_of_the_device(), first_device()
    from engine.memory.mounting import tensor_of

    memory = device.allocate(8 * MIB, shared=True)
    tensor = tensor_of(memory, 8 * MIB, device.name)
    tensor.fill_(5)
    facts["mapped_is_a_tensor"] = tensor.data_ptr() == memory.address and int(tensor.sum()) == 5 * 8 * MIB
    facts["mapped_has_a_handle"] = memory.handle is not None
    theirs = torch.arange(1 << 20, dtype=torch.int32, device=device.name)[1000:]
    torch.cuda.synchronize()
    export = device.export(theirs.data_ptr())
    facts["offset_in_allocation"] = export.offset
    arguments = [export.device.hex(), str(export.offset), str(export.nbytes), export.handle.hex(), str(theirs.nbytes)]
    child = subprocess.run(
        [sys.executable, "-c", _OPENS_AN_EXPORT, *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    expected = hashlib.md5(theirs.cpu().numpy()).hexdigest()
    facts["another_process_reads_it"] = child.stdout.strip() == expected or child.stderr[-300:]
    return facts


@item(90)
def captures() -> Facts:
    """Record PyTorch graphs, in both modes, while another thread copies and allocates with our calls."""
    facts: Facts = {"captures_failed": [], "copies_failed": []}
    torch, device = torch_of_the_device(), first_device()
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
                facts["copies_failed"].append(str(error))

        thread = threading.Thread(target=copies)
        factor = torch.randn(512, 512, device=device.name)
        factor @ factor  # loads its library before the recording
        thread.start()
        for mode in ("thread_local", "global") * 5:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode=mode):
                    factor @ factor
                graph.replay()
            except RuntimeError as error:
                facts["captures_failed"].append(f"{mode}: {str(error)[:200]}")
        torch.cuda.synchronize()
        stop.set()
        thread.join()
    return facts


@item(90)
def store() -> Facts:
    """Measure GB/s of puts from a tensor and gets into one. The first put also pins memory."""
    import kvstore

    torch = torch_of_the_device()
    facts: Facts = {}
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
                start_s = time.perf_counter()
                assert cache.put(cache.keys(prompt), source) == pages
                puts.append(round(source.numel() / (time.perf_counter() - start_s) / 1e9, 2))
            gets: dict[str, list[float]] = {}
            for count in (pages, 32, 1):
                for _ in range(6):
                    target.zero_()
                    torch.cuda.synchronize()
                    start_s = time.perf_counter()
                    pages_read = cache.get(cache.keys(prompts[0])[:count], target[:count]).pages
                    seconds = time.perf_counter() - start_s
                    gets.setdefault(str(count), []).append(round(pages_read * layout.page_bytes / seconds / 1e9, 2))
                    assert pages_read == count and torch.equal(source[:count], target[:count])
            facts[name] = {"put_gbs": puts, "get_gbs_by_pages": gets}
    return facts


@item(60)
def lost() -> Facts:
    """Run a kernel on a wrong address. The next wait and every later call must raise DeviceLost, and the process must
    still exit normally."""
    device, outcomes = first_device(), []
    stream, memory = device.stream(), device.allocate(4096)
    kernel = device._open().copies._kernel
    assert kernel is not None, device.kernel_missing
    with device.current():
        kernel.launch(stream._handle, u64(64), u64(memory.address), u64(4096), 1)
    for call in (lambda: done(stream), lambda: device.allocate(64), device.stream):
        try:
            call()
            outcomes.append("nothing")
        except DeviceLost:
            outcomes.append("DeviceLost")
        except KVStoreError as error:
            outcomes.append(str(error))
    memory.free()
    return {"said": outcomes, "lost": device.lost, "owns": device.owns(memory.address), "left": cuda.find().missing}


@item(90)
def attention() -> Facts:
    """Measure our Triton kernel in bfloat16, by its number of stages: GB/s in decode steps, TFLOP/s in prefill chunks.
    For chunks, measure PyTorch's kernel too."""
    torch = torch_of_the_device()
    facts: Facts = {}
    from engine.compute import triton_kernel
    from engine.compute.kernel_args import Terms, reading_of

    do_bench = __import__("triton.testing", fromlist=["do_bench"]).do_bench
    device = torch.device("cuda", 0)

    def seconds(call: Callable[[], object]) -> float:
        return float(do_bench(call, warmup=20, rep=80, return_mode="median")) / 1e3

    big = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    facts["copy_gbs"] = round(2 * (1 << 30) / seconds(big.clone) / 1e9)
    for name, (heads, group, k, v, v_at, content, context, counts) in {
        "gqa_step_1_of_8192": (8, 4, 128, 128, 128, 256, 8192, [1]),
        "gqa_step_16_of_8192": (8, 4, 128, 128, 128, 256, 8192, [1] * 16),
        "gqa_chunk_512_of_8192": (8, 4, 128, 128, 128, 256, 8192, [512]),
        "gqa_chunk_2048_of_2048": (8, 4, 128, 128, 128, 256, 2048, [2048]),
        "mla_step_16_of_8192": (1, 128, 576, 512, 0, 576, 8192, [1] * 16),
        "mla_chunk_512_of_4096": (1, 128, 576, 512, 0, 576, 4096, [512]),
    }.items():
        each = -(-context // 64)
        pages = torch.randn(each * len(counts) + 1, heads, 64, content, device=device).bfloat16()
        tables = list(torch.randperm(len(pages) - 1).split(each))[: len(counts)]
        query = torch.randn(sum(counts), heads * group, k, device=device).bfloat16()
        reading = reading_of(tables, [context - count for count in counts], counts, 64, device)
        chosen = triton_kernel.stages_of
        for stages in (2, 3):
            triton_kernel.stages_of = lambda *_, stages=stages: stages
            kernel = triton_kernel.TritonKernel()
            try:
                step_s = seconds(partial(kernel.attend, pages, query, reading, Terms(k**-0.5), v, v_at))
            except Exception as error:  # from Triton's compiler or the driver; the other stages are still measured
                facts[f"{name}_stages_{stages}"] = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            flops = sum(4 * count * (context - count / 2) * heads * group * (k + v) / 2 for count in counts)
            read_bytes = len(counts) * context * heads * content * 2
            facts[f"{name}_stages_{stages}"] = {
                "us": round(step_s * 1e6, 1),
                "gbs": round(read_bytes / step_s / 1e9),
                "tflops": round(flops / step_s / 1e12, 1),
            }
        triton_kernel.stages_of = chosen
    query, keys = (torch.randn(1, 32, 2048, 128, device=device).bfloat16() for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    attend_s = seconds(lambda: attend(query, keys, keys, is_causal=True))
    facts["torch_causal_2048_tflops"] = round(4 * 2048 * 1024 * 32 * 128 / attend_s / 1e12, 1)
    return facts


@item(60)
def ways() -> Facts:
    """Report the ways to the device as ``kvstore status`` shows them. cuFile may hang."""
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        file.write(os.urandom(MIB))
        file.flush()
        command = [sys.executable, "-m", "kvstore.node.operator.device_paths", file.name]
        child = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=ROOT)
    facts: Facts = json.loads(child.stdout)
    return facts


def main() -> int:
    """Run the items that the command line names, or all."""
    parser = argparse.ArgumentParser(description="Measures a GPU, with each item in its own process.")
    parser.add_argument("items", nargs="*", metavar="ITEM", help=f"one of {', '.join(ITEMS)}; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder for probe.json")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    options = parser.parse_args()
    unknown = sorted(set(options.items) - set(ITEMS))
    if unknown:
        parser.error(f"items: unknown item (got {unknown[0]!r})")
    if options.here:
        for name in options.items:
            print(json.dumps(ITEMS[name].measure(), default=str))
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

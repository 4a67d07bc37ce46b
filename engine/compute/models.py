"""The models that engines run: a preset with random weights, or a directory with config, safetensors and tokenizer.

Loading a model downloads nothing, runs no code from the directory (only that of transformers), and opens no pickle.
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.compute import presets
from engine.compute.probe import Geometry, one_line, probe, refuse_kind
from engine.text.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer
from kvstore import Layout
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

AUTO = "auto"  # the dtype that `dtype_on` chooses
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SEED_MAX = 2**32 - 1
# If the files have more bytes than this in total, the digest covers samples of them: reading 100 GB takes minutes.
WHOLE_BYTES_MAX = 4 << 30
SAMPLE_BYTES, SAMPLE_STRIDE_BYTES = 64 << 10, 16 << 20
DIGEST_THREADS = 4
PIECE_BYTES, READ_BYTES = 64 << 20, 8 << 20
# Fields of a config that do not change what the model computes.
CONFIG_IGNORED = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A loaded model on its device, in evaluation mode and without gradients.

    Attributes:
        name, revision: part of the identity of the model's pages. They come from the preset, or from the directory's
            name (in a hub's cache: repository and commit).
        net: the causal language model of transformers, with the attention that transformers chose ("sdpa" or "eager").
        geometry: the shape of the model's KV, see `engine.compute.probe`.
        dtype: the type of weights and KV, for example "float32".
        context_tokens_max: the most tokens of a prompt and its answer together.
        eos_ids: tokens that end an answer.
        weights_digest: 32 hexadecimal digits, a digest of the config and the weights. For a preset it covers names,
            shapes, types and bytes of all parameters; for a directory, the bytes of the safetensors files. If the files
            are larger than ``WHOLE_BYTES_MAX``, it covers their headers and samples, and begins with "sampled-".
        rope: the result of `rope_text`.
        pace: for a simulated model, how long each step takes; None for a real model.
    """

    name: str
    revision: str
    net: PreTrainedModel = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    geometry: Geometry
    device: torch.device
    dtype: str
    context_tokens_max: int
    eos_ids: tuple[int, ...]
    weights_digest: str
    rope: str
    pace: presets.Pace | None = None

    def layout(self, page_tokens: int) -> Layout:
        """Return the layout of pages that have ``page_tokens`` tokens and all layers.

        Raises:
            InvalidRequest: pages of that size are not possible, see `kvstore.Layout`.
        """
        kv = self.geometry
        return Layout(
            model=self.name,
            revision=self.revision,
            weights_digest=self.weights_digest,
            rope=self.rope,
            dtype=self.dtype,
            layers=kv.layers,
            kv_heads=kv.kv_heads,
            page_tokens=page_tokens,
            head_dim=0 if kv.is_mla else kv.k_dim,
            mla_latent=kv.k_dim if kv.is_mla else 0,
            mla_rope=kv.v_dim if kv.is_mla else 0,
        )

    def layouts(self, page_tokens: int) -> tuple[Layout, ...]:
        """Return the layout of the pages of each cache group (``Geometry.groups``).

        If there is only one group, its pages have all layers and form chains, with or without a window.

        Raises:
            InvalidRequest: pages of that size are not possible.
        """
        whole, groups = self.layout(page_tokens), self.geometry.groups
        if len(groups) == 1:
            return (whole,)
        kinds = ["window" if group.window else "full" for group in groups]
        return tuple(
            replace(whole, layers=len(group.layers), attention=kind, window=group.window, group=kind)
            for group, kind in zip(groups, kinds, strict=True)
        )


def load_model(spec: str, *, device: str = "cpu", dtype: str = "float32", seed: int = 0) -> Model:
    """Load the preset ``spec`` with weights drawn from ``seed``, or the model in the directory ``spec``.

    Raises:
        InvalidRequest: "model", "device", "dtype" or "seed" is invalid. Examples: there is no such preset or directory,
            a file is missing, the kind of model is not supported, or this machine does not have the device.
    """
    if dtype not in (AUTO, *DTYPES):
        raise InvalidRequest("dtype", f"must be one of {', '.join((AUTO, *DTYPES))} (got {dtype!r})")
    torch_device = find_device(device)
    if spec in presets.PRESETS:
        return _preset(spec, torch_device, dtype_on(torch_device, None) if dtype == AUTO else dtype, seed)
    return _directory(spec, torch_device, dtype)


def dtype_on(device: torch.device, saved: torch.dtype | None) -> str:
    """Return the dtype that "auto" stands for, if the weights are saved as ``saved``.

    On a CPU it is float32. On a GPU it is the saved type if that has half precision, else bfloat16, because float32
    takes twice the memory and leaves tensor cores idle.
    """
    if device.type == "cpu":
        return "float32"
    halves = {kind: name for name, kind in DTYPES.items() if kind.itemsize == 2}
    return halves.get(saved, "bfloat16") if saved is not None else "bfloat16"


def find_device(name: str) -> torch.device:
    """Return the device "cpu", "cuda" or "cuda:N".

    Raises:
        InvalidRequest: "device" is unknown, or this machine does not have it.
    """
    match = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", name)
    if match is None:
        raise InvalidRequest("device", f"must be cpu, cuda or cuda:N (got {name!r})")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no driver or no device"
        raise InvalidRequest("device", f"this machine has no CUDA device: {reason}; use cpu (got {name!r})")
    index, count = int(match[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise InvalidRequest("device", f"this machine has cuda:0 to cuda:{count - 1} (got {name!r})")
    return torch.device("cuda", index)


def rope_text(config: PreTrainedConfig) -> str:
    """Describe how positions rotate keys. Two models with equal theta, scaling, fraction and pairing give equal texts.

    Empty if keys are not rotated.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return ""
    terms: dict[str, object] = {"parameters": parameters}
    for name in ("partial_rotary_factor", "rope_interleave", "rotary_dim", "rotary_pct", "no_rope_layers"):
        if (value := getattr(config, name, None)) is not None:
            terms[name] = value
    return json.dumps(terms, sort_keys=True, separators=(",", ":"), default=str)


# --- Presets ---------------------------------------------------------------------------------------------------------


def _preset(name: str, device: torch.device, dtype: str, seed: int) -> Model:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= SEED_MAX:
        raise InvalidRequest("seed", f"must be an integer in 0..{SEED_MAX} (got {seed!r})")
    net = _moved(presets.build(name, seed), DTYPES[dtype])
    digest = blake2b(_config_text(net.config).encode(), digest_size=16, person=b"kvstore.weights")
    for parameter_name, parameter in sorted(net.named_parameters()):
        digest.update(f"{parameter_name} {list(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    model = _finish(net, ByteTokenizer(), device, dtype, name, f"seed-{seed}", digest.hexdigest())
    return replace(model, pace=presets.PRESETS[name].pace)


# --- Directories -----------------------------------------------------------------------------------------------------


def _directory(spec: str, device: torch.device, dtype: str) -> Model:
    path = Path(spec).expanduser()
    if not path.is_dir():
        problem = "is a file, not a directory" if path.exists() else "is neither a preset nor a directory here"
        raise InvalidRequest("model", f"{spec!r} {problem}; presets are {', '.join(presets.PRESETS)}")
    if not (path / "config.json").is_file():
        _raise_missing(path, "config.json")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, StrictDataclassError) as error:
        raise InvalidRequest("model", f"config.json in {path}: {one_line(error)}") from error
    refuse_kind(config)
    files = _weight_files(path)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        _raise_missing(path, f"a tokenizer (one of {', '.join(TOKENIZER_FILES)})")
    tokenizer = _tokenizer(path)
    dtype = dtype_on(device, getattr(config, "dtype", None)) if dtype == AUTO else dtype
    net = _read_weights(path, config, dtype)
    name, revision = _identity(path)
    digest = _files_digest(files, _config_text(config))
    return _finish(net, tokenizer, device, dtype, name, revision, digest)


def _weight_files(path: Path) -> list[Path]:
    """Return the safetensors files that contain the weights."""
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InvalidRequest("model", f"{index} is not an index of safetensors files: {one_line(error)}") from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise InvalidRequest("model", f"{index} lists {name!r}, which is not a safetensors file next to it")
            if not (path / name).is_file():
                _raise_missing(path, name)
        return [path / name for name in names]
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickles:
        reason = f"{path} has its weights in pickles ({pickles[0]}), which can run code; save them as safetensors"
        raise InvalidRequest("model", reason)
    _raise_missing(path, "model.safetensors, or model.safetensors.index.json and the files that it lists")


def _tokenizer(path: Path) -> HFTokenizer:
    try:
        return HFTokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise InvalidRequest("model", f"tokenizer in {path}: {one_line(error)}") from error
    except Exception as error:
        # The parser of tokenizer.json raises Exception itself, not a subclass.
        if type(error) is Exception:
            raise InvalidRequest("model", f"tokenizer in {path}: {one_line(error)}") from error
        raise


def _read_weights(path: Path, config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    load: Any = AutoModelForCausalLM.from_pretrained  # typed as if it returned only the model
    try:
        net, report = load(
            path,
            config=config,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InvalidRequest("model", f"weights in {path}: {one_line(error)}") from error
    # transformers would fill missing weights with random numbers.
    if missing := sorted(report["missing_keys"]):
        _raise_missing(path, f"{len(missing)} of the weights, for example {missing[0]}")
    loaded: PreTrainedModel = net
    return loaded


def _identity(path: Path) -> tuple[str, str]:
    """Return name and revision of the model in a directory.

    In a hub's cache the path ``models--ORG--NAME/snapshots/COMMIT`` has both. Otherwise the name is that of the
    directory, and the revision is empty.
    """
    real = path.resolve()
    match = re.fullmatch(r"models--(.+)", real.parent.parent.name) if real.parent.name == "snapshots" else None
    if match:
        return match[1].replace("--", "/"), real.name
    return real.name or "model", ""


def _files_digest(files: list[Path], config: str) -> str:
    """Return the digest of the config and of the safetensors files, or of samples if the files are large.

    Threads read several pieces at once.
    """
    sizes = [file.stat().st_size for file in files]
    sampled = sum(sizes) > WHOLE_BYTES_MAX
    digest = blake2b(f"{config} {sizes}".encode(), digest_size=16, person=b"kvstore.weights")
    pieces = [(file, start) for file, size in zip(files, sizes, strict=True) for start in range(0, size, PIECE_BYTES)]
    with ThreadPoolExecutor(DIGEST_THREADS) as threads:
        for part_digest in threads.map(_sample_digest, files) if sampled else threads.map(_piece_digest, pieces):
            digest.update(part_digest)
    return ("sampled-" if sampled else "") + digest.hexdigest()


def _piece_digest(piece: tuple[Path, int]) -> bytes:
    """Return the digest of ``PIECE_BYTES`` of a file that begin at an offset."""
    file, start = piece
    digest = blake2b(digest_size=32)
    with file.open("rb", buffering=0) as source:
        for offset in range(start, start + PIECE_BYTES, READ_BYTES):
            digest.update(os.pread(source.fileno(), READ_BYTES, offset))
    return digest.digest()


def _sample_digest(file: Path) -> bytes:
    """Return the digest of a file's size, its header (names, shapes, types) and samples of its data.

    A sample of ``SAMPLE_BYTES`` begins at every ``SAMPLE_STRIDE_BYTES``; one more is at the end of the file.
    """
    size = file.stat().st_size
    digest = blake2b(str(size).encode(), digest_size=32)
    with file.open("rb", buffering=0) as source:
        start = 8 + int.from_bytes(os.pread(source.fileno(), 8, 0), "little")
        digest.update(os.pread(source.fileno(), start, 0))
        for offset in [*range(start, size, SAMPLE_STRIDE_BYTES), max(start, size - SAMPLE_BYTES)]:
            digest.update(os.pread(source.fileno(), SAMPLE_BYTES, offset))
    return digest.digest()


# --- Both ------------------------------------------------------------------------------------------------------------


def _finish(
    net: PreTrainedModel,
    tokenizer: Tokenizer,
    device: torch.device,
    dtype: str,
    name: str,
    revision: str,
    digest: str,
) -> Model:
    try:
        net = _moved(net, device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise InvalidRequest("device", f"{name} does not fit on {device}: {one_line(error)}") from error
    geometry = probe(net)
    if tokenizer.vocab_size > geometry.vocab_size:
        reason = f"its tokenizer has {tokenizer.vocab_size} tokens, its logits only {geometry.vocab_size}"
        raise InvalidRequest("model", f"{name}: {reason}")
    return Model(
        name=name,
        revision=revision,
        net=net,
        tokenizer=tokenizer,
        geometry=geometry,
        device=device,
        dtype=dtype,
        context_tokens_max=_context(net.config),
        eos_ids=_eos_ids(net, tokenizer),
        weights_digest=digest,
        rope=rope_text(net.config),
    )


def _moved(net: PreTrainedModel, to: torch.device | torch.dtype) -> PreTrainedModel:
    module: torch.nn.Module = net  # transformers wraps `to` in a way that type checkers cannot follow
    module.to(to)
    return net


def _context(config: PreTrainedConfig) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise InvalidRequest("model", f"{config.model_type}: its config has no max_position_embeddings")


def _eos_ids(net: PreTrainedModel, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the end tokens, from the first source that has them: generation config, config, tokenizer.

    ``generate`` of transformers uses the same order.
    """
    for source in (net.generation_config, net.config):
        value: Any = getattr(source, "eos_token_id", None)
        if value is not None:
            return tuple(value) if isinstance(value, list | tuple) else (int(value),)
    return tokenizer.eos_ids


def _config_text(config: PreTrainedConfig) -> str:
    terms = {name: value for name, value in config.to_diff_dict().items() if name not in CONFIG_IGNORED}
    return json.dumps(terms, sort_keys=True, separators=(",", ":"), default=str)


def _raise_missing(path: Path, what: str) -> NoReturn:
    raise InvalidRequest("model", f"{path} lacks {what}")

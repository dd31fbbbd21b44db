"""The bytes of a checkpoint: a safetensors file whose metadata is a JSON header with a checksum of every tensor.

    8 bytes      length of the table
    the table    JSON: dtype, shape and place of every tensor, and the metadata
                     format, version   of this layout
                     header            a JSON text: what is saved, and dtype, shape and SHA-256 of every tensor
                     sha256            of that text
    the tensors  one behind the other

Any safetensors reader can open it. Nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slangvi.errors import CheckpointError

FORMAT, VERSION = "slangvi checkpoint", 1
# Names of dtypes in safetensors; others cannot be held.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Exceptions of safetensors, of JSON, and of a header that has another shape.
_SPOILT = (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class DamagedError(CheckpointError):
    """The bytes of the file are not those that were written, or there is no file."""


class ForeignError(DamagedError):
    """The file is whole, but somebody else's."""


def write(file: IO[bytes], about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a header, as JSON can hold it, and tensors on any device, one at a time."""
    # Large items first keeps every tensor aligned to its own size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    # A checksum is always 64 digits: the table keeps its length, and is written again when they are known.
    digests = dict.fromkeys(order, "0" * 64)
    file.write(_table(about, tensors, digests))
    for name in order:
        content = _bytes(tensors[name])
        digests[name] = hashlib.sha256(content).hexdigest()
        file.write(content)
    file.seek(0)
    file.write(_table(about, tensors, digests))


def _table(about: Mapping[str, Any], tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> bytes:
    entries, places, end = {}, {}, 0
    for name, digest in digests.items():
        value = tensors[name]
        kind, start = {"dtype": DTYPES[value.dtype], "shape": list(value.shape)}, end
        end += value.nbytes
        # Products may round by how numbers lie in memory, and a run that goes on must round alike.
        stride = list(torch.empty_like(value, device="meta").stride())
        entries[name] = {**kind, "stride": stride, "sha256": digest}
        places[name] = {**kind, "data_offsets": [start, end]}
    header = json.dumps({**about, "tensors": entries}, allow_nan=False)
    metadata = {"format": FORMAT, "version": str(VERSION), "sha256": _sha256(header), "header": header}
    text = json.dumps({"__metadata__": metadata, **places}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(value: Tensor) -> memoryview:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path, with_tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors on the CPU, every bit of them checked; or no tensors, if these are there.

    If there is no such file, or not every byte is what was written, the error is a `DamagedError`.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(f"{path} is not a file. Give the path of a checkpoint.")
    try:
        with safe_open(path, framework="pt") as file:
            header = _header(path, file.metadata() or {})
            told = {name: [entry["dtype"], entry["shape"]] for name, entry in header["tensors"].items()}
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
            found = {name: [part.get_dtype(), part.get_shape()] for name, part in slices.items()}
            for name in [*told, *found]:
                if told.get(name) != found.get(name):
                    raise DamagedError(
                        f"{path} is damaged: it should hold {told.get(name, 'no')} as tensor {name!r}, and holds "
                        f"{found.get(name, 'none')}."
                    )
            names = found if with_tensors else ()
            return header, {name: _tensor(path, name, file.get_tensor(name), header) for name in names}
    except FileNotFoundError as error:
        raise DamagedError(f"there is no file {path}.") from error
    except PermissionError as error:
        raise CheckpointError(f"{path} may not be read: {error.strerror or error}. Change its permissions.") from error
    except _SPOILT as error:
        raise DamagedError(f"{path} {_what_it_is(path)} ({str(error).strip() or type(error).__name__}).") from error


def _header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise ForeignError(f"{path} is a safetensors file, but no checkpoint of slangvi: its metadata does not say so.")
    version = metadata.get("version", "")
    if version != str(VERSION):
        told = f"{path} has format version {version!r}, and this slangvi reads version {VERSION}"
        if version.isdecimal() and int(version) > VERSION:
            raise CheckpointError(f"{told}. It was written by a newer slangvi: upgrade to read it.")
        raise DamagedError(f"{told}. It is damaged.")
    text = metadata.get("header", "")
    if _sha256(text) != metadata.get("sha256"):
        raise DamagedError(f"{path} is damaged: its header does not have the checksum it was written with.")
    header: dict[str, Any] = json.loads(text)
    return header


def _tensor(path: Path, name: str, mapped: Tensor, header: Mapping[str, Any]) -> Tensor:
    """Copy a tensor into memory of its own, laid out as it was, and compare its checksum."""
    entry = header["tensors"][name]
    value = mapped.clone()
    if hashlib.sha256(_bytes(value)).hexdigest() != entry["sha256"]:
        raise DamagedError(f"{path} is damaged: tensor {name!r} does not have the checksum it was written with.")
    return torch.empty_strided(value.shape, entry["stride"], dtype=value.dtype, device=value.device).copy_(value)


def _what_it_is(path: Path) -> str:
    """Say what a file seems to be by its first bytes."""
    with path.open("rb") as file:
        start = file.read(8)
    if start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] <= b"\x05"):
        return (
            "looks like a pickle, as torch.save writes it. Pickles can run any code and are never opened here; for a "
            "state_dict of your own use opt.load_state_dict(torch.load(path, weights_only=True))"
        )
    return "is damaged, or is no checkpoint of slangvi" if start else "is empty"

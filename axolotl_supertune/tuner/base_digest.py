"""Compare the weights of two base models by their files, without loading a model or downloading anything."""

import hashlib
import json
import os
from pathlib import Path

from ..method.messages import listed

# Rows that are compared per tensor: evenly spread, including the first and the last.
_ROWS = 16


def base_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of a base model: a local one, or that of the hub's cache; None if it is on neither."""
    from huggingface_hub import snapshot_download

    if os.path.isdir(name):
        return Path(os.path.realpath(name))
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or no name of the hub's
        return None


def weight_digests(folder: Path) -> dict[str, str] | None:
    """Tensor name → sha256 of its dtype, shape and 16 evenly spread rows (all of a vector).

    Returns:
        None if there are no safetensors files, or if some that the index lists are missing.

    Raises:
        ValueError: an unreadable file; the message names it.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files or not all(file.is_file() for file in files):
        return None
    digests = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    part = opened.get_slice(name)
                    shape = part.get_shape()
                    digest = hashlib.sha256(f"{part.get_dtype()}{shape}".encode())
                    rows = shape[0] if len(shape) > 1 else 0
                    spread = {round(at * (rows - 1) / (_ROWS - 1)) for at in range(_ROWS)} if rows else ()
                    pieces = [part[row : row + 1] for row in sorted(spread)] or [opened.get_tensor(name)]
                    for piece in pieces:
                        digest.update(piece.contiguous().flatten().view(torch.uint8).numpy().tobytes())
                    digests[name] = digest.hexdigest()
        except SafetensorError as error:
            raise ValueError(f"{file} is not a readable safetensors file ({error}).") from error
    return digests


def same_weights(first: tuple[str, str | None], second: tuple[str, str | None]) -> bool | None:
    """Whether two bases (name, revision) have the same weights; None if the files of one are not on this machine."""
    digests = _digests(first, second)
    return None if isinstance(digests, str) else digests[0] == digests[1]


def compared(first: tuple[str, str | None], second: tuple[str, str | None]) -> str:
    """`same_weights` in words, with the tensors that differ."""
    digests = _digests(first, second)
    if isinstance(digests, str):
        return f"whether they are the same weights was not checked: those of {digests} are not here"
    one, other = digests
    every = sorted({*one, *other})
    differing = [name for name in every if one.get(name) != other.get(name)]
    if not differing:
        return f"the same weights ({len(every)} tensors, {_ROWS} rows of each compared)"
    return f"other weights: {len(differing)} of {len(every)} tensors differ ({listed(differing)})"


def _digests(*bases: tuple[str, str | None]) -> list[dict[str, str]] | str:
    """`weight_digests` of each base, or the name of one whose files are not on this machine."""
    digests = []
    for name, revision in bases:
        folder = base_folder(name, revision)
        weights = None if folder is None else weight_digests(folder)
        if weights is None:
            return name
        digests.append(weights)
    return digests

"""Fingerprints of the weights in a folder, by which a measurement knows the weights that it was made on."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decode.core.errors import UserError

ROWS_OF_TOKENS = ("embed", "wte", "lm_head")  # parts of the names of tensors that have a row for each token


def weight_fingerprints(folder: str | Path) -> dict[str, str]:
    """For each tensor of a folder's safetensors files ``hash``, or ``hash/rows`` where its rows are tokens.

    ``rows`` does not depend on the order of the rows, so that a permuted embedding is told from another one.

    Raises:
        UserError: a file cannot be read.
    """
    found: dict[str, str] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as content:
                for name in content.keys():  # noqa: SIM118
                    found[name] = _fingerprint(name, content.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read: {error}; export the draft again") from error
    return found


def _fingerprint(name: str, tensor: Tensor) -> str:
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy()
    whole = hashlib.blake2b(raw.tobytes(), digest_size=6).hexdigest()
    if tensor.ndim != 2 or not any(part in name for part in ROWS_OF_TOKENS):
        return whole
    rows = raw.reshape(len(tensor), -1)
    total = sum(int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=6).digest(), "big") for row in rows)
    return f"{whole}/{total % (1 << 48):012x}"


def changed_weights(measured: Mapping[str, str], now: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Names of tensors that are not as measured, and of those among them whose rows only stand in another order."""
    changed = sorted(name for name in measured.keys() | now.keys() if measured.get(name) != now.get(name))
    rows = {name: (one.get(name, "").partition("/")[2]) for one in (measured,) for name in changed}
    permuted = [name for name in changed if rows[name] and rows[name] == now.get(name, "").partition("/")[2]]
    return changed, permuted

"""Features that several processes read, each its share of the texts; the first one fits the probes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from decode.core.atomic_files import write_safely
from decode.drafters.layer_search import Text
from distill.core import ranks
from distill.core.file_fingerprints import fingerprint
from probes.hidden_state_features import Features, collect, join

FILES = "features-*.safetensors"


def collect_together(folder: Path, made_from: Any, texts: Sequence[Text], **how: Any) -> Features | None:
    """Features of the texts in the first process, whose others leave their shares as files; None in those.

    Args:
        folder: for these files, which the first process removes.
        made_from: what decides the features beside the texts.
        texts: see `collect`.
        how: the other arguments of `collect`.
    """
    batches = math.ceil(sum(len(ids) > start for ids, start in texts) / how["batch_size"])
    rank, world = ranks.rank(), max(1, min(ranks.started(), batches))
    if rank >= world:
        return None
    own = collect(texts=texts, **how, share=(rank, world))
    key = fingerprint(made_from, texts, world)
    paths = [folder / FILES.replace("*", f"{key}-{number}") for number in range(world)]
    if rank:
        tensors = {"inputs": own.inputs, "outcome": own.outcome, "text": own.text}
        tensors |= {f"label {name}": label for name, label in own.labels.items()}
        write_safely(paths[rank], lambda file: save_file(tensors, file))
        return None
    others = [ranks.wait_for(lambda path=path: _read(path, own.exits), f"the features in {path}") for path in paths[1:]]  # type: ignore[misc]
    for path in paths[1:]:
        path.unlink()
    return join([own, *others])


def _read(path: Path, exits: list[int]) -> Features | None:
    """The features in a file; None where it is not there yet."""
    if not path.exists():
        return None
    tensors = load_file(path)
    labels = {name.removeprefix("label "): value for name, value in tensors.items() if name.startswith("label ")}
    return Features(exits, tensors["inputs"], labels, tensors["outcome"], tensors["text"])

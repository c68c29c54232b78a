"""Hidden states out of vLLM, which writes them to files through a connector of ours, and the GPUs of its servers."""

import json
import math
import re
import shlex
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file
from torch import Tensor

from decode.engines.base import Failure
from decode.errors import UserError
from distill.config.teacher import EngineSettings
from distill.engine.servers import Answer

WAIT, POLL = 60.0, 0.002  # seconds until a file has to be there after its answer, and between two looks for it
FOLDER_WAIT = 10.0  # seconds until its folder has to be there
CONNECTOR = Path(__file__).with_name("connector")
CLASS = {"kv_connector": "DraftsmithConnector", "kv_connector_module_path": "draftsmith_connector"}
FOLDER = "/dev/shm/states"
"""Through which states pass on one machine; a fast disk does as well."""


def server_options(layers: Sequence[int], folder: str) -> list[str]:
    """The options of vLLM for states that pass through a folder; `CONNECTOR` has to be in its PYTHONPATH."""
    aux = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    how = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": {"hf_config": aux}}
    where = CLASS | {"kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": folder}}
    return ["--speculative-config", json.dumps(how), "--kv-transfer-config", json.dumps(where)]


def server_command(
    model: Path, layers: Sequence[int], length: int, arguments: Sequence[str], *, url: str, gpus: Sequence[int],
    folder: str,
) -> str:  # fmt: skip
    """The command of a server, with further arguments, that gives the states that enter these layers away.

    Layer i is transformers' ``hidden_states[i]``, and the number of layers the last one's output before the norm. Its
    address ends with the port of ``url``; ``gpus`` are those that it takes, none: all that it sees.
    """
    options = ["--max-model-len", str(length), "--generation-config", "vllm", *server_options(layers, folder)]
    options += [*arguments, *(["--port", str(port)] if (port := urlsplit(url).port) else [])]
    visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, gpus))} " * bool(gpus)
    return f"{visible}PYTHONPATH={CONNECTOR} vllm serve {model} {shlex.join(options)}"


def take_states(answer: Answer, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """The states ``[tokens, layers, width]`` of the file that an answer names, which is deleted.

    Raises:
        Failure: They are not as they should be.
        UserError: Nor will they be another time.
    """
    told = answer.get("kv_transfer_params") or {}
    if not (path := told.get("hidden_states_path")):
        raise UserError(
            "the engine names no file of hidden states: start vLLM with the command that draftsmith distill "
            "check-engine prints, without a proxy that drops kv_transfer_params. SGLang gives no states of the "
            "last layer away, so that it can only answer (teacher.signal hidden, topk or online)"
        )
    if (given := told.get("layers")) != list(layers):
        raise UserError(
            f"the engine gives the states of layers {given} away, and {list(layers)} are needed, ascending and "
            "each once: start it with the command that draftsmith distill check-engine prints"
        )
    return take_file(Path(path), ids)


def take_file(path: Path, ids: Sequence[int]) -> Tensor:
    """The states ``[tokens, layers, width]`` of a file that is being written, which is deleted.

    Raises:
        Failure: It was not written, or is not of these tokens.
        UserError: Its folder is not here.
    """
    began, failed = time.monotonic(), path.with_name(f"{path.name}.failed")
    while not path.exists():
        if failed.exists():
            why = failed.read_text()
            failed.unlink()
            raise Failure(f"it could not write {path} ({why}): where no space is left, lower teacher.engine.in_flight")
        waited = time.monotonic() - began
        if waited > FOLDER_WAIT and not path.parent.exists():
            raise UserError(
                f"the engine writes states into {path.parent}, which is not on this machine: start it here, or give it "
                "a shared_storage_path that both machines see"
            )
        if waited > WAIT:
            raise Failure(f"it wrote no {path} within {WAIT:.0f} s, or it is on another machine")
        time.sleep(POLL)
    try:
        tensors = load_file(path)
    finally:
        path.unlink(missing_ok=True)
    states, written = tensors["hidden_states"], tensors["token_ids"].tolist()
    if written != list(ids):
        raise Failure(f"it wrote states of {len(written)} tokens that are not the {len(ids)} of the request")
    if len(states) != len(ids):
        raise Failure(f"it wrote {len(states)} states of {len(ids)} tokens: start it with --no-enable-prefix-caching")
    if not torch.isfinite(states).all():
        raise Failure("it wrote states that are not finite: give it another --dtype")
    return states


def server_gpus(engine: EngineSettings, free: Sequence[int], trained: Collection[int]) -> dict[str, list[int]]:
    """The GPUs of each server on this machine by its address, those first that do not train.

    Without addresses it is one server, whose address is empty; without GPUs they take none.

    Args:
        engine: Addresses and arguments of the servers.
        free: GPUs of this machine that do not train.
        trained: Those that do.

    Raises:
        UserError: A server that takes all memory of its GPUs would be on one that trains.
    """
    arguments, urls = " ".join(engine.arguments), engine.local if engine.urls else [""]
    each = math.prod(map(int, re.findall(r"--(?:tensor|pipeline|data)-parallel-size[= ](\d+)", arguments)))
    part = re.search(r"--gpu-memory-utilization[= ]0?\.[0-8]", arguments)  # vLLM takes 0.92 unless it is told otherwise
    wanted, gpus = each * len(urls), [*free, *trained]
    if trained and wanted > len(free) and not part:
        devices = f"leave them {wanted} (trainer.devices '{sorted(gpus)[wanted:]}'), or " * (wanted < len(gpus))
        raise UserError(
            f"teacher.engine: the servers on this machine take {wanted} of its {len(gpus)} GPUs, and trainer.devices "
            f"takes {sorted(trained)}: {devices}put --gpu-memory-utilization=0.4 or another share into "
            "teacher.engine.arguments and start the servers with it. Where CUDA_VISIBLE_DEVICES names the GPUs of this "
            "command, nothing is refused"
        )
    places = gpus * wanted
    return {url: sorted({*places[number * each : (number + 1) * each]}) for number, url in enumerate(urls)}

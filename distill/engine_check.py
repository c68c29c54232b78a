"""Whether a serving engine says of the target what its files say: on a few texts, by layer and position."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.engines import server
from decode.errors import UserError
from decode.models.open import DTYPES
from distill.data.dataset import Examples
from distill.engine import Engine, answer_ids, arguments, bytes_in_flight
from distill.files import existing
from distill.layers import final_norm
from distill.lm_head import LMHead
from distill.signal.vllm import StateFiles

if TYPE_CHECKING:
    from distill.run import Run

TEXTS, LONGEST = 8, 128  # compared; tokens of each
CLOSE = {"float32": 1e-3}  # largest relative difference of states, by number format; of the others:
ROUNDED = 0.06


@dataclass(frozen=True)
class Difference:
    """How far the engine's states are from transformers'."""

    layer: int
    largest: float  # of ‖difference‖ / ‖state‖ over all positions
    text: int  # where that is
    position: int


def check_engine(run: Run) -> None:
    """Refuse before anything is trained servers that do not answer, and an engine that cannot be started.

    Raises:
        UserError: With the next step.
    """
    settings, teacher = run.settings, run.settings.teacher
    given, length = teacher.engine, settings.data.max_length
    if not (teacher.served or teacher.signal == "vllm"):
        return
    if not given.urls:
        server.check_engine("vllm")
        planes, size = len(run.engine_layers), DTYPES[settings.target.dtype].itemsize
        most = bytes_in_flight(given, length, planes, run.target_config.hidden_size, size)
        if most > (free := shutil.disk_usage(existing(Path(given.folder))).free):
            raise UserError(
                f"states in flight take up to {most / 1e9:.2f} GB and {free / 1e9:.2f} GB are free in {given.folder}: "
                "lower teacher.engine.in_flight, or set teacher.engine.folder to a fast disk"
            )
        return
    engine = Engine(given.urls, given)
    try:
        for number, model in enumerate(engine.models):
            if teacher.served and not (run.work / "responses").exists():
                answer_ids(engine.complete(number, [1], tries=1, max_tokens=1, temperature=0.0))
            if model.context is not None and model.context < length:
                raise UserError(
                    f"{model.url} serves texts of {model.context} tokens and data.max_length is {length}: start it "
                    f"with --max-model-len {length}, or lower data.max_length"
                )
            if teacher.signal == "vllm" and Path(model.name).name != run.served_folder.name:
                run.line(f"{model.url} serves {model.name}, and the target is {run.served_folder}")
    finally:
        engine.close()


def serve_arguments(run: Run) -> str:
    """The command of a server that gives away what a run needs; its folder is bounded by `bytes_in_flight`."""
    given = " ".join(f"'{part}'" if "{" in part else part for part in arguments(run.engine_layers, "/dev/shm/states"))
    return (
        f"PYTHONPATH=$(python -c 'import distill.engine as e; print(e.CONNECTOR)') vllm serve {run.served_folder} "
        f"--max-model-len {run.settings.data.max_length} --generation-config vllm {given}"
    )


@torch.no_grad()
def check_states(run: Run, files: StateFiles) -> list[Difference]:
    """Compare the engine with transformers where memory holds the target, and with its own log-probabilities.

    Raises:
        UserError: They differ; with the first layer that does, and the known causes.
    """
    target = run.settings.target
    rows = Examples.of(run.examples, TEXTS)
    longest = min(LONGEST, run.settings.data.max_length - 1)  # a token is written after each
    texts = [rows.ids[rows.span(number)][:longest].tolist() for number in range(len(rows))]
    texts = [ids for ids in texts if len(ids) > 1]
    parts = run.target_parts().to(DTYPES[target.dtype])
    answers = [files.ask(number, ids, prompt_logprobs=0) for number, ids in enumerate(texts)]
    quantised = next((a["kv_transfer_params"].get("quantization") for a, _ in answers), None)
    if quantised:
        run.line(f"the engine computes with {quantised} weights, and the draft learns what the engine says")
    limit, found = CLOSE.get(target.dtype, ROUNDED), list[Difference]()
    if holds(run):
        model = run.at_work(run.open_target())
        found = differences(model, texts, [states for _, states in answers], files.layers)
        shown = ", ".join(f"{each.layer}: {each.largest:.1e}" for each in found)
        run.line(f"states of {len(texts)} texts beside transformers', largest relative difference by layer: {shown}")
        if not quantised:
            refuse_differences(found, int(model.config.get_text_config().num_hidden_layers), limit, str(run.target))
    else:
        run.line("this process has no memory for the target, so that its states are not compared with transformers'")
    head, norm, away = LMHead(parts), final_norm(parts), 0.0
    for ids, (answer, states) in zip(texts, answers):
        logits = head(norm(states[:-1, -1].to(head.linear.weight))).float()
        ours = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        theirs = [row[str(i)]["logprob"] for row, i in zip(answer["prompt_logprobs"][1:], ids[1:])]
        away = max(away, float((ours - torch.tensor(theirs)).abs().mean()))
    if away > limit:
        raise UserError(
            f"the last state that the engine gives, through the target's own norm and output head, is {away:.3f} "
            f"(mean, expected less than {limit:g}) away from the engine's own log-probabilities: another model or "
            f"revision is served than {run.target}, or the engine's class of it computes its logits otherwise"
        )
    run.line(f"log-probabilities from the engine's last state are {away:.1e} (mean) away from its own")
    return found


def holds(run: Run) -> bool:
    """Whether this process's device has room for the target beside what is there."""
    files = [*Path(run.target).glob("*.safetensors")]
    size = sum(file.stat().st_size for file in files)
    if run.device.type == "cuda":
        return size < 0.9 * torch.cuda.mem_get_info(run.device)[0]
    return 2 * size < 0.5 * psutil.virtual_memory().available  # files may hold half as many bytes as float32 takes


@torch.no_grad()
def differences(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], states: Sequence[Tensor], layers: Sequence[int]
) -> list[Difference]:
    """The largest relative difference of each layer's states ``[tokens, layers, width]`` from transformers' own."""
    before_norm = list[Tensor]()
    hook = final_norm(model).register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
    furthest = {layer: Difference(layer, 0.0, 0, 0) for layer in layers}
    try:
        for number, (ids, given) in enumerate(zip(texts, states)):
            out = model.base_model(
                input_ids=torch.tensor([ids], device=model.device), use_cache=False, output_hidden_states=True
            )
            wanted = [*out.hidden_states[:-1], before_norm.pop()]
            for place, layer in enumerate(layers):
                ours = wanted[layer][0].float().cpu()
                away = (given[:, place].float() - ours).norm(dim=-1) / ours.norm(dim=-1).clamp_min(1e-6)
                position = int(away.argmax())
                if float(away[position]) > furthest[layer].largest:
                    furthest[layer] = Difference(layer, float(away[position]), number, position)
    finally:
        hook.remove()
    return list(furthest.values())


def refuse_differences(found: Sequence[Difference], depth: int, limit: float, target: str) -> None:
    """Refuse states that are not the target's.

    Raises:
        UserError: With the first layer that differs, where, and the causes that are known.
    """
    wrong = [each for each in found if each.largest > limit]
    if not wrong:
        return
    first, alone = wrong[0], len(wrong) == 1
    if first.layer == 0:
        cause = "the embeddings differ: another model or revision is served, or they are scaled in one of the two"
    elif first.layer == depth and alone:
        cause = "the last state differs alone: the engine gives it after the final norm, or from another place"
    elif first is found[0]:
        cause = "all layers differ: another model or revision is served, or other layers are given away (one further)"
    else:
        cause = (
            "the layers before it are right: the engine's class of this model leaves a part out there (a residual, as "
            "Gemma 3 in SGLang, sglang#39286; deepstack inputs, SpecForge#431), or its attention computes otherwise"
        )
    raise UserError(
        f"the engine's states of {target} differ from transformers' at layer {first.layer} by {first.largest:.2g} "
        f"(relative, at position {first.position} of text {first.text}; expected less than {limit:g}). {cause}. Try "
        "teacher.engine.arguments [--model-impl=transformers] or another version, or set teacher.signal to hidden"
    )


def check_command(run: Run) -> None:
    """``python -m distill check-engine``: print the command of a server, then compare every layer."""
    from distill.stages import run_stages

    if run.settings.teacher.signal != "vllm":
        raise UserError(f"teacher.signal is {run.settings.teacher.signal}, and check-engine is about vllm: set it so")
    run_stages(run, ("target",), check=False)
    urls = run.settings.teacher.engine.urls
    run.console.print(f"a server for these settings, for teacher.engine.urls:\n{serve_arguments(run)}", soft_wrap=True)
    config = run.target_config
    planes, size = len(run.engine_layers), DTYPES[run.settings.target.dtype].itemsize
    most = bytes_in_flight(run.settings.teacher.engine, run.settings.data.max_length, planes, config.hidden_size, size)
    run.console.print(f"its states take at most {most / 1e6:.1f} MB in the folder at a time", soft_wrap=True)
    if not urls:
        run.captured_layers = list(range(config.num_hidden_layers))  # to name the first one that differs
    try:
        check_engine(run)
        if run.states.engine.log is None and not urls:  # a run's engine is there already
            check_states(run, run.states)
    finally:
        run.close()
    run.console.print("the engine gives the target's states", highlight=False)

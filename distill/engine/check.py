"""Whether a serving engine says of the target what its files say: on a few texts, by layer and position."""

from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.draft import Ids
from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from distill.engine.servers import answer_ids
from distill.engine.states import StateFiles
from distill.networks.layers import entering, final_norm
from distill.networks.lm_head import LMHead

SAMPLED = 24  # tokens that are sampled after each prompt
CLOSE = {"float32": 1e-3}  # largest relative difference of states, by number format; of the others:
ROUNDED = 0.06


@torch.no_grad()
def check_states(
    files: StateFiles,
    parts: PreTrainedModel,
    texts: Sequence[Ids],
    dtype: str,
    open_target: Callable[[], PreTrainedModel] | None,
    say: Callable[[str], None],
) -> None:
    """Compare an engine with transformers, and with its own log-probabilities.

    A token is written after each of the texts. ``parts`` has the final norm and the output head; ``open_target`` opens
    the whole target, unless memory does not hold it. ``say`` is told what was found.

    Raises:
        UserError: They differ; with the first layer that does, and the known causes.
    """
    answers = [files.ask(number, ids, prompt_logprobs=0) for number, ids in enumerate(texts)]
    limit, name = CLOSE.get(dtype, ROUNDED), str(parts.config.name_or_path)
    if quantised := files.protocol.quantization(answers[0][0]):
        say(f"the engine computes with {quantised} weights, and the draft learns what the engine says")
    if open_target is None:
        say("this process has no memory for the target, so that its states are not compared with transformers'")
    else:
        found = differences(open_target(), texts, [states for _, states in answers], files.layers)
        shown = ", ".join(f"{layer}: {away:.1e}" for layer, away in found.items())
        say(f"states of {len(texts)} texts beside transformers', largest relative difference by layer: {shown}")
        if not quantised:
            refuse_differences(found, limit, name)
    away = 0.0
    for ids, (answer, states) in zip(texts, answers):
        ours = last_logits(parts, states[:-1]).log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        theirs = [row[str(i)]["logprob"] for row, i in zip(answer["prompt_logprobs"][1:], ids[1:])]
        away = max(away, float((ours - torch.tensor(theirs)).abs().mean()))
    if not away <= limit:
        raise UserError(
            f"the last state that the engine gives, through the target's own norm and output head, is {away:.3f} "
            f"(mean, expected less than {limit:g}) away from the engine's own log-probabilities: another model or "
            f"revision is served than {name}, or the engine's class of it computes its logits otherwise"
        )
    say(f"log-probabilities from the engine's last state are {away:.1e} (mean) away from its own")


def last_logits(parts: PreTrainedModel, states: Tensor) -> Tensor:
    """The logits of states ``[tokens, layers, width]``, of which the last layer's is read before the final norm."""
    head = LMHead(parts)
    return head(final_norm(parts)(states[:, -1].to(head.linear.weight))).float()


@torch.no_grad()
def check_samples(
    files: StateFiles,
    parts: PreTrainedModel,
    prompts: Sequence[Ids],
    warp: LogitsWarper,
    say: Callable[[str], None],
) -> None:
    """Compare what an engine writes with the distribution that its states give, by the mean log-probability.

    ``warp`` has temperature and top_p of the answers; the others are as of `check_states`.

    Raises:
        UserError: The answers are no samples of the target.
    """
    how = {"max_tokens": SAMPLED, "temperature": warp.temperature, "top_p": warp.top_p}
    away, variance, count = 0.0, 0.0, 0
    for number, ids in enumerate(prompts):
        answer, states = files.ask(number, ids, seed=number, **how)
        new, p = answer_ids(answer), warp(last_logits(parts, states[len(ids) - 1 :]).double())
        log_p = p.clamp_min(1e-13).log()
        mean = (p * log_p).sum(-1)
        away += float((log_p.gather(1, torch.tensor(new)[:, None])[:, 0] - mean).sum())
        variance += float(((p * log_p.square()).sum(-1) - mean.square()).sum())
        count += len(new)
    if abs(away) > 6 * variance**0.5 + 0.05 * count:
        raise UserError(
            f"the engine's answers at temperature {warp.temperature:g} and top_p {warp.top_p:g} are no samples of the "
            f"target: their log-probabilities are {away / count:+.2f} a token from what is expected. Start it with "
            "--generation-config vllm, or another version of it"
        )
    say(f"log-probabilities of {count} sampled tokens are {away / count:+.3f} a token from what is expected")


def holds(folder: Path, device: torch.device) -> bool:
    """Whether a device has room for the model in a folder beside what is there."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if device.type == "cuda":
        return size < 0.9 * torch.cuda.mem_get_info(device)[0]
    return 2 * size < 0.5 * psutil.virtual_memory().available  # files may hold half as many bytes as float32 takes


@torch.no_grad()
def differences(
    model: PreTrainedModel, texts: Sequence[Ids], states: Sequence[Tensor], layers: Sequence[int]
) -> dict[int, float]:
    """The largest ‖difference‖ / ‖state‖ of each layer's states ``[tokens, layers, width]`` from transformers' own."""
    furthest = dict.fromkeys(layers, 0.0)
    for ids, given in zip(texts, states):
        with entering(model, layers) as wanted:
            model.base_model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
        for place, layer in enumerate(layers):
            ours = wanted[layer][0].float().cpu()
            away = (given[:, place].float() - ours).norm(dim=-1) / ours.norm(dim=-1).clamp_min(1e-6)
            furthest[layer] = max(furthest[layer], float(away.max()))
    return furthest


def refuse_differences(found: dict[int, float], limit: float, target: str) -> None:
    """Refuse states that are not the target's.

    Raises:
        UserError: With the first layer that differs, and the causes that are known.
    """
    wrong = [layer for layer, away in found.items() if away > limit]
    if not wrong:
        return
    if wrong == [max(found)]:
        cause = "the last state differs alone: the engine gives it after the final norm, or from another place"
    elif len(wrong) == len(found):
        cause = (
            "all layers differ: another model or revision is served, its embeddings are scaled in one of the two, or "
            "other layers are given away (one further)"
        )
    else:
        cause = (
            "the layers before it are right: the engine's class of this model leaves a part out there (a residual, as "
            "Gemma 3 in SGLang, sglang#39286; deepstack inputs, SpecForge#431), or its attention computes otherwise"
        )
    raise UserError(
        f"the engine's states of {target} differ from transformers' at layer {wrong[0]} by {found[wrong[0]]:.2g} "
        f"(relative; expected less than {limit:g}). {cause}. Try teacher.engine.arguments [--model-impl=transformers] "
        "or another version, or set teacher.signal to hidden"
    )

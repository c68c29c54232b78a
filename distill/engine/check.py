"""Whether a serving engine says of the target what its files say: on a few texts, by layer and position."""

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from statistics import NormalDist

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.draft import Ids
from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from decode.models.api import free_memory
from decode.models.sources import weight_files
from distill.engine.states import StateFiles
from distill.networks.layers import entering, final_norm
from distill.networks.lm_head import LMHead
from distill.networks.models import rows_at_once

FIRST = 64  # answers that are looked at before any is kept
EVERY = 8  # of so many tokens of later answers one is looked at
# standard errors, log-probability a token, and of all tokens, and greedy tokens that are others: see `AnswerCheck`
ERRORS, SLACK, FEW, MISSES = 4.5, 0.015, 25.0, 8
TOP_K = 20  # the cut that many models' own settings have, and a server may apply
TIE = 2**-6  # of the largest logit: logits as close as this are one number in 16 bits
LEAST = -100.0  # log-probability of what a model excludes
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
    answers = [files.ask(ids, tries=2, prompt_logprobs=0) for ids in texts]
    limit, name = CLOSE.get(dtype, ROUNDED), str(parts.config.name_or_path)
    if quantised := answers[0][0]["kv_transfer_params"].get("quantization"):
        say(f"the engine computes with {quantised} weights, and the draft learns what the engine says")
    if open_target is None:
        say("this process has no memory for the target, so that its states are not compared with transformers'")
    else:
        found = differences(open_target(), texts, [states for _, states in answers], files.layers)
        shown = ", ".join(f"{layer}: {away:.1e}" for layer, away in found.items())
        say(f"states of {len(texts)} texts beside transformers', largest relative difference by layer: {shown}")
        if not quantised:
            refuse_differences(found, limit, name)
    head, norm, away = LMHead(parts), final_norm(parts), 0.0
    for ids, (answer, states) in zip(texts, answers):
        log_p = head(norm(states[:-1, -1].to(head.linear.weight))).float().log_softmax(-1)
        ours = log_p.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        theirs = [row[str(i)]["logprob"] for row, i in zip(answer["prompt_logprobs"][1:], ids[1:])]
        away = max(away, float((ours - torch.tensor(theirs)).abs().mean()))
    if not away <= limit:
        raise UserError(
            f"the last state that the engine gives, through the target's own norm and output head, is {away:.3f} "
            f"(mean, expected less than {limit:g}) away from the engine's own log-probabilities: another model or "
            f"revision is served than {name}, or the engine's class of it computes its logits otherwise"
        )
    say(f"log-probabilities from the engine's last state are {away:.1e} (mean) away from its own")


class NoSamples(UserError):
    """Answers are no samples of the target; ``kept``: they are on disk, and may have been learned from."""

    kept = False


class AnswerCheck:
    """Whether the answers of servers are samples of the target, by the sum of their log-probabilities.

    Of a token x, f(x) is its log-probability at the answers' temperature, and q is what it is drawn from, which top_p
    cuts. Σ f(x) − E_q[f] has the variance Σ Var_q[f] if servers draw from q. It is refused where it is further from 0
    than `ERRORS` standard errors, `SLACK` a token for the rounding of another number format, and `FEW` together.
    Greedy answers are refused where too few tokens are the target's most probable one. Tokens that end a text count as
    one: servers leave out which of them it was.

    Args:
        warp: Temperature and top_p of the answers.
        ends: Ids that end them.
        quantised: Whether one of the two computes with weights in few bits.
        every: Of so many tokens one is looked at. It is a constant, since a choice that depended on how long an answer
            gets would be biased.
        most: Texts that are looked at; those that come after them have been looked at before.
        kept: Whether they are on disk already.
        say: Is told of the first outcome.
    """

    def __init__(
        self, warp: LogitsWarper, ends: Sequence[int], *, quantised: bool, every: int, most: float, kept: bool,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.warp, self.every, self.most, self.kept, self.say = warp, every, most, kept, say
        self.ends = torch.tensor(list(ends), dtype=torch.long)
        self.slack = SLACK * (5 if quantised else 1)
        self.sums: Tensor | None = None  # on the device: texts would wait for it otherwise
        self.texts, self.tokens, self.told = 0, 0, False

    @torch.no_grad()
    def add(self, head: LMHead, hidden: Tensor, tokens: Tensor, texts: int) -> None:
        """Look at answers: the target's output head, its last hidden states before each token and all tokens.

        ``hidden`` is ``[tokens, width]``, ``tokens`` ``[tokens]``, of so many answers.
        """
        if self.texts >= self.most:
            return
        weight, hidden, tokens = head.linear.weight, hidden[:: self.every], tokens[:: self.every]
        rows, self.ends = rows_at_once(head.vocab, weight.device), self.ends.to(weight.device)
        self.texts, self.tokens = self.texts + texts, self.tokens + len(tokens)
        for states, drawn in zip(hidden.split(rows), tokens.split(rows)):
            logits = head(states.to(weight.device, torch.promote_types(states.dtype, weight.dtype))).float()
            sums = self.measured(logits, drawn.to(weight.device)[:, None])
            self.sums = sums if self.sums is None else self.sums + sums

    def measured(self, logits: Tensor, drawn: Tensor) -> Tensor:
        """Sums over rows of logits ``[rows, vocab]`` and the ids that followed them ``[rows, 1]``.

        Greedy: rows whose id is the most probable one. Otherwise: f(x) − E_q[f], Var_q[f], and mean and variance of the
        former if servers cut the distribution to its `TOP_K` most probable ids.
        """
        if self.warp.greedy:
            logits[:, self.ends] = logits[:, self.ends].amax(-1, keepdim=True)
            top = logits.amax(-1)
            return (logits.gather(1, drawn)[:, 0] >= top - TIE * top.abs()).double().sum()[None]
        log_p = (logits / self.warp.temperature).log_softmax(-1).clamp_min(LEAST)
        log_p[:, self.ends] = log_p[:, self.ends].logsumexp(-1, keepdim=True)
        q = self.warp(logits)
        mean, variance = _moments(q, log_p)
        best, ids = q.topk(min(TOP_K, q.shape[1]))
        cut_mean, cut_variance = _moments(best / best.sum(-1, keepdim=True), log_p.gather(1, ids))
        away = log_p.gather(1, drawn)[:, 0] - mean
        return torch.stack([away, variance, cut_mean - mean, cut_variance]).double().sum(1)

    def judge(self, least: int = 1) -> None:
        """Refuse answers that do not fit, once there are as many as ``least`` or all; waits for the device.

        Raises:
            NoSamples: They are no samples of the target, with how far they are away.
        """
        if self.sums is None or self.texts < min(least, self.most):
            return
        count, (away, *rest) = self.tokens, self.sums.tolist()
        if not isfinite(away):
            return  # which is refused where such states are kept or trained on
        if self.warp.greedy:
            share, right = 1 - 2 * self.slack, away / count
            fits = right >= share - ERRORS * (share * (1 - share) / count) ** 0.5 - MISSES / count
            found = f"{right:.1%} of {count} tokens are the target's most probable ones"
            expected = f"at least {share:.0%}"
        else:
            variance, cut, cut_variance = rest
            limit = ERRORS * variance**0.5 + self.slack * count + FEW
            fits = abs(away) <= limit
            found = f"the log-probabilities of {count} tokens are {away / count:+.3f} a token from what is expected"
            power = NormalDist().cdf((abs(cut) - limit) / max(cut_variance, 1e-9) ** 0.5)
            expected = f"at most {limit / count:.3f}; servers with top_k {TOP_K} would be found with {power:.1%}"
        if not fits:
            error = NoSamples(
                f"what the servers answered (temperature {self.warp.temperature:g}, top_p {self.warp.top_p:g}) are no "
                f"samples of the target: of {self.texts} answers {found} ({expected}). Serve the target's own weights, "
                "without settings of sampling that the server has itself (vLLM with --generation-config vllm)"
                f"{'; the answers, and what learned from them, are put aside and not used' if self.kept else ''}"
            )
            error.kept = self.kept
            raise error
        if not self.told:
            self.say(f"of the first {self.texts} answers {found} ({expected})")
        self.told = True


def _moments(p: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance ``[rows]`` of values under distributions ``[rows, ids]``."""
    mean = (p * values).sum(-1)
    return mean, ((p * values.square()).sum(-1) - mean.square()).clamp_min(0)


def holds(folder: Path, device: torch.device) -> bool:
    """Whether a device has room for the model in a folder beside what is there."""
    share = 0.9 if device.type == "cuda" else 0.25  # there files may hold half as many bytes as float32 takes
    return sum(file.stat().st_size for file in weight_files(folder)) < share * free_memory(device)


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

"""Acceptance probes inside a block head: its confidence head beside linear probes on its states, and its stop rule.

Both predict, for each slot of a block at any position of the target's texts, whether the token drafted there is
accepted, given the text's tokens before it. The text's token t ~ p there is one that speculative decoding would have
written. It was drafted with probability min(1, q(t)/p(t)) (greedy: 0 or 1); else the draft came from max(0, q - p).
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from decode.core.verify import pick
from decode.drafters.probe import confidence_features
from decode.errors import UserError
from decode.files import Fields
from decode.measure.benchmark import BenchEntry
from decode.measure.statistics import plain
from decode.models.heads.block import BlockHead
from decode.models.heads.eagle import finish_of, output_head
from decode.models.heads.files import load_head
from decode.options import MethodOptions
from decode.progress import current, working
from distill.drafts.block import calibration_error
from distill.networks.lm_head import LMHead
from distill.results.evaluate import Text
from distill.run import Run
from probes.exit_search import bench, open_session, test_prompts
from probes.features import Features, read_here
from probes.fit import judged, scores_of, train_probes
from probes.labels import Mode
from probes.settings import ProbeSettings

Seen = tuple[Features, Tensor]
"""Features whose exits are the slots 1, 2, …; and the confidence head's calibrated log-odds, ``[slots, n]``."""


@torch.no_grad()
def collect_blocks(target: PreTrainedModel, head: BlockHead, texts: Sequence[Text], mode: Mode, seed: int = 0) -> Seen:
    """Read blocks at every response position of the target's texts whose block lies within its text."""
    table, output, finish = target.get_input_embeddings().weight, LMHead(target), finish_of(target)
    weight, kept, n = head.outputs(output_head(target, head.draft_ids(), block=True)), head.draft_ids(), head.drafts
    scale = torch.tensor((head.temperatures if mode.warp.greedy else head.sampled_temperatures) or [1.0] * n)
    generator, parts = torch.Generator().manual_seed(seed), list[tuple[Tensor, ...]]()
    for number, text in enumerate(texts):
        ids, start = text
        if len(ids) - start < n:
            continue
        tokens = torch.tensor([ids], device=target.device)
        last, states = read_here(target, [ids], head.captured_layers)
        features = torch.cat([states[layer] for layer in head.captured_layers], -1)
        anchors = torch.arange(start - 1, len(ids) - n, device=tokens.device)[None]
        embeds = functional.embedding(head.tokens(tokens[0, anchors[0]], n), table)[None]
        slots = head(embeds, features, anchors)
        at = anchors[0, :, None] + torch.arange(n, device=tokens.device)
        drafted, odds = head.logits(slots, tokens[0, at], weight, finish)
        drafted, hidden = drafted.transpose(0, 1).flatten(0, 1), slots
        read = at.T.flatten()  # slot by slot
        places = [(text, place) for place in read.tolist()]
        p = mode.probabilities(output(last[0, read]), places)
        if kept is not None:
            drafted = drafted.new_full(p.shape, -torch.inf).index_copy(1, kept, drafted)
        q, written = mode.probabilities(drafted, places), tokens[0, read + 1].cpu()
        chance = pick(q, written)
        label = chance / torch.maximum(chance, pick(p, written)).clamp_min(1e-30)
        hit = torch.rand(len(label), generator=generator) < label
        other = torch.multinomial(torch.maximum(q - p, 1e-9 * q), 1, generator=generator)[:, 0]  # no row is empty
        extra = confidence_features(drafted.float().cpu(), torch.where(hit, written, other))
        inputs = torch.cat([hidden.transpose(0, 1).flatten(0, 1).float().cpu(), extra], -1)
        confidences = torch.zeros_like(label) if odds is None else (odds.float().cpu() / scale).T.flatten()
        seen = (values.unflatten(0, (n, -1)) for values in (inputs, label, hit.float(), confidences))
        parts.append((*seen, torch.full(at.shape[:1], number)))
        current().advance(1)
    if not parts:
        raise UserError(
            f"every answer is shorter than the {n} tokens that a block drafts: raise probes.max_new_tokens, or give "
            "prompts with longer answers"
        )
    inputs, labels, hits, confidences = (torch.cat([part[i] for part in parts], 1) for i in range(4))
    return Features([*range(1, n + 1)], inputs, labels, hits, torch.cat([part[4] for part in parts])), confidences


def judge(head: BlockHead, seen: dict[str, Seen], label: str, l2: Sequence[float]) -> tuple[list[Fields], list[Fields]]:
    """Train linear probes for every slot, and compare all estimates on the test texts.

    Returns:
        A row for each slot, of blocks that were right before it; and a row for each estimate of the product up to each
        slot, the probability that the block is right that far.
    """
    (train, _), (validation, _), (test, odds) = (seen[split] for split in ("train", "validation", "test"))
    scores = scores_of(train_probes(train, validation, label, l2), validation, test)
    if head.confidence_head is not None:
        scores = {"confidence_head": odds.sigmoid()} | scores
    right = test.outcome.cumprod(0)  # the block up to each slot
    reached = torch.cat([torch.ones_like(right[:1]), right[:-1]]).bool()
    rows, products = list[Fields](), list[Fields]()
    for i, (slot, here) in enumerate(zip(test.exits, reached)):
        metrics = judged({name: score[i][here] for name, score in scores.items()}, test.outcome[i][here])
        rows.append({"slot": slot, "tokens": int(here.sum())} | metrics)
    for name, score in scores.items():
        product = score.cumprod(0)
        worst = max(calibration_error(p, y) for p, y in zip(product, right))
        metrics = judged({"probe": product.flatten()}, right.flatten()) | {"worst_slot_ece": worst}
        products.append({"estimate": name.replace("_", " ")} | metrics)
    return rows, products


def stop_rules(run: Run, target: PreTrainedModel, head: BlockHead, mode: Mode, options: ProbeSettings) -> list[Fields]:
    """Time constant block lengths, and the stop rules of the confidence head and of the token probability.

    Sampled modes draw the drafted tokens from q, whose acceptance is what the confidence head estimates.
    """
    new, drawn = partial(BenchEntry, draft="head", temperature=mode.warp.temperature), not mode.warp.greedy
    lengths = sorted({max(1, head.drafts * part // 4) for part in (1, 2, 3, 4)})
    constant = [MethodOptions(draft_length=k, sample_block=drawn) for k in lengths]
    entries = [new("block", options=given, name=f"block of {given.draft_length}") for given in constant]
    entries.append(new("cost-optimal", options=MethodOptions(sample_block=drawn), name="token probability"))
    if head.confidence_head is not None:
        entries.append(new("block-confidence", options=MethodOptions(sample_block=drawn), name="confidence head"))
    session = open_session(run, target, mode, options, {"head": head})
    return bench(session, test_prompts(run, options), entries)[0]


def block_experiment(run: Run, target: PreTrainedModel, modes: list[Mode], options: ProbeSettings) -> Fields:
    """Judge the run's best head in every mode, whose texts are written already; return the parts of the report."""
    chosen, seed = run.chosen(run.settings.export.choose), run.settings.seed
    head = load_head(run.path(chosen), target)
    assert isinstance(head, BlockHead)
    added: Fields = {"block_slots": [], "block_products": [], "block_stop_rules": []}
    for mode in modes:
        with working(run.console, f"blocks of {chosen} read, {mode.name}", bars=False):
            seen = {split: collect_blocks(target, head, texts, mode, seed) for split, texts in mode.texts.items()}
            rows, products = judge(head, seen, mode.label, options.l2)
        added["block_slots"] += [row | {"mode": mode.name} for row in rows]
        added["block_products"] += [row | {"mode": mode.name} for row in products]
        with working(run.console, f"stop rules, {mode.name}", bars=False):
            added["block_stop_rules"] += stop_rules(run, target, head, mode, options)
    return dict(plain(added))

"""Acceptance probes inside a block head: its confidence head beside linear probes on its states, and its stop rule.

Both predict, for each slot of a block, whether the target accepts the head's likeliest token once the block was right
so far. They are asked on the same tokens: those of blocks at every response position of texts that the target wrote,
with the text's own tokens before each slot, as they are where the block was right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.bench.benchmark import BenchEntry, Benchmark
from decode.bench.session import BenchOptions, Session
from decode.bench.statistics import plain
from decode.bench.suites import Suite
from decode.drafters.early_exit import Text
from decode.drafters.probe import confidence_features
from decode.method_options import MethodOptions
from decode.models.block_head import BlockHead
from decode.models.head_files import load_head
from decode.models.heads import output_head
from decode.progress import current, working
from distill.data.context import StageContext
from distill.data.corpus import test_suite
from distill.teacher.blocks import calibration_error
from probes.features import Features
from probes.fit import evaluate, logits, train_probes
from probes.labels import Mode
from probes.settings import ProbeSettings

SUFFIXES = {
    "confidence head": "_confidence_head",
    "probe": "",
    "confidence probe": "_confidence_probe",
    "token probability": "_token_probability",
}
"""Estimates of a token's acceptance, and the suffixes of their columns."""


@torch.no_grad()
def collect_blocks(target: PreTrainedModel, head: BlockHead, texts: Sequence[Text]) -> tuple[Features, Tensor]:
    """Read blocks at every response position whose whole block lies within its text.

    Returns:
        Features whose exits are the slots 1, 2, …, with the head's states as inputs; and the confidence head's
        log-odds, divided by the head's temperatures, ``[slots, n]``.
    """
    table, parts = target.get_input_embeddings().weight, list[tuple[Tensor, ...]]()
    weight, kept, n = head.outputs(output_head(target, head.draft_ids())), head.draft_ids(), head.drafts
    scale = torch.tensor(head.temperatures or [1.0] * n)
    for number, (ids, start) in enumerate(texts):
        if len(ids) - start < n:
            continue
        tokens = torch.tensor([ids], device=target.device)
        states = target.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in head.captured_layers], -1)
        anchors = torch.arange(start - 1, len(ids) - n, device=tokens.device)[None]
        at = anchors[0, :, None] + torch.arange(n, device=tokens.device)
        embeds = torch.nn.functional.embedding(head.tokens(tokens[0, anchors[0]], n), table)[None]
        hidden = head(embeds, features, anchors)[0]
        rows, odds = head.conditions(hidden, tokens[0, at])
        found = (rows @ weight.T).float()
        best = found.argmax(-1)
        drafted = best if kept is None else kept[best]
        hits = (drafted == tokens[0, at + 1]).float()
        extra = confidence_features(found.flatten(0, 1), best.flatten()).view(*best.shape, -1)
        inputs = torch.cat([hidden.float(), extra], -1).transpose(0, 1)
        own = torch.zeros_like(hits) if odds is None else odds / scale.to(odds)
        parts.append((inputs.cpu(), hits.T.cpu(), own.T.float().cpu(), torch.full((len(hits),), number)))
        current().advance(1)
    inputs, hits, own = (torch.cat([part[i] for part in parts], 1) for i in range(3))
    return Features(list(range(1, n + 1)), inputs, hits, hits, torch.cat([part[3] for part in parts])), own


def judge(
    head: BlockHead, seen: dict[str, tuple[Features, Tensor]], options: ProbeSettings
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train linear probes for every slot, and compare all estimates on the test texts.

    Returns:
        A row for each slot, whose tokens are those of blocks that were right before it; and a row for each estimate of
        the product up to each slot, the probability that the block is right that far.
    """
    (train, _), (validation, _), (test, odds) = (seen[split] for split in ("train", "validation", "test"))
    made = {(probe.layer, probe.kind): probe for probe in train_probes(train, validation, "match", options)}
    reached = torch.cat([torch.ones_like(test.outcome[:1]), test.outcome[:-1]]).cumprod(0).bool()
    whole = test.outcome.cumprod(0)
    rows: list[dict[str, Any]] = []
    estimates: dict[str, list[Tensor]] = {name: [] for name in SUFFIXES}
    for i, slot in enumerate(test.exits):
        scores = {"probe": logits(made[slot, "probe"], test).sigmoid()}
        scores["confidence probe"] = logits(made[slot, "confidence-probe"], test).sigmoid()
        scores["token probability"] = test.token_probability[i]
        if head.confidence_head is not None:
            scores["confidence head"] = odds[i].sigmoid()
        row: dict[str, Any] = {"slot": slot, "tokens": int(reached[i].sum())}
        for name, score in scores.items():
            found = evaluate(score[reached[i]], test.outcome[i][reached[i]])
            row |= {"base_rate": found["base_rate"]}
            row |= {metric + SUFFIXES[name]: found[metric] for metric in ("auroc", "brier", "ece")}
            estimates[name].append(score)
        rows.append(row)
    products = []
    for name, scores_ in estimates.items():
        if scores_:
            product = torch.stack(scores_).cumprod(0)
            found = evaluate(product.flatten(), whole.flatten())
            errors = [calibration_error(p, y) for p, y in zip(product, whole)]
            products.append({"estimate": name, "auroc": found["auroc"], "brier": found["brier"], "ece": found["ece"],
                             "worst_slot_ece": max(errors)})  # fmt: skip
    return rows, products


def run_stop_rules(
    target: PreTrainedModel,
    head: BlockHead,
    tokenizer: Any,
    suite: Suite,
    mode: Mode,
    options: ProbeSettings,
    seed: int,
) -> list[dict[str, Any]]:
    """Time constant block lengths, the confidence head's stop rule and the token probability's, on the same prompts."""
    how = BenchOptions(
        options.max_new_tokens, repeats=options.repeats, seed=seed, threads=options.threads, warp=mode.warp, samples=0
    )
    session = Session(target, {"head": head}, tokenizer, how)
    lengths = sorted({max(1, head.drafts * part // 4) for part in (1, 2, 3, 4)})
    given: dict[str, Any] = {"temperature": mode.warp.temperature}
    entries = [
        BenchEntry("block", "head", MethodOptions(draft_length=k), name=f"block of {k}", **given) for k in lengths
    ]
    entries.append(BenchEntry("cost-optimal", "head", name="token probability", **given))
    if head.confidence_head is not None:
        entries.append(BenchEntry("block-confidence", "head", name="confidence head", **given))
    rows: list[dict[str, Any]] = Benchmark(session).run([suite], entries)
    return rows


def block_experiment(context: StageContext, options: ProbeSettings, modes: Sequence[Mode]) -> dict[str, Any]:
    """Judge the exported head of a run; the texts of the modes are written already.

    Returns:
        The parts of the report: ``block_slots``, ``block_products`` and ``block_stop_rules``.
    """
    run, settings = context.run, context.settings
    target, chosen = context.load_target(), run.chosen(settings.export.choose)
    head = load_head(run.path(chosen), target)
    assert isinstance(head, BlockHead)
    greedy = next((mode for mode in modes if mode.warp.greedy), modes[0])
    with working(context.console, f"blocks of {chosen} read", bars=False):
        seen = {split: collect_blocks(target, head, texts) for split, texts in greedy.texts.items()}
    rows, products = judge(head, seen, options)
    suite, table = test_suite(context.corpus, settings.data.source, options.bench_prompts), list[dict[str, Any]]()
    for mode in modes:
        with working(context.console, f"stop rules, {mode.name}", bars=False):
            table += run_stop_rules(target, head, context.corpus.tokenizer, suite, mode, options, settings.seed)
    found: dict[str, Any] = plain({"block_slots": rows, "block_products": products, "block_stop_rules": table})
    return found


SLOT_COLUMNS = (
    "slot", "tokens", "base_rate", *(metric + end for metric in ("auroc", "brier", "ece") for end in SUFFIXES.values())
)  # fmt: skip
PRODUCT_COLUMNS = ("estimate", "auroc", "brier", "ece", "worst_slot_ece")
STOP_COLUMNS = ("name", "temperature", "speedup", "accepted_length", "draft_length", "alpha", "predicted_speedup")


def block_tables(added: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[dict[str, Any]]]]:
    """Titles, columns and rows of what `block_experiment` found."""
    return [
        ("Each slot of blocks that were right before it", SLOT_COLUMNS, added["block_slots"]),
        ("The product up to a slot: whether the block is right that far", PRODUCT_COLUMNS, added["block_products"]),
        ("How much of a block is verified", STOP_COLUMNS, added["block_stop_rules"]),
    ]

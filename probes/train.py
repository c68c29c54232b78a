"""Training and judging the probes of every exit, label and kind, and of a separate draft model."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from decode.drafters.acceptance_probe import AcceptanceProbe, save_probes
from decode.models.open import check_tokenizers, load_model, load_tokenizer
from distill.tracking.logger import for_stage
from probes.context import Lab, Mode
from probes.features import Features, collect
from probes.metrics import auroc_gain, calibrate, judge_exits, probability, scikit_check
from probes.newton import Training, train_probes


def learn(lab: Lab, modes: list[Mode]) -> tuple[list[AcceptanceProbe], list[dict[str, Any]], dict[str, Any]]:
    """Probes of all labels and exits, their judgement, and scikit-learn's beside ours."""
    settings = lab.settings.probes
    training = Training(tuple(settings.l2), settings.max_epochs, settings.patience, settings.class_balance)
    probes: list[AcceptanceProbe] = []
    rows: list[dict[str, Any]] = []
    for mode in modes:
        train, held, test = (mode.features[split] for split in ("train", "validation", "test"))
        for label in mode.labels:
            with lab.step("training", f"probes, {mode.name}, label {label}"):
                made = train_probes(train, held, label, training, for_stage(lab.logger, f"probes-{label}"))
            for probe in made:
                calibrate(probe, held)
            judged = judge_exits(made, held, test, label, settings.bins)
            for row in judged:
                row |= {"mode": mode.name, "model": "target"} | _gains(row, made, test)
            probes += made
            rows += judged
    return probes, rows, _check(lab, modes[0], training) if settings.check else {}


def _check(lab: Lab, mode: Mode, training: Training) -> dict[str, Any]:
    """The same fits by scikit-learn, one by one, and by us, at once: do they agree, and what do they cost?"""
    train, held, test = (mode.features[split] for split in ("train", "validation", "test"))
    strength = training.l2[len(training.l2) // 2]
    with lab.step("scikit-learn", "the same fits by scikit-learn, one by one"):
        aurocs, spent, fits = scikit_check(train, test, mode.label, training.l2, strength)
    began = time.perf_counter()
    train_probes(train, held, mode.label, training)
    mine = time.perf_counter() - began
    ours = train_probes(train, held, mode.label, replace(training, l2=(strength,), early_stopping=False))
    judged = judge_exits(ours, held, test, mode.label, lab.settings.probes.bins)
    return {
        "auroc": aurocs,
        "auroc_ours": [row["auroc"] for row in judged],
        "seconds": spent,
        "seconds_ours": mine,
        "fits": fits,
    }


def _gains(row: dict[str, Any], probes: list[AcceptanceProbe], test: Features) -> dict[str, Any]:
    """Intervals of what the probes gain in AUROC over the token probability."""
    at = test.exits.index(row["layer"])
    outcome = test.outcome[at] if row["label"] == "accept" else test.labels[row["label"]][at]
    return {
        f"auroc_gain_ci95_{p.kind.replace('-', '_')}": auroc_gain(
            probability(p, test), test.token_probability[at], outcome, test.text
        )
        for p in probes
        if p.layer == row["layer"]
    }


def learn_for_draft(lab: Lab, modes: list[Mode], folder: Path) -> list[dict[str, Any]]:
    """The same for a separate draft model's last hidden state."""
    settings = lab.settings.probes
    if settings.draft is None:
        return []
    trust = lab.settings.target.trust_remote_code
    check_tokenizers(lab.bench.corpus.tokenizer, load_tokenizer(settings.draft, trust_remote_code=trust))
    draft = load_model(settings.draft, device=lab.model.device, dtype="float32", trust_remote_code=trust)
    training = Training(tuple(settings.l2), settings.max_epochs, settings.patience, settings.class_balance)
    probes: list[AcceptanceProbe] = []
    rows: list[dict[str, Any]] = []
    for mode in modes:
        with lab.step("draft", f"probes of the draft model, {mode.name}"):
            found = {
                split: collect(
                    lab.model,
                    texts,
                    mode.warp,
                    draft=draft,
                    positions=settings.positions,
                    batch_size=settings.batch_size,
                    seed=lab.settings.seed + i,
                )
                for i, (split, texts) in enumerate(mode.texts.items())
            }
            made = train_probes(found["train"], found["validation"], mode.label, training)
        for probe in made:
            calibrate(probe, found["validation"])
        judged = judge_exits(made, found["validation"], found["test"], mode.label, settings.bins)
        rows += [row | {"mode": mode.name, "model": "draft"} | _gains(row, made, found["test"]) for row in judged]
        probes += made
    save_probes(folder / "draft", draft, probes)
    return rows

"""What is known about an exported draft, as `speculation_profile.json` and model card, before and after measuring."""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Template
from transformers import PreTrainedConfig, PreTrainedModel

from decode.engines.check import weight_fingerprints
from decode.files import read_json, write_json, write_text
from decode.measure.machine import doubt
from decode.measure.report import COLUMNS, cell, markdown
from decode.models.heads.eagle import DraftHead, draft_ids
from decode.models.heads.files import unserved
from decode.models.huggingface import mask_of
from distill.kinds.kind import of_model

Report = Mapping[str, Any]  # of a run, or a part of it
Facts = dict[str, Any]
HERE = Path(__file__).parent
PROFILE = "speculation_profile.json"
MEASURED = (
    "offline_alpha", "offline_alpha_likeliest", "alpha", "accepted_length", "accepted_per_drafted", "speedup",
    "speedup_vs_generate",
)  # fmt: skip
"""Rows of the card, by key of the profile."""


def recommended_row(report: Report, draft: str) -> Facts:
    """Returns the row of a draft at its recommended length and the lowest measured temperature; empty without any.

    Page, card and serving commands show this one (see `decode.measure.benchmark.recommend`).
    """
    rows = [row for row in report["decoding"] if row["draft"] == draft and row.get("recommended")]
    return min(rows, key=lambda row: row["temperature"], default={})


def export_profile(report: Report, draft: str) -> Facts:
    """Returns the measurements of one draft in a run's report.

    Returns:
        The numbers of the draft's `recommended_row`; ``best_draft_length`` is absent if decoding was not measured.
    """
    row: Facts = next((row for row in report["drafts"] if row["name"] == draft), {})
    profile = {key: value for key, value in row.items() if key.startswith(("offline_alpha", "acceptance"))}
    profile["trained_with"] = report.get("trained_with")
    if not (best := recommended_row(report, draft)):
        return profile
    machine = {name: fact for name, fact in (report.get("machine") or {}).items() if name != "note"}
    conditions = {"dataset": best.get("suite"), "num_samples": best.get("prompts"), "temperature": best["temperature"]}
    why = doubt(best)
    keys = [key for key in (*MEASURED, "speedup_ci95", "identical_to_target") if not (why and "speedup" in key)]
    return profile | {
        **{key: best[key] for key in keys if key in best},
        "doubt": why,
        "best_draft_length": best["draft_length"],
        "conditions": conditions | {"acceptance_rule": "exact"} | machine,
    }


def describe(
    model: PreTrainedModel | DraftHead, target: PreTrainedConfig, name: str, folder: str, gguf: Sequence[str] = ()
) -> Facts:
    """Returns what the card says of an export beside measurements, as plain data that its profile keeps.

    It warns of each engine that would run the export otherwise than it was trained; the card has no command of these.

    ``name`` is the folder or Hub name of the target, ``folder`` where the export will be.
    """
    config, ids = model.config, draft_ids(model)
    for engine, reason in (reasons := unserved(model)).items():
        warnings.warn(f"{engine} does not run this export as it was trained: {reason}", stacklevel=3)
    facts = {
        "kind": "draft" if mask_of(model) is None else "pard",
        "mask_id": getattr(model, "mask_id", mask_of(model)),
        "target": name,
        "folder": folder,
        "target_type": target.model_type,
        "vocabulary": target.get_text_config().vocab_size,
        "model_type": config.model_type,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "draft_vocabulary": None if ids is None else len(ids),
        "gguf_type": [*gguf, "f32"][0],
        "notes": [],
        "unserved": reasons,
    }
    if not isinstance(model, DraftHead):
        return facts
    kind = of_model(model)
    return facts | {
        "kind": kind.served,
        "longest": model.drafts,
        "captured_layers": list(model.captured_layers),
        "notes": [*kind.notes],
    }


def write_card(folder: Path, facts: Report, length: int, measured: Report | None = None) -> None:
    """Writes speculation_profile.json and README.md, each renamed into place.

    What other commands have added to the profile stays: `serve-check` what was served, `profile` costs by batch size.

    Args:
        folder: Folder that holds the exported files.
        facts: What `describe` returns, with ``trained_vocabulary`` of a draft model and the ``notes`` of this pair.
        length: Number of drafted tokens per round.
        measured: What `export_profile` returns. What is absent is left out.
    """
    measured, before = measured or {}, read_json(folder / PROFILE)
    method = "draft_model" if facts["kind"] in ("draft", "pard") else facts["kind"]
    profile = before | {"method": method, "num_speculative_tokens": length, "measured": measured}
    if trained := measured.get("trained_with"):
        profile["trained_with"] = trained
    weights = before.get("weights") or weight_fingerprints(folder)
    write_json(folder / PROFILE, profile | {"weights": weights, "export": facts})
    template = (HERE / "model_card.md").read_text(encoding="utf-8")
    text = Template(template, trim_blocks=True, lstrip_blocks=True).render(
        **facts, profile=measured, length=length, served=before.get("served") or [], cell=cell, columns=COLUMNS,
        conditions=measured.get("conditions") or {},
        measured=[key for key in MEASURED if measured.get(key) is not None],
        commands=commands(facts["target"], facts["folder"], (used := exported_facts(folder))), beyond=used["beyond"],
        positions=markdown(("position", "validation", "offline", "decoded"), measured.get("acceptance") or []),
    )  # fmt: skip
    write_text(folder / "README.md", re.sub(r"\n{3,}", "\n\n", text).strip() + "\n")


def add_measurements(export_dir: str | Path, report: Report, draft: str) -> None:
    """Adds what was measured of an export to its card, its profile, and its number of drafted tokens.

    Where decoding was not measured, the number of drafted tokens stays.
    """
    folder, measured = Path(export_dir), export_profile(report, draft)
    before = read_json(folder / PROFILE)
    length = max(1, measured.get("best_draft_length") or before["num_speculative_tokens"])
    length = min(length, before["export"].get("longest") or length)
    for path in (folder / "config.json", folder / "generation_config.json"):
        if "num_assistant_tokens" in (fields := read_json(path)):
            write_json(path, fields | {"num_assistant_tokens": length})
    write_card(folder, before["export"], length, measured)


def exported_facts(export_dir: str | Path) -> Facts:
    """Returns what `commands` needs to know about an export; a run's report has it as ``exported``.

    ``beyond`` says where the export is to draft more tokens than were trained.
    """
    profile = read_json(Path(export_dir) / PROFILE)
    facts = {key: profile["export"][key] for key in ("kind", "gguf_type", "unserved")}
    length = profile["num_speculative_tokens"]
    trained = profile["export"].get("trained_length") or length
    beyond = f" (more than the {trained} drafted tokens of its training)" * (length > trained)
    return {"length": length, "beyond": beyond, **facts}


def commands(target: str, draft: str, facts: Report) -> list[tuple[str, str, str]]:
    """Returns (title, language, lines to paste) for each engine that loads an export.

    ``facts`` are the `exported_facts`.
    """
    values = {"target": target, "draft": draft, **facts}
    engines = yaml.safe_load((HERE / "serving_commands.yaml").read_text(encoding="utf-8"))
    return [
        (engine["title"] + facts.get("beyond", ""), engine["language"], Template(engine["lines"]).render(values))
        for engine in engines
        if facts["kind"] in engine["kinds"] and not engine["title"].lower().startswith(tuple(facts["unserved"]))
    ]

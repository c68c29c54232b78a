"""What was measured on an exported draft: `speculation_profile.json` for machines, the model card for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from transformers import PreTrainedModel


def export_profile(report: Mapping[str, Any], draft: str = "adaspec") -> dict[str, Any]:
    """What a run's report says of one draft, as `distill.export.draft.export_draft` wants it.

    Args:
        report: as `distill.report.write.write_report` takes it.
        draft: name of the exported draft in the report.

    Returns:
        The numbers of the draft at its fastest measured greedy length. `best_draft_length` is absent if greedy
        decoding was not measured.
    """
    of_draft: dict[str, Any] = next((d for d in report["drafts"] if d["name"] == draft), {})
    profile = {"draft_name": draft, **{k: of_draft.get(k) for k in ("offline_alpha", "offline_alpha_se")}}
    costs = report.get("profile") or {}
    if costs.get("draft", draft) == draft:
        profile |= {key: costs.get(key) for key in ("cost_ratio", "break_even_alpha")}
    rows = [r for r in report["decoding"] if r["draft"] == draft and r["temperature"] == 0 and r.get("speedup")]
    honest = [row for row in rows if row.get("identical_to_target") is not False] or rows
    if honest:
        best = max(honest, key=lambda row: row["speedup"])
        profile |= {key: best.get(key) for key, _, _ in ROWS if key in best}
        profile |= {key: best.get(key) for key in ("speedup_ci95", "identical_to_target")}
        profile["best_draft_length"] = best["draft_length"]
        profile["acceptance_by_position"] = (report.get("analysis") or {}).get("acceptance_by_position", {}).get(draft)
        profile["conditions"] = {
            "dataset": best.get("suite"),
            "num_samples": best.get("prompts"),
            "temperature": 0.0,
            "acceptance_rule": "exact",
            **(report.get("machine") or {}),
        }
    return profile


def speculation_profile(profile: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The portable measurement file, in the field names that NVIDIA's Model-Optimizer proposes.

    Both conventions of acceptance by position are given with their errors: conditional (position i accepted, given
    that all before it were) and marginal (positions up to i all accepted), over the rounds whose draft neither a
    text's end nor its budget cut, repeats of a deterministic text counted once. Lengths count the target's own token,
    so a round that accepts m drafted tokens has length m + 1; the mean is 1 + Σ of the marginal rates, and the
    histogram counts the same rounds. `synthetic_acceptance_rates` are the marginal rates under the name by which vLLM
    takes them (unconditional, non-increasing).

    Args:
        profile: `acceptance_by_position`, the rows of `decode.core.trace.Trace.acceptance_by_position` of drafts of
            `best_draft_length` tokens; optionally `mean_accept_length_per_request` and `conditions` (data set,
            temperature, prompts, machine, …). Without the rows, or if they belong to another length, the vectors are
            null and `measured` is false.
        length: number of drafted tokens per round.
    """
    rows = list(profile.get("acceptance_by_position") or [])
    usable = bool(rows) and len(rows) == length == profile.get("best_draft_length")
    result: dict[str, Any] = {
        "schema_version": "1.0",
        "producer": "draftsmith",
        "measured": usable,
        "method": "draft_model",
        "num_speculative_tokens": length,
        "verification_method": "longest_prefix",
        "conditional_accept_rates": None,
        "marginal_accept_rates": None,
        "synthetic_acceptance_rates": None,
        "mean_accept_length": None,
        "mean_accept_length_per_request": profile.get("mean_accept_length_per_request"),
        "acceptance_length_histogram": None,
        "measurement_conditions": {k: v for k, v in (profile.get("conditions") or {}).items() if v is not None},
    }
    if not usable:
        reason = "acceptance was measured at another draft length" if rows else "acceptance was not measured"
        return result | {"vectors_unavailable_reason": reason}
    marginal = [round(row["marginal"], 6) for row in rows]
    rounds = int(rows[0]["rounds"])
    kept = [rounds, *(round(row["marginal"] * rounds) for row in rows), 0]
    rates = {
        f"{kind}_accept_rates{error}": [_rounded(row.get(f"{kind}{error}")) for row in rows]
        for kind in ("conditional", "marginal")
        for error in ("", "_se")
    }
    return (
        result
        | rates
        | {
            "synthetic_acceptance_rates": marginal,
            "mean_accept_length": round(1 + sum(row["marginal"] for row in rows), 6),
            "acceptance_length_histogram": {str(m + 1): a - b for m, (a, b) in enumerate(pairwise(kept))},
        }
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)


def model_card(
    profile: Mapping[str, Any],
    model: PreTrainedModel,
    target: str,
    folder: str,
    length: int,
    trained_vocabulary: int,
    notes: Sequence[str] = (),
) -> str:
    """The README.md of an exported draft: what it is, what was measured, how to use it.

    Args:
        profile: optional keys `draft_name`, `target_name`, `offline_alpha`, `offline_alpha_se`, `alpha`,
            `block_efficiency`, `accepted_per_drafted`, `speedup`, `speedup_ci95`, `speedup_vs_generate`,
            `predicted_speedup`, `cost_ratio`, `break_even_alpha`, `best_draft_length`, `identical_to_target`,
            `conditions`. What is absent is left out.
        model: the exported model.
        target: the target's folder or hub name, for the commands.
        folder: the export's folder, for the commands.
        length: drafted tokens per round.
        trained_vocabulary: vocabulary size before padding or cutting.
        notes: further ones of this pair; empty ones are left out.
    """
    text = model.config.get_text_config()
    parameters = sum(weight.numel() for weight in model.parameters())
    target = str(profile.get("target_name") or target)
    parts = [
        FRONT_MATTER,
        f"# Draft model for {target}",
        f"A {model.config.model_type} model of {parameters:,} parameters that proposes tokens for `{target}` in "
        "speculative decoding. It is a plain causal language model with the target's tokenizer"
        f" and vocabulary size ({text.vocab_size:,}).",
        summary(profile, length),
        "## Measured",
        measurements(profile),
        conditions(profile),
        "## Use",
        usage(target, folder, length),
        "## Notes",
        _notes(text.vocab_size, trained_vocabulary, notes),
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def usage(target: str, draft: str, length: int) -> str:
    """Paste-ready lines (Markdown) for transformers, vLLM, SGLang, llama.cpp and this project's own decoder."""
    return "\n\n".join(
        f"{title}:\n\n```{language}\n{lines}\n```" for title, language, lines in commands(target, draft, length)
    )


def commands(target: str, draft: str, length: int) -> list[tuple[str, str, str]]:
    """(title, language, lines to paste) for each engine."""
    return [
        ("transformers (the draft length is in generation_config.json)", "python", python_lines(target, draft)),
        ("vLLM", "sh", vllm_command(target, draft, length)),
        ("SGLang", "sh", sglang_command(target, draft, length)),
        ("llama.cpp (the files come with `export.formats: [hf, gguf]`)", "sh", llama_command(draft, length)),
        ("draftsmith", "sh", decode_command(target, draft)),
    ]


def python_lines(target: str, draft: str) -> str:
    """Assisted generation in transformers."""
    return f"""from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
target = AutoModelForCausalLM.from_pretrained("{target}")
draft = AutoModelForCausalLM.from_pretrained("{draft}")
inputs = tokenizer("...", return_tensors="pt")
output = target.generate(**inputs, assistant_model=draft, max_new_tokens=128)
print(tokenizer.decode(output[0]))"""


def decode_command(target: str, draft: str) -> str:
    """The bundled decoder, marking who wrote each token."""
    return f'python -m decode generate --target {target} --draft {draft} --method vanilla --prompt "..." --show'


def vllm_command(target: str, draft: str, length: int) -> str:
    """The `vllm serve` line for a standalone draft."""
    config = f'{{"method": "draft_model", "model": "{draft}", "num_speculative_tokens": {length}}}'
    return f"vllm serve {target} \\\n  --speculative-config '{config}'"


def sglang_command(target: str, draft: str, length: int) -> str:
    """The SGLang server line; with top-k 1 the drafted tokens are the steps plus one."""
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm STANDALONE \\\n"
        f"  --speculative-draft-model-path {draft} --speculative-num-steps {length} \\\n"
        f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {length + 1}"
    )


def llama_command(draft: str, length: int, kind: str = "draft-simple") -> str:
    """The llama-server line, with the GGUF files of the export."""
    return (
        f"llama-server -m {draft}/gguf/target-f32.gguf -md {draft}/gguf/draft-f32.gguf \\\n"
        f"  --spec-type {kind} --spec-draft-n-max {length} --spec-draft-p-min 0"
    )


FRONT_MATTER = """---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, draft-model, draftsmith]
---"""

ROWS = (
    ("offline_alpha", "acceptance rate α, offline", "mean of Σ min(p, q) over the target's own texts"),
    ("alpha", "acceptance rate α, while decoding", "mean of Σ min(p, q) over tested positions"),
    ("accepted_per_drafted", "accepted per drafted token", "Σ m / Σ k"),
    ("block_efficiency", "block efficiency", "Σ (m + 1) / rounds: tokens per target forward"),
    ("speedup", "speedup", "tokens/s over the same loop without a draft"),
    ("speedup_vs_generate", "speedup over `generate`", "tokens/s over `model.generate` of transformers"),
    ("predicted_speedup", "predicted speedup", "tokens per round / (c · drafted + v(drafted + 1))"),
    ("cost_ratio", "cost ratio c", "one draft forward in target forwards"),
    ("break_even_alpha", "break-even α", "acceptance rate at which nothing is gained"),
)


def measurements(profile: Mapping[str, Any]) -> str:
    """The numbers with their formulas, as a Markdown table."""
    lines = ["| number | value | T | formula |", "| --- | ---: | --- | --- |"]
    for key, name, formula in ROWS:
        value = profile.get(key)
        if isinstance(value, int | float):
            lines.append(f"| {name} | {value:.3f}{_spread(profile, key)} | {_temperature(profile, key)} | {formula} |")
    return "\n".join(lines) if len(lines) > 2 else "Nothing was measured before this export."


def _temperature(profile: Mapping[str, Any], key: str) -> str:
    """Temperature at which a number was measured; nothing for costs, which have none."""
    if key in ("cost_ratio", "break_even_alpha"):
        return ""
    known = 1.0 if key == "offline_alpha" else (profile.get("conditions") or {}).get("temperature")
    return "" if known is None else f"{known:g}"


def _spread(profile: Mapping[str, Any], key: str) -> str:
    if (error := profile.get(f"{key}_se")) is not None:
        return f" ± {error:.3f}"
    if interval := profile.get(f"{key}_ci95"):
        return f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    return ""


def conditions(profile: Mapping[str, Any]) -> str:
    """Under what the numbers were measured, but for the temperature, which stands beside each."""
    stated = (profile.get("conditions") or {}).items()
    known = {key.replace("_", " "): v for key, v in stated if v is not None and key != "temperature"}
    if not known:
        return ""
    values = "; ".join(f"{key}: {value}" for key, value in known.items())
    return f"Conditions: {values}. Speed belongs to this machine; the acceptance rate does not."


def summary(profile: Mapping[str, Any], length: int) -> str:
    """Whether the draft gained speed, in a sentence."""
    speedup = profile.get("speedup")
    if profile.get("best_draft_length") == 0 or (speedup is not None and speedup <= 1):
        return (
            "**This pair did not gain speed where it was measured.** A cheaper draft, a better one, or a machine on "
            "which checking several tokens costs little more than one may change that."
        )
    if speedup is None:
        return f"Suggested draft length: {length}."
    same = " with identical greedy output" if profile.get("identical_to_target") else ""
    return f"Measured: **{speedup:.2f} times** the speed of decoding without a draft{same}, at draft length {length}."


def _notes(size: int, trained: int, more: Sequence[str]) -> str:
    notes = [
        *filter(None, more),
        "`speculation_profile.json` holds the acceptance rates by position: conditional and marginal.",
        "vLLM drafts greedily unless `draft_sample_method` says otherwise, so above temperature 0 it accepts "
        "p(argmax q) of the tokens rather than Σ min(p, q).",
        "Keep `eagle-`, `eagle3`, `dflash` and `dspark` out of this folder's path: vLLM takes them for a method.",
    ]
    if size > trained:
        notes.append(
            f"The ids {trained:,} to {size - 1:,} are padding up to the target's vocabulary size. Their rows are the "
            "mean of the others (with a bias of −10⁴ where the head has one), so they are never the most likely token."
        )
    if size < trained:
        notes.append(f"Rows {size:,} to {trained - 1:,} were cut: the target's vocabulary ends there.")
    return "\n".join(f"- {note}" for note in notes)

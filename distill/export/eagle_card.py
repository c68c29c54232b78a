"""What stands beside an exported feature head: the commands that use it, and its README."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decode.models.eagle.files import default_captured_layers
from decode.models.eagle.head import FeatureHead
from distill.export.card import FRONT_MATTER, conditions, llama_command, measurements, summary

TOKEN_MAP = "token_map.pt"
"""The ids that an EAGLE-1 head of a reduced vocabulary drafts, as SGLang reads them."""


def head_commands(
    target: str, head: str, length: int, version: int, *, token_map: bool = False
) -> list[tuple[str, str, str]]:
    """(title, language, lines to paste) for each engine that takes heads of this kind."""
    method = "eagle3" if version == 3 else "eagle"
    serve = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method.upper()} \\\n"
        f"  --speculative-draft-model-path {head} --speculative-num-steps {length} \\\n"
        f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {length + 1}"
    )
    if token_map:
        serve += f" \\\n  --speculative-token-map {head}/{TOKEN_MAP}"
    own = f'python -m decode generate --target {target} --draft {head} --method eagle-tree --prompt "..." --show'
    found = [("SGLang", "sh", serve), ("draftsmith", "sh", own)]
    if version == 3:
        config = f'{{"method": "{method}", "model": "{head}", "num_speculative_tokens": {length}}}'
        found.insert(1, ("llama.cpp (the files come with `export.formats: [hf, gguf]`)", "sh",
                         llama_command(head, length, "draft-eagle3")))  # fmt: skip
        found.insert(0, ("vLLM", "sh", f"vllm serve {target} \\\n  --speculative-config '{config}'"))
    return found


def head_card(
    profile: Mapping[str, Any], head: FeatureHead, target: str, folder: str, length: int, layers: int, note: str = ""
) -> str:
    """The README.md of an exported head.

    Args:
        profile: what was measured, as for `distill.export.card.model_card`.
        head: the head.
        target: the target's folder or hub name.
        folder: the export's folder, for the commands.
        length: drafted tokens per round.
        layers: of the target.
        note: a further one; empty: none.
    """
    parameters, config = sum(p.numel() for p in head.parameters()), head.config
    kind = "EAGLE-3" if head.version == 3 else "EAGLE-1"
    parts = [
        FRONT_MATTER,
        f"# {kind} head for {target}",
        f"A feature head of {parameters:,} parameters that continues the hidden states of `{target}` and drafts for it "
        f"in speculative decoding. Embedding{'' if head.version == 3 else ' and output head'} are the target's own.",
        summary(profile, length),
        "## Measured",
        measurements(profile),
        conditions(profile),
        "## Use",
        *(f"{title}:\n\n```{language}\n{lines}\n```" for title, language, lines in
          head_commands(target, folder, length, head.version, token_map=head.version == 1 and head.reduced)),
    ]  # fmt: skip
    notes = []
    if head.version == 3:
        notes = ["It drafts every token of the target, so that it needs neither `d2t` nor `t2d`."]
        if head.draft_ids() is not None:
            notes = [
                f"It drafts {config.draft_vocab_size:,} of the {config.vocab_size:,} tokens (`d2t` holds offsets, "
                "`t2d` the mask); the others are left to the target.",
            ]
        if head.captured_layers != default_captured_layers(layers):
            captured = ", ".join(map(str, head.captured_layers))
            notes.append(
                f"It reads the states that enter layers {captured}; an engine that does not read "
                "`eagle_aux_hidden_state_layer_ids` would take others."
            )
        if max(head.captured_layers) == layers:
            notes.append(
                f"It reads the state behind the target's last norm ({layers}). Engines give the state before it, "
                "or none: of the commands above only draftsmith's drafts as measured."
            )
    if notes := [*notes, *filter(None, [note])]:
        parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"

"""How fast a head trains here, against the same head's module of vLLM's speculators in a plain PyTorch loop.

Both sides take steps on the same batches, with the same shapes, precision and optimiser, on states of the target that
were computed before. Speculators computes whole logits of head and target at every step; draftsmith reads the target's
likeliest tokens and computes the loss in chunks. Speculators packs a batch into one sequence.

    pip install --no-deps speculators==0.9.0 hs-connectors loguru pydantic-settings
    python tests/benchmarks/head_speed.py --config configs/smollm2-heads.yaml --student.kind eagle3 [--steps N --rounds N]

The stages of the run before its drafts are made if they are missing.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from training_speed import WARM, StepClock  # beside this file
from transformers import LlamaConfig, Qwen3Config

from decode.commands.cli import run_main
from decode.errors import UserError
from decode.files import scratch_folder
from decode.measure.report import console_table
from decode.models.heads.eagle import FeatureHead
from decode.progress import output_console, working
from distill.__main__ import read_settings
from distill.config import DraftSettings, Settings
from distill.data.dataset import Batch, DistillDataModule, Schedule, TrainingBatches, label_mask
from distill.networks.models import make_optimizer
from distill.pipeline import with_formats
from distill.run import Run
from distill.stages import open_draft, prepare, run_stages
from distill.training.modules import DistillModule
from distill.training.trainer import fit

KINDS = {"eagle3": "Eagle3DraftModel", "dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
"""Speculators' classes by ``student.kind``."""


def peer(run: Run, head: Any, attention: str) -> Any:
    """Speculators' module with the shape, the states and the vocabulary of a head, and with random weights."""
    kind, eagle = run.settings.student.kind, isinstance(head, FeatureHead)
    vocab, ids = int(head.config.vocab_size), head.draft_ids()
    ids = torch.arange(vocab) if ids is None else ids
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    shape = {name: getattr(head.config, name) for name in names}
    shape |= {"vocab_size": vocab, "num_hidden_layers": 1 if eagle else len(head.layers)}
    config = LlamaConfig(**shape) if eagle else Qwen3Config(**shape)
    options: dict[str, Any] = {"norm_before_residual": False, "ttt_steps": run.settings.student.steps}
    if not eagle:
        options = {"block_size": head.block, "mask_token_id": head.config.mask_token_id}
        options |= {"markov_rank": head.config.markov_rank} if kind == "dspark" else {}
    options |= {"target_layer_ids": list(head.captured_layers), "draft_attn_impl": attention}
    module = importlib.import_module(f"speculators.models.{kind}.core")
    return getattr(module, KINDS[kind]).from_training_args(
        config, torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True), ids - torch.arange(len(ids)),
        draft_vocab_size=len(ids), verifier_name_or_path=str(run.target.resolve()), **options,
    )  # fmt: skip


@torch.no_grad()
def packed(target: Any, layers: Sequence[int], batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Texts as speculators takes them: in one sequence without padding, with the target's states of every token.

    Its last state has been normed here already, which changes the loss but no time.
    """
    parts: dict[str, list[Tensor]] = {}
    for number, batch in enumerate(batches):
        ids = batch["input_ids"]
        states = target.base_model(input_ids=ids, output_hidden_states=True).hidden_states
        columns = {
            "hidden_states": torch.cat([states[layer] for layer in layers], -1),
            "verifier_last_hidden_states": states[-1],
            "input_ids": ids,
            "loss_mask": label_mask(batch["labels"]),
            "document_ids": torch.full_like(ids, number),
            "position_ids": torch.arange(ids.shape[1])[None],
        }
        for name, values in columns.items():
            parts.setdefault(name, []).append(values)
    return {name: torch.cat(values, 1) for name, values in parts.items()}


def measure(settings: Settings, steps: int, rounds: int, attention: str, console: Console) -> None:
    """Measures both sides in turn, and prints a table."""
    settings = with_formats(settings)
    settings.validate()
    if (kind := settings.student.kind) not in KINDS:
        raise UserError(f"student.kind is {kind}: speculators' module is compared for {', '.join(KINDS)}")
    run = Run(settings, console)
    run_stages(run, ("target", "initial"))
    draft = DraftSettings()
    data = prepare(run, open_draft(run, run.path("initial")), draft)
    training, bf16 = settings.training, "bf16" in settings.trainer.precision
    schedule = Schedule(data.train.lengths, training.batch_size, training.length_bucket, settings.seed)
    head, target = run.load_head(run.path("initial")), run.load_target("float32")
    singles = [[data.train.batch([example]) for example in schedule.batch(step)] for step in range(steps)]
    sequences = [packed(target, head.captured_layers, batches) for batches in singles]
    tokens = sum(sequence["input_ids"].numel() for sequence in sequences[WARM:])

    def theirs(clock: StepClock) -> None:
        module = peer(run, head, attention).train()
        optimizer = make_optimizer(module, training, precision=settings.trainer.precision)
        asked = {"loss_fn": "kl_div", "loss_implementation": "eager", "ttt_step_loss_decay": 1.0}
        asked |= {"ttt_steps": settings.student.steps, "max_anchors": settings.student.block.anchors * len(singles[0])}
        options = module.get_trainer_kwargs(**asked)[0]
        for sequence in sequences:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = module(**sequence, **options)[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_([w for w in module.parameters() if w.requires_grad], 1.0)
            optimizer.step()
            optimizer.zero_grad()
            clock.tick(loss)

    def ours(clock: StepClock) -> None:
        student = open_draft(run, run.path("initial"))
        module = DistillModule(student, data.signal, training, steps, settings=draft, seed=settings.seed)
        batches = DistillDataModule(TrainingBatches(data.train, schedule, steps), data.validation)
        trainer = replace(settings.trainer, validate_every=steps, validation_examples=4)
        with scratch_folder() as folder:
            trainer.callback_instances = lambda: [clock]
            fit(module, batches, trainer, folder, name="speed", console=Console(quiet=True))

    sides, seconds = {"speculators": theirs, "draftsmith": ours}, dict[str, list[float]]()
    for number in range(rounds):
        for side, train in sides.items():
            clock = StepClock(run.device)
            with working(console, f"round {number + 1} of {rounds}, {side}", bars=False):
                train(clock)
            seconds.setdefault(side, []).append((clock.ends[-1] - clock.ends[WARM - 1]) / (steps - WARM))
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    rows = [
        {"name": side, "step_ms": 1000 * step, "tokens_per_second": tokens / (steps - WARM) / step}
        for side, step in medians.items()
    ]
    console.print(console_table(f"Training of {kind}, all tokens", ("name", "tokens_per_second", "step_ms"), rows))
    ratios = [a / b for a, b in zip(*seconds.values())]
    console.print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", highlight=False)


def main() -> None:
    """Parses the arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25, help="of each side and round; the first five are not timed")
    parser.add_argument("--rounds", type=int, default=3, help="in which both sides train in turn")
    parser.add_argument("--attention", default="sdpa", help="of speculators: sdpa or eager")
    arguments, rest = parser.parse_known_args()
    settings = read_settings(rest)
    measure(settings, arguments.steps, arguments.rounds, arguments.attention, output_console())


if __name__ == "__main__":
    sys.exit(run_main(main))

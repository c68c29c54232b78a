"""What a feature head is trained on: examples with the target's features and distributions, the reference's losses."""

from dataclasses import replace
from functools import partial
from typing import Any

from decode.core.progress import working
from decode.models.eagle.head import FeatureHead
from decode.models.eagle.head_files import load_head
from decode.models.loading.open_model import stop_ids
from distill.config.distillation import Signal
from distill.core.file_fingerprints import fingerprint
from distill.data.batches.token_dataset import TokenDataset
from distill.data.stage_context import StageContext
from distill.eagle.drafting_steps import reference_loss
from distill.eagle.target_features import FeatureSource
from distill.losses.objective import Objective
from distill.models.attention import use_attention
from distill.models.lm_head import LMHead, check_head
from distill.teacher import hidden_state_store as signals
from distill.teacher.choose_signal import announced, choose_signal
from distill.teacher.distillation_data import LOSSES, SIGNAL, DistillData, fixed_texts
from distill.teacher.target_distribution import TargetSignal
from distill.teacher.target_model import at_work, open_target


def prepare_head(
    context: StageContext,
    head: FeatureHead,
    objective: Objective,
    share: float = 0.0,
    first: int | None = None,
) -> DistillData[FeatureSource]:
    """As `distill.teacher.distillation_data.prepare`, for a feature head.

    Args:
        context: settings, data and folder.
        head: which states it reads and which ids it drafts.
        objective: of the draft.
        share: of the examples whose responses the head will write itself.
        first: examples that are wanted, the first ones; None: all.
    """
    settings, run, folder = context.settings, context.run, context.run.work / "signals"
    model = at_work(context, open_target(context))
    check_head(model, LMHead(model))
    ids = head.draft_ids()
    ends = stop_ids(model, context.corpus.tokenizer)
    train, validation, key = fixed_texts(context, model, ends)
    train = train.part(0, min(first or len(train), len(train)))
    fixed = {"validation": validation} if share == 1 else {"validation": validation, "train": train}

    def signal_of(kind: Signal) -> TargetSignal:
        vocab = LMHead(model).vocab if ids is None else len(ids)
        return TargetSignal.of(replace(settings.reference, signal=kind), vocab)

    def size_of(kind: Signal) -> int:
        return sum(map(FeatureSource(model, head, signal_of(kind)).bytes, fixed.values()))

    signal = signal_of(choose_signal(context, size_of, fingerprint(key, head.captured_layers)))
    source = FeatureSource(model, head, signal, stays=settings.target.placed)
    source.to(context.device)
    use_attention(model, settings.trainer.attention)
    if signal.kind != "online":
        tokens, size = sum(rows.label_count for rows in fixed.values()), size_of(signal.kind)
        seconds = partial(signals.seconds_of, model, list(fixed.values()))
        about_signal = fingerprint(key, signal.key, head.captured_layers)
        with announced(context, signal.kind, "hidden states and signal", about_signal, size, tokens, seconds):
            for name, rows in fixed.items():
                told = f"the target's hidden states and signal ({signal.kind}), {name}"
                with working(context.console, told), context.timed(f"{SIGNAL} {name}", len(rows.ids)):
                    source.keep(model, rows, folder, name, key)
    reference, about = None, (settings.eagle.steps, objective.ranking, settings.trainer.precision)
    if objective.selection is not None:
        record = run.record("reference")
        assert record is not None
        reference = load_head(run.path("reference")).to(context.device)
        if "train" in fixed:
            made_from: Any = [key, record.fingerprint, source.signal.key, about[0], vars(objective.ranking), about[2]]
            path = folder / f"reference_{objective.ranking.name}.npy"
            with working(context.console, "the reference's losses"), context.timed(f"{LOSSES} train", len(train.ids)):
                made = reference_loss(reference, source, train, *about, path, fingerprint(*made_from))
                train.signals["reference_loss"] = made

    def add_signals(rows: TokenDataset) -> None:
        if signal.kind != "online":
            source.keep_now(model, rows)
        if reference is not None:
            rows.signals["reference_loss"] = reference_loss(reference, source, rows, *about)

    return DistillData(source, train, validation, ends, add_signals, share)

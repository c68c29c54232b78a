"""The stages of a run in order, each skipped if nothing it depends on has changed."""

import time
from collections.abc import Callable, Collection
from functools import partial

from decode.core.progress import working
from distill.config.drafts import AdaSpecSettings
from distill.core import ranks
from distill.core.file_fingerprints import remove
from distill.data.stage_context import StageContext
from distill.pipeline import draft_stages as draft_models
from distill.pipeline import eagle_stages as feature_heads
from distill.pipeline.preflight_checks import check_inputs
from distill.pipeline.stage_fingerprint import stage_fingerprints
from distill.pipeline.stages import StageResult, distil, language_model
from distill.pipeline.stages_of_other_runs import adopt, siblings
from distill.report.run_summary import display


def run_stages(
    context: StageContext, only: Collection[str] | None = None, *, check: bool = True, take_over: bool = True
) -> list[str]:
    """Runs the stages (``only`` some of them) that are not up to date; returns their names.

    Unless the target alone is wanted, data and models are checked before the first one, if ``check`` is true. With
    ``take_over`` a target, signals and texts that another run made from the same inputs are not made again.
    """
    settings, run, console = context.settings, context.run, context.console
    keys = stage_fingerprints(settings)
    ran: list[str] = []
    for stage, title, make in plan_stages(context):
        if only is not None and stage not in only:
            continue
        key, made_from = keys[stage]
        console.print(f"[bold]{title}[/bold]", highlight=False)
        if run.finished(stage, key) is not None:
            console.print(f"  up to date: {run.path(stage)}", highlight=False)
            if ranks.is_first():
                remove(run.work / f"checkpoints-{stage}")  # a kill may have left them
            continue
        if (noted := run.noted(stage)) is not None and noted.fingerprint == key:
            console.print(f"  {run.path(stage)} is not as it was written, and is made again", highlight=False)
        taken = adopt(run, settings, siblings(run), only=("target",)) if take_over and stage == "target" else {}
        if check and not ran and (only is None or "initial" in only):
            with working(console, "checking data and models", bars=False):
                check_inputs(context)
        started = time.monotonic()
        if taken:
            console.print(f"  the same one is in {taken[stage]}", highlight=False)
        else:
            with working(console, title, bars=False):
                made = make(key)
                made.record.made_from = made_from
                run.put(stage, made.record, made.save)
        ran.append(stage)
        console.print(f"  {run.path(stage)} [dim]{time.monotonic() - started:.1f} s[/dim]", highlight=False)
    return ran


def plan_stages(context: StageContext) -> list[tuple[str, str, Callable[[str], StageResult]]]:
    """Name, title and maker of every stage, in order."""
    settings, draft = context.settings, context.settings.draft
    if settings.eagle.enabled:
        kind = feature_heads.KINDS[settings.eagle.kind]
        names = f"untrained head: {kind}", kind, f"{kind} + {display(draft.name)}"
        initial, begin = partial(feature_heads.initial, context), feature_heads.begin
    else:
        names = (
            f"initial draft ({settings.initial.kind})",
            f"DistillSpec, {settings.reference.divergence}",
            display(draft.name),
        )
        initial, begin = partial(language_model, context, "initial"), draft_models.begin

    def draft_stage(stage: str, adaspec: AdaSpecSettings | None) -> Callable[[str], StageResult]:
        return lambda key: distil(context, stage, key, begin, adaspec)

    stages: list[tuple[str, str, Callable[[str], StageResult]]] = [
        ("target", f"target ({settings.target.kind})", partial(language_model, context, "target")),
        ("initial", names[0], initial),
        ("reference", f"reference: {names[1]}", draft_stage("reference", None)),
        ("draft", f"draft: {names[2]}, k = {draft.k:g}, iso {draft.iso}", draft_stage("draft", draft)),
    ]
    for other in settings.comparisons:
        title = f"comparison: {other.name} ({other.method}, k = {other.k:g}, iso {other.iso})"
        stages.append((other.name, title, draft_stage(other.name, other)))
    return stages

"""The stages of a run in order, each skipped if nothing it depends on has changed."""

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.heads import FeatureHead, head_config, load_head
from decode.models.loading import load_model, stop_ids
from decode.models.writing import write_texts
from decode.progress import working
from distill import ranks
from distill.checks import check_inputs
from distill.config.drafts import AdaSpecSettings
from distill.config.run import Settings
from distill.config.training import TrainingSettings
from distill.data.batches import TokenDataset
from distill.data.context import StageContext
from distill.files import RunDir, StageRecord, remove
from distill.losses.objective import Objective
from distill.models.lm_head import LMHead, check_head
from distill.models.loading import ready_to_save
from distill.models.lora import Adapter
from distill.modules import DistillModule, HeadModule
from distill.report import display
from distill.responses.on_policy import HeadTexts
from distill.responses.texts import answered_by_target, fixed_texts
from distill.stages import Distillation, StageResult, data_key, distil, language_model, say_size, stage_fingerprints
from distill.teacher.heads import start_from_target
from distill.teacher.store import prepare


def begin(
    context: StageContext, objective: Objective, share: float, training: TrainingSettings, steps: int, seed: int
) -> Distillation:
    """The training of a draft model that starts from the initial draft (see `distill.stages.Begin`)."""
    full, settings = context.settings, context.settings.reference
    load = partial(
        load_model, context.run.path("initial"), dtype="float32", trust_remote_code=full.initial.trust_remote_code
    )
    model = load(device="cpu").train()
    check_head(model, LMHead(model))
    parameters = model.num_parameters()
    adapter = None
    if settings.lora is not None:
        again = partial(load, device=context.device)
        adapter = Adapter(model, settings.lora, full.seed, full.trainer.precision, context.device, again)
        model = adapter.model
    data = prepare(context, objective, share, selector="reference")
    say_size(context, model, parameters)
    fused = full.trainer.fused_loss
    module = DistillModule(model, training, steps, target=data.teacher, objective=objective, fused=fused, seed=seed)

    def trained() -> PreTrainedModel:
        return ready_to_save(module.model if adapter is None else adapter.merged(), context.corpus.tokenizer)

    return Distillation(
        module,
        data.train,
        data.validation,
        parameters,
        trained,
        lambda schedule: data.on_policy(context, partial(write_texts, model), schedule, steps, seed),
    )


KINDS = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3"}  # settings' names for the heads, as people write them


def initial(context: StageContext, key: str) -> StageResult:
    """A head for the target, its vocabulary chosen; an EAGLE-3 one starts from the target's weights where they fit."""
    settings, console = context.settings.eagle, context.console
    target = context.load_target("float32", "cpu")
    config = head_config(target.config.get_text_config(), settings.version, **settings.shape())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.settings.seed)
        head = FeatureHead(config)
    if head.reduced:
        ids, share = frequent(_texts(context, target), int(config.draft_vocab_size), int(config.vocab_size))
        head.set_vocabulary(ids)
        console.print(f"  {len(ids):,} tokens drafted, {share:.1%} of the training labels", highlight=False)
    elif settings.version == 3:
        head.set_vocabulary(torch.arange(int(config.vocab_size)))
    if settings.version == 3 and settings.init == "target":
        left = start_from_target(head, target)
        console.print(
            "  starts from the target's last layer" + (f", but for {', '.join(left)}" if left else ""), highlight=False
        )
    elif settings.version == 3:
        with torch.no_grad():  # the target's own directions are where the head's will end
            rows, ids_or_all = target.get_output_embeddings().weight, head.draft_ids()
            head.lm_head.weight.copy_(rows[: int(config.vocab_size)] if ids_or_all is None else rows[ids_or_all])
    parameters = sum(p.numel() for p in head.parameters())
    console.print(f"  {parameters:,} parameters", highlight=False)
    if parameters >= target.num_parameters():
        raise UserError(
            f"the head has {parameters:,} parameters and the target {target.num_parameters():,}: a draft has to be "
            "smaller; lower eagle.intermediate_size or eagle.draft_vocab"
        )
    return StageResult(StageRecord(key, parameters=parameters), head, context.corpus.tokenizer)


def frequent(rows: TokenDataset, count: int, vocab: int) -> tuple[torch.Tensor, float]:
    """The most frequent label tokens (FR-Spec, arXiv 2502.14856), ascending, and their share of all labels.

    Ties and tokens that never occur by their ids.
    """
    counts = np.bincount(rows.labels[rows.labels >= 0], minlength=vocab)
    ids = np.sort(np.argsort(-counts, kind="stable")[:count])
    return torch.from_numpy(ids), float(counts[ids].sum() / max(1, counts.sum()))


def begin_eagle_stages(
    context: StageContext, objective: Objective, share: float, training: TrainingSettings, steps: int, seed: int
) -> Distillation:
    """The training of a head that starts from the initial one (see `distill.stages.Begin`)."""
    full = context.settings
    head = load_head(context.run.path("initial")).train()
    data = prepare(context, objective, share, head=head, selector="reference")
    how: dict[str, Any] = {
        "target": data.teacher,
        "settings": full.eagle,
        "objective": objective,
        "fused": full.trainer.fused_loss,
    }
    module = HeadModule(head, training, steps, **how, seed=seed)
    parameters = sum(p.numel() for p in head.parameters())
    writer = None if not share else HeadTexts(head, context.load_target("float32"), full.eagle.steps)
    return Distillation(
        module,
        data.train,
        data.validation,
        parameters,
        lambda: head.eval().cpu(),
        lambda schedule: None if writer is None else data.on_policy(context, writer, schedule, steps, seed),
    )


def _texts(context: StageContext, target: PreTrainedModel) -> TokenDataset:
    """The texts that the head will be trained on, as far as they do not depend on it."""
    responses = context.settings.reference.responses
    if responses.from_target and not responses.server.answers:
        return answered_by_target(context)[0]  # in the target's own place and number format
    return fixed_texts(context, target, stop_ids(target, context.corpus.tokenizer))[0]


TEXTS = ("prompts", "responses", "original")  # folders of a run's work with what the target wrote


def siblings(run: RunDir) -> list[RunDir]:
    """The other runs in the same output folder."""
    folder = run.folder.parent
    return [RunDir(path) for path in sorted(folder.iterdir()) if path != run.folder] if folder.is_dir() else []


def adopt(
    run: RunDir, settings: Settings, others: Iterable[RunDir], only: Collection[str] | None = None
) -> dict[str, Path]:
    """Takes stages over from runs that made them from the same inputs; returns whose folder each one was.

    The target's signals come with them, and the target's texts from runs with the same data. Files are linked where the
    file system allows it, since nothing is ever changed in place; texts, to which a run adds lines, are copied.

    Args:
        run: takes over what it does not have.
        settings: its own.
        others: runs to look at.
        only: stages to take; None takes all.
    """
    taken, others, donors = {}, list(others), []
    for stage, (key, _) in stage_fingerprints(settings).items():
        if (only is not None and stage not in only) or run.finished(stage, key) is not None:
            continue
        found = ((donor, donor.finished(stage, key)) for donor in others)
        donor, record = next(((d, r) for d, r in found if r is not None), (None, None))
        if donor is not None and record is not None:
            source = donor.path(stage)
            run.put(stage, record, lambda path, source=source: _link(source, path))  # type: ignore[misc]
            taken[stage] = source
            donors.append(donor)
    if ranks.is_first():
        same = [other for other in others if _same_data(other, settings)]
        for donor in sorted([*donors, *same], key=lambda one: (one in same, one in donors), reverse=True):
            for folder in ("signals", *TEXTS) if donor in same else ("signals",):
                _take_over_files(donor, run, folder)
    return taken


def _same_data(donor: RunDir, settings: Settings) -> bool:
    """Whether a run has distilled on the same examples, with responses by the same rule."""
    noted = donor.noted("reference")
    if noted is None:
        return False
    ours = data_key(settings) | {"responses": settings.reference.responses.key()}
    theirs = noted.made_from | {"responses": noted.made_from.get("reference", {}).get("responses")}
    return all(theirs.get(name) == value for name, value in json.loads(json.dumps(ours)).items())


def _take_over_files(donor: RunDir, run: RunDir, folder: str) -> None:
    """Files of a run's work that are not there yet; each carries the fingerprint of what it is good for."""
    for file in sorted((donor.work / folder).glob("*")):
        place = run.work / folder / file.name
        if not file.name.startswith(".") and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            if folder in TEXTS:
                shutil.copy2(file, place)
            else:
                _link_file(str(file), str(place))


def _link(source: Path, path: Path) -> None:
    """A folder of links to the files of another, or the same link where it is one."""
    if source.is_symlink():
        path.symlink_to(source.resolve(), target_is_directory=True)
    else:
        shutil.copytree(source, path, copy_function=_link_file)


def _link_file(source: str, path: str) -> None:
    try:
        os.link(source, path)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, path)


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
        kind = KINDS[settings.eagle.kind]
        names = f"untrained head: {kind}", kind, f"{kind} + {display(draft.name)}"
        make_initial, begin_draft = partial(initial, context), begin_eagle_stages
    else:
        names = (
            f"initial draft ({settings.initial.kind})",
            f"DistillSpec, {settings.reference.divergence}",
            display(draft.name),
        )
        make_initial, begin_draft = partial(language_model, context, "initial"), begin

    def draft_stage(stage: str, adaspec: AdaSpecSettings | None) -> Callable[[str], StageResult]:
        return lambda key: distil(context, stage, key, begin_draft, adaspec)

    stages: list[tuple[str, str, Callable[[str], StageResult]]] = [
        ("target", f"target ({settings.target.kind})", partial(language_model, context, "target")),
        ("initial", names[0], make_initial),
        ("reference", f"reference: {names[1]}", draft_stage("reference", None)),
        ("draft", f"draft: {names[2]}, k = {draft.k:g}, iso {draft.iso}", draft_stage("draft", draft)),
    ]
    for other in settings.comparisons:
        title = f"comparison: {other.name} ({other.method}, k = {other.k:g}, iso {other.iso})"
        stages.append((other.name, title, draft_stage(other.name, other)))
    return stages

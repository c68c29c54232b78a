"""Feature heads as drafts: the initial head, and its training by EAGLE or by EAGLE + AdaSPEC."""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.models.eagle.head import FeatureHead
from decode.models.eagle.head_files import head_config, load_head
from decode.models.loading.open_model import stop_ids
from distill.config.training import TrainingSettings
from distill.core.run_dir import StageRecord
from distill.data.batches.token_dataset import TokenDataset
from distill.data.stage_context import StageContext
from distill.eagle.head_training_data import prepare_head
from distill.eagle.initial_head import start_from_target
from distill.generation.eagle_head_texts import HeadTexts
from distill.losses.objective import Objective
from distill.pipeline.stages import Distillation, StageResult
from distill.teacher.distillation_data import answered_by_target, fixed_texts
from distill.training.eagle_distillation import HeadModule

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


def begin(
    context: StageContext, objective: Objective, share: float, training: TrainingSettings, steps: int, seed: int
) -> Distillation:
    """The training of a head that starts from the initial one (see `distill.pipeline.stages.Begin`)."""
    full = context.settings
    head = load_head(context.run.path("initial")).train()
    data = prepare_head(context, head, objective, share)
    how: dict[str, Any] = {
        "target": data.target,
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

"""Distillation of draft models: by DistillSpec, by AdaSPEC, or one of AdaSPEC's variations."""

from functools import partial

from transformers import PreTrainedModel

from decode.models.batched_generation import write_texts
from decode.models.loading.open_model import load_model
from distill.config.training import TrainingSettings
from distill.data.stage_context import StageContext
from distill.losses.objective import Objective
from distill.models.lm_head import LMHead, check_head
from distill.models.loading import ready_to_save
from distill.models.lora import Adapter
from distill.pipeline.stages import Distillation, say_size
from distill.teacher.distillation_data import prepare
from distill.training.distillation import DistillModule


def begin(
    context: StageContext, objective: Objective, share: float, training: TrainingSettings, steps: int, seed: int
) -> Distillation:
    """The training of a draft model that starts from the initial draft (see `distill.pipeline.stages.Begin`)."""
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
    data = prepare(context, objective, share)
    say_size(context, model, parameters)
    fused = full.trainer.fused_loss
    module = DistillModule(model, training, steps, target=data.target, objective=objective, fused=fused, seed=seed)

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

"""What is refused before the first training because a rehearsal would not show it, or the run only hours later."""

from collections.abc import Callable

import torch

from decode.errors import UserError
from decode.models.huggingface import context_of
from decode.models.open import load_model, stop_ids
from distill import ranks
from distill.config.base import refuse
from distill.config.models import ModelSettings
from distill.data.dataset import Examples
from distill.engine.vllm import server_gpus
from distill.fingerprints import stage_fingerprints
from distill.kinds.language_model import kept_layers
from distill.kinds.start import start_from_head
from distill.networks.models import config_of, empty_model, hollow_target, multiplies_bfloat16
from distill.responses.target import ANSWERED
from distill.results.tracking import tried
from distill.run import Run
from distill.signal.target import BYTES


def check_inputs(run: Run) -> None:
    """Refuse before anything is trained what would be found hours later, or never.

    Raises:
        UserError: With the key, the value seen, and what was expected.
    """
    check_given(run)
    for check in (_check_machine, _check_models, _check_batches):
        check(run)
    run.logger = tried(run.logger, run.line)


def check_given(run: Run, here: Callable[[str], bool] = lambda _: True) -> None:
    """Refuse files of models, and a head that cannot be continued; models that are not ``here`` are passed over.

    Raises:
        UserError: Files that cannot be read, or a head that the student cannot start from.
    """
    settings, student, source = run.settings, run.settings.student, run.settings.target.model
    for model in settings.language_models.values():
        if model.model and here(model.model):
            check_files(model)
    if student.draft.head and student.model and source and here(student.model) and here(source):
        trust = settings.target.trust_remote_code
        start_from_head(student, hollow_target(source, trust_remote_code=trust), run.captured_layers, settings.seed)


def check_files(model: ModelSettings) -> None:
    """Refuse a model by the headers of its files, if it is given.

    Raises:
        UserError: They cannot be read, or do not fit each other.
    """
    if model.model:
        load_model(model.model, device="cpu", dtype="auto", trust_remote_code=model.trust_remote_code, wanted="$^")


def _check_machine(run: Run) -> None:
    """Refuse devices, number formats and servers that are not there."""
    settings, device = run.settings, run.device
    trainer = settings.trainer
    # a target that is trained first can be served only later
    trained_first = settings.teacher.engine.urls and not run.as_it_is
    if not trained_first or run.record("target", stage_fingerprints(settings)["target"]):
        check_engine(run)
    frozen = [model.dtype for model in settings.language_models.values() if not model.trained]
    if not (trainer.precision.startswith("bf16") or "bfloat16" in frozen) or multiplies_bfloat16(device):
        return
    if device.type == "cuda":
        raise UserError(
            f"{torch.cuda.get_device_name(device)} has no bfloat16: set trainer.precision to 16-mixed or 32-true, and "
            "the dtype of a frozen target or student to float16 or float32"
        )
    run.line("this processor is slower in bfloat16: set trainer.precision and models' dtype to auto")


def check_engine(run: Run) -> None:
    """Refuse before anything is trained servers that do not answer, or with other states than the target's.

    Servers are asked for what is missing alone, so that none needs to be there once everything is finished.

    Raises:
        UserError: With the next step.
    """
    teacher = run.settings.teacher
    if (teacher.served or teacher.in_engine) and not teacher.engine.urls:
        _ = run.engine  # says what to do
    unanswered = teacher.served and not any((run.work / "responses").rglob(ANSWERED))
    kept = teacher.engine.keep and any((run.work / "signals").rglob("*.safetensors"))
    if unanswered and not teacher.in_engine:
        ends = stop_ids(run.served_files, run.tokenizer)
        run.servers(run.tokenizer, ends, ends[0]).ids(run.engine.complete([ends[0]], max_tokens=1, temperature=0.0))
    if teacher.in_engine and (unanswered or not kept):
        if teacher.engine.local:
            server_gpus(teacher.engine, *ranks.gpus(run.settings.trainer))
        _ = run.states  # compares them as they are opened


def _check_batches(run: Run) -> None:
    """Refuse batches that the processes cannot divide among them, or that the examples do not fill."""
    settings, parts = run.settings, run.settings.trainer.accumulate * ranks.process_count(run.settings.trainer)
    models, shared = settings.language_models.items(), settings.training
    trainings = [(name, model.training, run.corpus.train) for name, model in models if model.trained]
    trainings += [(f"drafts.{name}", each.training_of(shared), run.examples) for name, each in settings.drafts.items()]
    for name, training, rows in trainings:
        few = f"at least {parts} (trainer.accumulate times the processes)"
        wrong = not parts <= training.batch_size <= len(rows)
        expected = f"expected {few} and at most {len(rows)} (the training examples)"
        refuse(training, (wrong, "batch_size", expected), where=f"{name}.training.")
        training.steps_for(min(len(rows), training.examples or len(rows)), f"{name}.training.")


def _check_models(run: Run) -> None:
    """Refuse a head that does not fit, too long texts and a draft that is not smaller: first what needs no text."""
    settings, longest = run.settings, run.settings.data.max_length
    vocab = len(run.tokenizer) if settings.target.model is None else 2  # which is the size of a new model alone
    if settings.student.draft.head:
        settings.student.draft.check_target(empty_model(settings.target, vocab))
        _ = run.captured_layers
    if settings.student.kind == "cut":
        kept_layers(settings.student.layers, run.target_config.num_hidden_layers)
    if not (settings.teacher.responses.from_target or any(draft.on_policy for draft in settings.drafts.values())):
        longest = max(int(Examples.of(split).lengths.max()) for split in (run.corpus.train, run.corpus.validation))
    for name, model in settings.language_models.items():
        if model.kind == "cut":
            continue
        positions = context_of(config_of(model, vocab).get_text_config())
        if positions < longest:
            key = f"{name}.architecture.positions" if model.kind == "scratch" else f"the context of {name}.model"
            raise UserError(
                f"{key} is {positions} tokens and the longest example may have {longest}: set data.max_length to "
                f"{positions:d} or less"
            )
    if settings.student.kind != "cut" and not settings.student.draft.head:
        vocab = len(run.tokenizer)
        target, student = (empty_model(model, vocab).num_parameters() for model in settings.language_models.values())
        if student >= target:
            raise UserError(
                f"the draft has {student:,} parameters and the target {target:,}: make student.architecture smaller or "
                "choose a smaller student.model"
            )


def signal_sizes(run: Run) -> dict[str, float]:
    """Return the bytes that each kind of kept signal takes; of texts that have yet to be written, at most."""
    teacher, tokens, labels = run.settings.teacher, 0, 0
    for rows in map(Examples.of, (run.examples, run.validation)):
        unwritten = teacher.responses.from_target or not run.corpus.answered
        longest = min(teacher.responses.max_new_tokens, run.settings.data.max_length) * len(rows) if unwritten else 0
        tokens, labels = tokens + int(rows.lengths.sum()) + longest, labels + max(rows.label_count, longest)
    number, scale = BYTES[teacher.number_format(run.settings.target.dtype)]
    state = int(run.target_config.hidden_size) * number + scale
    read = len(run.captured_layers) * state * tokens
    # the states that EAGLE-1 and next-token layers read are those that logits are made of
    hidden = 0 if run.captured_layers == [int(run.target_config.num_hidden_layers)] else state * labels
    return {"hidden": read + hidden, "topk": read + 8 * teacher.signal_k * labels, "online": 0}

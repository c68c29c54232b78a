"""What a run will write and how long it will take, roughly: floating-point operations over what this machine does.

Upper bounds where lengths are not known beforehand: every example is taken to be as long as it may be.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, PretrainedConfig

from decode.core.progress import duration
from decode.models.eagle.files import head_config
from decode.models.eagle.head import FeatureHead
from decode.models.open import load_config
from distill.config.models import ModelSettings
from distill.config.settings import Settings
from distill.models.layer_pruning import kept_layers
from distill.models.loading import build_config
from distill.pipeline.training_budget import plan_draft, plan_reference

EFFICIENCY = 0.5  # of the speed of large products, what training and reading texts reach


USABLE = 0.7  # of the prompts that an instruct target writes, what is left after filtering


@dataclass(frozen=True)
class Machine:
    """What was measured here: operations a second in large products, bytes a second read from memory."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Step:
    """A part of the run: what it is, bytes written, seconds."""

    name: str
    bytes: float
    seconds: float


def measure_machine() -> Machine:
    """Half a second of float32 products on this machine's CPU, and of reading."""
    square, wide, vector = torch.ones(768, 768), torch.ones(4096, 8192), torch.ones(8192)

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(8):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return min(times)

    return Machine(2 * 768**3 / best(lambda: square @ square), wide.nbytes / best(lambda: wide @ vector))


def estimate(settings: Settings, machine: Machine) -> list[Step]:
    """The parts of a run, in order; the models' configurations have to be on this machine.

    Raises:
        UserError: a model cannot be found.
    """
    data, reference, evaluation = settings.data, settings.reference, settings.evaluation
    vocab = data.tokenizer_vocab_size
    config = _config(settings.target, vocab)
    target = _parameters(config)
    draft, signal_width = _draft(settings, config, target, vocab)
    examples = min(reference.examples or data.train_limit or 0, data.train_limit or reference.examples or 0)
    texts = examples + settings.trainer.validation_examples
    speed = machine.flops * EFFICIENCY

    def written(count: int, longest: int, batch: int) -> float:
        """Seconds in which the target writes texts: weights read once a step, products for the whole batch."""
        steps = count / batch * longest
        return steps * (4 * target / machine.bytes + 2 * target * batch / speed)

    def trained(steps: int, batch: int, weights: float, length: int) -> float:
        return steps * batch * length * 6 * weights / speed

    steps = []
    if settings.target.package is not None:
        steps.append(Step("package", settings.target.package.size, settings.target.package.size / 10e6))
    full = plan_reference(settings.target.training, data.train_limit or 0) if settings.target.trained else None
    seconds = trained(full.steps, full.batch_size, target, data.max_length) if full else 0.0
    steps.append(Step(f"target, {target / 1e6:.1f} M parameters", 4.0 * target, seconds))
    if data.from_target:
        count, own = (data.train_limit or 0) + data.validation_examples + data.test_examples, data.prompts
        count = round(count / USABLE)
        steps.append(Step(f"{count:,} prompts", count * 500.0, written(count, own.max_tokens, own.batch_size)))
    answers = min(reference.responses.max_new_tokens, data.max_length)
    if reference.responses.from_target:
        steps.append(
            Step(f"{texts:,} answers", texts * answers * 10.0, written(texts, answers, reference.responses.batch_size))
        )
    length = data.max_length if settings.eagle.enabled else answers
    if reference.signal != "online":
        seconds = texts * data.max_length * 2 * target / speed
        steps.append(Step(f"signal ({reference.signal})", texts * length * signal_width, seconds))
    whole = plan_reference(reference.training, examples)
    unroll = settings.eagle.steps if settings.eagle.enabled else 1
    head = 2 / 6 * config.get_text_config().hidden_size * config.get_text_config().vocab_size  # p, once a token
    for name, plan in [
        ("reference", whole),
        *((d.name, plan_draft(whole, d.k, d.iso)) for d in (settings.draft, *settings.comparisons)),
    ]:
        seconds = trained(plan.steps, plan.batch_size, unroll * (draft + head), length)
        steps.append(Step(f"{name}, {draft / 1e6:.1f} M parameters, {plan.steps} steps", 16.0 * draft, seconds))
    tried = (2 + len(settings.comparisons) + len(evaluation.draft_lengths)) * len(evaluation.temperatures)
    alone = (
        evaluation.decode_prompts * evaluation.repeats * tried * evaluation.max_new_tokens * 4 * target / machine.bytes
    )
    both = 2 * written(evaluation.prompts, evaluation.max_new_tokens, evaluation.batch_size)
    steps.append(Step("evaluation and export", 4.0 * draft, both + alone))
    return steps


def table(steps: list[Step]) -> Table:
    """For the terminal."""
    shown = Table("stage", "writes", "takes about", box=None, pad_edge=False)
    whole = Step("in all", sum(s.bytes for s in steps), sum(s.seconds for s in steps))
    for step in (*steps, whole):
        size = f"{step.bytes / 1e9:.1f} GB" if step.bytes >= 1e9 else f"{step.bytes / 1e6:.0f} MB"
        shown.add_row(step.name, size, duration(step.seconds))
    return shown


def _config(model: ModelSettings, vocab: int) -> PretrainedConfig:
    if model.model is None:
        return build_config(model.architecture, vocab)
    return load_config(model.model, trust_remote_code=model.trust_remote_code)


def _parameters(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def _draft(settings: Settings, config: PretrainedConfig, target: int, vocab: int) -> tuple[int, float]:
    """Parameters of the draft, and bytes of the signal for each token."""
    text, reference = config.get_text_config(), settings.reference
    hidden = text.hidden_size * (2 if reference.signal_dtype == "bfloat16" else 4)
    bytes = {"hidden": hidden, "topk": 8 * reference.signal_k, "log_probs": 4 * text.vocab_size, "online": 0}
    if settings.eagle.enabled:
        own = settings.eagle
        made = head_config(text, own.version, **own.shape())
        with torch.device("meta"):
            parameters = sum(p.numel() for p in FeatureHead(made).parameters())
        kept = 1 if own.version == 1 else 4 if reference.signal == "hidden" else 3
        return parameters, kept * hidden + (bytes["topk"] if reference.signal == "topk" else 0)
    initial = settings.initial
    if initial.kind == "cut":
        share = len(kept_layers(initial.layers, text.num_hidden_layers)) / text.num_hidden_layers
        embedding = text.hidden_size * text.vocab_size
        return int(embedding + share * (target - embedding)), bytes[reference.signal]
    return _parameters(_config(initial, vocab)), bytes[reference.signal]

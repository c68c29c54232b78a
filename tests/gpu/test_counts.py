"""How often the host waits for the device, and how many kernels are launched, held against ``counts.yaml``.

Counted on the pretended device. More than is recorded fails with the lines that wait. Fewer fails too, until
``pytest tests/gpu/test_counts.py --device pretended --record`` has written the file anew.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
import yaml
from families import build_tiny, resembling
from heads import make_block_head, make_head
from pairs import make_tokenizer
from pretended_cuda import Watch
from tiny_run import given, run_tiny, tiny_settings

from decode import loop
from decode.core.sampling import LogitsWarper, TorchRng
from decode.drafters.probe import AcceptanceProbe, save_probes
from decode.methods import MethodInputs, build
from decode.models.check import open_draft_runner, open_runner
from decode.models.fast.forward import fast_runner
from decode.options import MethodOptions
from distill.config import DraftSettings, Settings
from distill.config.models import BlockSettings, StudentSettings
from distill.training.trainer import ProgressLines

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not devices.PRETENDED, reason="counts on the pretended device")]
FILE = Path(__file__).with_name("counts.yaml")
ROOT = Path(__file__).parents[2]
HEAD = """# What a round, a training step or a layer costs, each as test_counts.py counts it, which writes this file (--record).
# sync: the host waits for a result; h2d: for a copy to the device; event: for an event. launch: operators on the device.
"""
ROUNDS = 6  # counted, after two others
STEPS = 3  # counted, after another one; none of them is logged
Counted = Callable[[str, Watch, int], bool]


@pytest.fixture
def as_recorded(request: pytest.FixtureRequest) -> Counted:
    """Whether the events of each of a number of rounds or steps are those that are recorded."""

    def compare(name: str, watch: Watch, count: int) -> bool:
        found = {kind: round(watch.kinds[kind] / count, 2) for kind in ("sync", "h2d", "event", "launch")}
        recorded = yaml.safe_load(FILE.read_text()) if FILE.is_file() else {}
        if request.config.getoption("record"):
            lines = [f"{key}: {json.dumps(value)}" for key, value in sorted((recorded | {name: found}).items())]
            FILE.write_text(HEAD + "\n".join(lines) + "\n")
            return True
        print(f"{name}: {found}, recorded {recorded[name]}; of each:\n{watch.table(count)}")
        return bool(found == recorded[name])

    return compare


# -- decoding ---------------------------------------------------------------------------------------------------------


def tiny(layers: int = 4) -> Any:
    return build_tiny("llama", num_hidden_layers=layers, max_position_embeddings=512)


@cache
def target_of(layers: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    return tiny(layers).to("cuda", dtype)


@cache
def repeating() -> Any:
    """A target that writes its last token again, whose texts can be copied from."""
    model = tiny()
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    return model.to("cuda")


def count_rounds(
    method: str, target: Any, *, temperature: float = 0.0, batch: int = 1, draft: Any = None, **options: Any
) -> Watch:
    """The events of some rounds in which no text begins or ends."""
    # the fast forward of 16 bits is not compared with transformers' first: these weights make much of every rounding
    runner, warp = (fast_runner if target.dtype == torch.bfloat16 else open_runner)(target), LogitsWarper(temperature)
    drafter = None if draft is None else open_draft_runner(draft.to("cuda"), runner.model)
    system = build(method, MethodInputs(runner, warp, drafter, options=MethodOptions(**options)))
    texts = []
    for number in range(batch):
        prompt = [3, 7, 1, 9, 3, 7, *range(2, 3 + number % 3)]
        texts.append(loop.Text(runner, system, warp, prompt, rng=TorchRng(number), shares_learning=batch == 1))
    rounds = loop.run(runner, system, texts, batch)
    for _ in range(2 * batch):
        next(rounds)
    with Watch(ROOT) as watch:
        for _ in range(ROUNDS * batch):
            next(rounds)
    rounds.close()
    return watch


HEADS = {"eagle3": lambda: make_head(tiny(), 3)} | {
    kind: lambda kind=kind: make_block_head(tiny(), kind)  # type: ignore[misc]
    for kind in ("dflash", "dspark", "dflash2")
}
ROWS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("autoregressive", None, {}),
    ("vanilla", "model", {}),
    ("eagle", "eagle3", {}),
    ("eagle-tree", "eagle3", {}),
    ("hybrid-tree", "eagle3", {"copy_branch": 4}),
    ("block", "dflash", {}),
    ("block", "dspark", {}),
    ("block", "dflash2", {}),
    ("prompt-lookup", None, {}),
    ("layerskip", None, {"exit_layer": 1}),
    ("confidence-probe", None, {"exit_layer": 1}),
    ("autoregressive", None, {"temperature": 0.7}),
    ("vanilla", "model", {"temperature": 0.7}),
    ("eagle", "eagle3", {"temperature": 0.7}),
    ("block", "dspark", {"temperature": 0.7, "sample_block": True}),
]


@pytest.mark.ci
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(("method", "draft", "options"), ROWS)
def test_a_round_waits_and_launches_no_more_than_is_recorded(
    method: str, draft: str | None, options: dict[str, Any], batch: int, as_recorded: Counted, tmp_path: Path
) -> None:
    options = dict(options)
    if method == "confidence-probe":
        probe = AcceptanceProbe(1, method, "match", torch.zeros(target_of().config.hidden_size), torch.zeros(3), 3.0)
        save_probes(tmp_path, target_of(), [probe])
        options["probes"] = str(tmp_path)
    target = repeating() if method in ("hybrid-tree", "prompt-lookup") else target_of()
    model = resembling(tiny(), 0.15) if draft == "model" else None
    watch = count_rounds(method, target, batch=batch, draft=HEADS[draft]() if draft in HEADS else model, **options)
    name = f"round, {method} {draft or ''} T={options.get('temperature', 0)}, batch {batch:2}".replace("  T", " T")
    assert as_recorded(name, watch, ROUNDS)


@pytest.mark.ci
def test_a_layer_in_sixteen_bits_launches_no_more_than_is_recorded(as_recorded: Counted) -> None:
    few, many = (count_rounds("autoregressive", target_of(n, torch.bfloat16)) for n in (2, 4))
    many.kinds.subtract(few.kinds)
    assert as_recorded("layer, bfloat16, one token", many, 2 * ROUNDS)


# -- training ---------------------------------------------------------------------------------------------------------


def settings_of(kind: str, signal: str, folder: Path) -> Settings:
    """A run that trains one draft beside a target that is as it is."""
    tokenizer = make_tokenizer(chat=True)
    target = build_tiny("llama", num_hidden_layers=4, vocab_size=len(tokenizer), max_position_embeddings=256)
    settings = tiny_settings(folder, target=given(folder / "given", target, tokenizer))
    settings.teacher.signal = signal  # type: ignore[assignment]
    settings.trainer.validate_every, settings.trainer.extra = 100, {"log_every_n_steps": 100}
    settings.training.steps = STEPS + 2
    settings.drafts = {"draft": DraftSettings()}
    if kind == "adaspec":
        settings.drafts = {"first": DraftSettings(), "draft": DraftSettings(reference="first")}
    elif kind != "language model":
        block = BlockSettings(size=4, anchors=6, markov_rank=None if kind == "dflash" else 4)
        settings.student = StudentSettings(kind=kind, unroll=3, block=block)  # type: ignore[arg-type]
    return settings


@pytest.mark.parametrize("signal", ["hidden", pytest.param("online", marks=pytest.mark.ci)])
@pytest.mark.parametrize("kind", ["language model", "adaspec", "eagle", "eagle3", "dflash", "dspark", "dflash2"])
def test_a_training_step_waits_and_launches_no_more_than_is_recorded(
    kind: str, signal: str, as_recorded: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the end of a step to the end of another one: its batch, forward, backward and update."""
    watch, original = Watch(ROOT), ProgressLines.on_train_batch_end

    def end(self: ProgressLines, trainer: Any, *rest: Any) -> None:
        if self.name == "draft" and trainer.global_step == 1 + STEPS:
            watch.__exit__()
        original(self, trainer, *rest)
        if self.name == "draft" and trainer.global_step == 1:
            watch.__enter__()

    monkeypatch.setattr(ProgressLines, "on_train_batch_end", end)
    run_tiny(settings_of(kind, signal, tmp_path))
    where = "states from disk" if signal == "hidden" else "target in process"
    assert as_recorded(f"step, {kind}, {where}", watch, STEPS)

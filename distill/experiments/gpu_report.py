"""``python -m distill gpu-report``: what this project does on one GPU, measured in about eight minutes.

Weights are random and made on the spot, because costs do not depend on them. Every part is a process of its own, which
gives its memory back. A part that fails leaves the rows that it had measured and the last line of its error.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch.nn import functional
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as hf_logging

from decode.bench import machine
from decode.bench.arithmetic import problems
from decode.bench.costs import LONGEST, measure_costs, timed_rounds
from decode.bench.page import markdown_table
from decode.bench.prediction import break_even
from decode.commands.parsing import parse
from decode.errors import UserError, scratch_folder, write_text
from decode.method_options import MethodOptions
from decode.methods import MethodInputs, build
from decode.models.choose_runner import open_draft_runner, open_runner
from decode.models.loading import config_for
from decode.models.runner import synchronize
from decode.sampling import LogitsWarper
from distill.config.training import StudentSettings
from distill.data.context import StageContext
from distill.data.tokenizer import train_tokenizer
from distill.experiments.speed import TrainingBenchSettings, run
from distill.losses.chunked import LossRequest, fused_loss
from distill.losses.divergences import Divergence, TargetRows
from distill.models.lm_head import LMHead
from distill.run_stages import new_head, run_stages
from distill.stages import run_of
from distill.trainer import peak_memory, reset_peak_memory

LARGE, MIDDLE, SMALL = "Qwen3-1.7B", "Qwen3-0.6B", "Qwen3-0.6B of four layers"
SHAPES = {LARGE: (2048, 28), MIDDLE: (1024, 28), SMALL: (1024, 4)}  # width and layers
BATCHES, WIDTHS, DRAFTED = (1, 8, 32), (2, 4, 8, 16), 5
Row = dict[str, str]


@dataclass
class GpuReportSettings:
    """Settings of python -m distill gpu-report."""

    output: str = "docs/gpu.md"
    """Page that is written."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device that is measured. cpu, with scale tiny, only shows that the command works."""
    scale: Literal["full", "tiny"] = "full"
    """full: models of up to 1.7 billion parameters. tiny: of some thousand, whose numbers mean nothing."""

    @property
    def cuda(self) -> bool:
        """Whether a GPU is measured."""
        return self.device == "cuda"

    @property
    def how(self) -> dict[str, Any]:
        """Device and number format of tensors."""
        return {"device": self.device, "dtype": torch.bfloat16 if self.cuda else torch.float32}

    def sized(self, full: int, tiny: int) -> int:
        """The number for the scale."""
        return full if self.scale == "full" else tiny


def pytest_rows(settings: GpuReportSettings) -> Iterator[Row]:
    """Runs ``tests/gpu``; yields the result and the tests that failed."""
    chosen = [] if settings.scale == "full" else ["-k", "one_softmax_over_both"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-rfE", *chosen]
    environment = os.environ | {"DRAFTSMITH_TEST_DEVICE": settings.device}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    yield {"test": "all", "result": lines[-1]}
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            test, _, why = line.partition(" - ")
            yield {"test": test.split()[-1], "result": why}
    if done.returncode:
        raise UserError(f"pytest ended with status {done.returncode}")


def draft_rows(settings: GpuReportSettings) -> Iterator[Row]:
    """Trains a draft by AdaSPEC here and in Hugging Face's Trainer."""
    products = product_rate(settings)
    with scratch_folder() as folder:
        made = run_settings(settings, folder, f"--student.kind finetune --student.model {folder}/draft")
        sides = run(made, Console(quiet=True))["sides"]
    work = 6 * random_model(settings, SMALL, device="meta").num_parameters()
    for side, found in sides.items():
        speed = found["tokens_per_second"]
        yield training_row(f"AdaSPEC, {side}", speed, work * speed / products, found.get("memory_gb"))


def head_rows(settings: GpuReportSettings) -> Iterator[Row]:
    """Trains an EAGLE-3 and a DSpark head beside their target."""
    products, anchors, config = product_rate(settings), settings.sized(128, 8), shape(settings, MIDDLE)
    for kind in ("eagle3", "dspark"):
        reset_peak_memory(torch.device(settings.device))
        with scratch_folder() as folder:
            blocks = f"--student.block.size 7 --student.block.anchors {anchors}"
            made = run_settings(settings, folder, f"--student.kind {kind} {blocks} --teacher.signal online")
            context = StageContext(made, run_of(made), Console(quiet=True), keep_corpus=False)
            run_stages(context)
            record, seen = context.run.record("draft"), context.seen["draft"]
        assert record is not None
        reads, work = float(made.student.steps), 6.0 * record.parameters
        if made.student.is_block:  # which ends in the target's frozen output head
            reads *= anchors / made.data.max_length
            work += 4 * config.vocab_size * config.hidden_size
        work = reads * work + 2 * random_model(settings, MIDDLE, device="meta").num_parameters()
        speed = seen.tokens * (1 - 1 / seen.batches) / (seen.seconds - seen.first)
        memory = peak_memory(context.device) / 1e9 if settings.cuda else None
        yield training_row(f"{kind}, {made.student.steps} tokens deep", speed, work * speed / products, memory)


def loss_rows(settings: GpuReportSettings) -> Iterator[Row]:
    """Computes the divergence of a batch and its gradients, in chunks and from whole logits."""
    config, rows, how = shape(settings, MIDDLE), settings.sized(4096, 64), settings.how
    width, vocab = config.hidden_size, config.vocab_size
    hidden, known = torch.randn(rows, width, **how).requires_grad_(), torch.randn(rows, width, **how)
    linear, frozen = (torch.nn.Linear(width, vocab, bias=False, **how) for _ in range(2))
    frozen.requires_grad_(False)

    def chunked(*, compiled: bool = False) -> torch.Tensor:
        target = TargetRows(known, vocab, LMHead.of(frozen))
        return fused_loss(hidden, LMHead.of(linear), target, LossRequest(Divergence()), compiled=compiled).total

    def plain() -> torch.Tensor:
        p, log_q = frozen(known).float().softmax(-1), linear(hidden).float().log_softmax(-1)
        return functional.kl_div(log_q, p, reduction="sum")

    def step(loss: Callable[[], torch.Tensor]) -> None:
        hidden.grad = linear.weight.grad = None
        loss().backward()

    kinds: dict[str, Callable[[], torch.Tensor]] = {"in chunks": chunked}
    if settings.cuda:  # as training there does
        kinds["in chunks, compiled"] = lambda: chunked(compiled=True)
    for name, loss in (kinds | {"whole logits": plain}).items():
        seconds, memory = timed(lambda loss=loss: step(loss), settings)  # type: ignore[misc]
        yield {"rows × ids": f"{rows:,} × {vocab:,}, {name}", "ms": f"{1e3 * seconds:.2f}", "memory (GB)": memory}


def decoding_rows(settings: GpuReportSettings) -> Iterator[Row]:
    """Measures forwards of a target and of two drafts, and rounds of decoding with them."""
    target, small = random_model(settings, LARGE), random_model(settings, MIDDLE)
    head = new_head(target, None, StudentSettings("eagle3"), 0).to(target.device, target.dtype)
    runner, warp, context = open_runner(target), LogitsWarper(0.0), settings.sized(512, 16)
    for name, method, draft in ((MIDDLE, "vanilla", small), ("EAGLE-3 head", "eagle", head.eval())):
        drafter = open_draft_runner(draft, target)
        built = build(method, MethodInputs(runner, warp, drafter, options=MethodOptions(DRAFTED)))
        for batch in BATCHES:
            cost = measure_costs(runner, drafter, widths=(*WIDTHS, DRAFTED + 1), context=context, batch=batch)
            ids = torch.randint(runner.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0))
            for count in (1, settings.sized(16, 2)):  # the first round warms up
                *parts, _ = timed_rounds(runner, built, warp, ids.tolist(), count)
            needed, k = min((break_even(k, cost) or 2.0, k) for k in range(1, LONGEST + 1))
            row = {"draft": name, "batch": str(batch), "t(B) ms": f"{1e3 * cost.target_seconds:.2f}"}
            row |= {"c": f"{cost.cost_ratio:.3f}"} | {f"v({n}B)": f"{cost.v(n):.2f}" for n in WIDTHS}
            row["least break-even α"] = f"{needed:.2f} (k = {k})" if needed <= 1 else "none"
            row["forwards of a round (ms)"] = f"{1e3 * cost.target_seconds * cost.of_round(DRAFTED):.1f}"
            yield row | {"round (ms)": f"{1e3 * sum(parts):.1f}"}


Part = Callable[[GpuReportSettings], Iterator[Row]]
SHARE = "MFU is over the measured rate of matrix products and counts 6 operations a parameter and token read"
PARTS: dict[str, tuple[Part, str]] = {
    "Tests": (pytest_rows, "`make test-gpu`."),
    "Training of drafts": (
        draft_rows, f"The draft is {SMALL}, the target {MIDDLE}, which Trainer runs in each step. {SHARE}.",
    ),
    "Training of heads": (head_rows, f"The target is {MIDDLE} and runs in each step. {SHARE}, 2 of the target's."),
    "Loss": (loss_rows, "KL divergence, with its gradients for the hidden states and the output head."),
    "Decoding": (
        decoding_rows, f"The target is {LARGE}. c, v(n) and α are those of `python -m decode profile`, without "
        f"bookkeeping. A round drafts {DRAFTED} tokens; the last column minus the one before it is bookkeeping.",
    ),
}  # fmt: skip
"""Every part's rows, and the text above its table."""


def shape(settings: GpuReportSettings, name: str, tokenizer: Any = None) -> PretrainedConfig:
    """The configuration of a model of this name; a tiny one is narrow and has few ids."""
    (width, layers), part, heads = SHAPES[name], settings.sized(1, 64), settings.sized(16, 2)
    return config_for(
        "qwen3", hidden_size=width // part, layers=layers, heads=heads, kv_heads=heads // 2, positions=4096,
        intermediate_size=3 * width // part, vocab=settings.sized(151_936, 512), tokenizer=tokenizer,
        extra={"head_dim": settings.sized(128, 8)},
    )  # fmt: skip


def random_model(settings: GpuReportSettings, name: str, tokenizer: Any = None, device: str | None = None) -> Any:
    """A model of random weights on a device; on ``meta`` it has none."""
    with torch.device(device or settings.device):
        model = AutoModelForCausalLM.from_config(shape(settings, name, tokenizer), dtype=settings.how["dtype"])
        return model.eval()


def run_settings(settings: GpuReportSettings, folder: Path, options: str) -> TrainingBenchSettings:
    """A run over texts of one length with these options; its models and texts are written to the folder."""
    texts = [f"{p.question}\n{p.solution}\n" for p in problems(0, "train", settings.sized(1600, 400))]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    tokenizer = train_tokenizer(texts, settings.sized(1024, 300))
    for name, place in ((MIDDLE, "target"), (SMALL, "draft")):
        random_model(settings, name, tokenizer).save_pretrained(folder / place)
        tokenizer.save_pretrained(folder / place)
    steps = f"steps {settings.sized(40, 10)}"
    accelerator, precision, dtype = ("gpu bf16-mixed bfloat16" if settings.cuda else "cpu 32-true float32").split()
    options += f"""
        --output-dir {folder} --target.kind as_is --target.model {folder}/target --target.dtype {dtype}
        --data.source {folder}/texts.jsonl --data.kind text --data.max-length {settings.sized(512, 64)}
        --data.train-examples 64 --student.training.{steps} --training.{steps} --speed.{steps}
        --training.batch-size {settings.sized(8, 2)} --speed.rounds {settings.sized(2, 1)} --drafts [{{"name":"draft"}}]
        --tracker.kind none --trainer.accelerator {accelerator} --trainer.devices 1 --trainer.precision {precision}
        --trainer.validate-every 1000000 --trainer.validation-examples 2"""
    return parse(TrainingBenchSettings, options.split())


def timed(function: Callable[[], object], settings: GpuReportSettings) -> tuple[float, str]:
    """Median seconds of a function that is called repeatedly, and the gigabytes that it takes of a GPU."""
    device, times = torch.device(settings.device), list[float]()
    for _ in range(10):
        reset_peak_memory(device)
        before = torch.cuda.memory_allocated() if settings.cuda else 0
        synchronize(device)
        began = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:]), f"{(peak_memory(device) - before) / 1e9:.2f}" if settings.cuda else "–"


def product_rate(settings: GpuReportSettings) -> float:
    """Floating-point operations a second of large matrix products."""
    n = settings.sized(8192, 256)
    a, b = (torch.randn(n, n, **settings.how) for _ in range(2))
    return 2 * n**3 / timed(lambda: a @ b, settings)[0]


def training_row(name: str, tokens: float, share: float, memory: float | None) -> Row:
    """The row of a training."""
    row = {"training": name, "tokens/s": f"{tokens:,.0f}", "MFU": f"{share:.1%}"}
    return row | {"peak memory (GB)": f"{memory:.2f}" if memory else "–"}


def measured(part: Part, settings: GpuReportSettings) -> tuple[list[Row], str]:
    """The rows of a part, and the last line of its error."""
    hf_logging.disable_progress_bar()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if settings.cuda else ""
    os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[0]  # the trainers take all the GPUs that they see
    rows = list[Row]()
    try:
        for row in part(settings):
            rows.append(row)
    except Exception:
        traceback.print_exc()
        return rows, traceback.format_exc().strip().splitlines()[-1]
    return rows, ""


def gpu_report(settings: GpuReportSettings) -> None:
    """Measures every part, prints it, and writes the page once all of them have ended.

    Raises:
        SystemExit: There is no GPU.
        UserError: A part failed; the page says why.
    """
    if settings.cuda and not torch.cuda.is_available():
        print("gpu-report needs a CUDA device, and PyTorch finds none here: nothing was measured", file=sys.stderr)
        raise SystemExit(1)
    git = subprocess.run("git rev-parse --short HEAD", shell=True, capture_output=True, text=True)  # if there is git
    place = machine.sentence(machine.describe(settings.device))
    if settings.cuda:
        place += f", {torch.cuda.get_device_properties(0).total_memory / 1e9:.0f} GB"
    page = [
        "# Measured on a GPU",
        f"`make gpu-report`, {date.today()}, commit {git.stdout.strip() or 'unknown'}: {place}.",
    ]
    failed = list[str]()
    for title, (part, about) in PARTS.items():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                rows, error = pool.submit(measured, part, settings).result()
            except BrokenProcessPool:
                rows, error = [], "its process was killed"
        page += [f"## {title}", about]
        if rows:
            page.append(markdown_table(list(rows[0]), [list(row.values()) for row in rows]))
        if error:
            page.append(f"**Failed**: {error}")
            failed.append(title)
        print("\n\n".join(page[page.index(f"## {title}") :]), end="\n\n", flush=True)
    write_text(settings.output, "\n\n".join(page) + "\n")
    print(f"wrote {settings.output}")
    if failed:
        raise UserError(f"{len(failed)} of {len(PARTS)} parts failed: {', '.join(failed)}; {settings.output} says why")

"""What this project does on one GPU, measured in about eight minutes: writes docs/gpu.md (``make gpu-report``).

Weights are random and made on the spot, because costs do not depend on them. Every part is a process of its own, which
gives its memory back. A part that fails leaves the rows that it had measured and the last line of its error.
"""

from __future__ import annotations

import argparse
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
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn import functional
from training_speed import measure
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as hf_logging

from decode.commands.cli import parse, run_main
from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from decode.files import scratch_folder, write_text
from decode.measure import machine
from decode.measure.arithmetic import problems
from decode.measure.costs import LENGTHS, LONGEST, break_even, measure_costs
from decode.measure.report import markdown_table
from decode.models.api import synchronize
from decode.models.check import open_draft_runner, open_runner
from distill.config import Settings
from distill.config.models import Architecture, StudentSettings
from distill.data.corpus import train_tokenizer
from distill.kinds.eagle import EAGLE3
from distill.losses.chunked import Rows, chunked_loss
from distill.losses.divergences import Divergence, TargetRows
from distill.networks.lm_head import LMHead
from distill.networks.models import config_for
from distill.rehearse import StepTimes
from distill.run import Run
from distill.stages import run_stages

LARGE, MIDDLE, SMALL = "Qwen3-1.7B", "Qwen3-0.6B", "Qwen3-0.6B of four layers"
SHAPES = {LARGE: (2048, 28), MIDDLE: (1024, 28), SMALL: (1024, 4)}  # width and layers
BATCHES = (1, 8, 32)
TINY = "--pretended" in sys.argv
"""On a pretended GPU with models of some thousand parameters, whose numbers mean nothing: shows that the script works."""
DEVICE = torch.device("cuda")
HOW: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
Row = dict[str, str]


def sized(full: int, tiny: int) -> int:
    """The number for the scale."""
    return tiny if TINY else full


def pytest_rows() -> Iterator[Row]:
    """Runs ``tests/gpu``; yields the result and the tests that failed."""
    chosen = ["pretended", "-k", "one_softmax_over_both"] if TINY else [DEVICE.type]
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-rfE", "--device", *chosen]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    yield {"test": "all", "result": lines[-1]}
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            test, _, why = line.partition(" - ")
            yield {"test": test.split()[-1], "result": why}
    if done.returncode:
        raise UserError(f"pytest ended with status {done.returncode}")


def draft_rows() -> Iterator[Row]:
    """Trains a draft by AdaSPEC here and in Hugging Face's Trainer."""
    products = product_rate()
    with scratch_folder() as folder:
        settings = run_settings(folder, f"--student.kind finetune --student.model {folder}/draft")
        sides = measure(settings, sized(40, 10), sized(2, 1), Console(quiet=True))
    work = 6 * random_model(SMALL, device="meta").num_parameters()
    for side, row in sides.items():
        speed = row["tokens_per_second"]
        yield training_row(f"AdaSPEC, {side}", speed, work * speed / products, row.get("memory_gb"))


def head_rows() -> Iterator[Row]:
    """Trains an EAGLE-3 and a DSpark head beside their target."""
    products, anchors, config = product_rate(), sized(128, 8), shape(MIDDLE)
    for kind in ("eagle3", "dspark"):
        torch.cuda.reset_peak_memory_stats()
        StepTimes.ends.clear()
        with scratch_folder() as folder:
            blocks = f"--student.block.size 7 --student.block.anchors {anchors}"
            settings = run_settings(folder, f"--student.kind {kind} {blocks} --teacher.signal online")
            settings.trainer.callbacks = [{"class_path": "distill.rehearse.StepTimes"}]
            run = Run(settings, Console(quiet=True))
            run_stages(run)
            record = run.draft_record("draft")
        reads, work = float(settings.student.steps), 6.0 * record.parameters
        if settings.student.draft.method == "block":  # which ends in the target's frozen output head
            reads *= anchors / settings.data.max_length
            work += 4 * config.vocab_size * config.hidden_size
        work = reads * work + 2 * random_model(MIDDLE, device="meta").num_parameters()
        (began, _), *rest = StepTimes.ends
        speed = sum(tokens for _, tokens in rest) / (rest[-1][0] - began)
        memory = torch.cuda.max_memory_allocated(DEVICE) / 1e9
        yield training_row(f"{kind}, {settings.student.steps} tokens deep", speed, work * speed / products, memory)


def loss_rows() -> Iterator[Row]:
    """Computes the divergence of a batch and its gradients, in chunks and from whole logits."""
    config, count = shape(MIDDLE), sized(4096, 64)
    width, vocab = config.hidden_size, config.vocab_size
    hidden, known = torch.randn(count, width, **HOW).requires_grad_(), torch.randn(count, width, **HOW)
    linear, frozen = (torch.nn.Linear(width, vocab, bias=False, **HOW) for _ in range(2))
    frozen.requires_grad_(False)

    def chunked(*, compiled: bool = False) -> torch.Tensor:
        rows = Rows(hidden, LMHead.of(linear), TargetRows(known, vocab, LMHead.of(frozen)), count)
        return chunked_loss(rows, Divergence(), compiled=compiled)[0]

    def plain() -> torch.Tensor:
        p, log_q = frozen(known).float().softmax(-1), linear(hidden).float().log_softmax(-1)
        return functional.kl_div(log_q, p, reduction="sum")

    def step(loss: Callable[[], torch.Tensor]) -> None:
        hidden.grad = linear.weight.grad = None
        loss().backward()

    compiled = partial(chunked, compiled=True)  # as training there does
    kinds = {"in chunks": chunked, "in chunks, compiled": compiled, "whole logits": plain}
    for name, loss in kinds.items():
        seconds, memory = timed(lambda loss=loss: step(loss))  # type: ignore[misc]
        yield {"rows × ids": f"{count:,} × {vocab:,}, {name}", "ms": f"{1e3 * seconds:.2f}", "memory (GB)": memory}


def decoding_rows() -> Iterator[Row]:
    """Measures forwards of a target and of two drafts, and rounds of decoding with them."""
    target, small = random_model(LARGE), random_model(MIDDLE)
    head = EAGLE3.create(target, None, StudentSettings(kind="eagle3"), 0).to(target.device, target.dtype)
    runner, warp, context = open_runner(target), LogitsWarper(0.0), sized(512, 16)
    for name, draft in ((MIDDLE, small), ("EAGLE-3 head", head.eval())):
        drafter = open_draft_runner(draft, target)
        ids = torch.randint(runner.vocab_size, (max(BATCHES), context), generator=torch.Generator().manual_seed(0))
        costs = measure_costs(runner, drafter, warp, ids.tolist(), lengths=LENGTHS, batch_sizes=BATCHES)
        needed, n = min((break_even(n, costs.rounds) or 2.0, n) for n in range(1, LONGEST + 1))
        for batch in BATCHES:
            row = {"draft": name, "batch": str(batch), "c": f"{costs.cost_ratio:.3f}"}
            row |= {f"n = {n}": f"{1e3 * costs.rounds.round(batch, n):.1f}" for n in (0, *LENGTHS)}
            yield row | {"least break-even α": f"{needed:.2f} (n = {n})" if needed <= 1 else "none"}


Part = Callable[[], Iterator[Row]]
SHARE = "MFU is over the measured rate of matrix products and counts 6 operations a parameter and token read"
PARTS: dict[str, tuple[Part, str]] = {
    "Tests": (pytest_rows, "`make test-gpu`."),
    "Training of drafts": (
        draft_rows, f"The draft is {SMALL}, the target {MIDDLE}, which Trainer runs in each step. {SHARE}.",
    ),
    "Training of heads": (head_rows, f"The target is {MIDDLE} and runs in each step. {SHARE}, 2 of the target's."),
    "Loss": (loss_rows, "KL divergence, with its gradients for the hidden states and the output head."),
    "Decoding": (
        decoding_rows, f"The target is {LARGE}. Milliseconds of a round that drafts n tokens for every text of a batch; "
        "c and α are those of `draftsmith decode profile`.",
    ),
}  # fmt: skip
"""Every part's rows, and the text above its table."""


def shape(name: str, tokenizer: Any = None) -> PretrainedConfig:
    """The configuration of a model of this name; a tiny one is narrow and has few ids."""
    (width, layers), part, heads = SHAPES[name], sized(1, 64), sized(16, 2)
    extra = {"head_dim": sized(128, 8), "num_key_value_heads": heads // 2}
    made = Architecture("qwen3", width // part, layers, heads, 3 * width // part, 4096, extra)
    return config_for(made, sized(151_936, 512), tokenizer)


def random_model(name: str, tokenizer: Any = None, device: str | None = None) -> Any:
    """A model of random weights on a device; on ``meta`` it has none."""
    with torch.device(device or DEVICE):
        return AutoModelForCausalLM.from_config(shape(name, tokenizer), dtype=HOW["dtype"]).eval()


def run_settings(folder: Path, options: str) -> Settings:
    """A run over texts of one length with these options; its models and texts are written to the folder."""
    texts = [f"{p.question}\n{p.solution}\n" for p in problems(0, "train", sized(1600, 400))]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    tokenizer = train_tokenizer(texts, sized(1024, 300))
    for name, place in ((MIDDLE, "target"), (SMALL, "draft")):
        random_model(name, tokenizer).save_pretrained(folder / place)
        tokenizer.save_pretrained(folder / place)
    steps = f"steps {sized(40, 10)}"
    options += f"""
        --output-dir {folder} --target.kind as_is --target.model {folder}/target --target.dtype bfloat16
        --data.source {folder}/texts.jsonl --data.max-length {sized(512, 64)}
        --data.train-examples 64 --student.training.{steps} --training.{steps}
        --training.batch-size {sized(8, 2)} --drafts {{"draft":{{}}}}
        --tracker none --trainer.accelerator gpu --trainer.devices 1 --trainer.precision bf16-mixed
        --trainer.validate-every 1000000 --trainer.validation-examples 2"""
    return parse(Settings, options.split())


def timed(function: Callable[[], object]) -> tuple[float, str]:
    """Median seconds of a function that is called repeatedly, and the gigabytes that it takes of a GPU."""
    times = list[float]()
    for _ in range(10):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        synchronize(DEVICE)
        began = time.perf_counter()
        function()
        synchronize(DEVICE)
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:]), f"{(torch.cuda.max_memory_allocated(DEVICE) - before) / 1e9:.2f}"


def product_rate() -> float:
    """Floating-point operations a second of large matrix products."""
    n = sized(8192, 256)
    a, b = (torch.randn(n, n, **HOW) for _ in range(2))
    return 2 * n**3 / timed(lambda: a @ b)[0]


def training_row(name: str, tokens: float, share: float, memory: float | None) -> Row:
    """The row of a training."""
    row = {"training": name, "tokens/s": f"{tokens:,.0f}", "MFU": f"{share:.1%}"}
    return row | {"peak memory (GB)": f"{memory:.2f}" if memory else "–"}


def start_device() -> None:
    """Pretends a GPU in this process if it is to."""
    if TINY:
        sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
        import pretended_cuda

        pretended_cuda.install()


def measured(title: str) -> tuple[list[Row], str]:
    """The rows of a part, and the last line of its error."""
    hf_logging.disable_progress_bar()
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    start_device()
    rows = list[Row]()
    try:
        for row in PARTS[title][0]():
            rows.append(row)
    except Exception:
        traceback.print_exc()
        return rows, traceback.format_exc().strip().splitlines()[-1]
    return rows, ""


def main() -> None:
    """Measures every part, prints it, and writes the page once all of them have ended, but for figures that mean nothing.

    Raises:
        UserError: There is no GPU, or a part failed; the page says why.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/gpu.md"), help="page that is written")
    parser.add_argument(
        "--pretended", action="store_true", help="tiny models on a pretended GPU, to see that the script works; no page"
    )
    output = parser.parse_args().output
    start_device()
    if not torch.cuda.is_available():
        raise UserError("gpu-report needs a CUDA device, and PyTorch finds none here: nothing was measured")
    git = subprocess.run("git rev-parse --short HEAD", shell=True, capture_output=True, text=True)  # if there is git
    place = machine.sentence(machine.describe(DEVICE.type))
    place += f", {torch.cuda.get_device_properties(0).total_memory / 1e9:.0f} GB"
    about = f"`make gpu-report`, {date.today()}, commit {git.stdout.strip() or 'unknown'}: {place}."
    page, failed = ["# Measured on a GPU", about], list[str]()
    for title, (_, text) in PARTS.items():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                rows, error = pool.submit(measured, title).result()
            except BrokenProcessPool:
                rows, error = [], "its process was killed"
        section = [f"## {title}", text]
        if rows:
            section.append(markdown_table(list(rows[0]), [list(row.values()) for row in rows]))
        if error:
            section.append(f"**Failed**: {error}")
            failed.append(title)
        page += section
        print("\n\n".join(section), end="\n\n", flush=True)
    if not TINY:
        write_text(output, "\n\n".join(page) + "\n")
        print(f"wrote {output}")
    if failed:
        raise UserError(f"{len(failed)} of {len(PARTS)} parts failed: {', '.join(failed)}; the page says why")


if __name__ == "__main__":
    sys.exit(run_main(main))

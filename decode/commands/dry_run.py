"""``bench --dry-run``: a benchmark's configuration in miniature, with tiny random models and without a network.

Every method, suite, temperature and store takes the path of the real run. Models are random ones of the same families,
rows of data sets that are not on this machine are word problems, and probes are random.
"""

import copy
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

from decode.bench.arithmetic import problems
from decode.bench.datasets import PRESETS
from decode.commands.bench import draft_names
from decode.commands.checks import check_models
from decode.commands.settings import BenchSettings
from decode.drafters.probe import FEATURES, KINDS, AcceptanceProbe, save_probes
from decode.method_options import split_spec
from decode.methods import PROBED, SELF_SPECULATIVE
from decode.models.heads import head_config, head_version, random_head, save_head
from decode.models.shapes import config_for, family_of
from decode.progress import output_console

ROWS = {"train": 48, "validation": 8, "test": 8}
FIRST_NUMBER = {"train": 601, "validation": 511, "test": 11}  # MBPP's task numbers define its splits
TEXT_COLUMNS = ("prompt", "question", "instruction", "input", "text", "article", "document")
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def shrink(settings: BenchSettings, console: Console | None = None) -> BenchSettings:
    """Settings of the same benchmark in miniature; its models and files are written to ``<output>-dry-run``.

    Raises:
        UserError: the settings are refused as they are.
    """
    console, small = console or output_console(), copy.deepcopy(settings)
    small.device, small.device_map, small.dtype, small.trust_remote_code = "cpu", None, "float32", False
    check_models(small)
    folder = Path(f"{settings.output or 'runs/bench'}-dry-run")
    shutil.rmtree(folder, ignore_errors=True)
    console.print(f"dry run of {settings.output or 'bench'}, in {folder}", highlight=False)
    small.output, small.datastore, small.trigrams = str(folder), None, None
    small.suite = [_local(spec, folder / "rows", "test", console) for spec in settings.suite]
    small.corpus = [_local(spec, folder / "rows", "train", console) for spec in settings.corpus]
    if (settings.datastore or settings.trigrams) and not settings.corpus:
        small.corpus = ["arithmetic"]
    small.corpus_texts, small.cost_turns = min(settings.corpus_texts, ROWS["train"]), 1
    small.limit, small.repeats, small.max_new_tokens, small.threads, small.samples = 2, 1, 8, 1, 1
    small.draft_lengths = settings.draft_lengths[:2]
    small.batch_sizes = [min(size, 3) for size in settings.batch_sizes[:2]]
    small.methods, deepest = [], max([small.exit_layer or 0, *small.skip_attention, *small.skip_mlp])
    for spec in settings.methods:
        method, own = split_spec(spec)
        deepest = max(deepest, own.get("exit_layer") or 0)
        if "texts" in own:
            own["texts"] = min(own["texts"], ROWS["train"] // 2)
        own.pop("probes", None)
        given = (f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in own.items())
        small.methods.append(":".join([method, *given]))
    # a byte-level tokenizer without merges
    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHAT
    target = tiny_model(str(small.target), tokenizer, 64, max(4, deepest + 1), console)
    small.target, small.draft = save_tiny(target, tokenizer, folder / "models" / "target"), []
    for name, path in draft_names(settings.draft).items():
        place = folder / "models" / name.replace("/", "-")
        if (version := head_version(path)) is not None:
            place.mkdir(parents=True)
            save_head(random_head(head_config(target.config, version)), place)
        else:
            save_tiny(tiny_model(path, tokenizer, 32, 2, console), tokenizer, place)
        small.draft.append(f"{name}={place}")
    if small.probes is not None or {split_spec(spec)[0] for spec in small.methods} & PROBED & SELF_SPECULATIVE:
        small.probes = str(folder / "probes")
        width, made = target.config.hidden_size, torch.Generator().manual_seed(0)
        extras = {kind: torch.zeros(len(FEATURES) if kind != "probe" else 0) for kind in KINDS}
        probes = [
            AcceptanceProbe(layer, kind, label, torch.randn(width, generator=made) / width, extras[kind], 1.0)
            for layer in range(1, target.config.num_hidden_layers)
            for kind in KINDS
            for label in ("match", "accept")
        ]
        save_probes(Path(small.probes), target, probes)
    return small


def tiny_model(
    name: str, tokenizer: PreTrainedTokenizerBase, width: int, layers: int, console: Console, *, tied: bool = True
) -> PreTrainedModel:
    """A random model of the named one's family; ``tied``: embedding and output head share one matrix."""
    family, grouped, note = family_of(name)
    if note:
        console.print(f"  {note}", highlight=False)
    config = config_for(
        family,
        hidden_size=width,
        layers=layers,
        heads=4,
        kv_heads=2 if grouped else None,
        vocab=len(tokenizer),
        positions=4096,
        tie_embeddings=tied,
        tokenizer=tokenizer,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.eval()


def save_tiny(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Write a model and its tokenizer without a progress bar; returns the folder."""
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    model.save_pretrained(folder)
    if bars:
        hf_logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)
    return str(folder)


def _local(spec: str, folder: Path, split: str, console: Console) -> str:
    """A suite or corpus; if it is not on this machine, a file of stand-in rows."""
    head, equals, path = spec.partition("=")
    source = head.partition(":")[0]
    if source in ("arithmetic", "chat", "open") or Path(path or spec).is_file():
        return spec
    console.print(f"  word problems stand for {spec}", highlight=False)
    if source not in PRESETS:  # a text file
        file = write_rows(folder / "text", "text", lambda q, a, n: {"text": f"{q}\n{a}"})["train"]
        return f"prompts={file}" if equals else str(file)
    files = write_rows(folder / source, source, lambda *problem: preset_row(source, *problem))
    return f"{source}={files[split]}"


def preset_row(source: str, question: str, solution: str, number: int) -> dict[str, Any]:
    """A row with the columns of a preset, made of a word problem."""
    if PRESETS[source].kind == "chat":
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]}
    return row_with(PRESETS[source].columns, source, question, solution, number)


def row_with(columns: Iterable[str], source: str, question: str, solution: str, number: int) -> dict[str, Any]:
    """A row with these columns, made of a word problem."""
    special = {
        "test_list": ["assert True"],
        "task_id": number,
        "choices": ["1", "2", "3", "4"],
        "turns": [question],
        "category": "word problems",
    }
    row = {name: special.get(name, question if name in TEXT_COLUMNS else solution) for name in columns}
    if source == "mmlu":
        row["answer"] = 0
    if "category" in row:  # the multi-turn sets, whose first turn is the prompt
        row["turns"] = [question]
    return row or {"prompt": question, "response": solution}


def write_rows(
    folder: Path, source: str, row: Callable[[str, str, int], dict[str, Any]], *, train: int = ROWS["train"]
) -> dict[str, Path]:
    """Write stand-in rows, one file for each split; `row` makes one of a question, its solution and a number."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for split, count in (ROWS | {"train": train}).items():
        made = enumerate(problems(0, split, count), FIRST_NUMBER[split])
        rows = [row(problem.question, problem.solution, number) for number, problem in made]
        files[split] = folder / f"{split}.jsonl"
        files[split].write_text("".join(json.dumps(content) + "\n" for content in rows), encoding="utf-8")
    return files

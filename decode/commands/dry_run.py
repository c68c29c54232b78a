"""``--dry-run``: a benchmark's configuration, run through to its report in seconds, with tiny random models.

Every method, suite, temperature and store takes the path that the real run will take, so a mistake shows before the
hours it would cost. Nothing is downloaded: models of the same families are made on the spot, word problems stand for
the rows of data sets, and probes are random.
"""

import copy
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
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
TEXT_COLUMNS = ("prompt", "question", "instruction", "input", "text", "article", "document")
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
NARROWEST, WIDTHS = 2, {"target": 64, "draft": 32}

RowMaker = Callable[[str, str, int], dict[str, Any]]  # a row from a question, its solution and a running number


def shrink(settings: BenchSettings, console: Console | None = None) -> BenchSettings:
    """Settings of the same benchmark in miniature; what it needs is made under ``<output>-dry-run``.

    Raises:
        UserError: the settings are refused as they are.
    """
    console = console or output_console()
    small = copy.deepcopy(settings)
    small.device, small.device_map, small.dtype, small.trust_remote_code = "cpu", None, "float32", False
    check_models(small)
    folder = Path(f"{settings.output or 'runs/bench'}-dry-run")
    shutil.rmtree(folder, ignore_errors=True)
    console.print(f"dry run of {settings.output or 'bench'}, in {folder}", highlight=False)
    small.output = str(folder)
    small.suite = [_local(spec, folder / "rows", console) for spec in settings.suite]
    small.corpus = [_local(spec, folder / "rows", console) for spec in settings.corpus]
    small.corpus_texts = min(settings.corpus_texts, ROWS["train"])
    small.methods = [_small_spec(spec) for spec in settings.methods]
    small.datastore = small.trigrams = None
    if (settings.datastore or settings.trigrams) and not settings.corpus:
        small.corpus = ["arithmetic"]
    small.limit, small.repeats, small.max_new_tokens, small.threads, small.samples = 2, 1, 8, 1, 1
    small.draft_lengths, small.cost_turns = settings.draft_lengths[:2], 1
    small.batch_sizes = [min(size, 3) for size in settings.batch_sizes[:2]]
    _make_models(small, folder, console)
    return small


def _make_models(small: BenchSettings, folder: Path, console: Console) -> None:
    """Tiny models in place of the named ones, and random probes where the settings name a folder of probes."""
    exits = [own["exit_layer"] for _, own in map(split_spec, small.methods) if own.get("exit_layer")]
    deepest = max([*exits, small.exit_layer or 0, *small.skip_attention, *small.skip_mlp], default=0)
    tokenizer = tiny_tokenizer()
    target = tiny_model(str(small.target), tokenizer, WIDTHS["target"], max(4, deepest + 1), console)
    small.target = save_tiny(target, tokenizer, folder / "models" / "target")
    drafts = []
    for name, path in draft_names(small.draft).items():
        place = folder / "models" / name.replace("/", "-")
        if (version := head_version(path)) is not None:
            place.mkdir(parents=True)
            save_head(random_head(head_config(target.config, version)), place)
        else:
            save_tiny(tiny_model(path, tokenizer, WIDTHS["draft"], NARROWEST, console), tokenizer, place)
        drafts.append(f"{name}={place}")
    small.draft = drafts
    methods = {split_spec(spec)[0] for spec in small.methods}
    if small.probes is not None or methods & (PROBED & SELF_SPECULATIVE):
        small.probes = str(folder / "probes")
        save_probes(Path(small.probes), target, _random_probes(target))


def tiny_model(
    name: str, tokenizer: PreTrainedTokenizerBase, width: int, layers: int, console: Console, *, tied: bool = True
) -> PreTrainedModel:
    """A random model of the family of the named one; ``tied``: with one matrix for embedding and output head."""
    family, grouped, told = family_of(name)
    if told:
        console.print(f"  {told}", highlight=False)
    config = config_for(
        family, hidden_size=width, layers=layers, heads=4, kv_heads=2 if grouped else None, vocab=len(tokenizer),
        positions=4096, tie_embeddings=tied, tokenizer=tokenizer,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 320 tokens, learned from word problems, with a chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator((problem.question for problem in problems(0, "train", 50)), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHAT
    return tokenizer


def save_tiny(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Write a model and its tokenizer without a bar; returns the folder."""
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    model.save_pretrained(folder)
    if bars:
        hf_logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)
    return str(folder)


def _random_probes(model: PreTrainedModel) -> list[AcceptanceProbe]:
    depth, width = model.config.num_hidden_layers, model.config.hidden_size
    made = torch.Generator().manual_seed(0)
    extras = {kind: torch.zeros(len(FEATURES) if kind != "probe" else 0) for kind in KINDS}
    return [
        AcceptanceProbe(layer, kind, label, torch.randn(width, generator=made) / width, extras[kind], 1.0)
        for layer in range(1, depth)
        for kind in KINDS
        for label in ("match", "accept")
    ]


def _small_spec(spec: str) -> str:
    """A method with its options, those that cost time made small."""
    method, own = split_spec(spec)
    if "texts" in own:
        own["texts"] = min(own["texts"], ROWS["train"] // 2)
    own.pop("probes", None)
    given = (f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in own.items())
    return ":".join([method, *given])


def _local(spec: str, folder: Path, console: Console) -> str:
    """The entry of a suite or corpus, with a file of stand-in rows where it is not on this machine."""
    head, equals, path = spec.partition("=")
    source = head.partition(":")[0]
    if source in ("arithmetic", "chat", "open") or Path(path or spec).is_file():
        return spec
    if source not in PRESETS:  # a text file that is not here
        console.print(f"  word problems stand for {spec}", highlight=False)
        file = write_rows(folder / "text", "text", lambda q, a, n: {"text": f"{q}\n{a}"})["train"]
        return f"prompts={file}" if equals else str(file)
    console.print(f"  word problems stand for the rows of {source}", highlight=False)
    files = write_rows(folder / source, source, lambda *problem: preset_row(source, *problem), merged=True)
    return f"{source}={files['all']}"


def preset_row(source: str, question: str, solution: str, number: int) -> dict[str, Any]:
    """A row with the columns of a preset, made of a word problem."""
    preset = PRESETS[source]
    if preset.kind == "chat":
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]}
    return row_with(preset.columns, source, question, solution, number)


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
    folder: Path, source: str, row: RowMaker, *, merged: bool = False, train: int = ROWS["train"]
) -> dict[str, Path]:
    """Files of stand-in rows, one a split, or a single one (``all``) that a suite reads any split from."""
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, list[dict[str, Any]]] = {}
    for split, count in (ROWS | {"train": train}).items():
        rows = [row(p.question, p.solution, number) for number, p in enumerate(problems(0, split, count))]
        if source == "mbpp":  # its task numbers say the split
            first = {"test": 11, "validation": 511, "train": 601}[split]
            rows = [{**content, "task_id": first + number} for number, content in enumerate(rows)]
        made["all" if merged else split] = made.get("all", []) + rows
    files = {name: folder / f"{name}.jsonl" for name in made}
    for name, rows in made.items():
        files[name].write_text("".join(json.dumps(content) + "\n" for content in rows), encoding="utf-8")
    return files

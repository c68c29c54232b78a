"""Decoding on a GPU: every method, alone and in a batch, writes what it writes on a CPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from families import build_tiny, resembling
from gpu_tests import CI, DEVICE, GPU, draft, target, there, with_ci
from greedy import generate
from pairs import make_tokenizer
from scripted import build_datastore, build_trigram_table

from decode.core.round import metrics
from decode.core.sampling import LogitsWarper, TorchRng
from decode.core.stop import Fixed, StopRule, max_probability
from decode.drafters.corpus import tokenizer_fingerprint
from decode.drafters.hybrid import HybridDrafter
from decode.drafters.model import ModelDrafter
from decode.drafters.probe import KINDS, AcceptanceProbe, save_probes
from decode.loop import Method, Text, decode, decode_texts
from decode.methods import MethodInputs, build, is_lossless
from decode.models.check import open_draft_runner, open_runner
from decode.models.tokens import StopStrings
from decode.options import MethodOptions

pytestmark = GPU
PROMPTS = [[3, 7, 1, 9, 3, 7], [1, 2, 3, 1, 2, 3, 1, 2, 3], [5]]
NEW = 12
SAMPLED = LogitsWarper(temperature=0.7, top_p=0.9, repetition_penalty=1.3)


class Case(NamedTuple):
    method: str
    draft: str | None = None
    rule: str | None = None
    sample_block: bool = False


BLOCKS = "dflash", "dspark", "dflash2"
CHAINS = [  # whose tokens are drawn from the draft, one after another
    *(Case(name, "model") for name in ("vanilla", "hf-dynamic", "cost-optimal", "adasd", "ears", "fuzzy", "typical")),
    Case("vanilla", "model", "block-verification"),
    Case("eagle", "eagle"),
    Case("eagle", "eagle3", "block-verification"),
    *(Case(name) for name in ("layerskip", "draft-verify", "adaspeed", "adaspeed-probe", "confidence-probe")),
    *(Case("block", kind, sample_block=True) for kind in BLOCKS),
    Case("block", "dspark", "block-verification", sample_block=True),
]
OTHERS = [
    Case("eagle-tree", "eagle"),
    Case("hybrid-tree", "eagle3"),
    Case("block-tree", "dspark"),
    Case("lookahead"),
    Case("block", "dspark"),
    *(Case("block", kind) for kind in BLOCKS[::2]),
    Case("cost-optimal", "dspark"),
    Case("hybrid", "model"),
    *(Case(name) for name in ("autoregressive", "prompt-lookup", "suffix", "rest", "adaptix")),
]
SHAPE = {"exit_layer": 1, "tree_width": 3, "tree_nodes": 8, "copy_branch": 2, "searches": 20}


def named(case: Case) -> str:
    return "-".join(filter(None, case[:3])) + "-sampled" * case.sample_block


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents, tri-grams and probes."""
    folder, tokenizer, runs = tmp_path_factory.mktemp("stores"), make_tokenizer(), [[*range(2, 40)] * 2] * 3
    for store in (build_datastore, build_trigram_table):
        store(runs, folder, tokenizer_fingerprint(tokenizer))
    width = target().config.hidden_size
    save_probes(folder / "probes", target(), [
        AcceptanceProbe(1, kind, label, torch.linspace(-0.1, 0.1, width), torch.ones(3 * (kind != KINDS[0])), 0.3, 1.5, {})
        for kind in KINDS for label in ("match", "accept")
    ], {})  # fmt: skip
    return folder


def texts(case: Case, warp: LogitsWarper, device: str, stores: Path) -> list[Text]:
    """What the method writes on a device after all prompts at once."""
    own, runner = there(target(), device), None
    if case.draft is not None:
        runner = open_draft_runner(there(draft(case.draft), device), own)
    probes = {"probes": str(stores / "probes")} if case.method.endswith("-probe") else {}
    options = MethodOptions(**SHAPE, **probes, rule=case.rule, sample_block=case.sample_block)
    inputs = MethodInputs(open_runner(own), warp, runner, make_tokenizer(), stores, options)
    method = build(case.method, inputs)
    rngs = [TorchRng(seed) for seed in range(len(PROMPTS))]
    return decode_texts(inputs.target, method, warp, PROMPTS, rngs=rngs, max_new_tokens=NEW)


@pytest.mark.parametrize(
    "case", with_ci([*CHAINS, *OTHERS], CHAINS[0], CHAINS[3], CHAINS[9], CHAINS[14], *OTHERS[1:4]), ids=named
)
def test_greedy_texts_in_a_batch_are_the_cpus(case: Case, stores: Path) -> None:
    found, wanted = texts(case, LogitsWarper(), DEVICE, stores), greedy_texts()
    if not is_lossless(case.method, case.rule):
        wanted = [text.ids for text in texts(case, LogitsWarper(), "cpu", stores)]
    assert [text.ids for text in found] == wanted
    drafted = sum(r.drafted for text in found for r in text.rounds)
    assert (drafted > 0) == (case.method != "autoregressive")


@cache
def greedy_texts() -> list[list[int]]:
    return [generate(target(), prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("case", with_ci(CHAINS, CHAINS[5], CHAINS[8], CHAINS[16]), ids=named)
def test_sampled_texts_with_penalties_are_the_cpus(case: Case, stores: Path) -> None:
    """Of drafts that are drawn, from one source of random numbers; with what every rule measured."""
    found, wanted = (texts(case, SAMPLED, device, stores) for device in (DEVICE, "cpu"))
    assert [text.ids for text in found] == [text.ids for text in wanted]
    a, b = (metrics([text.rounds for text in group]) for group in (found, wanted))
    for name in ("alpha", "accepted_length", "tv_spent"):
        assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["model", "eagle3", "dspark"])
def test_whole_texts_are_written_in_every_number_format(dtype: torch.dtype, kind: str) -> None:
    """A model accepts all of its own but for the rounding, and heads are what they are in 32 bits."""
    own, warp = there(target()).to(dtype), LogitsWarper(1.0)
    head = own if kind == "model" else there(draft(kind)).to(dtype)
    runner, method = open_runner(own), {"model": "vanilla", "eagle3": "eagle", "dspark": "block"}[kind]
    built = build(method, MethodInputs(runner, warp, open_draft_runner(head, own)))
    out = decode(runner, built, warp, PROMPTS[0], max_new_tokens=NEW, rng=TorchRng(0))
    assert len(out.new_ids) == NEW
    least = 1 - 1e-5 if dtype == torch.float32 else 0.9
    assert metrics([out.rounds])["alpha"] > (least if kind == "model" else 0)


@pytest.mark.parametrize("fast", [True, False], ids=["fast-forward", "ordinary-call"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "phi", "gpt_neox"])
def test_greedy_texts_of_families_are_those_of_generate(family: str, fast: bool) -> None:
    """As the CPU's own `generate` writes them."""
    plain = build_tiny(family)
    own, small = there(plain), there(resembling(plain, 0.15))
    runner, wanted = open_runner(own, fast=fast), generate(plain, PROMPTS[0], NEW)
    inputs = MethodInputs(runner, LogitsWarper(), open_draft_runner(small, own))
    for name in ("autoregressive", "vanilla"):
        assert decode(runner, build(name, inputs), LogitsWarper(), PROMPTS[0], max_new_tokens=NEW).ids == wanted


@CI
def test_stop_ids_and_stop_strings_end_texts_where_they_do_on_a_cpu() -> None:
    tokenizer, found = make_tokenizer(), []
    strings = [tokenizer.decode(greedy_texts()[0][-5:-3])]
    for device in (DEVICE, "cpu"):
        runner = open_runner(there(target(), device))
        small = open_draft_runner(there(draft("model"), device), runner.model)
        method = build("vanilla", MethodInputs(runner, LogitsWarper(), small))
        ends = {"stop_ids": {greedy_texts()[1][-3]}, "stop_strings": StopStrings(tokenizer, strings)}
        rngs = [TorchRng(0)] * len(PROMPTS)
        texts = decode_texts(runner, method, LogitsWarper(), PROMPTS, rngs=rngs, max_new_tokens=NEW, **ends)
        found.append([(text.ids, text.finish) for text in texts])
    assert found[0] == found[1]
    assert {"stop", "eos"} <= {finish for _, finish in found[0]}


def test_a_copy_after_a_refused_draft_leaves_nothing_of_it_in_the_drafts_cache() -> None:
    traces = []
    for device in ("cpu", DEVICE):
        runner, head = open_runner(there(target(), device)), open_draft_runner(there(draft("model"), device), target())
        warp = LogitsWarper()
        drafter = HybridDrafter(ModelDrafter(head, warp, runner.vocab_size), match=6, length=6)
        stop = StopRule(6, max_probability, True, Fixed(0.5), refuse=True)
        rngs = [TorchRng(i) for i in range(3)]
        texts = decode_texts(runner, Method("hybrid", drafter, stop), warp, PROMPTS, rngs=rngs, max_new_tokens=50)
        traces.append([[(r.draft.ids, r.path) for r in text.rounds] for text in texts])
    assert traces[0] == traces[1]

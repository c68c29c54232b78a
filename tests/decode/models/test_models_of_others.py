"""Drafts of another vocabulary: lossless by enumeration, greedy texts those of `generate`, commands run with them."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from benchmarks import run_benchmark
from enumeration import Clock, Experiment, ScriptedRunner, random_table
from pairs import TEXT, make_pair, make_suite, make_tokenizer
from plain_logits import draft_logits
from reading import Reader
from tokenizers_of_kinds import byte_level, sentencepiece, spelled_out
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from decode import loop
from decode.bench.benchmark import plan
from decode.bench.session import BenchOptions
from decode.commands import generate
from decode.commands.settings import GenerateSettings
from decode.drafters.draft_model import ModelDrafter
from decode.errors import UserError
from decode.loop import Method, decode
from decode.methods import STOPS, MethodInputs
from decode.models import other_tokenizer as vocabulary
from decode.models.choose_runner import open_draft_runner, open_runner
from decode.models.loading import open_draft
from decode.models.other_tokenizer import ForeignDraft, ForeignRunner, Intersection, Vocabulary
from decode.sampling import LogitsWarper, TorchRng
from decode.stopping import Fixed, StopRule, token_probability

TOLERANCE = 1e-12
SAMPLE = LogitsWarper(temperature=0.7)


# -- the distribution, enumerated ------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Intersection:
    """a, ab, b, cc for the target; b, x, c, a for the draft: two in common, the others read as two tokens."""
    monkeypatch.setattr(vocabulary, "LEAST", 1)
    target = spelled_out(["a", "ab", "b", "cc"])
    draft = spelled_out(["b", "x", "c", "a"])
    return Intersection(Vocabulary(target, 4, "target"), Vocabulary(draft, 4, "draft"))


def scripted(
    both: Intersection, *, tokens: int = 3, warp: LogitsWarper = SAMPLE, limit: int = 1 << 30
) -> tuple[Experiment, ForeignRunner]:
    clock = Clock()
    target = ScriptedRunner(random_table(1, 4), 4, clock=clock)
    inner = ScriptedRunner(random_table(3, 4, zeros=0), 4, clock=clock, cost=0.2, limit=limit)
    return Experiment(target, warp, [0, 3, 1, 0, 2], tokens, clock=clock), ForeignRunner(inner, both)


@pytest.mark.parametrize("name", STOPS)
def test_every_stop_rule_is_lossless(name: str, small: Intersection, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, draft = scripted(small)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=experiment.clock.perf_counter))
    stop = STOPS[name](MethodInputs(experiment.target, SAMPLE, draft))
    system = Method(name, ModelDrafter(draft, SAMPLE, 4), stop)
    assert experiment.bias(system) < TOLERANCE
    assert max(experiment.drafted) > 0
    assert any(sum(trace.accepted) for trace in experiment.traces)


@pytest.mark.parametrize(
    "warp",
    [
        LogitsWarper(1.0, top_k=2),
        LogitsWarper(0.8, top_p=0.8),
        LogitsWarper(1.0, repetition_penalty=1.7),
        LogitsWarper(),
        LogitsWarper(repetition_penalty=1.9),
    ],
    ids=["top-k", "top-p", "repetition", "greedy", "greedy-repetition"],
)
def test_every_warp_is_lossless(warp: LogitsWarper, small: Intersection) -> None:
    experiment, draft = scripted(small, warp=warp)
    stop = StopRule(5, token_probability, threshold=Fixed(0.2))
    assert experiment.bias(Method("foreign", ModelDrafter(draft, warp, 4), stop)) < TOLERANCE


@pytest.mark.parametrize("limit", [5, 7, 8, 10])
def test_a_draft_whose_context_ends_in_the_text_stops_drafting(limit: int, small: Intersection) -> None:
    """The prompt's five tokens are seven for the draft; the scripted runner refuses to read past its limit."""
    experiment, draft = scripted(small, tokens=4, limit=limit)
    experiment.prompt = [0, 3, 1, 0, 2]
    assert experiment.bias(Method("short", ModelDrafter(draft, SAMPLE, 4), StopRule(5))) < TOLERANCE
    assert (experiment.drafted == {0}) == (limit <= 7)


def test_a_q_that_is_not_renormalised_is_caught(small: Intersection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biased: q keeps the mass of what it cannot draft, so that the residual is wrong."""
    experiment, draft = scripted(small)

    class Whole(ModelDrafter):
        def propose(self, requests):  # type: ignore[no-untyped-def]
            (found,) = super().propose(requests)
            if found.probs is not None:
                found.probs = found.probs * 0.6
            return [found]

    assert experiment.bias(Method("whole", Whole(draft, SAMPLE, 4), StopRule(3))) > 0.01


# -- real models and tokenizers ----------------------------------------------------------------------------------------

TOKENIZERS = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "same-pieces": lambda: byte_level(TEXT, 281, ("<pad>", "</end>")),
}


def relabelled(target: PreTrainedModel, both: Intersection) -> PreTrainedModel:
    """The target in the draft's ids: the rows of shared tokens are the target's, those of the others random."""
    config = copy.deepcopy(target.config)
    config.vocab_size = both.draft.size
    draft = type(target)(config).eval()
    own = {name: weight for name, weight in target.state_dict().items() if weight.shape[0] != target.config.vocab_size}
    draft.load_state_dict(own, strict=False)
    ours = both.target_ids
    theirs = torch.tensor([both.translate(i)[0] for i in ours.tolist()])
    generator = torch.Generator().manual_seed(1)
    for get in (PreTrainedModel.get_input_embeddings, PreTrainedModel.get_output_embeddings):
        weight, source = get(draft).weight.data, get(target).weight.data
        weight.copy_(source.std() * torch.randn(weight.shape, generator=generator))
        weight[theirs] = source[ours]
    draft.generation_config.eos_token_id = both.draft.ids[vocabulary.EOS]
    return draft


def foreign(target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> ForeignDraft:
    ours = Vocabulary(make_tokenizer(), target.config.vocab_size, "target")
    both = Intersection(ours, Vocabulary(tokenizer, len(tokenizer), "draft"))
    return ForeignDraft(relabelled(target, both), both)


@pytest.fixture(scope="module")
def target(tiny) -> PreTrainedModel:
    return make_pair(tiny)[0]


@pytest.fixture(scope="module", params=TOKENIZERS)
def draft(request, target) -> ForeignDraft:
    torch.manual_seed(0)
    return foreign(target, TOKENIZERS[request.param]())


def test_greedy_texts_are_those_of_generate(target, draft) -> None:
    runner = open_runner(target)
    drafter = ModelDrafter(open_draft_runner(draft, target), LogitsWarper(), runner.vocab_size)
    for prompt in ("Tom has 3 apples", "Das Maß ist voll, 日本語", "How many?"):
        ids = make_tokenizer()(prompt).input_ids
        given = torch.tensor([ids])
        wanted = target.generate(given, do_sample=False, max_new_tokens=40, pad_token_id=0, eos_token_id=None)
        for name in ("length", "hf-dynamic", "entropy"):
            system = Method(name, drafter, STOPS[name](MethodInputs(runner, LogitsWarper(), drafter.runner)))
            out = decode(runner, system, LogitsWarper(), ids, max_new_tokens=40)
            assert out.ids == wanted[0].tolist()
            assert sum(out.trace.accepted) > 0


def test_the_same_pieces_under_other_ids_draft_as_the_target_itself(target) -> None:
    """Invariant 5, across vocabularies: α is 1 where nothing but the ids differs."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    whole = content["model"]["vocab"]
    turned = {piece: (i * 9 + 5) % len(whole) for piece, i in whole.items()}
    content["model"]["vocab"] = turned
    content["added_tokens"][0]["id"] = turned["<eos>"]
    other = PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(content)), eos_token="<eos>"
    )
    draft = foreign(target, other)
    assert len(draft.vocabulary.shared) == len(tokenizer)
    runner = open_runner(target)
    ids = tokenizer(TEXT).input_ids
    for warp in (LogitsWarper(), LogitsWarper(1.0)):
        system = Method("itself", ModelDrafter(open_draft_runner(draft, target), warp, 280), StopRule(4))
        trace = decode(runner, system, warp, ids, max_new_tokens=40, rng=TorchRng(0)).trace
        assert trace.metrics()["alpha"] == pytest.approx(1, abs=1e-5)
        assert trace.accepted == trace.drafted


@torch.inference_mode()
def test_rows_after_several_reads_equal_those_of_a_fresh_one(target, draft) -> None:
    ids = make_tokenizer()(TEXT).input_ids
    rows = draft_logits(target, draft, ids, 3)
    runner = Reader(open_draft_runner(draft, target))
    at_once = runner.read(ids[:-1])
    assert len(rows) == len(ids) - 3
    assert torch.allclose(at_once[2:], rows, atol=1e-3)
    runner.truncate(7)
    assert runner.length == 7
    assert torch.allclose(runner.read(ids[7:12], head=2), rows[8:10], atol=1e-3)
    assert len(runner.out.hidden) == 2
    assert runner.read(ids[12:14], head=0).shape == (0, runner.runner.vocab_size)
    assert torch.allclose(runner.read(ids[14:15], head=1), rows[12:13], atol=1e-3)
    assert runner.runner.remaining(runner.cache, ids) == runner.runner.limit - len(
        [i for token in ids for i in draft.vocabulary.translate(token)]
    )


def test_rows_behind_the_drafts_context_are_impossible(target, draft) -> None:
    short = ForeignDraft(copy.deepcopy(draft.model), draft.vocabulary)
    ids = make_tokenizer()(TEXT).input_ids
    short.model.config.max_position_embeddings = 12
    rows, whole = (draft_logits(target, d, ids, 3) for d in (short, draft))
    seen = (rows[:, 1:] > -torch.inf).any(-1)
    assert 5 < seen.sum() < len(rows)
    assert torch.allclose(rows[seen], whole[seen], atol=1e-3)
    assert (rows[~seen].argmax(-1) == 0).all()


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("foreign")
    torch.manual_seed(0)
    target.save_pretrained(path / "target")
    make_tokenizer(chat=True).save_pretrained(path / "target")
    tokenizer = byte_level()
    foreign(target, tokenizer).model.save_pretrained(path / "draft")
    tokenizer.save_pretrained(path / "draft")
    return path


def settings_for(folder, **changes) -> GenerateSettings:
    base = {"target": str(folder / "target"), "draft": str(folder / "draft"), "max_new_tokens": 24, "threads": 1}
    return GenerateSettings(**(base | {"prompt": "Tom has 3 apples", "draft_vocabulary": "intersection"} | changes))


def test_a_tokenizer_that_differs_is_refused_with_the_option_that_allows_it(folder) -> None:
    with pytest.raises(UserError, match=r"is not the target's: id .* --draft-vocabulary intersection"):
        generate.start(settings_for(folder, draft_vocabulary="same"), "Hi")
    with pytest.raises(UserError, match="draft_vocabulary is 'both', expected same or intersection"):
        generate.start(settings_for(folder, draft_vocabulary="both"), "Hi")


def test_bench_compares_it_and_leaves_it_out_of_transformers_own_methods(folder, target) -> None:
    draft = open_draft(folder / "draft", target, make_tokenizer(), vocabulary="intersection")
    entries = plan(["vanilla", "adasd", "eagle", "generate-assistant"], {"d": draft}, [0.0, 1.0])
    assert {c.method for c in entries} == {"vanilla", "adasd"}
    options = BenchOptions(16, 1, costs=False, threads=1)
    bench = run_benchmark(target, {"d": draft}, make_tokenizer(), [make_suite(2)], entries, options)
    rows = [row for row in bench.rows if row["method"] == "vanilla"]
    assert [row["identical_to_target"] for row in rows] == [True, None]
    assert all(row["alpha"] > 0 for row in rows)
    assert bench.session.notes["toy"].startswith("d: the draft shares")

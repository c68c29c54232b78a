"""``bench``: which methods run by default and the stores made for them; ``profile``: costs, predictions, the verdict."""

import json

import pytest
from families import build_architecture
from heads import make_block_head, make_head
from pairs import make_pair, make_suite, make_tokenizer, save_pair

from decode.commands import profile as profile_command
from decode.commands.bench import bench, chosen_methods, draft_names, open_session, run
from decode.commands.profile import profile_pair
from decode.commands.settings import BenchSettings, ProfileSettings
from decode.core.lengths import RoundCosts
from decode.core.sampling import LogitsWarper
from decode.drafters.corpus import tokenizer_fingerprint
from decode.drafters.rest import Datastore
from decode.errors import UserError
from decode.measure.acceptance import offline_alphas
from decode.measure.costs import speedups_by_length
from decode.methods import Parts
from decode.models.open import Pair
from decode.options import MethodOptions


def test_methods_default_to_what_the_given_parts_allow_and_two_drafts_have_two_names():
    options = MethodOptions()
    assert chosen_methods(BenchSettings(target="t"), [Parts(options)]) == ["prompt-lookup", "suffix"]
    assert chosen_methods(BenchSettings(target="t"), [Parts(options, "eagle")]) == ["eagle", "hybrid-tree"]
    both = chosen_methods(BenchSettings(target="t"), [Parts(options, "model", datastore=True), Parts(options, "block")])
    assert both == ["vanilla", "block", "hybrid", "rest", "adaptix"]
    early = chosen_methods(BenchSettings(target="t", exit_layer=2), [Parts(options)])
    assert early == ["prompt-lookup", "suffix", "layerskip", "draft-verify", "adaspeed"]  # without, it would be a guess
    settings = BenchSettings(target="t", methods=["lookahead"])
    assert chosen_methods(settings, [Parts(options)]) == ["lookahead"]
    for spec in ("generate:rule=ears", "autoregressive:rule=ears"):
        with pytest.raises(UserError, match=r"ears is a rule for drafts of this decoder, and .* drafts none"):
            chosen_methods(BenchSettings(target="t", methods=[spec]), [Parts(options)])
    assert draft_names(["a=x", "runs/b"]) == {"a": "x", "b": "runs/b"}
    with pytest.raises(UserError, match="have one name"):
        draft_names(["runs/b", "other/b"])


@pytest.mark.parametrize("method", ["rest", "adaptix"])
def test_methods_that_retrieve_get_a_store_of_the_corpus(method, tiny, tmp_path):
    (tmp_path / "own.jsonl").write_text(json.dumps({"text": "Tom has 3 apples."}) + "\n")
    pair = Pair(tiny("llama", vocab_size=280), make_tokenizer())
    settings = BenchSettings(target="t", corpus=[str(tmp_path / "own.jsonl")], threads=1, pack="off")
    assert open_session(settings, ["prompt-lookup"], pair, {}, tmp_path)[0].options.datastore is None
    folder = open_session(settings, [method], pair, {}, tmp_path)[0].options.datastore
    assert folder is not None
    ids = pair.tokenizer("Tom has").input_ids
    assert Datastore(folder, tokenizer_fingerprint(pair.tokenizer)).longest(ids)[0] == len(ids)


def test_a_method_that_was_named_and_no_draft_suits_is_refused(tiny, tmp_path):
    methods, (target, draft) = ["eagle-tree", "vanilla"], make_pair(tiny)
    settings = BenchSettings(target="t", methods=methods, threads=1, pack="off")
    with pytest.raises(
        UserError, match=r"eagle-tree drafts with a feature head \(EAGLE\), and Llama.* is a language mod"
    ):
        open_session(settings, methods, Pair(target, make_tokenizer()), {"d": draft}, tmp_path)


def test_without_names_the_methods_are_those_that_target_and_draft_allow(tiny, tmp_path) -> None:
    """A block head is no feature head, and a recurrent target reads no trees."""
    llama, settings = tiny("llama"), BenchSettings(target="t", threads=1, pack="off")
    for target, drafts, methods, planned in (
        (llama, {"d": make_block_head(llama, "dflash")}, ["block", "eagle", "lookahead"], ["block", "lookahead"]),
        (build_architecture("Mamba-2"), {}, ["prompt-lookup", "lookahead"], ["prompt-lookup"]),
    ):
        entries = open_session(settings, methods, Pair(target, make_tokenizer()), drafts, tmp_path)[1]
        assert [entry.method for entry in entries] == planned


def test_the_api_measures_batches_and_refuses_what_cannot_be_measured(tiny):
    options = {"batch_sizes": [2], "draft_lengths": [2], "limit": 2, "max_new_tokens": 4, "repeats": 1, "threads": 1}
    target, draft = make_pair(tiny)
    pair = Pair(target, make_tokenizer(), draft)
    rows = bench(pair, ["vanilla", "cost-optimal"], **options)
    assert [row["name"] for row in rows] == ["autoregressive", "generate", "vanilla", "cost-optimal"]
    with pytest.raises(UserError, match="batch_sizes"):
        bench(pair, **options | {"batch_sizes": [0]})
    with pytest.raises(UserError, match="draft_length is 900, and the target's context holds 256"):
        bench(pair, ["vanilla:draft_length=900"], **options | {"draft_lengths": []})


@pytest.mark.parametrize(("options", "message"), [
    ({"methods": ["adaspeed-probe"]}, "adaspeed-probe needs a folder of acceptance probes, --probes DIR; make them with"),
    ({"methods": ["layerskip"], "stop_rule": "probe"}, "layerskip needs a folder of acceptance probes"),
    ({"methods": ["layerskip"], "probes": "p"}, "no probes in 'p'; make them with `make probe`"),
    ({"methods": ["rest"], "datastore": "s"}, "no datastore folder 's'; build one with draftsmith decode datastore build"),
    ({"methods": ["adaspeed-probe"], "stop_rule": "length"}, "there is no folder 'runs/t'"),  # needs no probes
])  # fmt: skip
def test_folders_that_are_missing_are_refused_before_anything_is_loaded(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        run(BenchSettings(target="runs/t", **options))


@pytest.fixture(scope="module")
def pair(tiny):
    target, draft = make_pair(tiny)
    return Pair(target, make_tokenizer(), draft)


def profile_of(pair, **options):
    return profile_pair(ProfileSettings(max_new_tokens=24, **options), pair, [make_suite()])


def test_alpha_is_measured_on_the_targets_own_texts(pair):
    result = profile_of(pair, longest=4, temperature=1.0)
    warp, items = LogitsWarper(temperature=1.0), result.session.items(make_suite())
    answers = result.session.written([i.ids for i in items], warp)
    texts = [(i.ids + answer, len(i.ids)) for i, answer in zip(items, answers)]
    (offline,) = offline_alphas(pair.target, {"draft": pair.draft}, texts, warp)["draft"]
    assert result.alpha.mean == pytest.approx(offline.mean)
    assert 0 < result.alpha.mean < 1


@pytest.mark.parametrize("kind", ["dflash", "eagle"])
def test_no_draft_is_predicted_that_is_longer_than_a_block(pair, kind):
    """A feature head drafts as many tokens as are asked for."""
    head = make_block_head(pair.target, kind) if kind == "dflash" else make_head(pair.target, 1)
    rows = profile_of(Pair(pair.target, pair.tokenizer, head), longest=6).lengths
    assert len(rows) == (6 if kind == "eagle" else head.drafts)


def test_predictions_follow_from_the_one_table_of_costs(pair):
    result = profile_of(pair, longest=6, batch_sizes=[3, 1, 3])
    rounds = result.cost.rounds
    assert {1, 3} == set(rounds.seconds)
    assert [row["draft_length"] for row in result.lengths] == list(range(1, 7))
    assert [row["ms"] for row in result.lengths] == [1e3 * rounds.round(1, k) for k in range(1, 7)]
    best = max(result.lengths, key=lambda row: row["predicted_speedup"])
    assert result.best == (best["draft_length"] if best["predicted_speedup"] > 1 else 0)
    assert result.verdict.startswith("no speedup is predicted, since")  # of three prompts
    assert "fewer than 6 prompts were timed" in result.verdict
    alone, three = result.batches["batches"]
    assert alone["best_speedup"] == max(1.0, best["predicted_speedup"])
    assert (alone["batch_size"], three["batch_size"]) == (1, 3)
    assert RoundCosts.from_dict(json.loads(json.dumps(result.to_dict()))["round_costs"]) == rounds
    assert speedups_by_length([result.alpha], RoundCosts.of_ratios(0.0), 2)[1] > 1


def test_the_command_prints_what_it_measured_and_writes_the_draft_lengths_by_batch_size(tiny, tmp_path, capsys):
    folder = save_pair(tmp_path, tiny)
    profile = folder / "draft" / "speculation_profile.json"
    profile.write_text(json.dumps({"num_speculative_tokens": 2, "served": []}))
    options = {"limit": 2, "max_new_tokens": 6, "longest": 3, "batch_sizes": [1, 2], "threads": 1, "pack": "off"}
    settings = ProfileSettings(str(folder / "target"), draft=str(folder / "draft"), json=True, **options)
    profile_command.run(settings)
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert {"cost_ratio", "verify_cost", "offline_alpha", "drafted_tokens", "best_draft_length"} <= set(result)
    assert f"into {profile}" in printed.err
    content = json.loads(profile.read_text())
    assert content["served"] == []
    assert all(k <= 2 for _, _, k in content["num_speculative_tokens_per_batch_size"])
    assert content["batch_size_conditions"]["cpu"] == result["machine"]["cpu"]
    settings.json = False
    profile_command.run(settings)
    shown = capsys.readouterr().out
    assert "3 prompts; α" in shown
    assert "at draft length" not in shown
    assert 'vLLM: "num_speculative_tokens_per_batch_size": [[1, ' in shown.replace("\n", " ")

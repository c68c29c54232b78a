"""The exported draft: what is in the folder, who can load it, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from decode.errors import UserError
from distill.config.run import ExportSettings
from distill.export import draft as export
from distill.export.draft import export_draft, fit_vocabulary
from distill.export.model_card import export_profile, speculation_profile

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789.,+-*/=<>#?$", "tom", "has"]
FIELDS = ("position", "rounds", "tested", "conditional", "conditional_se", "marginal", "marginal_se")
RATES = ((1, 100, 0.9, 0.9), (2, 90, 70 / 90, 0.7), (3, 70, 1.0, 0.7), (4, 70, 0.8, 0.56))
PROFILE = {
    "best_draft_length": 4, "speedup": 1.62, "speedup_ci95": [1.5, 1.7], "offline_alpha": 0.912,
    "offline_alpha_se": 0.002, "identical_to_target": True,
    "acceptance_by_position": [dict(zip(FIELDS, (i, 100, t, c, 0.04, m, 0.05))) for i, t, c, m in RATES],
    "alpha": 0.94, "accepted_length": 3.86, "acceptance": [{"position": 1, "validation": 0.91, "offline": 0.92}],
    "conditions": {"dataset": "arithmetic", "temperature": 0.0},
}  # fmt: skip


def tokenizer(words: list[str] = WORDS) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def config(family: str, vocabulary: int, **more):
    shape = {"vocab_size": vocabulary, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    shape |= {"intermediate_size": 32, "max_position_embeddings": 96, "eos_token_id": 1} | more
    return {"llama": LlamaConfig, "gpt_neox": GPTNeoXConfig, "phi": PhiConfig}[family](**shape)


def make(folder: Path, family: str, vocabulary: int, words: list[str] = WORDS, **more) -> PreTrainedModel:
    torch.manual_seed(sum(map(ord, folder.name)))
    model = AutoModelForCausalLM.from_config(config(family, vocabulary, **more))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)  # spread the logits, so that the argmax is no matter of rounding
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer(words).save_pretrained(folder)
    return model


def pair(tmp_path: Path, family: str, target: int = 64, draft: int = 64, **more) -> tuple[Path, Path]:
    make(tmp_path / "target", family, target)
    make(tmp_path / "trained", family, draft, **more)
    return tmp_path / "trained", tmp_path / "target"


def run_export(tmp_path: Path, family: str = "llama", settings=None, profile=PROFILE, **sizes) -> Path:
    draft, target = pair(tmp_path, family, **sizes)
    return export_draft(draft, target, tmp_path / "draft", profile, settings or ExportSettings())


USER_SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for line in sys.stdin.read().splitlines():
    first, *folders = line.split("|")
    target = AutoModelForCausalLM.from_pretrained(first)
    for folder in folders:
        draft = AutoModelForCausalLM.from_pretrained(folder)
        AutoTokenizer.from_pretrained(folder)
        for prompt in ([5, 9, 11], [40, 41, 7, 7, 7, 30]):
            ids = torch.tensor([prompt])
            options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
            plain = target.generate(ids, **options)
            assert torch.equal(plain, target.generate(ids, assistant_model=draft, **options)), folder
        print("identical")
assert not [name for name in sys.modules if name.split(".")[0] in ("distill", "decode", "probes")]
"""


def exports(tmp_path: Path, family: str) -> list[Path]:
    """A target, and drafts of its own size, smaller vocabularies, a larger one, and the target as its own."""
    draft, target = pair(tmp_path, family)
    folders = [target, export_draft(draft, target, tmp_path / "draft", PROFILE, ExportSettings())]
    for name, vocabulary, tied in (("padded", 52, False), ("tied", 52, True), ("cut", 70, False)):
        trained = tmp_path / f"{name}-trained"
        make(trained, family, vocabulary, tie_word_embeddings=tied)
        folders.append(export_draft(trained, target, tmp_path / name, PROFILE, ExportSettings()))
    return [*folders, export_draft(target, target, tmp_path / "self", PROFILE, ExportSettings())]


def test_a_script_with_only_transformers_uses_it_as_assistant_with_identical_tokens(tmp_path):
    (tmp_path / "llama").mkdir()
    (tmp_path / "neox").mkdir()
    groups = [exports(tmp_path / "llama", "llama"), exports(tmp_path / "neox", "gpt_neox")]
    script = tmp_path / "use.py"
    script.write_text(USER_SCRIPT)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    result = subprocess.run(
        [sys.executable, str(script)], input="\n".join("|".join(map(str, group)) for group in groups),
        capture_output=True, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["identical"] * 10


def test_the_folder_holds_what_engines_read(tmp_path):
    draft, target = pair(tmp_path, "llama", max_position_embeddings=48)
    folder = export_draft(draft, target, draft, PROFILE, ExportSettings())  # a draft may be exported onto itself
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= names
    assert {"speculation_profile.json", "README.md", "tokenizer_config.json"} <= names
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["num_assistant_tokens"] == 4
    assert generation["num_assistant_tokens_schedule"] == "constant"
    assert generation["assistant_confidence_threshold"] == 0.0
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (1, 0)
    written = json.loads((folder / "config.json").read_text())
    assert written["dtype"] == written["torch_dtype"] == "float32"
    assert written["eos_token_id"] == 1
    assert written["max_position_embeddings"] == 96  # the target's
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    assert fields["tokenizer_class"] == "PreTrainedTokenizerFast"  # older engines know it
    assert not list(tmp_path.glob(".draft*"))


def test_what_is_written_as_tied_is_one_matrix(tmp_path, monkeypatch):
    """A config that ties over a file with another head: transformers keeps both, engines would tie."""
    draft, target = pair(tmp_path, "llama")
    fields = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
    folder = export_draft(draft, target, tmp_path / "draft", PROFILE, ExportSettings())
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    trained, exported = (AutoModelForCausalLM.from_pretrained(path) for path in (draft, folder))
    assert torch.equal(trained.lm_head.weight, exported.lm_head.weight)
    assert not torch.equal(exported.lm_head.weight, exported.model.embed_tokens.weight)

    def tie(path: Path) -> None:
        fields = json.loads(path.read_text())
        path.write_text(json.dumps(fields | {"tie_word_embeddings": True}))

    def damage(path: Path) -> None:
        state = load_file(path.parent / "model.safetensors")
        state["model.norm.weight"] *= 2
        save_file(state, path.parent / "model.safetensors", metadata={"format": "pt"})

    for change, words in (
        (tie, "tie_word_embeddings True .* head are two"),
        (damage, "other logits .* that was measured"),
    ):
        monkeypatch.setattr(export, "add_legacy_fields", change)
        with pytest.raises(UserError, match=rf"The exported draft, loaded again by transformers, .*{words}"):
            export_draft(draft, target, tmp_path / "other", PROFILE, ExportSettings())
        assert not (tmp_path / "other").exists()


def test_rope_is_written_in_the_new_and_the_old_fields(tmp_path):
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    draft, target = pair(tmp_path, "llama", rope_parameters=scaled)
    folder = export_draft(draft, target, tmp_path / "draft", PROFILE, ExportSettings())
    written = json.loads((folder / "config.json").read_text())
    assert written["rope_parameters"] == scaled
    assert written["rope_theta"] == 5000.0
    assert written["rope_scaling"] == {"rope_type": "linear", "type": "linear", "factor": 2.0}

    neox = tmp_path / "neox"
    neox.mkdir()
    folder = run_export(neox, "gpt_neox")
    written = json.loads((folder / "config.json").read_text())
    assert (written["rotary_emb_base"], written["rotary_pct"]) == (10000, 0.25)
    assert (written["rope_theta"], written["rope_scaling"]) == (10000, None)


def with_negative_logits(family: str, tied: bool) -> PreTrainedModel:
    """A model of 40 ids all of whose logits are negative, whatever the text."""
    model = AutoModelForCausalLM.from_config(config(family, 40, tie_word_embeddings=tied))
    last = {"llama": "model.norm", "gpt_neox": "gpt_neox.final_layer_norm", "phi": "model.final_layernorm"}
    norm = model.get_submodule(last[family])
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight.copy_(1 + 0.1 * torch.randn_like(layer.weight))
        (norm.weight if family == "llama" else norm.bias).fill_(-1)
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi"])
@pytest.mark.parametrize("tied", [False, True])
def test_padded_ids_are_never_the_most_likely_where_zero_rows_would_be(family, tied):
    torch.manual_seed(1)
    model = with_negative_logits(family, tied)
    ids = torch.randint(40, (8, 64))
    before = model(ids).logits
    assert fit_vocabulary(model, 64) == 40
    after = model(ids).logits
    assert model.config.vocab_size == after.shape[-1] == 64
    assert torch.allclose(after[..., :40], before, atol=1e-4)
    assert int(after.argmax(-1).max()) < 40

    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight[40:] = 0
        if head.bias is not None:
            head.bias[40:] = 0
    assert int(model(ids).logits.argmax(-1).min()) >= 40


@pytest.mark.parametrize("name", ["eagle-arithmetic", "runs-dspark"])
def test_a_path_that_vllm_reads_as_another_method_is_refused_before_anything_is_loaded(tmp_path, name):
    with pytest.raises(UserError, match="vLLM"):
        export_draft(tmp_path / "no", tmp_path / "no", tmp_path / name / "draft", PROFILE, ExportSettings())


def test_a_tokenizer_with_other_ids_is_refused_with_the_first_differing_token(tmp_path):
    swapped = list(WORDS)
    swapped[7], swapped[8] = swapped[8], swapped[7]
    draft, target = pair(tmp_path, "llama", words=swapped)
    with pytest.raises(UserError, match=r"id 7 is 'e' for the target and 'f' for the draft"):
        export_draft(draft, target, tmp_path / "draft", PROFILE, ExportSettings())
    assert not (tmp_path / "draft").exists()


def test_a_tokenizer_with_the_same_ids_that_splits_differently_is_refused():
    other = tokenizer()
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(UserError, match="splits text differently"):
        export.check_same_tokenizer(tokenizer(), other)


def test_a_failed_export_leaves_the_earlier_one_untouched(tmp_path, monkeypatch):
    folder = run_export(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "add_legacy_fields", broken)
    with pytest.raises(OSError, match="No space"):
        export_draft(tmp_path / "trained", tmp_path / "target", folder, PROFILE, ExportSettings())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not list(tmp_path.glob(".draft*"))


def test_the_profile_gives_conditional_and_marginal_rates_of_the_same_rounds():
    profile = speculation_profile(PROFILE, 4)
    # 100 rounds; 90 accepted at least one token, 70 at least two and three, 56 all four.
    assert profile["conditional_accept_rates"] == [0.9, round(70 / 90, 6), 1.0, 0.8]
    assert profile["marginal_accept_rates"] == [0.9, 0.7, 0.7, 0.56]
    assert profile["acceptance_length_histogram"] == {"1": 10, "2": 20, "3": 0, "4": 14, "5": 56}
    assert profile["mean_accept_length"] == 3.86
    assert profile["marginal_accept_rates_se"] == [0.05] * 4
    assert profile["synthetic_acceptance_rates"] == profile["marginal_accept_rates"]
    assert profile["measured"] is True
    assert profile["measurement_conditions"]["dataset"] == "arithmetic"
    assert speculation_profile({"best_draft_length": 4}, 4)["measured"] is False
    other_length = speculation_profile(PROFILE, 7)
    assert (other_length["measured"], other_length["marginal_accept_rates"]) == (False, None)


def test_a_report_becomes_the_profile_of_its_fastest_identical_greedy_row():
    row = {"draft": "adaspec", "temperature": 0.0, "draft_length": 4, "speedup": 1.6, "alpha": 0.9, "suite": "s"}
    report = {
        "drafts": [{"name": "undistilled"}, {"name": "adaspec", "offline_alpha": 0.9, "offline_alpha_se": 0.01}],
        "decoding": [
            row | {"identical_to_target": True},
            row | {"draft_length": 8, "speedup": 2.0, "identical_to_target": False},
            row | {"temperature": 1.0, "draft_length": 9, "speedup": 3.0, "identical_to_target": None},
            row | {"draft": "generate", "draft_length": None, "speedup": 9.0},
        ],
        "profile": {"draft": "adaspec", "cost_ratio": 0.1},
        "analysis": {"acceptance_by_position": {"adaspec": PROFILE["acceptance_by_position"]}},
        "machine": {"cpu": "Some CPU", "note": "measured packing"},
    }
    profile = export_profile(report)
    assert (profile["best_draft_length"], profile["speedup"], profile["cost_ratio"]) == (4, 1.6, 0.1)
    assert (profile["offline_alpha"], profile["conditions"]["cpu"]) == (0.9, "Some CPU")
    assert "note" not in profile["conditions"]
    assert speculation_profile(profile, 4)["measured"] is True
    assert "best_draft_length" not in export_profile(report, "undistilled")
    sampled = [row | {"temperature": t, "identical_to_target": None} for t in (0.7, 1.0)]
    profile = export_profile({"drafts": [], "decoding": sampled})
    assert (profile["best_draft_length"], profile["conditions"]["temperature"]) == (4, 0.7)


def test_the_card_states_the_measurements_and_lines_to_paste(tmp_path):
    folder = run_export(tmp_path, draft=52)
    card = (folder / "README.md").read_text()
    assert "**1.62 times**" in card
    assert "0.9120 ± 0.0020" in card
    assert "assistant_model=draft" in card
    config_line = card.split("--speculative-config '")[1].split("'")[0]
    assert json.loads(config_line) == {
        "method": "draft_model", "model": str(folder), "num_speculative_tokens": 4
    }  # fmt: skip
    assert "--speculative-algorithm STANDALONE" in card
    assert "--speculative-num-steps 4" in card
    assert "--speculative-num-draft-tokens 5" in card
    assert "52 to 63 are padding" in card
    temperature = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in card.splitlines() if "|" in line}
    assert (temperature["α offline"], temperature["speedup"]) == ("1", "0")
    assert "| α | 0.940 | 0 |" in card
    assert "| acc. length | 3.86 | 0 |" in card
    assert "| position | validation | offline |\n| --- | ---: | ---: |\n| 1 | 0.910 | 0.920 |" in card

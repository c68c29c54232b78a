"""Fingerprints of stages: what changes them, and what does not."""

import copy
import hashlib
import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tiny_run import STAGES, altered, tiny_settings

from decode.errors import UserError
from distill import files
from distill.fingerprints import READ, UNREAD, measurement_fingerprint, stage_fingerprints
from distill.losses.divergences import Divergence

DISTILLED = STAGES[2:]


WRITTEN = {"teacher__responses__source": "target", "teacher__engine__urls": ["http://a/v1"]}
WRITTEN |= {"0__on_policy": 0.5, "1__on_policy": 0.5}
RECIPE = {"target__kind": "finetune", "target__layerskip__enabled": True}
AS_IS = {"target__kind": "as_is"}
ENGINE = {"teacher__signal": "vllm", "teacher__responses__source": "target"}
CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    AS_IS | {"student__kind": "cut", "data__source": "target", "trainer__validate_every": 9} | WRITTEN,
    RECIPE | ENGINE | {"student__kind": "lora", "teacher__engine__keep": "topk"},
    {"target__kind": "lora", "student__kind": "eagle3", "data__source": "someone/rows"},
    ENGINE | {"student__kind": "dspark"},
    {"student__kind": "as_is", "teacher__responses__source": "target"},
]


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted names and values of all settings; NAME stands for the second draft."""
    for field in fields(section):
        name, value = f"{prefix}{field.name}", getattr(section, field.name)
        if name == "drafts":
            name, value = "drafts.NAME", list(value.values())[1]
        if is_dataclass(value):
            yield from leaves(value, f"{name}.")
        else:
            yield name, value


def other(name: str, value: Any) -> Any:
    """Another value of a setting."""
    special = {
        "data.files": {"train": "x"}, "student.kind": "eagle3", "target.kind": "as_is",
        "trainer.devices": 2, "trainer.callbacks": [{"class_path": "EarlyStopping"}],
        "teacher.signal": "topk" if value != "topk" else "hidden", "trainer.extra": {"gradient_clip_val": 0.5},
        "data.chat_template": "{{ x }}", "drafts.NAME.training": {"lr": 0.5}, "student.draft_vocab": 9,
        "drafts.NAME.divergence": "tv",
    }  # fmt: skip
    if name in special:
        return special[name]
    match value:
        case bool():
            return not value
        case int() | float():
            return (value or 1) / 2 if name.startswith("drafts") else value + 1
        case list() | dict():
            return ["x"] if isinstance(value, list) else {"x": 1}
        case _:
            return f"{value}x" if value else "x" if name.endswith(("model", "tokenizer", "file", "template")) else 3


@pytest.mark.parametrize("name", [name for name, _ in leaves(tiny_settings(Path()))])
def test_every_setting_is_read_by_a_stage_or_listed_as_one_that_changes_no_result(name: str) -> None:
    """A new setting has to be put into the one table or the other."""
    listed = lambda names: any(name == each or name.startswith(f"{each}.") for each in names)  # noqa: E731
    assert listed(chain(*READ.values())) != listed(UNREAD)
    changed = False
    for given in CONFIGURATIONS:
        settings = altered(tiny_settings(Path("runs")), **given)
        before = {**stage_fingerprints(settings), "measured": measurement_fingerprint(settings)}
        *sections, key = name.replace("drafts.NAME", "1").split(".")
        value = other(name, dict(leaves(settings))[name])
        altered(settings, **{"__".join([*sections, key]): value})
        changed |= before != {**stage_fingerprints(settings), "measured": measurement_fingerprint(settings)}
    assert changed is not listed(UNREAD)


@pytest.mark.parametrize(
    ("given", "key", "value", "wanted"),
    [
        ({}, "1__k", 0.5, ["adaspec"]),
        ({}, "1__training", {"lr": 1e-4}, ["adaspec"]),
        ({}, "trainer__devices", 2, ["adaspec"]),
        ({}, "data__test_examples", 3, []),
        ({"data__source": "someone/rows"}, "data__test_examples", 3, STAGES),  # of the Hub, whose sample grows with it
        (AS_IS | {"data__source": "target"}, "data__test_examples", 3, STAGES[1:]),  # whose prompts are dealt out
        ({}, "0__divergence", "tv", DISTILLED),
        ({}, "teacher__signal", "topk", DISTILLED),
        ({}, "teacher__signal_k", 3, []),  # of hidden states
        ({}, "student__architecture__hidden_size", 8, STAGES[1:]),
        ({}, "target__dtype", "bfloat16", DISTILLED),
        ({}, "target__training__steps", 9, STAGES),
        ({}, "seed", 5, STAGES),
        ({}, "trainer__precision", "bf16-mixed", STAGES),
        ({}, "trainer__attention", "eager", STAGES),  # signals too are computed by it
        ({}, "trainer__accumulate", 2, ["adaspec"]),  # each part of a step selects its own tokens
        ({}, "trainer__extra", {"log_every_n_steps": 1, "profiler": "simple", "enable_progress_bar": True}, []),
        ({}, "trainer__callbacks", [{"class_path": "LearningRateMonitor"}, {"class_path": "x.TQDMProgressBar"}], []),
        ({}, "trainer__callbacks", [{"class_path": "EarlyStopping"}], STAGES),
        ({"student__kind": "as_is"}, "trainer__precision", "bf16-mixed", ["target", *DISTILLED]),
        (AS_IS | {"student__kind": "as_is"}, "data__train_examples", 12, DISTILLED),
        (AS_IS | ENGINE, "teacher__engine__arguments", ["--quantization=fp8"], DISTILLED),
        (RECIPE | ENGINE, "teacher__engine__arguments", ["--quantization=fp8"], STAGES),
        (AS_IS | ENGINE, "teacher__engine__arguments", ["--tensor-parallel-size=4"], []),
        ({}, "trainer__extra", {"gradient_clip_val": 0.5}, STAGES),
        ({}, "target__lora__rank", 3, []),  # not used by a target from scratch
        ({}, "teacher__responses__temperature", 0.5, []),  # the data has responses
        ({"teacher__signal": "vllm"}, "teacher__engine__keep", "float8", DISTILLED),
        (WRITTEN, "teacher__responses__temperature", 0.5, DISTILLED),
        (WRITTEN, "teacher__responses__refresh_every", 7, DISTILLED),
        (WRITTEN | RECIPE, "target__dtype", "bfloat16", STAGES),  # in which it answers before it is trained
        # a target that is taken as it is stays whatever is trained for it
        (AS_IS, "data__train_examples", 12, STAGES[1:]),
        (AS_IS, "data__chat_template", "{{ messages }}", STAGES),
        # a draft depends on its reference only where that selects
        ({"1__k": 1.0}, "0__divergence", "tv", ["distillspec"]),
    ],
)
def test_a_changed_setting_runs_its_stage_again(
    tmp_path, given: dict[str, Any], key: str, value, wanted: list[str]
) -> None:
    settings = altered(tiny_settings(tmp_path), target__model=str(tmp_path), **given)
    before, after = stage_fingerprints(settings), stage_fingerprints(altered(settings, **{key: value}))
    assert [stage for stage in before if before[stage] != after[stage]] == wanted
    settings.drafts["again"] = replace(settings.drafts["adaspec"])
    keys = stage_fingerprints(settings)
    assert keys["again"] == keys["adaspec"]  # a name is no input


def test_a_changed_divergence_of_the_users_is_trained_with_again(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings, keys = altered(tiny_settings(tmp_path), **{"0__divergence": "mine_of_a_test.loss"}), []
    for factor in (2, 2, 30):
        Path("mine_of_a_test.py").write_text(f"def loss(pair):\n    return {factor} * pair.tv()\n")
        sys.modules.pop("mine_of_a_test", None)
        importlib.invalidate_caches()
        keys.append(stage_fingerprints(settings))
    assert keys[0] == keys[1]
    assert [stage for stage in STAGES if keys[2][stage] != keys[0][stage]] == DISTILLED
    (tmp_path / "broken_of_a_test.py").write_text("loss = (")
    for name, words in {
        "mine_of_a_test.los": r"divergence 'mine_of_a_test\.los' cannot be imported",
        "math.pi": r"'math\.pi' is of type float, expected a function",
        "broken_of_a_test.loss": r"cannot be imported \(SyntaxError",
    }.items():
        with pytest.raises(UserError, match=words):
            Divergence(name)
    assert str(tmp_path) not in sys.path
    lines = "from functools import partial\nfrom torch import mul\nloss = partial(mul, 2)\n"
    (tmp_path / "partial_of_a_test.py").write_text(lines)
    key = Divergence("partial_of_a_test.loss").key
    (tmp_path / "partial_of_a_test.py").write_text(lines + "more = 1\n")
    assert Divergence("partial_of_a_test.loss").key != key
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "own_of_a_test", lambda pair: pair.tv(), raising=False)
    monkeypatch.setattr(sys.modules["__main__"].own_of_a_test, "__module__", "__main__")
    with pytest.raises(UserError, match="expected a function of a module file"):
        _ = Divergence("__main__.own_of_a_test").key


@pytest.mark.parametrize(
    ("key", "value", "given", "alike"),
    [
        ("training__steps", 20, {}, []),  # whose learning rate falls to the last step
        ("training__steps", 20, {"training__schedule": "constant"}, ["distillspec"]),  # adaspec's reference
        ("training__steps", 20, {"training__schedule": "constant", "0__kl_first": 0.5}, []),
        ("training__steps", 20, {"training__schedule": "constant", "1__on_policy": 0.5}, ["distillspec"]),
        ("training__lr", 1e-4, {"training__schedule": "constant"}, []),
        ("1__training", {"epochs": 2}, {"training__schedule": "constant"}, ["adaspec"]),
        ("target__training__steps", 20, {"target__training__schedule": "constant"}, ["target"]),
        ("target__training__steps", 20, RECIPE | {"target__training__schedule": "constant"}, []),
        ("student__training__steps", 20, {"student__training__schedule": "constant"}, ["initial"]),
    ],
)
def test_checkpoints_are_of_a_training_whatever_its_length_where_no_step_depends_on_that(
    tmp_path, key: str, value, given: dict[str, Any], alike: list[str]
) -> None:
    settings = altered(tiny_settings(tmp_path), **given)
    both = settings, altered(copy.deepcopy(settings), **{key: value})

    def agree(stage: str, going_on: str = "") -> bool:
        first, second = (stage_fingerprints(each, going_on)[stage] for each in both)
        return first == second

    assert [stage for stage in STAGES if not agree(stage) and agree(stage, stage)] == alike


@pytest.mark.parametrize("large", [False, True])
def test_files_are_known_by_their_content_wherever_they_are(tmp_path, monkeypatch, large: bool) -> None:
    """A purge and another download give a large file of a model a new time, a copy another place."""
    if large:
        monkeypatch.setattr(files, "LARGE", 10)
        monkeypatch.setattr(files, "HASHES", tmp_path / "hashes.json")
    model, copied = tmp_path / "model", tmp_path / "copied"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"x" * 100)
    state = files.files_state([str(model)])
    shutil.copytree(model, copied, copy_function=shutil.copyfile)
    os.utime(model / "model.safetensors", (1, 1))
    assert files.files_state([str(model)]) == files.files_state([str(copied)]) == state
    with monkeypatch.context() as patch:  # a large one is not read again by another process
        files._hash.cache_clear()
        patch.setattr(files.hashlib, "file_digest", lambda *_: pytest.fail("read") if large else hashlib.sha256())
        files.files_state([str(model)])
    files._hash.cache_clear()
    (copied / "model.safetensors").write_bytes(b"y" * 100)
    assert files.files_state([str(copied)]) != state
    settings = altered(tiny_settings(tmp_path), target__kind="as_is", target__model=str(model))
    before = stage_fingerprints(settings)
    model.rename(tmp_path / "moved")
    assert stage_fingerprints(altered(settings, target__model=str(tmp_path / "moved"))) == before


def test_a_data_file_is_known_by_its_content(tmp_path) -> None:
    paths = {split: tmp_path / f"{split}.jsonl" for split in ("train", "test")}
    for path in paths.values():
        path.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    settings = tiny_settings(tmp_path)
    settings.data.source, settings.data.files = "gsm8k", {split: str(path) for split, path in paths.items()}
    before, measured = stage_fingerprints(settings), measurement_fingerprint(settings)
    os.utime(paths["train"], (1, 1))
    assert stage_fingerprints(settings) == before
    for split in ("test", "train"):  # training rows that are also test rows are dropped
        paths[split].write_text("{}")
        keys = stage_fingerprints(settings)
        assert all(key != before[stage] for stage, key in keys.items())
        before = keys
    assert measurement_fingerprint(settings) != measured

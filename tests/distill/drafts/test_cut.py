"""Drafts cut from the target's layers."""

from pathlib import Path

import pytest
import torch
from families import FAMILIES, build_tiny, in_double
from safetensors.torch import load_file
from tiny_run import run_tiny, tiny_settings
from transformers import AutoModelForCausalLM

from decode.models.families import decoder_layers, final_norm, state_of
from distill.config import StudentSettings, TrainingSettings
from distill.drafts.language_model import cut, kept_layers
from distill.lm_head import LMHead, check_head

LAYERS = {"gpt2": "n_layer", "codegen": "n_layer"}


@pytest.mark.parametrize(
    ("layers", "wanted"), [(1, [0]), (2, [0, 7]), (3, [0, 4, 7]), (4, [0, 2, 5, 7]), ([1, 6], [1, 6])]
)
def test_layers_are_spread_from_the_first_to_the_last(layers: int | list[int], wanted: list[int]) -> None:
    assert kept_layers(layers, 8) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_draft_is_the_target_with_the_other_layers_passed_over(family: str, tmp_path: Path) -> None:
    model = build_tiny(family, dtype=torch.float64, **{LAYERS.get(family, "num_hidden_layers"): 4})
    draft = in_double(cut(in_double(model), [1, 3]))
    check_head(draft, LMHead(draft))
    assert draft.config.get_text_config().num_hidden_layers == 2
    ids = torch.arange(2, 12)[None]  # longer than the sliding windows
    hooks = [
        decoder_layers(model)[i].register_forward_hook(
            lambda layer, args, kwargs, output: _like(output, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for i in (0, 2)
    ]
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        for hook in hooks:
            hook.remove()
        assert torch.allclose(draft(input_ids=ids, use_cache=False).logits, wanted, atol=1e-5)
        whole = model(input_ids=ids, use_cache=False).logits
    assert not torch.allclose(wanted, whole, atol=1e-2)
    next(iter(decoder_layers(draft).parameters())).data.fill_(0)  # the draft's own, not the target's
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, whole)
    draft.save_pretrained(tmp_path)
    assert len(decoder_layers(AutoModelForCausalLM.from_pretrained(tmp_path))) == 2
    assert final_norm(draft) is not final_norm(model)


def _like(output: object, state: torch.Tensor) -> object:
    return (state, *output[1:]) if isinstance(output, tuple) else state if state_of(output) is not None else output


def test_a_cut_draft_is_distilled_with_or_without_training_of_its_own(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, student=StudentSettings(kind="cut"))
    ran, run, _ = run_tiny(settings)
    assert ran == ["target", "initial", "distillspec", "adaspec"]
    target, initial = (load_file(run.path(stage) / "model.safetensors") for stage in ("target", "initial"))
    kept = [name for name in initial if "layers.1." not in name]
    assert all(torch.equal(initial[name], target[name]) for name in kept)
    assert run.record("initial").history == []  # type: ignore[union-attr]
    settings.student.training = TrainingSettings(steps=2, batch_size=4)
    ran, run, _ = run_tiny(settings)
    assert ran == ["initial", "distillspec", "adaspec"]
    assert [row["step"] for row in run.record("initial").history] == [0, 2]  # type: ignore[union-attr]

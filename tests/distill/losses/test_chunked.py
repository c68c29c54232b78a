"""The fused loss and its plain twin: the same numbers and gradients on every kind of head, with a chunk's memory."""

import copy
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from families import build_tiny, in_double
from plain_losses import plain_loss
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import distill.losses.chunked
from distill.config.drafts import DivergenceName
from distill.losses.chunked import LossRequest, LossRows, can_fuse, fused_loss
from distill.losses.divergences import Divergence, TargetRows
from distill.losses.objective import Selection
from distill.models.lm_head import LMHead, last_hidden

Tiny = Callable[..., PreTrainedModel]
LOSSES = get_args(DivergenceName)

HEADS = ["llama", "llama-tied", "phi", "gemma2", "scaled"]
"""Plain, tied, with a bias, tied and soft-capped, multiplied."""


def of_hidden(hidden: torch.Tensor, head: LMHead) -> TargetRows:
    return TargetRows(hidden, head.vocab, head)


@dataclass
class Side:
    """A draft whose loss is wanted against a target."""

    model: PreTrainedModel
    head: LMHead
    target: TargetRows
    ids: torch.Tensor
    mask: torch.Tensor

    def run(self, compute: Any, task: LossRequest, **options: Any) -> tuple[LossRows, list[torch.Tensor]]:
        """What `compute` finds, and the gradient of every parameter."""
        self.model.zero_grad()
        found = compute(last_hidden(self.model, self.ids, self.mask), self.head, self.target, task, **options)
        (found.total * 0.37).backward()
        return found, [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


def side(
    kind: str, *, labels: bool = True, draft: int = 48, target: int = 48, dtype: torch.dtype = torch.float64
) -> Side:
    family = "llama" if kind == "scaled" else kind
    model, teacher = (
        in_double(build_tiny(name, seed=seed, vocab_size=vocab, dtype=dtype))
        for name, seed, vocab in ((family, 5, draft), ("llama", 6, target))
    )
    head = LMHead(model)
    head.scale = 0.3 if kind == "scaled" else 1.0
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 40, (3, 11), generator=generator)
    mask = (torch.rand(3, 11, generator=generator) < 0.7) & labels
    with torch.no_grad():
        rows = of_hidden(last_hidden(teacher, ids, mask), LMHead(teacher))
    rows.labels = torch.randint(-1, 40, (len(rows.values),), generator=generator)
    return Side(model, head, rows, ids, mask)


def task(name: str = "forward_kl", k: float | None = 0.4, **options: Any) -> LossRequest:
    choose = None if k is None else (lambda values, _: Selection(k).choose(values - values.flip(0)))
    return LossRequest(Divergence(name), choose, **options)  # type: ignore[arg-type]


def assert_equal(got: tuple[LossRows, list[torch.Tensor]], wanted: tuple[LossRows, list[torch.Tensor]]) -> None:
    """Losses to 1e-6 and gradients to 1e-5 relative to the largest in float32, both to 1e-9 in float64."""
    (fused, gradients), (plain, others) = got, wanted
    double = fused.losses.dtype == torch.float64
    close, near = (1e-9, 1e-9) if double else (1e-6, 1e-5)
    assert fused.total.item() == pytest.approx(plain.total.item(), rel=close)
    assert torch.allclose(fused.losses, plain.losses, rtol=near, atol=close)
    assert (fused.chosen is None) == (plain.chosen is None)
    assert fused.chosen is None or torch.equal(fused.chosen, plain.chosen)
    for name in ("alpha", "agreement"):
        a, b = getattr(fused, name), getattr(plain, name)
        assert a is b is None or torch.allclose(a, b, atol=close)
    scale = max(float(g.abs().max()) for g in others)
    for a, b in zip(gradients, others, strict=True):
        assert (a - b).abs().max() <= near * scale


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("k", [None, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_divergence_equals_its_plain_twin(name: str, k: float | None, dtype: torch.dtype) -> None:
    one, wanted = side("llama", dtype=dtype), task(name, k)
    assert_equal(one.run(fused_loss, wanted, chunk=5), one.run(plain_loss, wanted))


def test_a_loss_without_a_compiler_is_computed_all_the_same_after_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill.losses.chunked, "_kernels", [])
    torch.compiler.reset()
    one, wanted = side("llama", dtype=torch.float32), task()
    nothing = torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",), "fx_graph_cache": False})
    said = r"the distillation loss is not compiled \(.*/no/such/compiler"
    with nothing, pytest.warns(UserWarning, match=said):
        found = one.run(fused_loss, wanted, chunk=5, compiled=True)
    assert_equal(found, one.run(plain_loss, wanted))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "gemma2")) for kind in HEADS])
def test_compiled_kernels_equal_the_plain_twin(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill.losses.chunked, "KEPT", 0)
    one, wanted = side(kind, dtype=torch.float32), task("kl_tv")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # it is compiled; PyTorch's own deprecations do not count
        assert_equal(one.run(fused_loss, wanted, chunk=7, compiled=True), one.run(plain_loss, wanted))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("kept", [0, 1 << 26])
def test_every_kind_of_head_equals_its_plain_twin(kind: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill.losses.chunked, "KEPT", kept)
    one, wanted = side(kind), task("kl_tv")
    for chunk in (1, 7, 100):
        assert_equal(one.run(fused_loss, wanted, chunk=chunk), one.run(plain_loss, wanted))


@pytest.mark.parametrize(("draft", "target"), [(48, 56), (56, 48)])
def test_ids_that_only_one_model_has_are_left_out(draft: int, target: int) -> None:
    for kind in ("llama-tied", "phi"):
        one = side(kind, draft=draft, target=target)
        got = one.run(fused_loss, task(), chunk=6)
        assert_equal(got, one.run(plain_loss, task()))
        head = one.model.get_output_embeddings().weight.grad
        assert head is not None
        if kind == "phi":  # untied: the extra ids get no gradient
            assert not head[48:].any()


@pytest.mark.parametrize("k", [None, 0.4])
@pytest.mark.parametrize("kept", [0, 1 << 26])
def test_weights_multiply_the_rows_losses_in_their_sum(
    k: float | None, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill.losses.chunked, "KEPT", kept)
    one = side("phi")
    own = torch.rand(int(one.mask.sum()), dtype=torch.float64)
    wanted = task(k=k, factors=own)
    assert_equal(one.run(fused_loss, wanted, chunk=5), one.run(plain_loss, wanted))


def test_the_criterion_ranks_and_the_loss_trains() -> None:
    one, mixed = side("llama"), task("forward_kl", criterion=Divergence("tv"))
    got = one.run(fused_loss, mixed, chunk=4)
    assert_equal(got, one.run(plain_loss, mixed))
    tv = one.run(plain_loss, task("tv"))[0]
    assert got[0].chosen is not None
    assert torch.equal(got[0].chosen, tv.chosen)
    assert got[0].total.item() == pytest.approx(got[0].losses[tv.chosen].sum().item())


@pytest.mark.parametrize("k", [None, 0.4])
@pytest.mark.parametrize("kind", ["phi", "gemma2"])
def test_a_batch_without_labels_is_a_zero_connected_to_every_parameter(kind: str, k: float | None) -> None:
    one = side(kind, labels=False)
    found, gradients = one.run(fused_loss, task(k=k))
    assert found.total.item() == 0.0
    assert len(gradients) == len(list(one.model.parameters()))
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("name", LOSSES)
def test_saturated_rows_stay_finite_and_as_exact_as_autograd(name: str) -> None:
    one = side("scaled", dtype=torch.float32)
    one.head.scale = 100.0
    (fused, gradients), (plain, others) = one.run(fused_loss, task(name)), one.run(plain_loss, task(name))
    assert fused.total.item() == pytest.approx(plain.total.item(), rel=1e-5)
    double = Side(copy.deepcopy(one.model).double(), one.head, one.target, one.ids, one.mask)
    double.head = LMHead(double.model)
    double.head.scale = 100.0
    exact = double.run(plain_loss, task(name))[1]
    scale = max(float(gradient.abs().max()) for gradient in exact)
    for a, b, wanted in zip(gradients, others, exact, strict=True):
        assert (a - wanted).abs().max() <= 5 * (b - wanted).abs().max() + 1e-5 * scale


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.parametrize("k", [None, 0.4])
def test_no_tensor_of_all_rows_times_the_vocabulary_is_ever_made(
    k: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill.losses.chunked, "KEPT", 0)
    monkeypatch.setattr(distill.losses.chunked, "WAITING", 0)
    rows, vocab, width, chunk = 300, 400, 8, 20
    draft, teacher = LMHead.of(torch.nn.Linear(width, vocab)), LMHead.of(torch.nn.Linear(width, vocab))
    hidden = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = of_hidden(torch.randn(rows, width, generator=torch.Generator().manual_seed(1)), teacher)
    with Largest() as seen:
        fused_loss(hidden, draft, target, task(k=k), chunk=chunk).total.backward()
    assert seen.numel == chunk * vocab
    with Largest() as seen:
        plain_loss(hidden, draft, target, task(k=k)).total.backward()
    assert seen.numel == rows * vocab


def test_under_bfloat16_autocast_losses_are_those_of_float32_and_gradients_close_to_them() -> None:
    head, teacher = LMHead.of(torch.nn.Linear(8, 400)), LMHead.of(torch.nn.Linear(8, 400))
    hidden = torch.randn(300, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = of_hidden(torch.randn(300, 8, generator=torch.Generator().manual_seed(1)), teacher)
    found = []
    for narrow in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            losses = fused_loss(hidden, head, target, task(k=None))
        found.append((losses.losses, torch.autograd.grad(losses.total, [hidden, head.linear.weight])))
    (exact, gradients), (losses, narrow_gradients) = found
    assert torch.allclose(losses, exact, rtol=1e-4, atol=1e-5)
    for gradient, narrow in zip(gradients, narrow_gradients):
        error = float((gradient - narrow).norm() / gradient.norm())
        assert 0 < error < 0.01


def test_what_needs_no_gradient_gets_none() -> None:
    one = side("llama")
    with torch.no_grad():
        hidden = last_hidden(one.model, one.ids, one.mask)
        assert not fused_loss(hidden, one.head, one.target, task()).total.requires_grad
    one.model.zero_grad()
    fused_loss(hidden, one.head, one.target, task()).total.backward()  # frozen backbone, trained head
    assert [name for name, p in one.model.named_parameters() if p.grad is not None] == ["lm_head.weight"]


def test_a_head_with_an_adapter_is_left_to_autograd(tiny: Tiny) -> None:
    from peft import LoraConfig, get_peft_model

    model = copy.deepcopy(tiny("llama"))
    assert can_fuse(LMHead(model))
    get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    assert not can_fuse(LMHead(model))

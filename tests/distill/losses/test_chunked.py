"""The chunked loss and its plain twin: the same numbers and gradients for every divergence, head and signal."""

import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from plain_losses import plain_loss
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from decode.errors import UserError
from distill.config import DivergenceName
from distill.lm_head import LMHead
from distill.losses import chunked
from distill.losses.chunked import Compared, Rows, chunked_loss, compare
from distill.losses.divergences import Divergence, TargetRows

LOSSES = get_args(DivergenceName)
HEADS = ["plain", "bias", "capped", "scaled", "markov"]
FORMS = ["hidden", "topk", "probabilities"]
WIDTH, LABELS, ROWS = 8, 17, 23


def case(
    kind: str = "plain", form: str = "hidden", *, dtype: Any = torch.float32, vocab: int = 48, known: int = 48,
    scale: float = 0.3, rows: int = ROWS,
) -> Rows:  # fmt: skip
    """Rows of a head with several drafting steps: weighted, several of a label token, part of p drafted by nobody."""
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    linear, teacher = nn.Linear(WIDTH, vocab, bias=kind == "bias"), nn.Linear(WIDTH, known, bias=False)
    markov = nn.Parameter(some(vocab, 3)) if kind == "markov" else None
    linear.requires_grad_(markov is None)
    for part in (linear, teacher):
        for name, weight in list(part.named_parameters()):
            setattr(part, name, nn.Parameter(some(*weight.shape), requires_grad=weight.requires_grad))
    head = LMHead.of(linear, scale if kind == "scaled" else 1.0, 2.0 if kind == "capped" else None, markov=markov)
    states, shared = some(LABELS, WIDTH), min(vocab, known)
    log_p = (states @ teacher.weight.T).log_softmax(-1).detach()
    target = {
        "hidden": lambda: TargetRows(states, known, LMHead.of(teacher)),
        "topk": lambda: TargetRows(
            log_p[:, :shared].topk(5).values, shared, ids=log_p[:, :shared].topk(5).indices.int()
        ),
        "probabilities": lambda: TargetRows(log_p, known),
        "labels": lambda: TargetRows(None, vocab),
    }[form]()
    target.labels = torch.randint(-1, 40, (LABELS,), generator=generator)
    target.mass = torch.rand(LABELS, generator=generator).to(dtype)
    return Rows(
        some(rows, WIDTH + 3 * (kind == "markov")).requires_grad_(),
        head,
        target,
        LABELS,
        torch.randint(0, LABELS, (rows,), generator=generator).sort().values,
        torch.zeros(rows, dtype=torch.long),
        weight=torch.rand(rows, generator=generator).to(dtype),
    )


Result = tuple[Tensor, Compared, list[Tensor]]


def run(rows: Rows, compute: Callable[..., Any], *given: Any, **options: Any) -> Result:
    """The loss, the measures, and the gradients of states, weight, bias and Markov weight."""
    leaves = [rows.hidden, *rows.head.parameters(), rows.head.markov]
    leaves = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    total, measured = compute(rows, *given, **options)
    return total.detach(), measured, list(torch.autograd.grad(total * 0.37, leaves))


def close(found: Result, wanted: Result) -> bool:
    """Losses and measures to 1e-6 and gradients to 1e-5 of the largest in float32, both to 1e-9 in float64."""
    losses, gradients = (1e-9, 1e-9) if wanted[0].dtype == torch.float64 else (1e-6, 1e-5)
    scale = max(float(gradient.abs().max()) for gradient in wanted[2])
    return (
        found[0].item() == pytest.approx(wanted[0].item(), rel=losses)
        and same_measures(found[1], wanted[1], losses)
        and all((a - b).abs().max() <= gradients * scale for a, b in zip(found[2], wanted[2], strict=True))
    )


def same_measures(found: Compared, wanted: Compared, gap: float) -> bool:
    fields = [(getattr(each, name) for each in (found, wanted)) for name in ("losses", "alpha", "agreement")]
    return all(a.dtype == b.dtype and torch.allclose(a, b, rtol=gap, atol=gap) for a, b in fields)


def results(rows: Rows, name: Any, chosen: Tensor | None = None, **options: Any) -> Iterator[tuple[Result, Result]]:
    """The chunked loss of chosen rows beside its plain twin: alone, and after all rows were compared and kept or not."""
    divergence = Divergence(name)
    plain = run(rows, plain_loss, divergence, chosen)
    for keep in (None, False, True):
        compared = None if keep is None else compare(rows, divergence, keep=keep)
        assert compared is None or (compared.kept is not None) == keep
        yield run(rows, chunked_loss, divergence, chosen, compared, **options), plain
    whole = compare(rows, divergence, chosen)
    yield (plain[0], whole, plain[2]), plain


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five rows."""
    monkeypatch.setattr(chunked, "CPU_CHUNK", 0)
    monkeypatch.setattr(chunked, "FEWEST_ROWS", 5)
    monkeypatch.setattr(chunked, "FEWEST_NARROW", 5)


CHOSEN = torch.tensor([0, 3, 4, 5, 11, 12, 20, 22])  # of several chunks, one of which has none


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_divergence_equals_its_plain_twin(name: str, form: str, dtype: Any) -> None:
    for chosen in (None, CHOSEN):
        assert all(close(*both) for both in results(case("bias", form, dtype=dtype), name, chosen))
    rows = case("bias", "labels", dtype=dtype)  # no target: the text's own tokens
    assert all(close(*both) for both in results(rows, "cross_entropy", CHOSEN))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("size", [1, 7, 100])
def test_every_kind_of_head_equals_its_plain_twin(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "FEWEST_ROWS", size)
    for waiting in (0, 1 << 23):  # the weight's gradient is updated after each chunk, or at the end
        monkeypatch.setattr(chunked, "WAITING", waiting)
        monkeypatch.setattr(chunked, "MOST_WAITING", waiting)
        for name in ("kl_tv", "dspark"):
            assert all(close(*both) for both in results(case(kind, dtype=torch.float64), name))
            assert all(close(*both) for both in results(case(kind), name, CHOSEN))


@pytest.mark.parametrize(("vocab", "known"), [(48, 56), (56, 48)])
@pytest.mark.parametrize("form", FORMS[:2])
def test_ids_that_only_one_model_has_are_left_out(vocab: int, known: int, form: str) -> None:
    rows = case("bias", form, vocab=vocab, known=known)
    assert all(close(*both) for both in results(rows, "kl_tv", CHOSEN))
    gradients = run(rows, chunked_loss, Divergence("kl_tv"))[2]
    assert not any(gradient[48:].any() for gradient in gradients[1:])


def test_one_divergence_ranks_and_another_one_trains() -> None:
    rows = case("bias")
    compared = compare(rows, Divergence("tv"), keep=True)
    found = run(rows, chunked_loss, Divergence("forward_kl"), CHOSEN, compared)
    assert close(found, run(rows, plain_loss, Divergence("forward_kl"), CHOSEN))
    assert torch.allclose(compared.losses, run(rows, plain_loss, Divergence("tv"))[1].losses, rtol=1e-6)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("rows", "chosen"), [(0, None), (0, torch.tensor([], dtype=torch.long)), (ROWS, CHOSEN[:0])])
def test_a_part_without_rows_gives_a_zero_connected_to_every_weight(kind: str, rows: int, chosen: Any) -> None:
    made = case(kind, rows=rows)
    compared = compare(made, Divergence(), keep=True)
    assert len(compared.losses) == rows
    total, measured, gradients = run(made, chunked_loss, Divergence(), chosen, compared)
    assert total.item() == 0.0
    assert len(measured.losses) == 0
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("name", LOSSES)
def test_saturated_rows_stay_finite_and_as_exact_as_autograd(name: Any, form: str) -> None:
    made, double = case("scaled", form, scale=100.0), case("scaled", form, scale=100.0, dtype=torch.float64)
    total, _, gradients = run(made, chunked_loss, Divergence(name))
    assert total.isfinite()
    exact, _, wanted = run(double, plain_loss, Divergence(name))
    assert total.item() == pytest.approx(exact.item(), rel=1e-5)
    scale = max(float(gradient.abs().max()) for gradient in wanted)
    for ours, plain, best in zip(gradients, run(made, plain_loss, Divergence(name))[2], wanted, strict=True):
        assert (ours - best).abs().max() <= 5 * (plain - best).abs().max() + 1e-5 * scale


@pytest.mark.parametrize("kind", ["plain", "markov"])
def test_a_draft_that_is_the_target_is_accepted_throughout(kind: str) -> None:
    rows = case(kind)
    with torch.no_grad():
        products = rows.head.products(rows.hidden, rows.vocab)
    rows.target, rows.at = TargetRows(products.log_softmax(-1), rows.vocab), torch.arange(ROWS)
    for name in LOSSES[:7]:
        compared = compare(rows, Divergence(name))
        assert torch.allclose(compared.alpha, torch.ones(ROWS), atol=1e-6)
        assert torch.allclose(compared.losses, torch.zeros(ROWS), atol=2e-6)
        assert compared.agreement.eq(1).all()


def test_a_loss_without_a_compiler_is_computed_all_the_same_after_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_kernels", [])
    torch.compiler.reset()
    rows = case("bias")
    nothing = torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",), "fx_graph_cache": False})
    with nothing, pytest.warns(UserWarning, match=r"the distillation loss is not compiled \(.*/no/such/compiler"):
        total, _ = chunked_loss(rows, Divergence(), compiled=True)
    assert total.item() == pytest.approx(plain_loss(rows, Divergence())[0].item(), rel=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "capped")) for kind in HEADS])
def test_compiled_kernels_equal_the_plain_twin(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "FEWEST_ROWS", 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # it is compiled; PyTorch's own deprecations do not count
        assert all(close(*both) for both in results(case(kind), "kl_tv", compiled=True))


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


@pytest.mark.parametrize("chosen", [None, torch.arange(0, 300, 2)])
def test_no_tensor_of_all_rows_times_the_vocabulary_is_ever_made(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FEWEST_ROWS": 20, "KEPT": 0, "WAITING": 0, "MOST_WAITING": 0}.items():
        monkeypatch.setattr(chunked, name, value)
    rows = case(vocab=400, known=400, rows=300)
    with Largest() as seen:
        compared = compare(rows, Divergence(), keep=True)
        assert compared.kept is None
        chunked_loss(rows, Divergence(), chosen, compared)[0].backward()
    assert seen.numel == 20 * 400
    with Largest() as seen:
        plain_loss(rows, Divergence(), chosen)[0].backward()
    assert seen.numel == 300 * 400


def test_under_bfloat16_autocast_losses_are_those_of_float32_and_gradients_close_to_them() -> None:
    rows, made = case("bias", rows=300, vocab=400, known=400), []
    for narrow in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            made.append(run(rows, chunked_loss, Divergence("kl_tv")))
    (exact, plain, gradients), (total, measured, rounded) = made
    assert total.dtype == measured.losses.dtype == torch.float32
    assert total.item() == pytest.approx(exact.item(), rel=1e-6)
    assert torch.equal(measured.losses, plain.losses)
    for ours, other in zip(rounded[:2], gradients, strict=False):
        assert 0 < float((ours - other).norm() / other.norm()) < 0.01


def test_what_needs_no_gradient_gets_none() -> None:
    rows = case("bias")
    with torch.no_grad():
        assert not chunked_loss(rows, Divergence())[0].requires_grad
    rows.hidden = rows.hidden.detach()  # a frozen model below a trained head
    chunked_loss(rows, Divergence())[0].backward()
    assert rows.hidden.grad is None
    assert all(weight.grad is not None for weight in rows.head.parameters())
    rows = case("markov")
    chunked_loss(rows, Divergence())[0].backward()
    assert rows.head.linear.weight.grad is None  # the target's, beside a bias that is trained


def test_a_head_whose_gradient_is_not_known_is_refused() -> None:
    class Adapted(nn.Linear):
        pass

    rows = case()
    rows.head.linear.__class__ = Adapted
    with pytest.raises(UserError, match="output head is a Adapted, expected"):
        chunked_loss(rows, Divergence())

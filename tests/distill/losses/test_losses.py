"""Every divergence by hand; the chunked loss and its plain twin, for every head and signal; which tokens are chosen."""

import copy
import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain_losses import plain_loss
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from decode.errors import UserError
from distill.losses import chunked
from distill.losses.chunked import Compared, Rows, chunked_loss, compare, next_token_hits, next_token_loss
from distill.losses.divergences import DIVERGENCES, Divergence, TargetRows
from distill.losses.selection import accepted_rows, share, top_k
from distill.networks.lm_head import LMHead

Result = tuple[Tensor, Compared, list[Tensor]]

LOSSES = list(DIVERGENCES)
HEADS = ["plain", "bias", "capped", "scaled", "markov"]
FORMS = ["hidden", "topk", "probabilities"]
WIDTH, LABELS, ROWS = 8, 17, 23


def case(kind: str='plain', form: str='hidden', *, dtype: Any=torch.float32, vocab: int=48, known: int=48, scale: float=0.3, rows: int=ROWS) -> Rows:  # fmt: skip
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
        at=torch.randint(0, LABELS, (rows,), generator=generator).sort().values,
        step=torch.zeros(rows, dtype=torch.long),
        weight=torch.rand(rows, generator=generator).to(dtype),
    )


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
        and all(
            a.dtype == b.dtype and torch.allclose(a, b, rtol=losses, atol=losses)
            for a, b in zip(*map(measures, (found, wanted)))
        )
        and all((a - b).abs().max() <= gradients * scale for a, b in zip(found[2], wanted[2], strict=True))
    )


def measures(found: Result) -> list[Tensor]:
    return [found[1].losses, found[1].alpha, found[1].likeliest, found[1].agreement]


def results(rows: Rows, name: Any, chosen: Tensor | None = None, **options: Any) -> Iterator[tuple[Result, Result]]:
    """The chunked loss of chosen rows and their comparison, each beside its plain twin."""
    divergence = Divergence(name)
    plain = run(rows, plain_loss, divergence, chosen)
    yield run(rows, chunked_loss, divergence, chosen, **options), plain
    whole = compare(rows, divergence, chosen)
    yield (plain[0], whole, plain[2]), plain


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch) -> None:
    """Of five rows."""
    for name, value in {"CPU_CHUNK": 0, "FEWEST_ROWS": 5, "FEWEST_NARROW": 5, "AUTOGRAD_CPU": 0}.items():
        monkeypatch.setattr(chunked, name, value)


CHOSEN = torch.tensor([0, 3, 4, 5, 11, 12, 20, 22])  # of several chunks, one of which has none


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_divergence_equals_its_plain_twin(name: str, form: str, dtype) -> None:
    for chosen in (None, CHOSEN):
        assert all(close(*both) for both in results(case("bias", form, dtype=dtype), name, chosen))
    rows = case("bias", "labels", dtype=dtype)  # no target: the text's own tokens
    assert all(close(*both) for both in results(rows, "cross_entropy", CHOSEN))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("size", [1, 7, 100])
def test_every_kind_of_head_equals_its_plain_twin(kind: str, size: int, monkeypatch) -> None:
    monkeypatch.setattr(chunked, "FEWEST_ROWS", size)
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


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("name", LOSSES)
def test_saturated_rows_stay_finite_and_as_exact_as_autograd(name, form: str) -> None:
    made, double = case("scaled", form, scale=100.0), case("scaled", form, scale=100.0, dtype=torch.float64)
    total, _, gradients = run(made, chunked_loss, Divergence(name))
    assert total.isfinite()
    exact, _, wanted = run(double, plain_loss, Divergence(name))
    assert total.item() == pytest.approx(exact.item(), rel=1e-5)
    scale = max(float(gradient.abs().max()) for gradient in wanted)
    for ours, plain, best in zip(gradients, run(made, plain_loss, Divergence(name))[2], wanted, strict=True):
        assert (ours - best).abs().max() <= 5 * (plain - best).abs().max() + 1e-5 * scale


def test_a_loss_without_a_compiler_is_computed_all_the_same_after_a_warning(monkeypatch) -> None:
    monkeypatch.setattr(chunked, "_kernels", [])
    torch.compiler.reset()
    rows = case("bias")
    nothing = torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",), "fx_graph_cache": False})
    with nothing, pytest.warns(UserWarning, match=r"the distillation loss is not compiled \(.*/no/such/compiler"):
        total, _ = chunked_loss(rows, Divergence(), compiled=True)
    assert total.item() == pytest.approx(plain_loss(rows, Divergence())[0].item(), rel=1e-6)


def test_an_ablation_may_need_more_kernels_than_pytorch_compiles_of_a_function(monkeypatch) -> None:
    monkeypatch.setattr(
        chunked, "_kernels", [torch.compile(chunked._chunk, dynamic=True, fullgraph=True, backend="eager")]
    )
    torch.compiler.reset()
    rows = case("plain")
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=1):
        warnings.simplefilter("error", UserWarning)
        for name in ("forward_kl", "tv", "jsd"):
            total, _ = chunked_loss(rows, Divergence(name), compiled=True, metrics=False)
            assert total.item() == pytest.approx(plain_loss(rows, Divergence(name))[0].item(), rel=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "capped")) for kind in HEADS])
def test_compiled_kernels_equal_the_plain_twin(kind: str, monkeypatch) -> None:
    monkeypatch.setattr(chunked, "FEWEST_ROWS", 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # it is compiled; PyTorch's own deprecations do not count
        assert all(close(*both) for both in results(case(kind), "kl_tv", compiled=True))


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [value for value in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(value, Tensor)]
        self.numel = max([self.numel, *(value.numel() for value in tensors)])
        return out


@pytest.mark.parametrize("chosen", [None, torch.arange(0, 300, 2)])
def test_no_tensor_of_all_rows_times_the_vocabulary_is_ever_made(chosen, monkeypatch) -> None:
    monkeypatch.setattr(chunked, "FEWEST_ROWS", 20)
    rows = case(vocab=400, known=400, rows=300)
    with Largest() as seen:
        compare(rows, Divergence())
        chunked_loss(rows, Divergence(), chosen)[0].backward()
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


def test_what_needs_no_gradient_gets_none_and_a_head_whose_gradient_is_not_known_is_refused() -> None:
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
    rows.head.linear.__class__ = type("Adapted", (nn.Linear,), {})
    with pytest.raises(UserError, match="output head is a Adapted, expected"):
        chunked_loss(rows, Divergence())


def test_chunks_of_the_next_token_loss_give_that_of_all_logits(monkeypatch) -> None:
    rows = case("capped", dtype=torch.float64, rows=150)
    hidden, head, labels, widest = rows.hidden, rows.head, torch.arange(150) % 48, []

    def computed() -> list[Tensor]:
        loss, hits = next_token_loss(hidden, head, labels), next_token_hits(hidden, head, labels)
        return [loss.detach(), hits, *torch.autograd.grad(3 * loss, [hidden, *head.parameters()])]

    monkeypatch.setattr(chunked, "CPU_CHUNK", 64 * 4 * 48)
    with head.linear.register_forward_hook(lambda module, given, made: widest.append(len(made))):
        parts = computed()
    assert max(widest) == 64  # logits of all rows are never made
    monkeypatch.setattr(chunked, "AUTOGRAD_CPU", 1 << 30)
    for ours, plain in zip(parts, computed(), strict=True):
        assert torch.allclose(ours.double(), plain.double(), rtol=1e-9, atol=1e-9)
    none = next_token_loss(hidden[:0], head, labels[:0])
    none.backward()
    assert none.item() == 0.0
    assert all(leaf.grad is not None for leaf in (hidden, *head.parameters()))


def test_a_head_with_an_adapter_is_left_to_autograd(tiny) -> None:
    model = copy.deepcopy(tiny("llama"))
    get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    head = LMHead(model)
    next_token_loss(torch.ones(3, 32), head, torch.tensor([1, 2, 3])).backward()
    trained = [name for name, weight in head.named_parameters() if weight.grad is not None]
    assert trained
    assert all("lora" in name for name in trained)


KL, ALPHA = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), 0.75
HAND = {
    "forward_kl": KL,
    "reverse_kl": 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5),
    "jsd": 0.25 * (math.log(0.5 / 0.375) + math.log(0.5 / 0.625))
    + 0.125 * (math.log(0.25 / 0.375) + 3 * math.log(0.75 / 0.625)),
    "tv": 1 - ALPHA,
    "neg_log_alpha": -math.log(ALPHA),
    "lk_hybrid": math.exp(-3 * ALPHA) * KL + (1 - math.exp(-3 * ALPHA)) * (1 - ALPHA),
    "kl_tv": KL + 2 * (1 - ALPHA),
    "cross_entropy": -math.log(0.75),
    "dspark": -0.1 * math.log(0.75) + 1.8 * (1 - ALPHA),
}


@pytest.mark.parametrize("name", HAND)
def test_a_divergence_agrees_with_its_formula_by_hand(name) -> None:
    """Of different and of equal distributions, of which the text's token is the second, then unknown to the draft."""
    p, q = (torch.tensor([row, [0.9, 0.1]]).log() for row in ([0.5, 0.5], [0.25, 0.75]))
    rows = TargetRows(p, 2, labels=torch.tensor([1, -1])).compare(q)
    assert Divergence(name).loss(rows).tolist() == pytest.approx([HAND[name], 0.0], abs=1e-6)
    assert rows.alpha.tolist() == pytest.approx([ALPHA, 1.0])


def test_acceptance_of_drawn_and_of_likeliest_tokens_and_agreement_by_hand() -> None:
    p, q = ([0.7, 0.2, 0.1], [0.3, 0.6, 0.1]), ([0.5, 0.5, 1e-9], [0.8, 0.2, 1e-9])
    target = TargetRows(torch.tensor(q).log(), 3)
    rows = target.compare(torch.tensor(p).log())
    found = [values.tolist() for values in rows.accepted()]
    assert found == [pytest.approx(row, abs=1e-5) for row in ([0.7, 0.5], [0.5, 0.2], [1.0, 0.0])]
    target.mass, target.learnable = (
        torch.tensor([0.5, 1.0]),
        torch.tensor([0.0, 1.0]),
    )  # the head drafts a part of the ids
    found = [values.tolist() for values in rows.accepted()]
    assert found == [pytest.approx(row, abs=1e-5) for row in ([0.45, 0.5], [0.25, 0.2], [0.0, 0.0])]


# -- which tokens are chosen --------------------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("delta", "k", "wanted"),
    [
        ([0.1, 0.9, -1.0, 0.5, 0.7], 0.6, [1, 3, 4]),
        ([0.0] * 10, 0.4, [0, 1, 2, 3]),  # of equal ones the first
        ([1.0, 2.0, 1.0, 2.0, 1.0], 0.6, [0, 1, 3]),
        ([0.1, NAN, 5.0], 0.3, [1]),  # so that it shows in the loss
        ([], 0.4, []),
    ],
)
def test_the_largest_differences_are_chosen_in_ascending_order_of_place(delta, k: float, wanted) -> None:
    """Their number is the ceiling of k·n, despite binary fractions; each drafting step has a share of its own."""
    given = torch.tensor(delta)
    assert top_k(given, k).tolist() == top_k(given, k, [len(given)]).tolist() == wanted
    both = top_k(torch.cat([given, given + 9]), k, [len(given)] * 2).tolist()
    assert both == [*wanted, *(len(delta) + place for place in wanted)]
    counts = [(0.07, 100), (0.28, 25), (0.4, 5), (0.4, 6), (0.1, 30), (1.0, 7), (0.001, 3), (0.4, 0)]
    assert [share(k, n) for k, n in counts] == [7, 7, 2, 3, 3, 7, 1, 0]


def unrolled(alphas: list[list[float]], at: list[list[int]]) -> Rows:
    """Rows of several drafting steps with these acceptance rates."""
    steps = torch.repeat_interleave(torch.arange(len(at)), torch.tensor([len(step) for step in at]))
    alpha, places = (torch.tensor([value for step in values for value in step]) for values in (alphas, at))
    linear = nn.Linear(3, 3, bias=False)
    nn.init.eye_(linear.weight)
    q = torch.stack([alpha, 1 - alpha, torch.zeros_like(alpha)], 1).clamp_min(1e-30)
    p = torch.tensor([1.0, 1e-30, 1e-30]).log().expand(max(map(max, at)) + 1, 3)
    return Rows(q.log(), LMHead.of(linear), TargetRows(p, 3), len(p), [len(step) for step in at], places, steps)


def test_a_drafting_step_goes_on_where_every_token_before_it_was_accepted(monkeypatch) -> None:
    """Label tokens 0 to 3 of a text, then 4 and 5 of another one; a token is accepted above a chance of one half."""
    monkeypatch.setattr(torch, "rand_like", lambda alpha: torch.full_like(alpha, 0.5))
    place = torch.tensor([1, 2, 3, 4, 8, 9])
    first, second, third = [0.9, 0.1, 0.9, 0.9, 0.9, 0.9], [0.9, 0.9, 0.2, 0.9], [0.9, 0.9]
    rows = unrolled([first, second, third], [[0, 1, 2, 3, 4, 5], [1, 2, 3, 5], [2, 3]])
    chosen = accepted_rows(rows, place, 12, Divergence()).nonzero()[:, 0]
    # of the second step: 1 follows 0, 2 follows the rejected 1, 3 follows 2, 5 follows 4; of the third: 2 follows 0, 1
    assert chosen.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10]
    empty = Rows(rows.hidden[:0], rows.head, rows.target, 0, [0, 0], rows.at[:0], rows.step[:0])
    assert accepted_rows(empty, place[:0], 12, Divergence()).tolist() == []

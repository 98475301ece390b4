"""Head and loss in pieces of rows: values and gradients are those of whole logits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.loss.loss_utils import ForCausalLMLoss

from ds_lgamp.cost.activations import rows_of_piece
from ds_lgamp.integrations.split.outputs import works_by_rows
from ds_lgamp.runtime.logits import Entry, Logits, deferred
from ds_lgamp.runtime.measure import PeakMemory
from ds_lgamp.runtime.pieces import Head
from ds_lgamp.runtime.recompute import SavedTensors

WIDTH, VOCABULARY, BATCH, LENGTH = 6, 23, 2, 9
IGNORED = -100


def logits_of(head: nn.Module, hidden: Tensor, piece: int) -> Tensor:
    logits = deferred(Head.of(head, [*head.parameters()], hidden.device), hidden, piece)
    return head(hidden) if logits is None else logits


class LargestResult(TorchDispatchMode):
    """The most elements of a result of any operation."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not isinstance(leaf, Logits)]
        sizes = [leaf.numel() for leaf in made if leaf.device.type != "meta"]
        self.elements = max(self.elements, *sizes, 0)
        return result


class Computed:
    """Loss and gradients of hidden states, and of a head's weight and bias."""

    def __init__(self, loss_of: Callable[[Tensor, Tensor], Tensor], piece: int, dtype: torch.dtype = torch.float32):
        torch.manual_seed(3)
        head = nn.Linear(WIDTH, VOCABULARY).to(dtype)
        hidden = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
        labels = torch.randint(VOCABULARY, (BATCH, LENGTH))
        labels[0, 2:5] = IGNORED
        with LargestResult() as largest:
            logits = logits_of(head, hidden, piece)
            self.is_deferred = isinstance(logits, Logits)
            self.loss = loss_of(logits, labels)
            # As the engine does by 1/M, and the script by what it likes.
            (0.37 * self.loss).backward()
        self.largest = largest.elements
        self.tensors = [self.loss.detach(), hidden.grad, head.weight.grad, head.bias.grad]


def rows(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), **options)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """As scripts wrote it before transformers had loss functions."""
    before, after = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(before.view(-1, before.size(-1)), after.view(-1))


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return ForCausalLMLoss(torch.tanh(logits / 0.7) * 0.7, labels, VOCABULARY)


def weighed(logits: Tensor, labels: Tensor) -> Tensor:
    weights = torch.linspace(0.1, 2, labels.numel())
    return (rows(logits.float(), labels, reduction="none") * weights).sum() / weights.sum()


def of_all_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return ForCausalLMLoss(logits, labels, VOCABULARY, num_items_in_batch=torch.tensor(31))


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    counts = labels != IGNORED
    return functional.cross_entropy(logits[counts], labels[counts])


IN_PIECES = {
    "a causal language model": lambda logits, labels: ForCausalLMLoss(logits, labels, VOCABULARY),
    "num_items_in_batch": of_all_tokens,
    "another ignore_index": lambda logits, labels: ForCausalLMLoss(
        logits, labels.masked_fill(labels == IGNORED, 3), VOCABULARY, ignore_index=3
    ),
    "a soft cap": capped,
    "a logit scale": lambda logits, labels: rows(2 * (logits * 0.25).float(), labels),
    "shifted logits": shifted,
    "masked rows": masked,
    "label smoothing": lambda logits, labels: rows(logits.float(), labels, label_smoothing=0.1),
    "label smoothing of a sum": lambda logits, labels: rows(logits, labels, label_smoothing=0.3, reduction="sum"),
    "weights of rows": weighed,
    "two losses": lambda logits, labels: rows(logits, labels) + 0.1 * rows(logits / 2, labels, reduction="sum"),
    "no row counts": lambda logits, labels: rows(logits, labels.fill_(IGNORED)),
    "no row counts in a sum over their number": lambda logits, labels: (
        rows(logits, labels.fill_(IGNORED), reduction="sum") / (labels != IGNORED).sum()
    ),
    "no row counts, with label smoothing": lambda logits, labels: rows(
        logits, labels.fill_(IGNORED), label_smoothing=0.1
    ),
}


@pytest.mark.parametrize("piece", [1, 4, 7])
@pytest.mark.parametrize("idiom", IN_PIECES)
def test_a_loss_in_pieces_is_that_of_whole_logits(idiom, piece):
    whole, pieces = Computed(IN_PIECES[idiom], 0), Computed(IN_PIECES[idiom], piece)
    assert not whole.is_deferred and pieces.is_deferred
    torch.testing.assert_close(pieces.tensors, whole.tensors, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert pieces.largest <= max(piece * VOCABULARY, WIDTH * VOCABULARY) < whole.largest


def with_accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        right = (logits.argmax(-1) == labels).float().mean()
    return rows(logits, labels) + right


def changed_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    view, copy = logits.view(-1, VOCABULARY), logits * 3
    logits.mul_(0.5)
    return rows(view, labels) + rows(copy, labels)


class OwnLoss(torch.autograd.Function):
    """A loss that calls kernels, as those of Liger do."""

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        context.save_for_backward(logits)
        return torch.ops.aten.sum(torch.ops.aten.mul(logits, logits))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        (logits,) = context.saved_tensors
        return 2 * logits * gradients[0], None


def attended_to(logits: Tensor, labels: Tensor) -> Tensor:
    seen: list[Tensor] = []
    logits.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    return rows(logits, labels)


WHOLE = {
    "a metric": with_accuracy,
    "columns": lambda logits, labels: rows(logits, labels) + logits[..., :3].sum(),
    "a term of all logits": lambda logits, labels: rows(logits, labels) + 0.01 * logits.logsumexp(-1).pow(2).mean(),
    "transposed logits": lambda logits, labels: functional.cross_entropy(logits.transpose(1, 2), labels),
    "weights of classes": lambda logits, labels: rows(logits, labels, weight=torch.linspace(1, 2, VOCABULARY)),
    "changed in place": changed_in_place,
    "a function of autograd": lambda logits, labels: rows(logits, labels) + OwnLoss.apply(logits, labels),
    "a function of a part": lambda logits, labels: OwnLoss.apply(logits.float() / 3, labels),
    "a hook": attended_to,
    "numpy": lambda logits, labels: rows(logits, labels) + float(logits.detach().numpy().sum()),
    "other logits": lambda logits, labels: (logits * logits).sum(),
    "soft labels": lambda logits, labels: functional.cross_entropy(
        logits.view(-1, VOCABULARY), torch.full((labels.numel(), VOCABULARY), 1 / VOCABULARY)
    ),
}


@pytest.mark.parametrize("idiom", WHOLE)
def test_whatever_else_reads_logits_gets_their_values(idiom):
    whole, pieces = Computed(WHOLE[idiom], 0), Computed(WHOLE[idiom], 4)
    assert pieces.is_deferred
    torch.testing.assert_close(pieces.tensors, whole.tensors, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("idiom", ["a causal language model", "a soft cap", "weights of rows", "label smoothing"])
def test_numbers_of_16_bits_are_rounded_as_with_whole_logits(idiom, dtype):
    whole, pieces = (Computed(IN_PIECES[idiom], piece, dtype).tensors for piece in (0, 4))
    assert [each.dtype for each in pieces] == [each.dtype for each in whole]
    tolerance = 2 * torch.finfo(dtype).eps
    for one, other in zip(pieces, whole):
        assert (one.float() - other.float()).norm() <= tolerance * other.float().norm()


def test_a_loss_scale_reaches_gradients_of_16_bits_before_they_are_rounded():
    """Of so many words all are equally likely, and a probability has five bits in fp16 without the scale."""
    words, targets = 650_000, torch.arange(12)
    found = []
    for piece, dtype in ((0, torch.float64), (4, torch.float16)):
        head, hidden = nn.Linear(2, words, bias=False).to(dtype), torch.ones(12, 2, dtype=dtype)
        nn.init.zeros_(head.weight)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        loss = functional.cross_entropy(logits_of(head, hidden, piece).to(wide), targets)
        (2.0**16 * loss).backward()
        found.append(head.weight.grad[12:].double())
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


@settings(max_examples=60)
@given(
    st.integers(1, 20),
    st.lists(st.sampled_from(["float", "half of it", "cap", "view", "first", "copy"]), max_size=5),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from([0.0, 0.1]),
)
def test_any_way_to_a_loss_is_that_of_whole_logits(piece, ways, reduction, smoothing):
    apply: dict[str, Callable[[Tensor], Tensor]] = {
        "float": lambda logits: logits.float(),
        "half of it": lambda logits: logits / 2,
        "cap": torch.tanh,
        "view": lambda logits: logits.reshape(-1, VOCABULARY),
        "first": lambda logits: logits[1:],
        "copy": lambda logits: logits.contiguous().clone(),
    }

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        for way in ways:
            logits = apply[way](logits)
            if way == "view":
                labels = labels.reshape(-1)
            elif way == "first":
                labels = labels[1:]
        if not labels.numel():
            return logits.sum()
        return rows(logits, labels, reduction=reduction, label_smoothing=smoothing).square().sum()

    whole, pieces = Computed(loss_of, 0), Computed(loss_of, piece)
    torch.testing.assert_close(pieces.tensors, whole.tensors, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("idiom", ["a causal language model", "weights of rows", "a metric"])
def test_a_loss_that_is_recomputed_computes_gradients_once(idiom):
    loss_of = {**IN_PIECES, **WHOLE}[idiom]

    def again(logits: Tensor, labels: Tensor) -> Tensor:
        return loss_of(logits, labels)

    torch.manual_seed(3)
    head = nn.Linear(WIDTH, VOCABULARY)
    values, labels = torch.randn(BATCH, LENGTH, WIDTH), torch.randint(VOCABULARY, (BATCH, LENGTH))
    found = []
    for recomputes in (False, True):
        hidden = values.clone().requires_grad_()

        def compute(leaf: Tensor) -> Tensor:
            return again(logits_of(head, 1.0 * leaf, 4), labels)

        saved = SavedTensors()
        if recomputes:
            with saved.dropped():
                loss = compute(hidden)
            saved.restore(lambda: compute(values.clone().requires_grad_()), completely=False)
        else:
            loss = compute(hidden)
        loss.backward()
        found.append([loss.detach(), hidden.grad, head.weight.grad, head.bias.grad])
        head.zero_grad()
    torch.testing.assert_close(*found)


def test_gradients_that_hooks_of_the_model_have_kept_too_early_are_refused():
    head, saved = nn.Linear(WIDTH, VOCABULARY), SavedTensors()
    hidden, labels = torch.randn(20, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (20,))
    with saved.dropped(), torch.autograd.graph.save_on_cpu():
        loss = rows(logits_of(head, hidden, 4), labels)
    with pytest.raises(RuntimeError, match="hooks for saved tensors of the model's own have kept"):
        loss.backward()


def test_a_second_backward_is_refused():
    def twice(logits: Tensor, labels: Tensor) -> Tensor:
        loss = rows(logits, labels)
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Computed(twice, 4)


def test_hidden_states_that_change_before_the_loss_are_refused():
    head, hidden = nn.Linear(WIDTH, VOCABULARY), 1.0 * torch.randn(20, WIDTH, requires_grad=True)
    logits = logits_of(head, hidden, 4)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="changed in place after the head had got them"):
        rows(logits, torch.zeros(20, dtype=torch.long))


def test_logits_say_their_shape_without_being_computed():
    head, hidden = nn.Linear(WIDTH, VOCABULARY), torch.randn(4, 5, WIDTH)
    logits = logits_of(head, hidden, 4)
    assert isinstance(logits, Logits)
    facts = (logits.shape, logits.size(-1), logits.dim(), logits.numel(), logits.dtype, logits.device.type, len(logits))
    assert facts == (torch.Size([4, 5, VOCABULARY]), VOCABULARY, 3, 20 * VOCABULARY, torch.float32, "cpu", 4)
    assert logits.requires_grad and logits._computed is None


def under_autocast(loss_of: Callable[[Tensor], Tensor], piece: int) -> list[Tensor]:
    """Returns a loss of which ``loss_of`` is called with autocast, and the gradients that it leaves."""
    torch.manual_seed(3)
    head, hidden = nn.Linear(WIDTH, VOCABULARY), torch.randn(20, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        logits = logits_of(head, hidden, piece)
        assert logits.dtype is torch.bfloat16
        loss = loss_of(logits)
    loss.sum().backward()
    assert isinstance(hidden.grad, Tensor) and isinstance(head.weight.grad, Tensor)
    return [loss.detach(), hidden.grad, head.weight.grad]


def without_autocast(logits: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return rows(logits.float(), torch.arange(20))


@pytest.mark.parametrize(
    "loss_of",
    [
        without_autocast,
        lambda logits: functional.cross_entropy(logits, torch.arange(20)),
        lambda logits: functional.cross_entropy(logits, torch.arange(20), reduction="none"),
    ],
    ids=["of the head alone", "mean", "by row"],
)
def test_head_and_loss_compute_under_the_autocast_of_their_calls(loss_of):
    """Under autocast a loss has 32 bits, and so has its backward, which runs without."""
    whole, pieces = under_autocast(loss_of, 0), under_autocast(loss_of, 4)
    assert pieces[0].dtype is torch.float32
    torch.testing.assert_close(whole[0], pieces[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(whole, pieces, rtol=1e-2, atol=1e-3)


def test_frozen_weights_get_no_gradient_and_hidden_states_do():
    head, hidden = nn.Linear(WIDTH, 900).requires_grad_(False), torch.randn(20, WIDTH, requires_grad=True)
    with PeakMemory([hidden, *head.parameters()]) as memory:
        before = memory.live()
        functional.cross_entropy(logits_of(head, hidden, 2), torch.arange(20)).backward()
    # Three times the logits of a piece, and no gradient of the weight.
    assert memory.peak - before < 3.5 * (2 * 900 * 4)
    own, hidden.grad = hidden.grad, None
    functional.cross_entropy(head(hidden), torch.arange(20)).backward()
    torch.testing.assert_close(own, hidden.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_without_gradients_losses_are_computed_in_pieces_too(dtype):
    head, labels = nn.Linear(WIDTH, VOCABULARY).to(dtype), torch.randint(VOCABULARY, (20,))
    hidden = torch.randn(20, WIDTH, dtype=dtype)
    criterion = partial(functional.cross_entropy, reduction="none")
    with torch.no_grad():
        of_rows = criterion(head(hidden), labels)
        weights = torch.arange(20.0)
        with PeakMemory([hidden, labels, of_rows, weights, *head.parameters()]) as memory:
            before, logits = memory.live(), logits_of(head, hidden, 3)
            assert isinstance(logits, Logits)
            # Kernels may add up products of few rows in another order.
            torch.testing.assert_close(logits.loss_by_row(labels, criterion), of_rows)
            total = logits.loss_in_all(labels, criterion, torch.float32, torch.tensor(7.0), weights)
        torch.testing.assert_close(total, (of_rows.float() * weights).sum() / 7)
        # Twice the logits of a piece, and no gradient of the weight.
        assert memory.peak - before < 3.5 * (3 * VOCABULARY * dtype.itemsize)
        values = logits.float()
    assert torch.equal(values, head(hidden).float()) and not values.requires_grad


@pytest.mark.parametrize("trains", [True, False])
def test_losses_are_those_of_values_that_something_has_changed_in_place(trains):
    """As a hook of a head does, which returns nothing."""
    head, labels = nn.Linear(WIDTH, VOCABULARY), torch.randint(VOCABULARY, (20,))
    hidden = torch.randn(20, WIDTH)
    criterion = partial(functional.cross_entropy, reduction="none")
    with torch.set_grad_enabled(trains):
        logits = logits_of(head, hidden, 3)
        logits.mul_(3)
        expected = criterion(3 * head(hidden), labels)
        torch.testing.assert_close(logits.loss_by_row(labels, criterion), expected)
        total = logits.loss_in_all(labels, criterion, torch.float32)
        torch.testing.assert_close(total, expected.sum())
    assert total.requires_grad == trains


def test_logits_without_gradients_give_none_to_what_computes_with_gradients():
    """As of a teacher whose head runs under ``no_grad``."""
    head, labels = nn.Linear(WIDTH, VOCABULARY), torch.randint(VOCABULARY, (20,))
    criterion = partial(functional.cross_entropy, reduction="none")
    with torch.no_grad():
        logits = logits_of(head, torch.randn(20, WIDTH), 3)
    assert isinstance(logits, Logits)
    losses = [functional.cross_entropy(each, labels) for each in (logits, logits / 2)]
    losses += [logits.loss_by_row(labels, criterion), logits.loss_in_all(labels, criterion, torch.float32)]
    assert not any(each.requires_grad for each in losses)


def test_automatic_pieces_have_no_more_logits_than_hidden_states_have_numbers():
    assert rows_of_piece("auto", 1 << 15, 4096, 1 << 17) == 1024
    assert rows_of_piece("auto", 1 << 18, 4096, 1 << 17) == 8192
    assert rows_of_piece("auto", 500, 4096, 1 << 17) == 500
    # Four more bytes for each of 4,096 elements of the head's gradient per word, and twelve less for each row.
    assert rows_of_piece("auto", 1024 + 1365, 4096, 1 << 17) == 1024 + 1365
    assert rows_of_piece("auto", 1024 + 1366, 4096, 1 << 17) == 1024
    assert rows_of_piece(300, 1000, 4096, 1 << 17) == 300
    assert rows_of_piece(0, 1000, 4096, 1 << 17) == rows_of_piece(None, 1000, 4096, 1 << 17) == 1000


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_gradients_are_refused(reduction):
    hidden = torch.randn(20, WIDTH, requires_grad=True)
    logits = logits_of(nn.Linear(WIDTH, VOCABULARY), hidden, 4)
    loss = functional.cross_entropy(logits, torch.arange(20), reduction=reduction)
    with pytest.raises(RuntimeError, match="gradients of gradients were asked for .* set ds_lgamp.loss_chunk to 0"):
        torch.autograd.grad(loss.sum(), hidden, create_graph=True)


def test_slices_of_columns_are_no_rows():
    hidden, head = torch.randn(20, WIDTH, requires_grad=True), nn.Linear(WIDTH, VOCABULARY)
    for index in ((slice(None), slice(3, 7), ...), (..., slice(3, 7)), (slice(None), slice(3, 7))):
        assert torch.equal(logits_of(head, hidden, 4)[index], head(hidden)[index])
    rows_alone = logits_of(head, hidden, 4)[2:9, ...]
    assert isinstance(rows_alone, Logits) and rows_alone.shape == (7, VOCABULARY)


def test_a_head_whose_weight_is_computed_or_with_adapters_that_are_watched_gives_whole_logits():
    plain, pruned = nn.Linear(WIDTH, VOCABULARY), prune.identity(nn.Linear(WIDTH, VOCABULARY), "weight")
    assert works_by_rows(plain) and not works_by_rows(pruned)
    layers = nn.Sequential(nn.Linear(WIDTH, VOCABULARY))
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0"], lora_dropout=0.0), layers)[0]
    assert works_by_rows(adapted)
    adapted.lora_A["default"].register_forward_hook(lambda *_: None)
    assert not works_by_rows(adapted)


def test_hidden_states_are_gathered_once_and_only_where_all_ranks_together_have_more_rows_than_a_piece():
    """Of two ranks with nine rows each."""
    gathered: list[Tensor] = []

    def gather(own: Tensor) -> Tensor:
        gathered.append(own)
        return torch.cat([own, own])

    head, labels = Head.linear(nn.Linear(WIDTH, VOCABULARY).weight, None), torch.randint(VOCABULARY, (2 * LENGTH,))
    hidden = torch.randn(LENGTH, WIDTH, requires_grad=True)
    for piece in (2 * LENGTH, 0):
        assert deferred(head, hidden, piece, Entry(gather, 2)) is None and not gathered
    for piece in (2 * LENGTH - 1, 4):
        logits = deferred(head, hidden, piece, Entry(gather, 2))
        assert isinstance(logits, Logits) and logits.shape == (2 * LENGTH, VOCABULARY)
        found = torch.autograd.grad(functional.cross_entropy(logits, labels), hidden)
        whole = torch.autograd.grad(functional.cross_entropy(head(torch.cat([hidden, hidden])), labels), hidden)
        torch.testing.assert_close(found, whole)
    assert len(gathered) == 2

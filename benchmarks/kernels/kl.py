"""Time, memory and error of the distillation loss on one GPU, beside full-logit torch and Liger.

The command is ``python -m benchmarks.kernels.kl [--out kl.json]``. It measures forward and backward in bf16
with a trained output head. Each line of the result contains:

- the median milliseconds, also divided by the time of full-logit torch, and divided by the time of the four matrix
  products at the rate that this benchmark measures
- the temporary memory (the peak minus the inputs and the returned gradients), also as a share of one model's fp32
  logits ``[tokens, vocab]``
- the relative errors of the loss, of the hidden gradient and of the head gradient against float64
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from benchmarks.kernels.rates import product_rate
from benchmarks.out_file import out_file
from benchmarks.turns import timings
from torch import Tensor
from torch.nn import functional as F

from fcsd.bench.runner import table, write
from fcsd.foreign_errors import reason_of
from fcsd.kernels.fused_kl import kl_divergence

SHAPES = [(2048, 151_936), (5120, 202_048), (2048, 102_400), (5120, 151_936), (2048, 202_048), (5120, 102_400)]
TOKENS = [16_384, 4_096]
LIGER = "liger, compiled"
Sides = tuple[Tensor, Tensor, Tensor, Tensor]
Loss = Callable[..., Tensor]  # (student hidden, student head, teacher hidden, teacher head) -> mean over tokens


@dataclass
class Timing:
    """One measurement of a variant at one shape.

    Attributes:
        note: the error, if the variant failed; else empty.
        ms: median milliseconds of forward and backward.
        over_torch: ``ms`` divided by that of full-logit torch.
        over_products: ``ms`` divided by the time of the four matrix products at the measured rate.
        temporary_mb: peak memory without inputs and returned gradients, in MB.
        temporary_share: temporary memory divided by the bytes of one model's fp32 logits.
        gradient_mb: size of the returned gradients, in MB.
        loss_error, hidden_error, head_error: relative errors against float64.
    """

    tokens: int
    hidden: int
    vocab: int
    variant: str
    note: str = ""
    ms: float = float("nan")
    over_torch: float = float("nan")
    over_products: float = float("nan")
    temporary_mb: float = float("nan")
    temporary_share: float = float("nan")
    gradient_mb: float = float("nan")
    loss_error: float = float("nan")
    hidden_error: float = float("nan")
    head_error: float = float("nan")


def sides(tokens: int, hidden: int, vocab: int) -> Sides:
    """A student near its teacher: logits of standard deviation 3, of which 1/20 differs."""
    width = hidden**-0.5
    teacher = torch.randn(tokens, hidden, device="cuda")
    student = (teacher + 0.05 * torch.randn_like(teacher)).bfloat16().requires_grad_()
    head = (torch.randn(vocab, hidden, device="cuda") * 3 * width).bfloat16()
    other = (head.float() * (1 + 0.01 * torch.randn_like(head[:, :1].float()))).bfloat16()
    return student, other.requires_grad_(), teacher.bfloat16(), head


def full_logits(student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor) -> Tensor:
    log_p = (student @ student_head.t()).float().log_softmax(-1)
    with torch.no_grad():
        log_q = (teacher @ teacher_head.t()).float().log_softmax(-1)
    return F.kl_div(log_p, log_q, log_target=True, reduction="sum") / len(student)


def fused(student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor, *, chunk: int) -> Tensor:
    mask = torch.ones(len(student), dtype=torch.bool, device="cuda")
    weights = (student, student_head, teacher, teacher_head)
    return kl_divergence(*weights, mask, denominator=len(student), chunk_tokens=chunk)


def liger(*, compiled: bool) -> Loss:
    """Liger's chunked loss at beta 0, which is KL(teacher ‖ student)."""
    # Liger belongs to the optional part `baselines`.
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss  # pyright: ignore[reportMissingImports]

    torch.compiler.reset()  # otherwise the shapes of earlier cases would make torch compile for dynamic shapes
    module = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=compiled)

    def loss(student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor) -> Tensor:
        labels = torch.zeros(len(student), dtype=torch.long, device=student.device)
        return module(student, student_head, teacher, teacher_head, labels)

    return loss


def gradients(loss: Loss, inputs: Sides) -> tuple[Tensor, Tensor, Tensor]:
    value = loss(*inputs)
    to_hidden, to_head = torch.autograd.grad(value, inputs[:2])
    return value.detach(), to_hidden, to_head


@torch.no_grad()
def exact(inputs: Sides, chunk: int = 1024) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the loss and its gradients in float64; the gradients are returned in fp32."""
    student, student_head, teacher, teacher_head = inputs
    weight, other = student_head.double(), teacher_head.double()
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    to_hidden = torch.empty_like(student, dtype=torch.float32)
    to_head = torch.zeros_like(weight)
    for at in range(0, len(student), chunk):
        rows = slice(at, at + chunk)
        log_p = (student[rows].double() @ weight.t()).log_softmax(-1)
        q = (teacher[rows].double() @ other.t()).log_softmax(-1)
        log_p, q = q - log_p, q.exp_()  # log_p now holds log(q/p)
        total += (q * log_p).sum()
        difference = q * torch.expm1(log_p.neg_())
        to_hidden[rows] = difference @ weight
        to_head.addmm_(difference.t(), student[rows].double())
    count = len(student)
    return total / count, to_hidden / count, (to_head / count).float()


def distance(got: Tensor, truth: Tensor) -> float:
    return ((got.float() - truth).norm() / truth.norm()).item() if got.isfinite().all() else float("nan")


def attempt(
    row: Timing, make: Callable[[], Loss], inputs: Sides, truth: tuple[Tensor, Tensor, Tensor], rate: float
) -> Timing:
    """Measures the errors, then the memory, then the time of a loss, and fills them into ``row``.

    If the loss raises an exception, for example because a package is missing, the row's note holds the message.
    """
    try:
        loss = make()
        value, to_hidden, to_head = gradients(loss, inputs)
        row.loss_error = abs(value.item() / truth[0].item() - 1)
        row.hidden_error, row.head_error = distance(to_hidden, truth[1]), distance(to_head, truth[2])
        returned = to_hidden.nbytes + to_head.nbytes
        del value, to_hidden, to_head
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = gradients(loss, inputs)
        torch.cuda.synchronize()
        temporary = torch.cuda.max_memory_allocated() - before - returned
        del results
        row.temporary_mb, row.gradient_mb = temporary / 1e6, returned / 1e6
        row.temporary_share = temporary / (4 * row.tokens * row.vocab)
        row.ms = timings({"": lambda: gradients(loss, inputs)}, inputs[0].device, 5)[""].median
        row.over_products = row.ms / (8e3 * row.tokens * row.hidden * row.vocab / rate)
    except Exception as error:  # a failing variant must not hide the others
        row.note = f"{type(error).__name__}: {reason_of(error)}"
    torch.cuda.empty_cache()
    return row


def variants(with_liger: bool) -> dict[str, Callable[[], Loss]]:
    found: dict[str, Callable[[], Loss]] = {
        "torch, full logits": lambda: full_logits,
        "fused": lambda: partial(fused, chunk=512),
    }
    return found | ({LIGER: lambda: liger(compiled=True)} if with_liger else {})


def compare(rate: float, began: float, limits: argparse.Namespace) -> list[Timing]:
    """Measures every shape and variant until the time is over. A row's note says when a shape was left out."""
    rows = []
    for hidden, vocab in SHAPES:
        for tokens in TOKENS:
            torch.manual_seed(0)
            case: list[Timing] = []
            spent = time.monotonic() - began
            if spent > limits.seconds:
                rows.append(Timing(tokens, hidden, vocab, "all", note=f"left out: {spent:.0f} s spent"))
                continue
            inputs = sides(tokens, hidden, vocab)
            truth = exact(inputs)
            torch.cuda.empty_cache()
            for name, make in variants(spent < limits.liger_seconds).items():
                row = attempt(Timing(tokens, hidden, vocab, name), make, inputs, truth, rate)
                case.append(row)
                if name == LIGER and row.note:
                    eager = Timing(tokens, hidden, vocab, "liger, not compiled")
                    case.append(attempt(eager, lambda: liger(compiled=False), inputs, truth, rate))
            for row in case:
                row.over_torch = row.ms / case[0].ms
                print(table({name_of(row): cells(row)}), flush=True)
            rows += case
            del inputs, truth
            torch.cuda.empty_cache()
    return rows


def cells(row: Timing) -> dict[str, str | None]:
    """The cells of a row in the table; a variant that failed has none but its error."""
    if row.note:
        return {"note": row.note}
    return {
        "ms": f"{row.ms:.2f}",
        "over torch": f"{row.over_torch:.2f}",
        "over products": f"{row.over_products:.2f}",
        "temporary MB": f"{row.temporary_mb:.1f}",
        "of fp32 logits": f"{row.temporary_share:.1%}",
        "gradients MB": f"{row.gradient_mb:.0f}",
        "loss error": f"{row.loss_error:.1e}",
        "hidden error": f"{row.hidden_error:.1e}",
        "head error": f"{row.head_error:.1e}",
    }


def name_of(row: Timing) -> str:
    """The name of a row in the table."""
    return f"{row.tokens} tokens, {row.hidden} x {row.vocab}, {row.variant}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=out_file, help="write all rows as JSON")
    parser.add_argument("--seconds", type=float, default=200, help="start no new shape after this")
    parser.add_argument("--liger-seconds", type=float, default=140, help="leave Liger out after this (it compiles)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernels.kl compares kernels on a GPU, and this machine has none")
    began = time.monotonic()
    rate = product_rate()
    rows = compare(rate, began, options)
    write({"product_rate": rate, "rows": [asdict(row) for row in rows]}, options.out)
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, products at {rate / 1e12:.0f} TFLOP/s")
    print(table({name_of(row): cells(row) for row in rows}))


if __name__ == "__main__":
    main()

"""Time, memory and error of the distillation loss on one GPU, beside full-logit torch and Liger.

The command is ``python -m benchmarks.kernels.kl [--tune] [--out kl.json]``. It measures forward and backward in bf16
with a trained output head. Each line of the result contains:

- the median milliseconds, also divided by the time of full-logit torch, and divided by the time of the four matrix
  products at the rate that this benchmark measures
- the temporary memory (the peak minus the inputs and the returned gradients), also as a share of one model's fp32
  logits ``[tokens, vocab]``
- the relative errors of the loss, of the hidden gradient and of the head gradient against float64
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from benchmarks.out_file import out_file
from torch import Tensor
from torch.nn import functional as F

from fcsd.bench.runner import on_gpu
from fcsd.kernels.fused_kl import Tuning, kl_divergence
from fcsd.kernels.vocabulary import Launch, divergence, log_sum_exp_parts

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


def fused(
    student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor, *, chunk: int, tuning: Tuning
) -> Tensor:
    mask = torch.ones(len(student), dtype=torch.bool, device="cuda")
    weights = (student, student_head, teacher, teacher_head)
    return kl_divergence(*weights, mask, denominator=len(student), chunk_tokens=chunk, tuning=tuning)


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


def product_rate() -> float:
    """FLOP/s of a large bf16 matrix product on random data."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (clock(lambda: left @ right, 10) / 1e3)


def clock(work: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of ``work``, measured by CUDA events after two warm-up runs."""
    return statistics.median([on_gpu(work) for _ in range(repeats + 2)][2:])


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
        row.ms = clock(lambda: gradients(loss, inputs), 5)
        row.over_products = row.ms / (8e3 * row.tokens * row.hidden * row.vocab / rate)
    except Exception as error:  # a failing variant must not hide the others
        row.note = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    torch.cuda.empty_cache()
    return row


def variants(with_liger: bool) -> dict[str, Callable[[], Loss]]:
    table: dict[str, Callable[[], Loss]] = {
        "torch, full logits": lambda: full_logits,
        "fused": lambda: partial(fused, chunk=512, tuning=Tuning()),
        "fused, fp32 head": lambda: partial(fused, chunk=1024, tuning=Tuning(head_sum=torch.float32)),
    }
    return table | ({LIGER: lambda: liger(compiled=True)} if with_liger else {})


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
                print(line(row), flush=True)
            rows += case
            del inputs, truth
            torch.cuda.empty_cache()
    return rows


def tune(rate: float) -> list[Timing]:
    """Measures chunk sizes, logit shares and kernel launches at two shapes, and the time of each stage of a chunk."""
    rows = []
    for hidden, vocab in SHAPES[:2]:
        torch.manual_seed(0)
        inputs = sides(16_384, hidden, vocab)
        truth = exact(inputs)
        torch.cuda.empty_cache()
        cuts = [(256, 1), (384, 1), (512, 1), (512, 2), (768, 2), (768, 3), (768, 4), (1024, 2), (1024, 4), (2048, 4)]
        launches = [Launch(b, s, w) for b, s, w in ((1024, 8192, 4), (4096, 16384, 8), (4096, 32768, 16))]
        launches += [Launch(2048, 32768, 4), Launch(2048, 8192, 8), Launch(8192, 65536, 16)]
        trials = [(chunk, Tuning(share, None)) for chunk, share in cuts]
        trials += [(1024, Tuning(2, torch.float32)), (2048, Tuning(4, torch.float32))]
        trials += [(512, Tuning(launch=launch)) for launch in launches]
        for chunk, tuning in trials:
            at = tuning.launch
            name = f"{chunk}/{tuning.logit_share} {at.block},{at.span},{at.warps} {tuning.head_sum or 'bf16'}"
            row = Timing(16_384, hidden, vocab, name)
            make = partial(partial, fused, chunk=chunk, tuning=tuning)
            rows.append(attempt(row, make, inputs, truth, rate))
            print(line(rows[-1]), flush=True)
        del truth
        for chunk in (256, 512, 1024):
            stages(inputs, chunk)
        del inputs
        torch.cuda.empty_cache()
    return rows


@torch.no_grad()
def stages(inputs: Sides, chunk: int) -> None:
    """Prints the milliseconds and the TFLOP/s or TB/s of each stage of one chunk."""
    student, weight, teacher, other = (x.detach() for x in inputs)
    vocab, hidden = weight.shape
    x, y = student[:chunk], teacher[:chunk]
    s, t = (torch.mm(a, b.t(), out_dtype=torch.float32) for a, b in ((x, weight), (y, other)))
    gradient, to_head, one = torch.empty_like(s, dtype=torch.bfloat16), torch.zeros_like(weight), s.new_ones(())
    flops, size, launch = 2 * chunk * hidden * vocab, chunk * vocab, Launch()
    work: dict[str, tuple[Callable[[], object], float, str]] = {
        "logits": (lambda: torch.mm(x, weight.t(), out_dtype=torch.float32), flops, "TFLOP/s"),
        "log-sum-exp": (lambda: log_sum_exp_parts(s, 1.0, launch), 4 * size, "TB/s"),
        "both log-sum-exps, divergence": (lambda: divergence(s, t, gradient, one, 1.0, launch), 18 * size, "TB/s"),
        "to hidden": (lambda: gradient @ weight, flops, "TFLOP/s"),
        "to head": (lambda: to_head.addmm_(gradient.t(), x), flops, "TFLOP/s"),
    }
    for name, (run, amount, unit) in work.items():
        ms = clock(run, 9)
        print(f"  stage {hidden}x{vocab} chunk {chunk:5d} {name:30s} {ms:7.3f} ms {amount / ms / 1e9:7.2f} {unit}")


def line(row: Timing) -> str:
    head = f"{row.tokens:6d} {row.hidden:5d} {row.vocab:7d} {row.variant:26s}"
    if row.note:
        return f"{head} {row.note}"
    return (
        f"{head} {row.ms:8.2f} {row.over_torch:6.2f} {row.over_products:6.2f} {row.temporary_mb:9.1f} "
        f"{row.temporary_share:7.1%} {row.gradient_mb:7.0f} {row.loss_error:8.1e} {row.hidden_error:8.1e} "
        f"{row.head_error:8.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tune", action="store_true", help="time chunk sizes and launches instead of comparing")
    parser.add_argument("--out", type=out_file, help="write all rows as JSON")
    parser.add_argument("--seconds", type=float, default=200, help="start no new shape after this")
    parser.add_argument("--liger-seconds", type=float, default=140, help="leave Liger out after this (it compiles)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernels.kl compares kernels on a GPU, and this machine has none")
    began = time.monotonic()
    rate = product_rate()
    rows = tune(rate) if options.tune else compare(rate, began, options)
    if options.out:
        options.out.write_text(json.dumps({"product_rate": rate, "rows": [asdict(row) for row in rows]}, indent=1))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, products at {rate / 1e12:.0f} TFLOP/s")
    columns = "ms  /torch /prod  temp MB  of fp32 grad MB  loss err hidden   head"
    print(f"tokens hidden vocab variant {'':20s}  {columns}")
    for row in sorted(rows, key=lambda row: (row.hidden, bool(row.note), row.ms)) if options.tune else rows:
        print(line(row))


if __name__ == "__main__":
    main()

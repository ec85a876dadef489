"""The large sections of a recipe: `data`, `objective` with the table of its terms, `train` and `parallel`."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fcsd.config.fields import Count, Dtype, InputPath, NonNegative, Positive, Section, Weight, whole
from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format
from fcsd.models.adapters import GROUPS


class Source(Section):
    """Documents to train or measure on: `column`, `token_ids`, `messages`, or `prompt` and `response`."""

    path: InputPath
    """A file, folder or glob on disk. For format `hf`: a folder of datasets, a dataset saved on disk, or a hub id.
    A path that begins with `bundled:` lies in the folder `assets` of fcsd's repository, wherever fcsd is called."""
    format: Literal["auto", "jsonl", "parquet", "hf"] = "auto"
    """The file format; `auto` chooses it by the file name's ending."""
    subset: str | None = None
    """The configuration of an `hf` dataset, if the dataset has several."""
    split: str = "train"
    """The split of an `hf` dataset; `a+b` joins two splits."""
    revision: str | None = None
    """The commit, tag or branch of an `hf` dataset on the hub; null means the default branch."""
    streaming: bool = False
    """Download only the first `max_rows` rows of an `hf` dataset instead of the whole dataset."""
    max_rows: Count | None = None
    """The number of rows to read, from the first one on; null reads all rows."""
    column: str = "text"
    """The field or column that holds plain text. Every token of it counts in the loss."""
    token_ids: str | None = None
    """The field or column of documents that are tokenised already, as lists of token ids of the model's vocabulary. No
    token is added to them. Every token counts in the loss."""
    messages: str | None = None
    """The field or column that holds a chat as a list of messages; the chat template turns it into text."""
    message_keys: Literal["role/content", "from/value"] = "role/content"
    """The keys of a message for its speaker and its text. With `from/value` the speakers are human, gpt and system."""
    prompt: str | None = None
    """The field or column of a question; together with `response` it makes a chat of one turn."""
    response: str | None = None
    """The field or column of the answer to `prompt`."""
    chat_template: InputPath | None = None
    """A Jinja file with the chat template; null means the tokenizer's own template."""
    train_on: Literal["response", "all"] = "response"
    """The tokens of a chat that count in the loss: `response` means those of the assistant, `all` means all."""
    earlier_reasoning: Literal["dropped", "kept"] = "dropped"
    """What later turns of a chat read where the chat template changes earlier turns, as Qwen3's removes their
    reasoning. `dropped`: what the template shows at that moment; such a chat becomes several documents, one for each
    response that the next turn changes. `kept`: every turn as it was written, in one document."""
    overlong: Literal["auto", "split", "truncate", "skip"] = "auto"
    """What happens to a document longer than `data.seq_len`: `split` spreads it over several rows, `truncate` cuts it
    to one row, and `skip` leaves it out. `auto` splits text and truncates chats. A chat is cut so that the row holds
    its first response, or half a row of it."""
    min_counted: Annotated[float, Field(ge=0, le=1)] = 0.01
    """The smallest share of the tokens in the packed rows of this source, padding included, that must count in the
    loss. A source below it is refused before the first step."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """The share of this source in the mixture, relative to the weights of the other sources; see `data.weight_by`."""

    @property
    def chat(self) -> bool:
        """Whether its documents are chats."""
        return self.messages is not None or self.prompt is not None

    @property
    def plain(self) -> bool:
        """Whether its documents are plain text."""
        return not self.chat and self.token_ids is None

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read, in the order in which they are asked for."""
        if (only := self.messages or self.token_ids) is not None:
            return (only,)
        return (self.column,) if self.prompt is None or self.response is None else (self.prompt, self.response)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.prompt is None) != (self.response is None):
            raise ValueError("prompt and response go together: give both or neither")
        given = (self.column != "text", *(f is not None for f in (self.token_ids, self.messages, self.prompt)))
        if given.count(True) > 1:
            raise ValueError(
                "give one of column (plain text), token_ids, messages (chats), and prompt with response (chats)"
            )
        if self.chat_template is not None and not self.chat:
            raise ValueError("chat_template is for chats: give messages, or prompt and response")
        if self.streaming and (self.format != "hf" or self.max_rows is None):
            raise ValueError("streaming needs format: hf and max_rows, the number of rows to read")
        return self


class Data(Section):
    """The texts and chats that the student is trained on and measured on."""

    sources: Annotated[list[Source], Field(min_length=1)]
    """The sources of training text and chats, mixed in proportion to their `weight`."""
    weight_by: Literal["tokens", "counted", "rows"] = "tokens"
    """What the weights are shares of: `tokens` that the model reads, padding excluded; `counted`, the tokens that count
    in the loss; or packed `rows`, padding included."""
    seq_len: Annotated[int, Field(ge=2)] = 256
    """The number of tokens per row. Several short documents are packed into one row."""
    document_end: Annotated[str, Field(min_length=1)] | None = None
    """The token at the end of each document of plain text, for example `<|endoftext|>`. Chats and token ids are not
    changed. null takes the tokenizer's EOS, unless the chat template writes it, as the end of a turn: then
    `<|endoftext|>` or `<|end_of_text|>` if it is one of the tokenizer's special tokens, else another token at which the
    model's generation config ends text, else the EOS all the same. `--dry-run` shows the token."""
    held_out: Source | None = None
    """Text that the run does not train on, for the held-out loss; null means that it is not measured."""
    held_out_own: Source | None = None
    """Text that the teacher wrote and that the run does not train on, as `fcsd write` keeps some apart. It is measured
    beside `held_out`, so that the run says whether the text that it trains on leads away from what the teacher is. null
    means that it is not measured."""

    @property
    def measured(self) -> dict[str, Source]:
        """The texts that are measured on and never trained on, by the field that names them."""
        texts = {"held_out": self.held_out, "held_out_own": self.held_out_own}
        return {name: source for name, source in texts.items() if source is not None}

    @model_validator(mode="after")
    def _two_texts(self) -> Self:
        if self.held_out_own is not None and self.held_out is None:
            raise ValueError("held_out_own is measured beside held_out: give held_out, too, or name the text there")
        return self


def automatic_chunk(vocab: int) -> int:
    """How many tokens' logits are in memory at the same time where the recipe does not say it."""
    return max(512, 2**26 // vocab // 64 * 64)


@dataclass(frozen=True)
class Term:
    """A row of the table of terms: what marks a field of ``Objective`` as the weight of a term of the loss.

    Attributes:
        title: the title of its curve.
        teacher: whether it needs a teacher in memory.
        models: of how many models it computes logits, which take memory; 0 if it computes none.
        held_out: its name as a measure of held-out text, whatever its weight; empty if only its weight lets it measure.
    """

    title: str
    teacher: bool = False
    models: int = 0
    held_out: str = ""


class Hidden(Section):
    """The squared distance between the hidden states of student and teacher: weight * sum over layers of
    ||student - teacher||^2 (FarSkip eq. 5)."""

    weight: Weight = 0.0
    """The weight of the distance in the loss; 0 turns it off. The distance grows with the hidden size and with the
    number of layers."""
    layers: str = "all"
    """The layers whose full residual stream is compared: all, last:24, first:8, 50%, 12-27 or 0,2,5-7. The comparison
    costs the overlap of these layers."""


class Objective(Section):
    """The loss: kl * KL(teacher || student) + sft * cross-entropy + hidden.weight * squared distance."""

    kl: Annotated[Weight, Term("KL(teacher || student)", teacher=True, models=2, held_out="KL")] = 1.0
    """The weight of KL(teacher || student), the divergence from the teacher's distribution; 0 turns it off."""
    sft: Annotated[Weight, Term("cross-entropy", models=1, held_out="cross-entropy")] = 0.0
    """The weight of the cross-entropy with the text itself; 0 turns it off."""
    hidden: Annotated[Hidden, Term("hidden L2", teacher=True)] = Hidden()
    """The distance between the hidden states of student and teacher, as a third term of the loss."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The temperature of the teacher's and the student's softmax in the divergence."""
    reduction: Literal["mean", "sum"] = "mean"
    """Whether the loss is the mean or the sum over the tokens of a batch that count. With `sum`, `optim.grad_clip` and
    `optim.lr` have to fit the batch size."""
    chunk_tokens: Positive | None = None
    """The number of tokens whose logits are in memory at the same time. Smaller values need less memory, larger ones
    start fewer kernels; the result is the same up to rounding. null takes 512 tokens, or more where the vocabulary is
    so small that 2^26 logits are those of more tokens."""
    freeze_embeddings: bool = False
    """Do not train the input embeddings."""
    freeze_lm_head: bool = False
    """Do not train the output head."""

    def chunk(self, vocab: int) -> int:
        """``chunk_tokens`` for a vocabulary of this size."""
        return self.chunk_tokens or automatic_chunk(vocab)

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the terms by name; terms with weight 0 are left out."""
        found = {name: getattr(self, name) for name in TERMS}
        return {name: weight for name, term in found.items() if (weight := getattr(term, "weight", term))}

    @property
    def needs_teacher(self) -> bool:
        """Whether a term needs a teacher in memory."""
        return any(TERMS[name].teacher for name in self.weights)

    @property
    def measures(self) -> tuple[str, ...]:
        """The terms that held-out text is measured with; no teacher is loaded for them alone."""
        possible = {name: term for name, term in TERMS.items() if self.needs_teacher or not term.teacher}
        return tuple(name for name, term in possible.items() if term.held_out or name in self.weights)

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not self.weights:
            raise ValueError(f"the weights of objective.{', objective.'.join(TERMS)} are all 0, so nothing is learned")
        return self


TERMS = {
    name: mark for name, field in Objective.model_fields.items() for mark in field.metadata if isinstance(mark, Term)
}


Word = Annotated[str, Field(min_length=1, max_length=256)]


class Adapter(Section):
    """Matrices of low rank that train beside frozen weights; docs/adapters.md explains them. An adapter adds
    `alpha / rank * B @ A` to a weight (LoRA), where A has `rank` rows and B `rank` columns."""

    rank: Positive = 64
    """The rank of each adapter. More can learn more and takes more memory."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The numerator of the factor `alpha / rank` of each adapter; null means `rank`, and so a factor of 1."""
    targets: list[Word] = Field(default=list(GROUPS), min_length=1)
    """The linear layers that have adapters: `attention`, `mlp` (dense MLPs), `shared_experts`, or names in the model's
    decoder layers such as `q_proj` or `self_attn.o_proj`. Routed experts are frozen."""
    layers: Word = "all"
    """The decoder layers that have adapters: `converted`, those that the wiring names, or as in `init.layers`. Student
    and teacher share the first layers if these are not converted and nothing trains in them or before them."""

    base: Literal["nf4"] | None = None
    """How the frozen weights are held in memory: `nf4` rounds the linear layers of a bf16 model to four bits when it is
    loaded (QLoRA), for student and teacher. Each process holds all of them. `final/` is a plain checkpoint of
    the rounded weights and the adapters. It needs `pip install 'fcsd[nf4]'` and a model without routed experts. null
    holds them in `train.dtype`."""

    @property
    def factor(self) -> float:
        """What multiplies the product of an adapter's two matrices."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class Train(Section):
    """Batches, length and precision of a run, and what it logs."""

    batch_tokens: Positive = 8192
    """Tokens per optimizer step, over all processes. A multiple of `micro_batch_size` * `data.seq_len` * processes."""
    micro_batch_size: Positive = 8
    """Rows of `data.seq_len` tokens per forward pass and process. Smaller values need less memory; the result of a step
    is the same up to rounding."""
    steps: Positive = 300
    """The number of optimizer steps of the run."""
    tokens: Count | None = None
    """The length of the run in tokens, instead of `steps`; it is rounded up to whole steps. null means `steps`."""
    dtype: Dtype = "bf16"
    """The precision of weights and activations. The optimizer keeps its copy of the weights in fp32."""
    attention: Literal["packed", "masked"] = "packed"
    """How attention stays inside the documents of a packed row, on GPUs in bf16. `packed` computes the scores inside
    documents alone; `masked` computes all scores of a row and masks the rest, which is slower and rounds differently.
    Models with sliding windows or chunks, other devices and fp32 always use `masked`."""
    compile: bool = False
    """Compile each decoder layer of student and teacher by torch.compile. It helps small models, whose step is limited
    by the number of kernels that the host starts; the first step takes about a minute longer. Results differ in
    rounding. It needs `parallel.ep_size: 1`."""
    adapter: Adapter | None = None
    """Train adapters beside frozen weights instead of the weights. The teacher is then the model itself with its
    adapters off and in the standard wiring, so no second copy of the weights is in memory. null trains the weights, or
    those parts that `optim.train` names."""
    draft_head: bool = False
    """Train a draft head (EAGLE, one llama layer) for `model`, which is frozen, instead of the model. The teacher in
    `objective` is the model itself, one token later. `final/` is the head, for vLLM's `--speculative-config`."""
    activation_checkpointing: bool = False
    """Recompute the activations of each layer in the backward pass: less memory, one more forward pass per step."""
    log_every: Positive = 10
    """The number of optimizer steps between lines of metrics.jsonl."""
    eval_every: NonNegative = 0
    """The number of optimizer steps between measurements of the held-out loss; 0 measures only at the end."""
    trace_every: NonNegative = 0
    """With `parallel.ep_size` above 1: the number of optimizer steps between steps that are profiled to measure exposed
    communication; 0 profiles none."""
    sample_tokens: NonNegative = 64
    """The longest answer, in tokens, that student and teacher generate to each of the fixed prompts at an evaluation;
    0 generates none."""

    @model_validator(mode="before")
    @classmethod
    def _steps_of_tokens(cls, given: object) -> object:
        if not isinstance(given, dict) or given.get("tokens") is None or given.get("steps"):
            return given
        tokens, batch = whole(given["tokens"]), given.get("batch_tokens", cls.model_fields["batch_tokens"].default)
        if not isinstance(tokens, int) or not isinstance(batch, int) or min(tokens, batch) < 1:
            return given  # the fields themselves say what is wrong
        return {**given, "steps": -(-tokens // batch)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens is not None and self.steps != -(-self.tokens // self.batch_tokens):
            raise ValueError(
                f"train.tokens ({self.tokens}) is {-(-self.tokens // self.batch_tokens)} steps of "
                f"{self.batch_tokens} tokens, but train.steps is {self.steps}; give one, set the other to null"
            )
        return self


def _known_format(value: str) -> str:
    try:
        Format.parse(value)
    except ConfigError as error:
        raise ValueError(f"{error}; {error.hint}") from error
    return value


FormatName = Annotated[str, AfterValidator(_known_format)]


class Quantised(Section):
    """The formats of the student's rows in dispatch and combine; docs/slow_links.md explains them. null
    sends bf16. The gradients of all weights are computed as if rows were not rounded (straight-through). The teacher's
    rows are not rounded, nor are those of evaluations during the run."""

    dispatch: FormatName | None = None
    """The format of the rows that are sent to the experts, for example `int8` or `int4:g32`."""
    combine: FormatName | None = None
    """The format of the experts' outputs on their way back."""
    dispatch_grad: FormatName | None = None
    """The format of the gradients of the rows of dispatch. Formats of gradients have bf16 scales."""
    combine_grad: FormatName | None = None
    """The format of the gradients of the rows of combine."""

    @property
    def any(self) -> bool:
        """Whether any direction has a format."""
        return any((self.dispatch, self.combine, self.dispatch_grad, self.combine_grad))


class Placement(Section):
    """When the student's experts change places between processes, so that the busiest process receives fewer rows;
    docs/slow_links.md explains it."""

    every: NonNegative = 0
    """Search better places every this many steps, by the experts that the tokens of the last step chose; 0 leaves every
    expert where it is."""
    swaps: Positive | None = None
    """The largest number of swaps in a layer at a time. null swaps as long as a swap saves more time until the next
    search than the move takes."""
    far_cost: Annotated[float, Field(gt=0)] = 8.0
    """With `dedup: node`: how many times as long a byte takes between nodes as inside a node."""
    work_cost: Annotated[float, Field(ge=0)] = 1.0
    """How many times as long an expert computes for a row as the row takes to arrive from a process of the same node.
    Above 0 the search also makes the work of the busiest process smaller. 0 counts rows alone, as HierMoE does."""


class Parallel(Section):
    """How a run is divided among processes, and how they communicate."""

    zero_stage: Literal[0, 1, 2] = 1
    """The DeepSpeed ZeRO stage: 0 keeps optimizer states and gradients on every process, 1 divides the optimizer
    states among the processes, 2 the gradients, too. Weights are divided by `tp_size` or `ep_size`."""
    ep_size: Positive = 1
    """The expert-parallel size: the number of processes that divide the experts of each MoE layer among them. It
    divides the number of processes and the number of experts. 1 keeps all experts on every process."""
    tp_size: Positive = 1
    """The tensor-parallel size: the number of neighbouring processes that shard the decoder layers of a dense student
    and its teacher, and compute with the same rows. It divides the number of processes, the heads, the key-value heads
    and the intermediate size. Every process has the whole embeddings and the whole output head. A run may be resumed
    with another size."""
    overlap: Literal["on", "eager-sync", "off"] = "on"
    """With `ep_size` or `tp_size` above 1: `on` runs other computation during the all-to-alls or all-reduces,
    `eager-sync` takes the same order but waits for each of them at once, and `off` runs the blocking reference. The
    results are the same."""
    all_reduce: Literal["nccl", "host"] = "nccl"
    """With `tp_size` above 1: how the all-reduces travel. `host` sends them through memory of the host, between 2 to 8
    GPUs of one host without peer access, and sums in fp32 in the order of the processes. With two processes the
    results are the same; with more they differ by rounding."""
    transport: Literal["auto", "nccl", "host"] = "auto"
    """With `ep_size` above 1: how rows travel between GPUs. `auto` copies them into symmetric memory if the GPUs of an
    expert-parallel group are in one host, and uses NCCL otherwise; `nccl` always uses NCCL. `host` sends them through
    memory of the host by copy engines, between 2 to 8 GPUs of one host without peer access. The results are the
    same."""
    quantised: Quantised = Quantised()
    """The formats of the rows that processes exchange. By default all rows are bf16. With `ep_size: 1` nothing is sent,
    but rows are rounded in the same way, so the effect on training can be studied on one GPU."""
    fused: bool = True
    """On GPUs: compute each norm in one kernel, rotate queries and keys by one, and move rows to and from experts by
    one kernel in each direction. With `ep_size: 1` the product inside each gated MLP and each routed expert is one
    kernel, too. This is faster and takes less memory, and results differ from the unfused ones by rounding."""
    dedup: Literal["off", "rank", "node"] = "off"
    """With `ep_size` above 1: how often the row of a token is sent if several of its experts are in one place. `off`
    sends it once for each expert, `rank` once to each process that holds any of them, and `node` once to each node,
    where one process forwards it to the others. Results differ from those of `off` by rounding. A model whose tokens
    choose one expert always uses `off`."""
    node_size: Positive | None = None
    """With `dedup: node`: the number of neighbouring processes that form a node. It divides `ep_size` and is smaller
    than it."""
    placement: Placement = Placement()
    """Moves experts between processes during the run. Losses and weights stay the same, up to rounding."""
    teacher_placement: Literal["auto", "sharded", "replicated"] = "auto"
    """Where the teacher's experts are: `sharded` divides them among `ep_size` processes, `replicated` keeps all of them
    on every process. `auto` means `sharded` if `ep_size` is above 1."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.teacher_placement == "sharded" and self.ep_size == 1:
            raise ValueError("parallel.teacher_placement sharded needs parallel.ep_size above 1")
        if self.placement.every and self.ep_size == 1:
            raise ValueError("parallel.placement.every needs parallel.ep_size above 1: one process has all experts")
        if self.all_reduce == "host" and self.tp_size == 1:
            raise ValueError("parallel.all_reduce host needs parallel.tp_size above 1: nothing else is summed so")
        if self.transport == "host" and self.ep_size == 1:
            raise ValueError("parallel.transport host needs parallel.ep_size above 1: otherwise no rows are sent")
        if self.transport == "host" and self.overlap == "off":
            raise ValueError("parallel.transport host needs parallel.overlap on or eager-sync: off sends by NCCL")
        if self.dedup != "off" and self.ep_size == 1:
            raise ValueError(f"parallel.dedup {self.dedup} needs parallel.ep_size above 1")
        if self.dedup == "node" and self.node_size is None:
            raise ValueError("parallel.dedup node needs parallel.node_size, the number of processes of a node")
        if self.node_size is not None and (self.ep_size % self.node_size or not 1 < self.node_size < self.ep_size):
            raise ValueError(
                f"parallel.node_size {self.node_size} must be above 1, below parallel.ep_size {self.ep_size}, and "
                "divide it; if all processes are on one node, set parallel.dedup: rank"
            )
        return self

    @property
    def teacher_ep_size(self) -> int:
        """The number of processes that divide the teacher's experts."""
        return 1 if self.teacher_placement == "replicated" else self.ep_size

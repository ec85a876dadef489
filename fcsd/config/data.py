"""`data`: the texts and chats that a run trains on and measures on."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fcsd.config.fields import Count, InputPath, Section


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

"""`data`: the text."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fcsd.config.fields import Count, PathText, Section


class Source(Section):
    """Text or chats to train or measure on: `column`, or `messages`, or `prompt` and `response`."""

    path: PathText
    """File, folder or glob on disk; for `hf`, a folder of datasets, a dataset saved on disk, or a hub id."""
    format: Literal["auto", "jsonl", "parquet", "hf"] = "auto"
    """How to read it; `auto` goes by the file's ending."""
    subset: str | None = None
    """Configuration of an `hf` dataset that has several."""
    split: str = "train"
    """Which split of an `hf` dataset; `a+b` joins two."""
    revision: str | None = None
    """Commit, tag or branch of an `hf` dataset on the hub."""
    streaming: bool = False
    """Read the first `max_rows` rows of an `hf` dataset over the network and leave the rest there."""
    max_rows: Count | None = None
    """Rows to take from the front; null takes all."""
    column: str = "text"
    """Field or column that holds plain text, every token of which counts."""
    messages: str | None = None
    """Field or column that holds a chat as a list of messages, rendered by the chat template."""
    message_keys: Literal["role/content", "from/value"] = "role/content"
    """What a message calls its speaker and its text; `from/value` speakers are human, gpt and system."""
    prompt: str | None = None
    """Field or column of a question; with `response` it makes a chat of one turn."""
    response: str | None = None
    """Field or column of the answer to `prompt`."""
    chat_template: PathText | None = None
    """Jinja file to render chats with; null is the tokenizer's own template."""
    train_on: Literal["response", "all"] = "response"
    """Tokens of a chat that count in the loss: the assistant's, or all."""
    overlong: Literal["auto", "split", "truncate", "skip"] = "auto"
    """Documents that outgrow a row: split over rows, cut to one, or left out; `auto` splits text, truncates chats."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the mixture, relative to the other sources' weights."""

    @property
    def chat(self) -> bool:
        """Whether its documents are chats."""
        return self.messages is not None or self.prompt is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read, in the order in which they are asked for."""
        if self.messages is not None:
            return (self.messages,)
        return (self.column,) if self.prompt is None or self.response is None else (self.prompt, self.response)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.prompt is None) != (self.response is None):
            raise ValueError("prompt and response go together: give both or neither")
        if [self.column != "text", self.messages is not None, self.prompt is not None].count(True) > 1:
            raise ValueError("give one of column (plain text), messages (chats), and prompt with response (chats)")
        if self.chat_template is not None and not self.chat:
            raise ValueError("chat_template is for chats: give messages, or prompt and response")
        if self.streaming and (self.format != "hf" or self.max_rows is None):
            raise ValueError("streaming needs format: hf and max_rows, the number of rows to read")
        return self


class Data(Section):
    """What the student sees."""

    sources: Annotated[list[Source], Field(min_length=1)]
    """Training text, mixed by weight."""
    seq_len: Annotated[int, Field(ge=2)] = 256
    """Tokens per packed row."""
    held_out: Source | None = None
    """Text never trained on, for the held-out loss."""

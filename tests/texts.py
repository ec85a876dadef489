"""A real fast tokenizer without files, with one token per character, and texts for it."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = 2


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one id per printable ASCII character. Id 0 is padding, 1 is unknown, 2 ends a document."""
    vocab = {"<pad>": 0, "<unk>": 1, "<eos>": EOS, **{chr(c): c - 29 for c in range(32, 127)}}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def ids(text: str) -> list[int]:
    """The token ids that ``tokenizer()`` gives for printable ASCII text."""
    return [ord(c) - 29 for c in text]


def write_jsonl(path: Path, texts: list[object], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


# Three chat templates: one that marks its responses, the same one without marks, and one that changes an answer when
# another turn follows it, as Qwen3's does with the reasoning.
_TURNS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:@BEGIN@{{ m.content }}{{ eos_token }}@END@"
    "{% else %}{{ m.role[0] | upper }}:{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
PLAIN = _TURNS.replace("@BEGIN@", "").replace("@END@", "")
MARKED = _TURNS.replace("@BEGIN@", "{% generation %}").replace("@END@", "{% endgeneration %}")
FORGETFUL = PLAIN.replace("A:{{", "A:{% if loop.last %}(hm){% endif %}{{")
MARKED_FORGETFUL = MARKED.replace("{% generation %}", "{% generation %}{% if loop.last %}(hm){% endif %}")
FORGETTING_ALL = PLAIN.replace("{% if add_generation_prompt %}A:", "{% if add_generation_prompt %}A:(hm)")
# This template removes the reasoning of all answers before the last question, as Qwen3's does.
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set earlier = m.role == 'assistant' and loop.index0 < ns.last %}"
    "{{ m.role }}:{{ m.content.split('</think>')[-1] if earlier else m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}" + PLAIN


def chat(*contents: str) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def decode(tokens: list[int]) -> str:
    """The text for which ``tokenizer()`` gives these tokens; ``.`` stands for the end of a document."""
    return "".join("." if token == EOS else chr(token + 29) for token in tokens)

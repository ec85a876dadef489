"""Chats as training data: what counts is what the assistant would generate, whatever the template."""

import json
from itertools import pairwise
from pathlib import Path

import datasets
import pytest
import texts
import tiny
import torch
from tokenizers import decoders

from fcsd.config import Source
from fcsd.distill.data.chat_template import Templates, render_chat
from fcsd.distill.data.corpus import Corpus, Document, encode_rendering, load_corpus
from fcsd.distill.data.examples import Chat
from fcsd.distill.data.of_run import load_corpora
from fcsd.distill.data.rows import Mixture, Rows, batch
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.preview import preview, show_first_row
from fcsd.distill.step.feed import rows_of_step
from fcsd.errors import BadInputError, ConfigError
from fcsd.launch.world import World

CHATS = [texts.chat(f"question {n}", "answer " * (1 + n % 4), "more?", f"yes {n}") for n in range(30)]


def corpus(path: Path, rows: list[object], template: str = texts.PLAIN, **source) -> Corpus:
    texts.write_jsonl(path, rows, "messages")
    (path.parent / "t.jinja").write_text(template)
    fields = {"messages": "messages", "chat_template": str(path.parent / "t.jinja"), **source}
    return load_corpus(Source(path=str(path), **fields), texts.tokenizer(), tiny.VOCAB)


def documents(chat: list[dict[str, str]], template: str, **source) -> list[Document]:
    """The documents that a chat becomes."""
    tokenizer = texts.tokenizer()
    read = Source(path="x", messages="m", **source)
    special = dict(tokenizer.special_tokens_map)
    found = render_chat(Chat(chat), Templates(template, template), special, read, set())
    assert not isinstance(found, str), found
    return [encode_rendering(rendering, tokenizer) for rendering in found.texts]


def counted(template: str, *contents: str, **source) -> list[str]:
    """The documents of a chat with a ``_`` for everything that does not count; ``.`` is EOS."""
    return [
        "".join(c if count else "_" for c, count in zip(texts.decode(ids), counts, strict=True))
        for ids, counts in documents(texts.chat(*contents), template, **source)
    ]


def test_marked_and_unmarked_templates_count_the_same_tokens() -> None:
    for template in (texts.PLAIN, texts.MARKED, texts.STRICT):
        for reasoning in ("dropped", "kept"):
            assert counted(template, "hi", "yo", "so", "no", earlier_reasoning=reasoning) == ["_______yo._______no."]
            assert counted(template, "hi", "yo", "so", earlier_reasoning=reasoning) == ["_______yo."]
        assert counted(template, "hi", "yo", "so", train_on="all") == ["U:hi;A:yo.U:so;"]


def test_a_response_that_the_next_turn_changes_counts_as_it_was_written() -> None:
    for template in (texts.FORGETFUL, texts.MARKED_FORGETFUL):
        assert counted(template, "hi", "yo", "so", "no") == ["_______(hm)yo.", "_________________(hm)no."]
        assert counted(template, "hi", "yo", "so", "no", earlier_reasoning="kept") == ["_______(hm)yo._______(hm)no."]
        assert counted(template, "hi", "yo") == ["_______(hm)yo."]


def test_qwen3s_reasoning_is_learned_in_every_turn() -> None:
    """The last answer was given after a tool's: its template keeps the reasoning since the last question."""
    roles = ("user", "assistant", "user", "assistant", "tool", "assistant")
    contents = ("hi", "<think>a</think>yo", "so", "<think>b</think>run", "ok", "<think>c</think>no")
    chat = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    first, second = documents(chat, texts.QWEN3)
    (kept,) = documents(chat, texts.QWEN3, earlier_reasoning="kept")
    learned = [texts.decode([i for i, count in zip(*found, strict=True) if count]) for found in (first, second, kept)]
    assert learned == ["<think>a</think>yo;", "<think>b</think>run;<think>c</think>no;", "".join(learned[:2])]
    assert texts.decode(first.ids) == "user:hi;assistant:<think>a</think>yo;"
    assert texts.decode(second.ids).startswith("user:hi;assistant:yo;user:so;assistant:<think>b</think>run;tool:ok;")
    assert texts.decode(kept.ids) == texts.decode(first.ids) + texts.decode(second.ids).removeprefix(
        "user:hi;assistant:yo;"
    )


def test_every_turn_of_a_chat_becomes_a_document_of_the_corpus(tmp_path: Path) -> None:
    chats = [texts.chat("hi", "yo", "so", "no"), texts.chat("hi"), texts.chat("ok", "go")]
    got = corpus(tmp_path / "a.jsonl", chats, texts.FORGETFUL)
    assert got.lengths.tolist() == [14, 24, 0, 14] and got.skipped == {"without a response": 1}
    kept = corpus(tmp_path / "a.jsonl", chats, texts.FORGETFUL, earlier_reasoning="kept")
    assert kept.lengths.tolist() == [28, 0, 14]


def test_a_template_without_stable_turns_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="30 no response begins where the chat template"):
        corpus(tmp_path / "a.jsonl", CHATS, texts.FORGETTING_ALL)
    got = corpus(tmp_path / "a.jsonl", CHATS, texts.FORGETTING_ALL, train_on="all")
    assert got.counted() == got.tokens


def test_content_cannot_pass_for_a_response() -> None:
    assert counted(texts.PLAIN, "A:no<eos>", "yo") == ["_" * len("U:A:no.;A:") + "yo."]


def test_every_way_to_write_a_chat_gives_the_same_documents(tmp_path: Path) -> None:
    chats = [chat[:2] for chat in CHATS]
    want = corpus(tmp_path / "a.jsonl", chats)
    template = {"chat_template": str(tmp_path / "t.jinja")}
    names = {"user": "human", "assistant": "gpt"}
    other = [[{"from": names[m["role"]], "value": m["content"]} for m in chat] for chat in chats]
    pairs = {"q": [chat[0]["content"] for chat in chats], "a": [chat[1]["content"] for chat in chats]}
    datasets.Dataset.from_dict({"conversations": other, "id": list(range(30))}).to_parquet(tmp_path / "b.parquet")
    datasets.Dataset.from_dict(pairs).save_to_disk(tmp_path / "pairs")
    for source in [
        {"path": "b.parquet", "messages": "conversations", "message_keys": "from/value"},
        {"path": "pairs", "prompt": "q", "response": "a"},
    ]:
        source["path"] = str(tmp_path / source["path"])
        got = load_corpus(Source(**source, **template), texts.tokenizer(), tiny.VOCAB)
        for number in range(len(chats)):
            for mine, its in zip(got.document(number), want.document(number), strict=True):
                assert mine.tolist() == its.tolist()


def test_hostile_chats_are_counted_and_left_out(tmp_path: Path) -> None:
    ok = texts.chat("hi", "yo")
    rows = [
        ok,
        [],
        "hi",
        {"role": "user"},
        [{"role": "user"}],
        ["hi", "yo"],
        [{"role": "wizard", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": None}],
        texts.chat("hi"),
        texts.chat("hi", "  "),
        [{"role": "assistant", "content": "yo"}],
        texts.chat("hi", "\ud83d"),
        texts.chat("hi", "y" * 10_000_001),
    ]
    got = corpus(tmp_path / "a.jsonl", rows, texts.STRICT)
    assert got.lengths.tolist() == [10] + [0] * 13
    assert got.skipped == {
        "empty": 1,
        "not a list of messages": 2,
        "a message without 'role' and 'content'": 2,
        "a speaker other than system, user, assistant, tool": 2,
        "not text": 1,
        "without a response": 1,
        "empty response": 1,
        "refused by the chat template: the user speaks first": 1,
        "not Unicode text": 1,
        "over 10,000,000 characters": 1,
    }


# A template that writes the tools, the reasoning and the calls of tools, as those of today's models do.
CALLING = (
    "{% for tool in tools or [] %}T:{{ tool | tojson }};{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}A:"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}{{ call.function.arguments | tojson }}]{% endfor %}"
    "{{ eos_token }}{% else %}{{ m.role[0] | upper }}:{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": "rain", "parameters": {"properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "number"}}}}},
]


def called(content: str | None, name: str = "rain", **arguments: object) -> dict[str, object]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


SAID = [
    [
        *texts.chat("rain?"),
        called(None, city="Oslo"),
        {"role": "tool", "name": "rain", "content": "yes"},
        {"role": "assistant", "content": "it rains"},
    ],
    [
        *texts.chat("1+1"),
        called("", "add", a=1),
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2", "reasoning_content": "the tool said so"},
    ],
    [*texts.chat("hi"), {"role": "assistant", "content": "yo", "reasoning_content": "a greeting"}],
]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "parquet with tools as text", "from/value"])
def test_a_chat_has_the_tokens_that_apply_chat_template_gives(tmp_path: Path, form: str) -> None:
    """Tools, calls of tools and reasoning: from a file of any form, nothing that was said is lost."""
    tokenizer = texts.tokenizer()
    tokenizer.chat_template = CALLING
    source = {"path": str(tmp_path / "a.jsonl"), "messages": "messages"}
    chats = [{"messages": chat, "tools": TOOLS if n < 2 else None} for n, chat in enumerate(SAID)]
    wanted = [tokenizer.apply_chat_template(c["messages"], tools=c["tools"], return_dict=False) for c in chats]
    if form == "parquet":
        source["path"] = str(tmp_path / "a.parquet")
        datasets.Dataset.from_list(chats).to_parquet(source["path"])
    elif form == "parquet with tools as text":
        source["path"] = str(tmp_path / "a.parquet")
        as_text = [{**chat, "tools": json.dumps(chat["tools"])} for chat in chats]
        datasets.Dataset.from_list(as_text).to_parquet(source["path"])
    else:
        if form == "from/value":
            source["message_keys"] = form
            names = {"user": "human", "assistant": "gpt", "tool": "tool"}
            for chat in chats:
                chat["messages"] = [
                    {"from": names[m["role"]], "value": m["content"]}
                    | {key: value for key, value in m.items() if key not in ("role", "content")}
                    for m in chat["messages"]
                ]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    got = load_corpus(Source(**source), tokenizer, tiny.VOCAB)
    assert got.skipped == {} and got.unread == {"'name' of tool messages": 1}
    assert [got.document(n)[0].tolist() for n in range(3)] == wanted
    learned = ["".join(texts.decode(ids[keep].tolist())) for ids, keep in map(got.document, range(3))]
    assert learned == [
        '[rain{"city": "Oslo"}].it rains.',
        '[add{"a": 1}].(the tool said so)2.',
        "(a greeting)yo.",
    ]
    kept = load_corpus(Source(**source, earlier_reasoning="kept"), tokenizer, tiny.VOCAB)
    assert [kept.document(n)[0].tolist() for n in range(3)] == wanted


def test_fields_that_nothing_reads_are_counted(tmp_path: Path, capsys) -> None:
    rows = [
        {"messages": chat, "tools": TOOLS, "id": n}
        for n, chat in enumerate([*SAID, [*texts.chat("hi"), called("wait", city="Oslo")]])
    ]
    (tmp_path / "t.jinja").write_text(texts.PLAIN)
    fields = {"messages": "messages", "chat_template": str(tmp_path / "t.jinja")}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        source = Source(path=str(tmp_path / name), **fields)
        (got,) = load_corpora([source], texts.tokenizer(), tiny.VOCAB, 32, World(0, 1, torch.device("cpu")), texts.EOS)
        assert got.skipped == {"a message of which the chat template reads nothing: 'tool_calls'": 2}
        reasoning, calls = "'reasoning_content' of assistant messages", "'tool_calls' of assistant messages"
        rows_of = 4 if name == "a.parquet" else 2  # a table says so of all of its rows, those left out among them
        assert got.unread == {reasoning: 1, calls: 1, "'tools' of chats": 2, "'id' of rows": rows_of}
        said = capsys.readouterr().err
        assert f"{name}: fields that nothing reads: " in said and f"1 {reasoning}" in said


@pytest.mark.parametrize("template", [texts.PLAIN, texts.MARKED])
@pytest.mark.parametrize("mask", [{"weight": 0}, {"train": False}, {"weight": 0.0, "train": True}])
def test_a_turn_of_weight_0_is_read_and_not_learned(template: str, mask: dict[str, object]) -> None:
    chat: list[dict[str, object]] = [*texts.chat("hi", "bad", "so", "good", "and", "best")]
    for earlier in ("dropped", "kept"):
        how = {"earlier_reasoning": earlier}
        chat[1] = {"role": "assistant", "content": "bad", **mask}
        chat[3] = {"role": "assistant", "content": "good", "weight": 1, "train": True}
        (document,) = documents(chat, template, **how)
        shown = [c if count else "_" for c, count in zip(texts.decode(document.ids), document.counts, strict=True)]
        assert texts.decode(document.ids) == "U:hi;A:bad.U:so;A:good.U:and;A:best."
        assert "".join(shown) == "_" * len("U:hi;A:bad.U:so;A:") + "good." + "_" * len("U:and;A:") + "best."
    (document,) = documents(chat, template, train_on="all")
    shown = [c if count else "_" for c, count in zip(texts.decode(document.ids), document.counts, strict=True)]
    assert "".join(shown) == "U:hi;" + "_" * len("A:bad.") + "U:so;A:good.U:and;A:best."


def test_weights_that_have_no_meaning_cost_the_row_and_are_named(tmp_path: Path) -> None:
    def turn(**fields: object) -> list[dict[str, object]]:
        return [*texts.chat("hi"), {"role": "assistant", "content": "yo", **fields}]

    rows = [turn(), turn(weight=0.5), turn(train="no"), turn(weight=0), turn(train=None), turn(weight=2)]
    got = corpus(tmp_path / "a.jsonl", rows)
    assert got.lengths.tolist() == [10, 0, 0, 0, 10, 0] and got.counted() == 6
    assert got.skipped == {
        "a message whose 'weight' is neither 0 nor 1": 2,
        "a message whose 'train' is neither 0 nor 1": 1,
        "no response counts, by 'weight' or 'train'": 1,
    }


def test_tools_that_are_none_cost_the_row(tmp_path: Path) -> None:
    deep: object = "x"
    for _ in range(100):
        deep = [deep]
    chat = texts.chat("hi", "yo")
    tools = [None, [], "", "{", "text", {"name": "x"}, ["x"], [{"x": deep}], [{"x": "\ud83d"}]]
    lines = [json.dumps({"messages": chat, "tools": value}) for value in tools]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "t.jinja").write_text(texts.PLAIN)
    fields = {"messages": "messages", "chat_template": str(tmp_path / "t.jinja")}
    got = load_corpus(Source(path=str(tmp_path / "a.jsonl"), **fields), texts.tokenizer(), tiny.VOCAB)
    assert got.lengths.tolist() == [10, 10, 10, *[0] * 6]
    assert got.skipped == {
        "'tools' that are not JSON": 2,
        "'tools' that are not a list of objects": 2,
        "a field nested more than 64 levels deep": 1,
        "not Unicode text": 1,
    }


def test_a_tokenizer_with_a_template_for_tools_uses_it_for_chats_with_tools(tmp_path: Path) -> None:
    tokenizer = texts.tokenizer()
    tokenizer.chat_template = {"default": texts.PLAIN, "tool_use": CALLING}
    lines = [json.dumps({"messages": texts.chat("hi", "yo"), "tools": tools}) for tools in (None, TOOLS)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    got = load_corpus(Source(path=str(tmp_path / "a.jsonl"), messages="messages"), tokenizer, tiny.VOCAB)
    assert texts.decode(got.document(0)[0].tolist()) == "U:hi;A:yo."
    wanted = tokenizer.apply_chat_template(texts.chat("hi", "yo"), tools=TOOLS, return_dict=False)
    assert got.document(1)[0].tolist() == wanted and len(wanted) > 100


def test_the_tokenizers_own_template_is_used_and_its_absence_refused(tmp_path: Path) -> None:
    texts.write_jsonl(tmp_path / "a.jsonl", CHATS, "messages")
    source, tokenizer = Source(path=str(tmp_path / "a.jsonl"), messages="messages"), texts.tokenizer()
    with pytest.raises(BadInputError, match="has no chat template"):
        load_corpus(source, tokenizer, tiny.VOCAB)
    tokenizer.chat_template = texts.MARKED
    own = load_corpus(source, tokenizer, tiny.VOCAB)
    named = corpus(tmp_path / "a.jsonl", CHATS, texts.MARKED)
    assert own.sha256 == named.sha256
    assert own.sha256["chat template"] != corpus(tmp_path / "a.jsonl", CHATS, texts.PLAIN).sha256["chat template"]
    with pytest.raises(ConfigError, match="cannot be read as a chat template"):
        load_corpus(source.model_copy(update={"chat_template": str(tmp_path / "none")}), tokenizer, tiny.VOCAB)


def test_rows_keep_chats_whole_and_lose_none(tmp_path: Path) -> None:
    rows = Rows(corpus(tmp_path / "a.jsonl", CHATS), seq_len=100, seed=[0])
    wanted = sorted(texts.decode(documents(chat, texts.PLAIN)[0].ids) for chat in CHATS)
    for epoch in (0, 1):
        found = []
        for number in range(epoch * rows.per_epoch, (epoch + 1) * rows.per_epoch):
            ids, positions, counts = rows[number]
            assert len(ids) == 100 and counts.any()
            starts = [*(positions == 0).nonzero()[0], 100]
            pieces = [ids[a:b].tolist() for a, b in pairwise(starts)]
            found += [texts.decode(piece) for piece in pieces if set(piece) != {texts.EOS}]
        assert sorted(found) == wanted
    assert [rows[n][0].tolist() for n in range(rows.per_epoch)] != [
        rows[n + rows.per_epoch][0].tolist() for n in range(rows.per_epoch)
    ]


def test_chats_that_outgrow_a_row_follow_the_policy(tmp_path: Path) -> None:
    chats = [texts.chat("hi", "y" * n) for n in (5, 50, 5)]  # of 13, 58 and 13 tokens
    kept = {}
    for policy in ("auto", "truncate", "skip", "split"):
        got = corpus(tmp_path / "a.jsonl", chats, overlong=policy)
        rows = Rows(got, seq_len=20)
        kept[policy] = [texts.decode(rows[n][0].tolist()).rstrip(".") for n in range(rows.per_epoch)]
        said = {"split": {}, "skip": {"over 20 tokens": 1}}.get(policy, {"cut to 20 tokens": 1})
        assert got.left_out(20) == said
    assert kept["auto"] == kept["truncate"] == ["U:hi;A:yyyyy", "U:hi;A:" + "y" * 13, "U:hi;A:yyyyy"]
    assert kept["skip"] == ["U:hi;A:yyyyy", "U:hi;A:yyyyy"]
    assert kept["split"][1] == "y" * 20
    with pytest.raises(BadInputError, match="do not fill one row"):
        Rows(corpus(tmp_path / "a.jsonl", chats, overlong="skip"), seq_len=12)


def test_a_long_chat_is_cut_where_something_counts(tmp_path: Path) -> None:
    def row(*contents: str) -> str:
        """The first row of 20 tokens; what does not count is ``_``."""
        rows = Rows(corpus(tmp_path / "a.jsonl", [texts.chat(*contents)]), seq_len=20)
        ids, positions, counts = rows[0]
        assert positions[:5].tolist() == [0, 1, 2, 3, 4] and rows.counted == counts.sum() / 20
        return "".join(c if count else "_" for c, count in zip(texts.decode(ids.tolist()), counts, strict=True))

    assert row("q" * 50, "yo") == "_" * 17 + "yo."  # the question alone would fill two rows
    assert row("q" * 50, "y" * 50) == "_" * 10 + "y" * 10
    assert row("hi", "yo", "q" * 50, "no") == "_______yo." + "_" * 10  # the second question is cut off
    assert row("hi", "yo", "q", "n" * 50) == "_______yo.______nnnn"


def test_a_source_in_which_too_little_counts_is_refused(tmp_path: Path) -> None:
    chats = [texts.chat("q" * 150, "y")] * 3  # 2 of 157 tokens count
    rows = Rows(corpus(tmp_path / "a.jsonl", chats), seq_len=160)
    assert rows.counted == 2 / 160
    with pytest.raises(BadInputError, match=r"a.jsonl: only 1.25% of the tokens in its rows of 160 count") as caught:
        Rows(corpus(tmp_path / "a.jsonl", chats, min_counted=0.02), seq_len=160)
    assert "min_counted" in str(caught.value.hint)
    with pytest.raises(BadInputError, match=r"only 0.83% of the tokens in its rows of 240 count"):
        Rows(corpus(tmp_path / "a.jsonl", chats), seq_len=240)
    assert Rows(corpus(tmp_path / "a.jsonl", chats, min_counted=0.0), seq_len=240).per_epoch == 3


def test_a_template_that_fails_costs_the_row(tmp_path: Path) -> None:
    for cause, reason in {
        "{{ 1 // 0 }}": "integer division or modulo by zero",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "maximum recursion depth exceeded",
        "{{ 'x' * 3 * 10 ** 9 }}": "MemoryError",
    }.items():
        template = "{% if messages[0].content == 'bad' %}" + cause + "{% endif %}" + texts.PLAIN
        got = corpus(tmp_path / "a.jsonl", [texts.chat("bad", "yo"), texts.chat("hi", "yo")], template)
        assert got.lengths.tolist() == [0, 10]
        assert got.skipped == {f"refused by the chat template: {reason}": 1}


def test_a_template_that_does_not_end_costs_the_row(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("fcsd.checkpoint.tokenizer.CPU_SECONDS", 0.5)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    some = "{% if messages[0].content == 'bad' %}" + loop + "{% endif %}" + texts.PLAIN
    got = corpus(tmp_path / "a.jsonl", [texts.chat("bad", "yo"), texts.chat("hi", "yo")] * 2, some)
    assert got.lengths.tolist() == [0, 10, 0, 10]
    assert got.skipped == {"the chat template ran for more than 0.5 s": 2}
    with pytest.raises(BadInputError, match=r"ran for more than 0\.5 s on each of 3 chats"):
        corpus(tmp_path / "a.jsonl", CHATS, loop)


def test_several_processes_render_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = corpus(tmp_path / "a.jsonl", CHATS, texts.FORGETFUL)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("fcsd.distill.data.corpus._ROWS_PER_PROCESS", 10)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    several = corpus(tmp_path / "a.jsonl", CHATS, texts.FORGETFUL)
    assert len(list((tmp_path / "elsewhere" / "fcsd").glob("*_of_00002.arrow"))) == 2
    assert several.lengths.tolist() == one.lengths.tolist() and len(one.lengths) == 2 * len(CHATS)


def test_a_dry_run_counts_after_cutting(tmp_path: Path) -> None:
    from runs import resolved, write_models

    write_models(tmp_path)
    texts.write_jsonl(tmp_path / "a.jsonl", [texts.chat("hi", "y" * 50, "so", "no")] * 40, "messages")
    (tmp_path / "t.jinja").write_text(texts.PLAIN)
    source = {
        "path": str(tmp_path / "a.jsonl"),
        "messages": "messages",
        "chat_template": str(tmp_path / "t.jinja"),
    }
    recipe = resolved(tmp_path).recipe
    data = recipe.data.model_copy(update={"sources": [Source(**source)]})
    shown = preview(recipe.model_copy(update={"data": data}))
    assert "2,720 tokens in 40 rows, 100.0% full; 1,000 tokens (78.1%) count" in shown  # 25 of 32 in each row
    assert "40 cut to 32 tokens" in shown


@pytest.mark.parametrize("arch", ["deepseek_v2", "qwen3_moe", "llama"])
def test_packed_loss_is_the_unpacked_loss_of_the_responses(tmp_path: Path, arch: str) -> None:
    chats = corpus(tmp_path / "a.jsonl", CHATS[:4])
    rows, model = Rows(chats, seq_len=120), tiny.model(arch)
    packed = batch(rows, range(rows.per_epoch))
    labels = packed.pop("labels")
    keep = labels != IGNORE
    together = torch.nn.functional.cross_entropy(
        model(**packed, use_cache=False).logits[keep], labels[keep], reduction="none"
    )
    alone = []
    for chat in CHATS[:4]:
        ids, counts = map(torch.tensor, documents(chat, texts.MARKED)[0])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        alone.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[counts[1:]])
    assert keep.sum() == chats.counted() < chats.tokens
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_a_step_has_the_same_samples_at_any_world_size(tmp_path: Path) -> None:
    from runs import resolved

    recipe = resolved(tmp_path).recipe  # 8 rows of 32 tokens a step
    text = load_corpus(recipe.data.sources[0], texts.tokenizer(), tiny.VOCAB)
    chats = corpus(tmp_path / "a.jsonl", CHATS)
    packed = [Rows(text, 32, [0, 0]), Rows(chats, 32, [0, 1])]

    def samples(size: int, step: int) -> list[str]:
        rows = Mixture(packed, [1.0, 2.0], 80, seed=0)
        worlds = [World(rank, size, torch.device("cpu")) for rank in range(size)]
        micro = [batch(rows, numbers) for world in worlds for numbers in rows_of_step(recipe, world, step)]
        whole = {name: torch.cat([data[name] for data in micro]).tolist() for name in micro[0] if name != "borders"}
        return sorted(json.dumps(row) for row in zip(*whole.values(), strict=True))

    for step in (9, 1):
        assert samples(1, step) == samples(2, step) == samples(4, step)
    assert samples(1, 1) != samples(1, 9)


def test_a_shown_row_marks_what_counts(tmp_path: Path) -> None:
    tokenizer = texts.tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()  # without a blank between characters
    chats = corpus(tmp_path / "a.jsonl", [texts.chat("hi", "yo"), texts.chat("so")])
    assert show_first_row(chats, Rows(chats, 15), tokenizer) == (
        "3 of 15 positions count, ⟦marked⟧; | ends a document\nU:hi;A:⟦yo<eos>⟧|(5 of padding)"
    )
    long = corpus(tmp_path / "b.jsonl", [texts.chat("hi", "y" * 2000)])
    shown = show_first_row(long, Rows(long, 2008), tokenizer)
    assert shown.startswith("2001 of 2008") and shown.endswith("U:hi;A:⟦" + "y" * 1017 + "⟧ ...")

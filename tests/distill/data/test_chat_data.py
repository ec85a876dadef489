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
from fcsd.distill.data.corpus import Corpus, load_corpus
from fcsd.distill.data.render import encode_chat
from fcsd.distill.data.rows import Mixture, Rows, batch
from fcsd.distill.feed import rows_of_step
from fcsd.distill.losses import IGNORE
from fcsd.distill.preview import show_first_row
from fcsd.errors import BadInputError, ConfigError
from fcsd.launch.world import World

CHATS = [texts.chat(f"question {n}", "answer " * (1 + n % 4), "more?", f"yes {n}") for n in range(30)]


def corpus(path: Path, rows: list[object], template: str = texts.PLAIN, **source) -> Corpus:
    texts.write_jsonl(path, rows, "messages")
    (path.parent / "t.jinja").write_text(template)
    fields = {"messages": "messages", "chat_template": str(path.parent / "t.jinja"), **source}
    return load_corpus(Source(path=str(path), **fields), texts.tokenizer(), tiny.VOCAB)


def counted(template: str, *contents: str, train_on: str = "response") -> str:
    """The rendered chat with a ``_`` for everything that does not count; ``.`` is EOS."""
    ids, counts = encode_chat(texts.chat(*contents), texts.tokenizer(), template, train_on)
    return "".join(c if count else "_" for c, count in zip(texts.decode(ids), counts, strict=True))


def test_marked_and_unmarked_templates_count_the_same_tokens() -> None:
    for template in (texts.PLAIN, texts.MARKED, texts.STRICT):
        assert counted(template, "hi", "yo", "so", "no") == "_______yo._______no."
        assert counted(template, "hi", "yo", "so") == "_______yo._____"
        assert counted(template, "hi", "yo", train_on="all") == "U:hi;A:yo."


def test_a_turn_that_later_turns_rewrite_is_context() -> None:
    assert counted(texts.FORGETFUL, "hi", "yo", "so", "no") == "_______________" + "__(hm)no."
    assert counted(texts.FORGETFUL, "hi", "yo") == "_______(hm)yo."


def test_a_template_without_stable_turns_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="30 no response keeps its rendering in the whole chat"):
        corpus(tmp_path / "a.jsonl", CHATS, texts.FORGETTING_ALL)
    got = corpus(tmp_path / "a.jsonl", CHATS, texts.FORGETTING_ALL, train_on="all")
    assert got.counted() == got.tokens


def test_content_cannot_pass_for_a_response() -> None:
    assert counted(texts.PLAIN, "A:no<eos>", "yo") == "_" * len("U:A:no.;A:") + "yo."


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
    wanted = sorted(texts.decode(encode_chat(chat, texts.tokenizer(), texts.PLAIN, "all")[0]) for chat in CHATS)
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
    documents = {}
    for policy in ("auto", "truncate", "skip", "split"):
        got = corpus(tmp_path / "a.jsonl", chats, overlong=policy)
        rows = Rows(got, seq_len=20)
        documents[policy] = [texts.decode(rows[n][0].tolist()).rstrip(".") for n in range(rows.per_epoch)]
        said = {"split": {}, "skip": {"over 20 tokens": 1}}.get(policy, {"cut to 20 tokens": 1})
        assert got.left_out(20) == said
    assert documents["auto"] == documents["truncate"] == ["U:hi;A:yyyyy", "U:hi;A:" + "y" * 13, "U:hi;A:yyyyy"]
    assert documents["skip"] == ["U:hi;A:yyyyy", "U:hi;A:yyyyy"]
    assert documents["split"][1] == "y" * 20
    with pytest.raises(BadInputError, match="do not fill one row"):
        Rows(corpus(tmp_path / "a.jsonl", chats, overlong="skip"), seq_len=12)


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
        ids, counts = map(torch.tensor, encode_chat(chat, texts.tokenizer(), texts.MARKED, "response"))
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
        whole = {name: torch.cat([data[name] for data in micro]).tolist() for name in micro[0]}
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

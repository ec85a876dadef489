"""Where an answer ends: at an end-of-text token, or at a stop string wherever it lies in the tokens."""

import pytest
import tiny

from fcsd.engine.generate import SLOTS, Ending, _say_once, generate


class Letters:
    """A tokenizer with one token for each character."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


STOP = Ending(Letters(), frozenset({0}), ("STOP",), tail=8)


@pytest.mark.parametrize("before", range(12))
def test_a_stop_string_is_found_wherever_it_begins_and_however_much_was_seen(before: int) -> None:
    """It may lie far before the last tokens if many are new, and may have begun before those that are new."""
    answer = ids("." * before + "STOP" + "." * 30)
    for seen in range(before + 4):  # more cannot be known not to end the answer
        assert STOP.of(answer, seen) == len(answer), seen
        assert STOP.of(ids("." * 40), seen) is None
    assert STOP.text(answer) == "." * before


def test_an_end_of_text_token_ends_an_answer_where_it_stands() -> None:
    answer = [*ids("ab"), 0, *ids("STOP")]
    assert STOP.of(answer, 0) == STOP.of(answer, 2) == 3
    assert STOP.text(answer[:3]) == "ab"


def test_a_model_that_no_slots_suit_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    _say_once.cache_clear()
    model = tiny.model("deepseek_v32")
    answers = [dict(generate(model, [[5, 6, 7]], max_new_tokens=2, ended=lambda *_: None, way=SLOTS)) for _ in range(2)]
    assert answers[0] == answers[1] and len(answers[0][0]) == 2
    assert len([line for line in caplog.messages if "cannot generate in slots" in line]) == 1

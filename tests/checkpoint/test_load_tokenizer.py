"""A model directory without a tokenizer is refused in one line."""

import pytest
import texts
import tiny

from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.errors import BadInputError


def test_a_directory_without_a_tokenizer_is_refused_in_one_line(tmp_path):
    tiny.config("mixtral").save_pretrained(tmp_path)
    with pytest.raises(BadInputError, match="there is no usable tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value) and "tokenizer.json" in (caught.value.hint or "")
    texts.tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).eos_token_id is not None

"""Text and stop texts of tokens as they come, against what the tokenizer makes of all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from datamodules.inference.reply_text import Decode, ReplyText, TextStops, bytes_of, cut_at_stop, decode_of, maybe_stop
from tests.helpers.recorded_samples import byte_tokenizer, fallback_tokenizer

TOKENIZER = byte_tokenizer()
DECODE = partial(TOKENIZER.decode, skip_special_tokens=False)
TEXT = st.text("ab \n€é😀\ufffd", max_size=30)
TEXTS = TEXT.map(lambda text: TOKENIZER.encode(text, add_special_tokens=False))
# Falling back to bytes, as Llama 2 and Mistral do for ends of lines, too.
FALLBACK = fallback_tokenizer()
OF_BYTES = partial(FALLBACK.decode, skip_special_tokens=False)
FALLBACK_TEXTS = TEXT.map(lambda text: FALLBACK.encode(text, add_special_tokens=False))
BOTH = st.one_of(st.tuples(st.just(DECODE), TEXTS), st.tuples(st.just(OF_BYTES), FALLBACK_TEXTS))
# Any ids: most of their bytes are no characters, and long runs of them neither.
IDS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=200)


def pieces(ids: list[int], sizes: list[int], decode: Decode = DECODE) -> tuple[list[str], str]:
    text, found, at = ReplyText(decode), [], 0
    for size in sizes:
        found.append(text.add(ids[at : at + size]))
        at += size
    found.append(text.add(ids[at:]))
    return found, text.finish()


@settings(max_examples=80, deadline=None)
@given(st.one_of(BOTH, st.tuples(st.just(DECODE), IDS)), st.lists(st.integers(0, 3), max_size=90))
def test_pieces_are_the_whole_text(case: tuple[Decode, list[int]], sizes: list[int]) -> None:
    decode, ids = case
    found, rest = pieces(ids, sizes, decode)
    assert "".join([*found, rest]) == decode(ids)


@settings(max_examples=80, deadline=None)
@given(st.one_of(TEXTS, IDS))
def test_ids_are_decoded_as_the_tokenizer_decodes_them(ids: list[int]) -> None:
    assert decode_of(TOKENIZER)(ids) == DECODE(ids)


def test_a_tokenizers_own_decoding_is_kept() -> None:
    class Own(PreTrainedTokenizerFast):
        def decode(self, *args: Any, **known: Any) -> str:
            return f"own {super().decode(*args, **known)}"

    class Inner(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **known: Any) -> str:
            return f"inner {super()._decode(*args, **known)}"

    ids = [*TOKENIZER.encode("a", add_special_tokens=False), TOKENIZER.eos_token_id]
    for kind, begins in ((Own, "own a"), (Inner, "inner a"), (PreTrainedTokenizerFast, "a")):
        one = kind(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token=TOKENIZER.eos_token)
        assert decode_of(one)(ids) == f"{begins}{TOKENIZER.eos_token}"
    cleaned = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer, clean_up_tokenization_spaces=True)
    assert getattr(decode_of(cleaned), "func", None) == cleaned.decode


@pytest.mark.parametrize("tokenizer", [TOKENIZER, FALLBACK])
def test_the_bytes_of_tokens_are_those_of_their_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """Byte-level (GPT-2, Qwen), and with bytes for what no token spells (Llama 2, Mistral, Gemma)."""
    of, ids = bytes_of(tokenizer), tokenizer.encode("a é😀 a", add_special_tokens=False)
    assert b"".join(of(one) or b"?" for one in ids).decode() == "a é😀 a"
    assert of(tokenizer.eos_token_id) == tokenizer.eos_token.encode()
    assert of(len(tokenizer) + 3) == b""


@pytest.mark.parametrize("tokenizer", [TOKENIZER, FALLBACK])
def test_a_character_comes_with_its_last_byte(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode("a€😀", add_special_tokens=False)
    text = ReplyText(decode_of(tokenizer))
    assert [text.add([one]) for one in ids] == ["a", "", "", "€", "", "", "", "😀"]


def test_characters_that_come_together_are_whole_before_the_beginning_of_one() -> None:
    """And many of them, of whose bytes a vocabulary that falls back makes no character until the last is whole."""
    ids = FALLBACK.encode("😀" * 40, add_special_tokens=False)
    text = ReplyText(OF_BYTES)
    assert [text.add(ids[:-2]), text.add(ids[-2:])] == ["😀" * 39, "😀"]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, FALLBACK])
def test_bytes_that_are_no_characters_cost_no_more_than_others(tokenizer: PreTrainedTokenizerFast) -> None:
    decode, seen = decode_of(tokenizer), list[int]()

    def counting(ids: list[int]) -> str:
        seen.append(len(ids))
        return decode(ids)

    text, bad = ReplyText(counting), tokenizer.encode("€", add_special_tokens=False)[:1]
    said = "".join(text.add(bad) for _ in range(500)) + text.finish()
    assert said == decode(bad * 500) and max(seen) < 80


def test_what_was_given_is_not_taken_back() -> None:
    """By bytes that are no characters, behind which a decoder that falls back to them has none before them either."""
    whole, bad, after = (FALLBACK.encode(one, add_special_tokens=False) for one in ("é", "😀", "b"))
    text = ReplyText(OF_BYTES)
    assert [text.add([one]) for one in [*whole, *bad[:2], *after]] == ["", "é", "", "", "\ufffd" * 3 + "b"]


@settings(max_examples=80, deadline=None)
@given(BOTH, st.lists(st.text("ab€😀", min_size=1, max_size=3), min_size=1, max_size=4))
def test_a_stop_is_found_with_the_token_that_completes_it(case: tuple[Decode, list[int]], stops: list[str]) -> None:
    decode, ids = case
    first = next(
        (k for k in range(1, len(ids) + 1) if any(stop in decode(ids[:k]) for stop in stops)),
        None,
    )
    assert TextStops(stops, decode).end(ids) == first
    one_by_one = TextStops(stops, decode)
    assert next((k for k, one in enumerate(ids, 1) if one_by_one.end([one])), None) == first


@pytest.mark.parametrize(
    ("text", "stops", "cut", "held"),
    [
        ("so on END more", ("END", "more"), 6, 0),
        ("so on EN", ("END", "more"), None, 2),
        ("mormor", ("more",), None, 3),
        ("aab", ("b", "ab"), 1, 1),
        ("x", (), None, 0),
    ],
)
def test_where_a_reply_is_cut(text: str, stops: tuple[str, ...], cut: int | None, held: int) -> None:
    assert cut_at_stop(text, stops) == cut and maybe_stop(text, stops) == held

"""The text of a reply while its tokens are sampled, and the stop texts in it.

Promises: characters come as soon as all their bytes are there, whatever tokens they are spread over, and together they
are what the tokenizer makes of all the tokens at once (but for characters that were given, and that a vocabulary which
falls back to bytes takes back, as bytes that are none follow right behind them); a stop text is found with the token
that completes it, wherever the tokens are cut. Cost of a token: decoding the few around it (as TGI's and vLLM's
incremental detokenization).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens included."""

_UNKNOWN = "\ufffd"  # what decoders put in place of bytes that are no character, or not one yet
_SPACE = "\u2581"  # SentencePiece's
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_MOST_HELD = 3  # of them may be the beginning of one character
_LONGEST_WINDOW, _SHORTEST_WINDOW = 64, 8  # tokens; both far above those of one character


def decode_of(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """The tokenizer's, for lists of ids alone: its own would look at each of them for tensors and batches first."""
    kind = type(tokenizer)
    if (
        kind.decode is PreTrainedTokenizerBase.decode
        and getattr(kind, "_decode", None) is PreTrainedTokenizerFast._decode
        and not tokenizer.clean_up_tokenization_spaces
    ):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=False)


def bytes_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], bytes | None]:
    """What tells the bytes of a token: its own in byte-level vocabularies and those that fall back to bytes, elsewhere
    those of its text; None where that is no text by itself, b"" for an id that no token has."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = "" if backend is None else str(backend.decoder)
    by_bytes, falls_back, has_marks = "ByteLevel" in decoder, "ByteFallback" in decoder, _SPACE in decoder
    added = tokenizer.added_tokens_decoder  # which are written as they are

    def read(token: int) -> bytes | None:
        name = tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if token not in added:
            if by_bytes and all(one in _BYTES for one in name):
                return bytes(_BYTES[one] for one in name)
            if falls_back and (byte := _FALLBACK.fullmatch(name)):
                return bytes.fromhex(byte[1])
            if has_marks:  # decoded alone it would lose the space, as the beginning of a text does
                return str(name).replace(_SPACE, " ").encode("utf-8", "replace")
        text = str(tokenizer.decode([token]))
        return None if _UNKNOWN in text else text.encode("utf-8", "replace")

    return read


def _byte_names() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes (GPT-2's): themselves where they can be seen."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + k): byte for k, byte in enumerate(unseen)}


_BYTES = _byte_names()


class ReplyText:
    """`add` tokens and get the text that stands with them; `finish` for what was still held back.

    Args:
        decode: of the model's tokenizer.

    Attributes:
        holds: whether the last token belongs to a character that is not whole yet.
    """

    def __init__(self, decode: Decode) -> None:
        self.holds = False
        self._decode = decode
        self._tokens: list[int] = []  # the last ones: what is decoded anew with each that comes
        self._settled = 0  # of these, tokens whose text was given
        self._said = 0  # characters of the window's text that were given

    def add(self, tokens: Sequence[int]) -> str:
        """The characters that are whole now and were not before; may be empty."""
        self._tokens += tokens
        now = self._decode(self._tokens)
        held = len(now) - len(now.rstrip(_UNKNOWN))  # all: falling back to bytes, a run of them is whole or nothing
        if held > _MOST_HELD:
            if len(tokens) > 1:  # whole characters, maybe, before the beginning of one
                del self._tokens[-len(tokens) :]
                return "".join(self.add([one]) for one in tokens)
            if len(self._tokens) > _LONGEST_WINDOW:  # no characters
                held = _MOST_HELD
        whole = len(now) - held
        self.holds = held > 0
        piece, self._said = now[self._said : whole], max(whole, self._said)
        if not held:
            # The tokens before stay for one more round: some decoders treat the first token of a text otherwise.
            self._shrink(len(self._tokens) - self._settled, 0)
            self._settled = len(self._tokens)
        elif len(self._tokens) > _LONGEST_WINDOW:  # bytes that are no characters, many in a row
            self._shrink(_SHORTEST_WINDOW, held)
            self._settled = 0
        return piece

    def finish(self) -> str:
        """The rest, when no token comes any more."""
        return self._decode(self._tokens)[self._said :]

    def _shrink(self, kept: int, held: int) -> None:
        if kept < len(self._tokens):
            self._tokens = self._tokens[-kept:] if kept else []
            self._said = max(0, len(self._decode(self._tokens)) - held)


class TextStops:
    """Finds where a reply ends.

    Args:
        texts: one of them ends it; none is empty.
        decode: of the model's tokenizer.
    """

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        self._texts = tuple(texts)
        self._text = ReplyText(decode)
        self._tail = ""  # of what was said; shorter than the longest stop
        self._longest = max(map(len, texts), default=1)

    def end(self, tokens: Sequence[int]) -> int | None:
        """The number of `tokens` up to that which completes a stop text, counting it; None where none does."""
        for count, token in enumerate(tokens, 1):
            piece = self._text.add([token])
            if not piece:
                continue
            said = self._tail + piece
            if any(text in said for text in self._texts):
                return count
            self._tail = said[max(0, len(said) - self._longest + 1) :]
        return None


def cut_at_stop(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Where the first of `stops` begins in a reply, from `start` on; None where there is none."""
    return min((at for stop in stops if (at := text.find(stop, start)) >= 0), default=None)


def maybe_stop(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `stops`."""
    longest = max(map(len, stops), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0

"""Prompt sources, tokenizers and the dealer between them."""

from __future__ import annotations

import gzip
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from datamodules.prompts import ArithmeticPrompts, JsonlPrompts, Prompt, PromptSource
from datamodules.prompts.dealer import PromptDealer, PromptTooLong
from datamodules.prompts.tokenizers import encode_prompt, load_tokenizer, texts_of

ALPHABET = "0123456789+-*="
GSM8K = Path(os.environ.get("ARBORIST_DATA", "nowhere")) / "gsm8k" / "train.jsonl"


def lines(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


class Listed(PromptSource):
    def __init__(self, *texts: str) -> None:
        self.prompts = [Prompt(id=f"p{i}", text=text) for i, text in enumerate(texts)]

    @property
    def size(self) -> int:
        return len(self.prompts)

    def deal(self, index: int) -> Prompt:
        return self.prompts[index % len(self.prompts)]


# ---- arithmetic


@pytest.mark.parametrize("operators", ["+", "-", "*", "+-*"])
def test_arithmetic_answers_are_right_and_a_function_of_the_index(operators: str) -> None:
    source = ArithmeticPrompts(digits=3, operators=operators, operands=3, seed=5)
    prompts = [source.deal(i) for i in range(300)]
    assert prompts == [ArithmeticPrompts(digits=3, operators=operators, operands=3, seed=5).deal(i) for i in range(300)]
    for prompt in prompts:
        assert prompt.text.endswith("=")
        assert int(prompt.answer) == eval(prompt.text[:-1])
        numbers = [int(n) for n in prompt.text[:-1].replace("*", "+").replace("-", "+").split("+")]
        assert max(numbers) < 1000
    assert len({prompt.text for prompt in prompts}) > 250
    assert prompts[0] != ArithmeticPrompts(digits=3, operators=operators, operands=3, seed=6).deal(0)


def test_arithmetic_validation_is_disjoint_whatever_the_seeds() -> None:
    def problems(split: Any, seed: int, count: int) -> set[tuple[str, ...]]:
        source = ArithmeticPrompts(digits=2, split=split, seed=seed)
        return {tuple(sorted(source.deal(i).text[:-1].split("+"))) for i in range(count)}

    train = problems("train", 1, 20_000) | problems("train", 2, 20_000)
    held_out = problems("validation", 1, 2_000) | problems("validation", 3, 2_000)
    assert len(train) > 4_000 and len(held_out) > 400
    assert not train & held_out


def test_sized_arithmetic_is_distinct_and_starts_over() -> None:
    source = ArithmeticPrompts(digits=2, split="validation", size=200)
    assert source.size == 200
    assert len({source.deal(i).text for i in range(200)}) == 200
    assert source.deal(203) == source.deal(3)
    assert len(list(source.first(1000))) == 200
    with pytest.raises(ValueError, match=r"size: 200, but only \d+ distinct"):
        ArithmeticPrompts(digits=1, split="validation", size=200)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("digits", 0), ("operators", "/"), ("operators", ""), ("operands", 1), ("split", "test"), ("size", 0)],
)
def test_arithmetic_refuses_by_name(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"ArithmeticPrompts.{argument}"):
        ArithmeticPrompts(**{argument: value})


# ---- JSONL


def test_jsonl_fields_template_pattern_and_metadata(tmp_path: Path) -> None:
    path = lines(tmp_path / "maths.jsonl", {"q": "1+1?", "a": "easy\n#### 2 ", "level": 3})
    source = JsonlPrompts(
        path, question_field="q", answer_field="a", template="Level {level}: {q}\n", answer_pattern="#### (.+)"
    )
    prompt = source.deal(0)
    assert prompt.text == "Level 3: 1+1?\n"
    assert (prompt.answer, prompt.solution) == ("2", "easy\n#### 2 ")
    assert prompt.metadata == {"level": 3}
    assert prompt.id.endswith("maths:1")

    chat = JsonlPrompts(path, question_field="q", answer_field="a", chat=True, system="Be brief.").deal(0)
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    assert chat.text == "" and chat.messages[1]["content"] == "1+1?"


@pytest.mark.parametrize("said", [True, False])
def test_booleans_are_spelled_as_the_file_spells_them(tmp_path: Path, said: bool) -> None:
    path = lines(tmp_path / "boolq.jsonl", {"question": "is it?", "answer": said, "hard": said})
    prompt = JsonlPrompts(path, template="{hard}: {question}").deal(0)
    text = json.dumps(said)
    assert (prompt.text, prompt.answer, prompt.solution) == (f"{text}: is it?", text, text)


def test_a_nested_question_and_answer_are_not_in_the_metadata(tmp_path: Path) -> None:
    """Agents are shown that."""
    record = {"reward_model": {"ground_truth": "42", "style": "rule"}, "extra": {"q": "6*7?", "n": 1}, "a.b": "42"}
    path = lines(tmp_path / "a.jsonl", record)
    verl = JsonlPrompts(path, question_field="extra.q", answer_field="reward_model.ground_truth").deal(0)
    assert (verl.text, verl.answer) == ("6*7?", "42")
    assert verl.metadata == {"reward_model": {"style": "rule"}, "extra": {"n": 1}, "a.b": "42"}
    dotted = JsonlPrompts(path, question_field="extra.q", answer_field="a.b").deal(0)
    assert dotted.metadata == {"reward_model": record["reward_model"], "extra": {"n": 1}}


def test_jsonl_shuffles_every_lap_anew_and_misses_nothing(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"question": f"q{i}", "answer": i} for i in range(50)))
    source = JsonlPrompts(path, seed=3)
    laps = [[source.deal(50 * lap + i).text for i in range(50)] for lap in range(3)]
    assert all(sorted(lap) == sorted(laps[0]) for lap in laps)
    assert len({tuple(lap) for lap in laps}) == 3
    assert source.deal(7).text == laps[0][7]  # going back is free
    plain = JsonlPrompts(path, shuffle=False, offset=10, size=20)
    assert [plain.deal(i).text for i in (0, 19, 20)] == ["q10", "q29", "q10"]


def test_jsonl_reads_gzip(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"question": "q", "answer": "a"}\n\n')
    assert JsonlPrompts(str(tmp_path / "a.jsonl.gz")).size == 1
    with pytest.raises(FileNotFoundError, match="is a folder; name one file in it"):
        JsonlPrompts(str(tmp_path))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet is no JSONL; datamodules\.prompts\.DatasetPrompts reads it"):
        JsonlPrompts(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "q", "answer"', "not valid JSON"),
        ('["question"]', "expected a JSON object, got list"),
        ('{"question": "q"}', "no text in field 'answer'"),
        ('{"question": null, "answer": "a"}', "field 'question' holds nothing; it must be text, a number, or a list"),
        ('{"question": "q", "answer": ["1", "2"]}', "field 'answer' holds a list; .*: correct or remove the record"),
        ('{"question": {"text": "q"}, "answer": "a"}', "field 'question' holds an object"),
        ('{"question": "q", "answer": "no mark", "hint": "h"}', "answer_pattern"),
        ('{"question": "q", "answer": "#### 1"}', "template"),
        ("\xff\xfe", "not valid JSON"),
        (
            '{"question": "q", "answer": "#### 1", "hint": "h", "answer": "#### 2"}',
            "the key 'answer' stands twice",
        ),
        ('{"question": "q", "answer": "#### 1", "hint": {"a": [{"b": 1, "b": 1}]}}', "the key 'b' stands twice in one"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "#### 1", "hint": "h"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=rf"broken\.jsonl:2: .*{said}"):
        JsonlPrompts(str(path), template="{question} {hint}", answer_pattern="#### (.+)")


def test_jsonl_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARBORIST_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"ARBORIST_DATA.*arborist data import-gsm8k CHECKOUT"):
        JsonlPrompts("${ARBORIST_DATA}/gsm8k/train.jsonl")
    monkeypatch.setenv("ARBORIST_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"path.*import-gsm8k CHECKOUT"):
        JsonlPrompts("${ARBORIST_DATA}/gsm8k/train.jsonl")
    path = lines(tmp_path / "a.jsonl", {"question": "q", "answer": "a"})
    assert JsonlPrompts("${ARBORIST_DATA}/a.jsonl").size == 1
    for options, said in (
        ({"system": "s"}, "system has no effect without chat"),
        ({"answer_field": None, "answer_pattern": "(.)"}, "answer_pattern has no effect without answer_field"),
        ({"answer_pattern": "####"}, "has no group"),
        ({"size": 2}, "has 1 prompts"),
    ):
        with pytest.raises(ValueError, match=said):
            JsonlPrompts(path, **options)


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"needs {GSM8K} (set ARBORIST_DATA)")
def test_gsm8k_is_a_jsonl_file() -> None:
    source = JsonlPrompts(str(GSM8K), answer_pattern="#### (.+)", shuffle=False)
    assert source.size == 7473 and source.name == "gsm8k/train"
    assert source.deal(0).answer == "72" and source.deal(0).solution.endswith("#### 72")


# ---- tokenizers


def test_character_tokenizer() -> None:
    tokenizer = load_tokenizer(f"char:{ALPHABET}")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 16)
    tokens = encode_prompt(tokenizer, Prompt(id="p", text="17+25="))
    assert tokens == (3, 9, 12, 4, 7, 15)
    assert tokenizer.decode([*tokens, 1], skip_special_tokens=True) == "17+25="
    with pytest.raises(ValueError, match=r"prompt 'p' cannot be tokenized: data.tokenizer has no token for ' ', 'x';"):
        encode_prompt(tokenizer, Prompt(id="p", text="17 x 25"))
    with pytest.raises(ValueError, match="prompt 'p' has no tokens"):
        encode_prompt(tokenizer, Prompt(id="p"))
    with pytest.raises(ValueError, match=r"'1' more than once"):
        load_tokenizer("char:0121")


@pytest.mark.parametrize(
    ("template", "begins"), [("<pad> $A <eos>", [0]), ("$A <eos>", []), ("$A", []), ("<pad> $A", [0])]
)
def test_a_prompt_does_not_end_where_the_tokenizer_ends_texts(template: str, begins: list[int]) -> None:
    tokenizer = load_tokenizer("char:0123456789+=")
    core: Any = tokenizer._tokenizer  # type: ignore[attr-defined]
    core.post_processor = TemplateProcessing(single=template, special_tokens=[("<pad>", 0), ("<eos>", 1)])
    bare = load_tokenizer("char:0123456789+=").encode("17+25=")
    assert list(encode_prompt(tokenizer, Prompt(id="p", text="17+25="))) == begins + bare
    assert list(encode_prompt(tokenizer, Prompt(id="p", text="17+25="), bare=True)) == bare
    asked = encode_prompt(tokenizer, Prompt(id="p", text="17<eos>"))  # of the text itself
    assert asked[-1] == tokenizer.eos_token_id and asked[-2] != tokenizer.eos_token_id


def test_trained_tokenizer_is_lossless_and_reproducible() -> None:
    texts = ["the ducks lay eggs, the ducks eat eggs"] * 20
    tokenizer = load_tokenizer("train:300", texts)
    assert len(tokenizer) <= 300 and tokenizer.eos_token_id == 1
    text = "the ducks äöü lay\n\t  3 eggs \N{EGG}"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the ducks")) < 5
    assert load_tokenizer("train:300", texts).get_vocab() == tokenizer.get_vocab()
    for spec, said in (("train:100", "from 258 up"), ("train:many", "from 258 up"), ("train:300", "needs texts")):
        with pytest.raises(ValueError, match=said):
            load_tokenizer(spec)


def test_tokenizer_directory_and_chat(tmp_path: Path) -> None:
    load_tokenizer(f"char:{ALPHABET}").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    chat = Prompt(id="c", messages=({"role": "user", "content": "1+2"},))
    with pytest.raises(ValueError, match=r"'c' .* no token for '\\n'; add it"):  # with which the template ends a line
        encode_prompt(tokenizer, chat)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}={% endfor %}"
    assert encode_prompt(tokenizer, chat) == encode_prompt(tokenizer, Prompt(id="t", text="1+2="))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(tokenizer, chat)
    with pytest.raises(FileNotFoundError, match="tokenizer: no directory nowhere/at-all"):
        load_tokenizer("nowhere/at-all")


def test_texts_for_training_cover_prompts_and_solutions() -> None:
    assert list(texts_of(ArithmeticPrompts(size=3)))[1::2] == [p.answer for p in ArithmeticPrompts(size=3).first(3)]


class Rows(Listed):
    """Deals what it was given."""

    def deal(self, index: int) -> Prompt:
        return {"id": "p", "text": "1+1="}  # type: ignore[return-value]


def test_a_source_that_deals_no_prompts_is_told_so() -> None:
    with pytest.raises(ValueError, match=r"Rows\.deal\(0\) returned dict, not a Prompt"):
        list(Rows("1+1=").first(1))


@pytest.mark.parametrize(("field", "value"), [("id", 7), ("text", None), ("answer", 2), ("solution", 0.5)])
def test_what_has_to_be_text_is_told_by_its_field(field: str, value: Any) -> None:
    kind = type(value).__name__
    with pytest.raises(ValueError, match=rf"Prompt\.{field}: '{value}' is a {kind}, must be text"):
        Prompt(**{"id": "p", field: value})


# ---- dealer


def dealer(source: PromptSource, max_context: int = 12, **options: Any) -> PromptDealer:
    options = {"vocab_size": 16, "reply_tokens": 4, **options}
    return PromptDealer(source, load_tokenizer(f"char:{ALPHABET}"), max_context=max_context, **options)


def test_dealer_encodes() -> None:
    source = dealer(Listed("1+2=", "12345678"))
    source.check()
    dealt = source.deal(0)
    assert dealt is not None and dealt.tokens == (3, 12, 4, 15)


def test_long_prompts_are_refused_at_the_start_or_skipped_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    texts = ("1+2=", "123456789=", "1=", "0123456789=")
    strict = dealer(Listed(*texts))
    with pytest.raises(ValueError, match=r"2 of 4 prompts.*'p1', 'p3'.*long_prompts: skip"):
        strict.check()
    with pytest.raises(PromptTooLong, match="'p1' has 10 tokens"):
        strict.deal(1)

    skipping = dealer(Listed(*texts), long_prompts="skip")
    with caplog.at_level(logging.WARNING):
        skipping.check()
    assert "2 of 4 prompts" in caplog.text
    assert [skipping.deal(i) is None for i in range(4)] == [False, True, False, True]
    with pytest.raises(ValueError, match="4 of 4 prompts"):
        dealer(Listed(*texts), max_context=5, long_prompts="skip").check()


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt 'p0' has token 15, outside the model's vocabulary of 15"):
        dealer(Listed("1="), vocab_size=15).check()

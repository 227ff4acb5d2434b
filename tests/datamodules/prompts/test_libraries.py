"""Prompts from Parquet, from data sets, and from reasoning-gym with its verifiers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from datamodules.prompts import DatasetPrompts, Prompt, ReasoningGymPrompts
from datamodules.prompts.dealer import PromptDealer
from datamodules.prompts.tokenizers import load_tokenizer
from datamodules.rewards import BySource, ReasoningGym, RewardError, RewardPool, exact_match, math_verify
from tests.datamodules.rewards.test_rewards import with_pool

ROWS = [
    {"q": f"{i}+{i}?", "chat": [{"role": "user", "content": f"{i}+{i}?"}], "gold": {"answer": f"so #### {2 * i}"}}
    for i in range(6)
]
FIELDS: dict[str, Any] = {"question_field": "q", "answer_field": "gold.answer", "answer_pattern": "#### (.+)"}


def parquet(path: Path, rows: list[dict[str, Any]] | None = None) -> str:
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(arrow.Table.from_pylist(ROWS if rows is None else rows), path)
    return str(path)


def parquet_folder(path: Path) -> str:
    """The rows in two files."""
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for k in range(2):
        writer.write_table(arrow.Table.from_pylist(ROWS[3 * k : 3 * k + 3]), path / f"part-{k}.parquet")
    return str(path)


def saved(path: Path) -> str:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(path / "saved")
    return str(path / "saved")


def saved_splits(path: Path) -> str:
    datasets = pytest.importorskip("datasets")
    found = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS)})
    found.save_to_disk(path / "splits")
    return str(path / "splits")


# ---- tables


def test_rows_of_torl_are_prompts_with_a_checkable_answer(tmp_path: Path) -> None:
    """verl's form of ToRL's data: messages, and the ground truth in a nested record."""
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    messages = [{"role": "system", "content": "Use python."}, {"role": "user", "content": "What is 6 x 7?"}]
    truth = {"style": "rule", "ground_truth": "\\frac{84}{2}"}
    row = {"data_source": "math", "prompt": messages, "ability": "math", "reward_model": truth}
    writer.write_table(arrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    fields = {"question_field": "prompt", "answer_field": "reward_model.ground_truth"}
    prompt = DatasetPrompts(str(tmp_path / "train.parquet"), **fields).deal(0)
    assert [one["role"] for one in prompt.messages] == ["system", "user"] and prompt.answer == "\\frac{84}{2}"
    assert math_verify(prompt, "So it is \\boxed{42}.") == 1.0 and math_verify(prompt, "\\boxed{41}") == 0.0


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda path: parquet(path / "sums.parquet"), {}),
        (parquet_folder, {}),
        (saved, {}),
        (saved_splits, {"split": "test"}),
    ],
)
def test_tables_are_read_as_written(tmp_path: Path, make: Any, options: dict[str, Any]) -> None:
    source = DatasetPrompts(make(tmp_path), **FIELDS, **options, shuffle=False)
    assert source.size == 6
    assert [source.deal(i).text for i in (0, 5, 6)] == ["0+0?", "5+5?", "0+0?"]
    prompt = source.deal(3)
    assert (prompt.answer, prompt.solution) == ("6", "so #### 6")
    assert prompt.metadata["chat"] == ROWS[3]["chat"] and prompt.id.endswith(":3")
    shuffled = DatasetPrompts(source.path, **FIELDS, **options, seed=1, offset=2)
    laps = [[shuffled.deal(4 * lap + i).answer for i in range(4)] for lap in range(5)]
    assert all(sorted(lap) == ["10", "4", "6", "8"] for lap in laps) and len({tuple(lap) for lap in laps}) > 1


def test_messages_are_questions_too(tmp_path: Path) -> None:
    path = parquet(tmp_path / "sums.parquet")
    source = DatasetPrompts(path, **{**FIELDS, "question_field": "chat"}, system="Be brief.", shuffle=False)
    assert [message["content"] for message in source.deal(2).messages] == ["Be brief.", "2+2?"]
    assert source.deal(2).text == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"question_field": "question"}, r"row 0: no text in field 'question' \(the record has q, chat, gold\)"),
        ({"answer_field": "gold.missing"}, "no text in field 'gold.missing'"),
        ({"answer_pattern": "=> (.+)"}, "row 0: answer_pattern"),
        ({"answer_pattern": "("}, "DatasetPrompts.answer_pattern: .* is no regular expression"),
        ({"question_field": "chat", "chat": True}, "chat has no effect, field 'chat' holds messages"),
        ({"question_field": "chat", "template": "{q}"}, "template has no effect"),
        ({"system": "s"}, "system has no effect without chat"),
        ({"size": 7}, "has 6 rows; offset 0 and size 7"),
        ({"offset": 6}, "has 6 rows"),
        ({"offset": -1}, "DatasetPrompts.offset: -1"),
        ({"split": "train"}, "split has no effect on the Parquet"),
    ],
)
def test_tables_that_do_not_fit_are_refused_by_name(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    path = parquet(tmp_path / "sums.parquet")
    with pytest.raises(ValueError, match=said):
        DatasetPrompts(path, **{**FIELDS, **options})


def test_a_folder_of_several_splits_is_one_of_them(tmp_path: Path) -> None:
    for name, first in (("train-00000-of-00002", 0), ("train-00001-of-00002", 2), ("test-00000-of-00001", 4)):
        parquet(tmp_path / f"{name}.parquet", ROWS[first : first + 2])
    for split, texts in (("train", ["0+0?", "1+1?", "2+2?", "3+3?"]), ("test", ["4+4?", "5+5?"])):
        source = DatasetPrompts(str(tmp_path), split=split, **FIELDS, shuffle=False)
        assert [source.deal(i).text for i in range(source.size)] == texts
    for split, said in ((None, "has the splits test, train; name one"), ("dev", "of test, train, none of 'dev'")):
        with pytest.raises(ValueError, match=f"DatasetPrompts.split: .*{said}"):
            DatasetPrompts(str(tmp_path), split=split, **FIELDS)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train-00000-of-00001-a09b74b3ef9c3b56", "test-00000-of-00001-5c3b9a7ef9c3b56a"),
        ("train_prefs-00000-of-00001", "test_prefs-00000-of-00001"),
        ("train", "validation_matched"),
        ("sums-train", "sums-test"),
        ("Train", "rest"),
        ("train-0", "test-0"),
    ],
)
def test_held_out_rows_are_not_read_unasked(tmp_path: Path, train: str, test: str) -> None:
    parquet(tmp_path / f"{train}.parquet", ROWS[:2])
    parquet(tmp_path / f"{test}.parquet", ROWS[2:])
    with pytest.raises(ValueError, match=r"DatasetPrompts.split: .* has the splits .*; name one") as caught:
        DatasetPrompts(str(tmp_path), **FIELDS)
    names = str(caught.value).split("has the splits ")[1].removesuffix("; name one").split(", ")
    assert sorted(DatasetPrompts(str(tmp_path), split=name, **FIELDS).size for name in names) == [2, 4]


@pytest.mark.parametrize("names", [("part.0", "part.1"), ("train-0", "train-1"), ("train-0-of-2-a", "train-1-of-2-c")])
def test_parts_of_one_whole_need_no_split(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, rows in zip(names, (ROWS[:2], ROWS[2:])):
        parquet(tmp_path / f"{name}.parquet", rows)
    assert DatasetPrompts(str(tmp_path), **FIELDS).size == 6


def test_every_file_of_a_folder_keeps_its_own_columns(tmp_path: Path) -> None:
    """One table of them all would have the columns, and the fields within columns, of the first file alone."""
    said = {"role": "user", "content": "1 + 1"}
    parquet(tmp_path / "train-0.parquet", [{"question": [said], "answer": "2"}])
    parquet(tmp_path / "train-1.parquet", [{"question": [{**said, "name": "Ann"}], "answer": 2, "level": 3}])
    first, second = (DatasetPrompts(str(tmp_path), shuffle=False).deal(k) for k in (0, 1))
    assert (first.answer, first.metadata, first.messages) == ("2", {}, (said,))
    assert (second.answer, second.metadata, second.messages) == ("2", {"level": 3}, ({**said, "name": "Ann"},))


@pytest.mark.parametrize("other", ["more/part-1.parquet", "part-1.jsonl", "part-1.jsonl.gz", "part-1.csv"])
def test_what_a_folder_holds_besides_is_not_left_out_in_silence(other: str, tmp_path: Path) -> None:
    parquet(tmp_path / "part-0.parquet")
    (tmp_path / other).parent.mkdir(exist_ok=True)
    (tmp_path / other).write_bytes(b"")
    with pytest.raises(ValueError, match=f"holds Parquet files and {other}, which would be left out"):
        DatasetPrompts(str(tmp_path))
    named = DatasetPrompts(str(tmp_path / "part-0.parquet"), **FIELDS)
    assert named.size == len(ROWS)
    with pytest.raises(ValueError, match=r"part-1\.csv is no \.parquet file"):
        (tmp_path / "part-1.csv").write_bytes(b"")
        DatasetPrompts(str(tmp_path / "part-1.csv"))


def test_data_sets_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable was read long ago
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    splits = saved_splits(tmp_path)
    for path, options, said in (
        ("nobody/has-this", {"split": "train"}, r"the data set 'nobody/has-this' \(name None, split train\) cannot be"),
        (str(tmp_path / "broken.parquet"), {}, "cannot be read as Parquet"),
        (splits, {}, "DatasetPrompts.split: .* has the splits train, test; name one"),
        (splits, {"split": "val"}, "cannot be loaded: KeyError"),
        (splits, {"split": "test", "name": "main"}, "DatasetPrompts.name has no effect"),
        ("./nowhere", {}, "DatasetPrompts.path: there is no directory"),
        ("${NOT_SET_ANYWHERE}/x.parquet", {}, "NOT_SET_ANYWHERE, which is not set"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            DatasetPrompts(path, **FIELDS, **options)


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("datasets", lambda: DatasetPrompts("openai/gsm8k")),
        ("reasoning_gym", lambda: ReasoningGymPrompts("chain_sum")),
    ],
)
def test_a_missing_library_is_named_with_the_remedy(module: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datamodules.prompts.extras.find_spec", lambda name: None if name == module else object())
    with pytest.raises(ImportError, match=rf"needs the library {module}.*pip install -e '\.\["):
        make()


# ---- reasoning-gym

CHAIN = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_reasoning_gym_problems_depend_on_the_index_alone() -> None:
    pytest.importorskip("reasoning_gym")
    source = ReasoningGymPrompts("chain_sum", CHAIN, size=200)
    dealt = [source.deal(i) for i in range(200)]
    again = ReasoningGymPrompts("chain_sum", CHAIN, size=200)
    assert [again.deal(i) for i in (199, 7, 207)] == [dealt[i] for i in (199, 7, 7)]
    assert all(prompt.text and prompt.answer.lstrip("-").isdigit() for prompt in dealt)
    held_out = ReasoningGymPrompts("chain_sum", {"min_digits": 6, "max_digits": 6}, size=200, seed=1)
    train = ReasoningGymPrompts("chain_sum", {"min_digits": 6, "max_digits": 6}, size=200)
    assert not {p.text for p in held_out.first(200)} & {p.text for p in train.first(200)}  # seeds do not overlap
    chat = ReasoningGymPrompts("chain_sum", size=2, chat=True, system="Think.", template="{question} /no_think").deal(0)
    assert [m["role"] for m in chat.messages] == ["system", "user"] and chat.messages[1]["content"].endswith(
        "/no_think"
    )


def test_only_some_problems_are_made_to_check_lengths() -> None:
    pytest.importorskip("reasoning_gym")
    source = ReasoningGymPrompts("chain_sum", size=1_000_000)
    assert len(list(source.samples())) == 64
    dealer = PromptDealer(source, load_tokenizer("train:258", ["a"]), vocab_size=258, max_context=20, reply_tokens=4)
    with pytest.raises(ValueError, match="64 of 64 prompts of 'chain_sum'"):
        dealer.check()


def test_verifiers_judge_in_reward_workers() -> None:
    pytest.importorskip("reasoning_gym")
    tasks = ("chain_sum", "countdown", "prime_factorization", "word_ladder", "basic_arithmetic")
    prompts = [ReasoningGymPrompts(task, size=5).deal(3) for task in tasks]
    forms = ("well <answer>no</answer> or <answer> {}\n</answer>.", "<answer>no idea</answer>", "{}")

    async def body(pool: RewardPool) -> list[list[float]]:
        return [[await pool.score(one, form.format(one.answer)) for form in forms] for one in prompts]

    for right, wrong, untagged in with_pool(body, reward=ReasoningGym(), deadline_s=60.0):
        assert (right, untagged) == (1.0, 0.0) and wrong <= 0.1
    assert [ReasoningGym(tag=None)(one, f" {one.answer}\n") for one in prompts] == [1.0] * 5


def test_each_source_has_its_reward() -> None:
    pytest.importorskip("reasoning_gym")
    reward = BySource({"gym": ReasoningGym(tag=None), "plain": exact_match})
    gym = ReasoningGymPrompts("chain_sum", size=5).deal(0)
    gym.metadata["source"] = "gym"
    assert reward(gym, gym.answer) == 1.0
    assert reward(Prompt(id="p", answer="4", metadata={"source": "plain"}), "5") == 0.0
    with pytest.raises(ValueError, match=r"prompt 'p' is of the source 'other', BySource.rewards has gym, plain"):
        reward(Prompt(id="p", metadata={"source": "other"}), "")
    with pytest.raises(ValueError, match=r"BySource.rewards: empty"):
        BySource({})

    async def body(pool: RewardPool) -> None:
        await pool.score(Prompt(id="p", answer="4"), "<answer>4</answer>")

    with pytest.raises(RewardError, match="prompt 'p' is no problem of reasoning-gym"):
        with_pool(body, reward=ReasoningGym(), deadline_s=60.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": "chain_sums"}, "task: 'chain_sums' is none of reasoning-gym's tasks; did you mean 'chain_sum'"),
        ({"options": {"digits": 3}}, "options.digits is no option of 'chain_sum'; it has .*max_terms"),
        ({"options": {"min_terms": 9, "max_terms": 2}}, "options of 'chain_sum': AssertionError"),
        ({"options": {"seed": 3}}, r"options.seed: set ReasoningGymPrompts.seed instead"),
        ({"size": 0}, "ReasoningGymPrompts.size: 0"),
        ({"seed": -1}, "ReasoningGymPrompts.seed: -1"),
        ({"system": "s"}, "system has no effect without chat"),
    ],
)
def test_reasoning_gym_refuses_by_name(options: dict[str, Any], said: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=said):
        ReasoningGymPrompts(**{"task": "chain_sum", **options})


def test_sources_are_cheap_to_import() -> None:
    """Reward workers import the package; what only some sources need is imported when they are made."""
    import subprocess

    code = (
        "import sys, datamodules.prompts, datamodules.rewards;"
        "print([m for m in ('torch', 'datasets', 'reasoning_gym', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.stdout.strip() == "[]", done.stderr

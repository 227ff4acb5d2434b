"""A stream that goes on says what is no longer as it was, and refuses another tokenizer."""

from __future__ import annotations

import json
import random
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from transformers import AutoTokenizer

from app.batch import Trajectory
from app.strategies.checkpoint.checkpoints import pack
from datamodules.answers import math_answer
from datamodules.files.recording import RolloutRecorder
from datamodules.filters import NoSignal
from datamodules.groups import Group
from datamodules.pipeline import fingerprint
from datamodules.pipeline.limits import Limits
from datamodules.pipeline.validation import Validation
from datamodules.prompts import ArithmeticPrompts, JsonlPrompts
from datamodules.prompts.tokenizers import load_tokenizer, texts_of
from datamodules.rewards import exact_match
from datamodules.rewards.judges import JudgeModel, RubricJudge
from datamodules.rewards.options import RewardOptions
from datamodules.rollout import RolloutDataModule
from datamodules.supervised import PairsDataModule, SupervisedDataModule
from datamodules.workflows import RLVRWorkflow, VisionRLVRWorkflow
from datamodules.workflows.gateway import AgentWorkflow
from tests.datamodules.fake_engine import FakeEngine
from tests.datamodules.test_recorded import module as recorded
from tests.helpers.doubles import conversations
from tests.helpers.recorded_samples import byte_tokenizer, line, write_jsonl

CHARS = "0123456789+-*="


def rollouts(tmp_path: Path, tokenizer: str = f"char:{CHARS}", **options: Any) -> RolloutDataModule:
    given: dict[str, Any] = {
        "prompts": ArithmeticPrompts(size=100),
        "workflow": RLVRWorkflow(max_new_tokens=4),
    }
    data = RolloutDataModule(engine=FakeEngine(), tokenizer=tokenizer, **(given | options))
    return _set_up(data, tmp_path)


def supervised(tmp_path: Path, tokenizer: str = f"char:{CHARS}", **options: Any) -> SupervisedDataModule:
    return _set_up(SupervisedDataModule(options.pop("prompts", ArithmeticPrompts()), tokenizer, **options), tmp_path)


def _set_up(data: Any, tmp_path: Path) -> Any:
    data.trainer = L.Trainer(default_root_dir=tmp_path, logger=False, enable_checkpointing=False, accelerator="cpu")
    data.setup("fit")
    return data


def _state(data: Any) -> dict[str, Any]:
    """As a datamodule's state has it, of a stream that has not begun."""
    return {"position": 0, fingerprint.KEY: dict(data._made_with)}


@pytest.mark.parametrize("make", [rollouts, supervised])
def test_another_order_of_the_alphabet_is_refused(make: Any, tmp_path: Path) -> None:
    state = _state(make(tmp_path))
    with pytest.raises(
        ValueError, match=r"data\.tokenizer: .*16 tokens.* Give the old tokenizer, or begin a new run"
    ) as caught:
        make(tmp_path, f"char:{CHARS[::-1]}").load_state_dict(state)
    assert "\n" not in str(caught.value)


def test_the_same_settings_are_not_mentioned(tmp_path: Path) -> None:
    data = rollouts(tmp_path)
    assert pack(data.state_dict()), "fingerprints are primitives"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rollouts(tmp_path).load_state_dict(data.state_dict())
        rollouts(tmp_path).load_state_dict({"position": 3})  # an older version's
        supervised(tmp_path).load_state_dict(_state(supervised(tmp_path)))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"prompts": ArithmeticPrompts(size=100, seed=3)},
            r"data\.prompts was arithmetic, 100 prompts, \w+ and is",
        ),
        (
            {"prompts": ArithmeticPrompts(size=99)},
            r"data\.prompts was .* and is arithmetic, 99 prompts",
        ),
        ({"seed": 7}, r"data\.seed was 0 and is 7"),
        ({"group_size": 4, "batch_size": 2}, r"data\.group_size was 8 and is 4; data\.batch_size was 16 and is 2"),
        ({"max_staleness": 2}, r"data\.max_staleness was 1 and is 2"),
        ({"workflow": RLVRWorkflow(max_new_tokens=5)}, r"data\.workflow\.max_new_tokens was 4 and is 5\."),
        ({"workflow": RLVRWorkflow(4, temperature=0.3)}, r"data\.workflow\.temperature was 1\.0 and is 0\.3\."),
        ({"workflow": RLVRWorkflow(4, hint="{answer}")}, r"data\.workflow\.hint was None and is '{answer}'"),
        (
            {"workflow": RLVRWorkflow(4, template_options={"enable_thinking": False})},
            r"data\.workflow\.template_options was None and is {'enable_thinking': False}\.",
        ),
        (
            {"workflow": VisionRLVRWorkflow(4)},
            r"data\.workflow's import path was .*\.RLVRWorkflow and is .*\.VisionRLVRW",
        ),
        ({"reward": exact_match}, r"data\.reward's import path was None and is .*\.functions\.exact_match\."),
        ({"over_sampling": 1.5}, r"data\.over_sampling was 1\.0 and is 1\.5\."),
        ({"limits": Limits(episode_deadline_s=9.0)}, r"data\.limits\.episode_deadline_s was 300\.0 and is 9\.0\."),
        ({"limits": Limits(long_prompts="skip")}, r"data\.limits\.long_prompts was error and is skip\."),
        ({"filter": NoSignal(0.1)}, r"data\.filter's import path was None and is datamodules\.filters\.NoSignal\."),
    ],
)
def test_other_settings_are_told_in_one_line(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    state = _state(rollouts(tmp_path))
    with pytest.warns(UserWarning, match=told) as caught:
        rollouts(tmp_path, **changed).load_state_dict(state)
    [warning] = [str(one.message) for one in caught if "ckpt_path" in str(one.message)]
    assert "\n" not in warning and "tokenizer" not in warning
    assert "Rollouts finished before are trained on" in warning, "of examples another sentence is true"


def test_other_held_out_prompts_are_told_with_what_they_spoil(tmp_path: Path) -> None:
    def held_out(seed: int) -> RolloutDataModule:
        prompts = ArithmeticPrompts(size=8, seed=seed, split="validation")
        return rollouts(tmp_path, validation=Validation(prompts=prompts))

    state = _state(held_out(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held_out(3).load_state_dict(state)
        rollouts(tmp_path).load_state_dict(state)  # without any, or with more than before, nothing is compared
        held_out(3).load_state_dict(_state(rollouts(tmp_path)))
    told = r"another validation: data\.validation, set arithmetic was arithmetic, 8 prompts, \w+ and is .*val/\*"
    with pytest.warns(UserWarning, match=told) as caught:
        held_out(4).load_state_dict(state)
    assert len([one for one in caught if "ckpt_path" in str(one.message)]) == 1, "the stream is the same"


def test_another_way_to_validate_is_told_with_what_it_spoils(tmp_path: Path) -> None:
    def sampled(**options: Any) -> RolloutDataModule:
        prompts = ArithmeticPrompts(size=8, split="validation")
        return rollouts(tmp_path, validation=Validation(**{"prompts": prompts, "temperature": 0.5, **options}))

    state = _state(sampled())
    for changed, said in (
        ({"temperature": 1.0}, r"data\.validation\.temperature was 0\.5 and is 1\.0"),
        ({"solved_at": 0.5}, r"data\.validation\.solved_at was 1\.0 and is 0\.5"),
        (
            {"samples": 2, "answer": math_answer},
            r"data\.validation\.samples was 1 and is 2; data\.validation\.answer's import path was None and is .*math_",
        ),
    ):
        with pytest.warns(UserWarning, match=rf"goes on with another validation: {said}.*\. val/\*") as caught:
            sampled(**changed).load_state_dict(state)
        assert len([one for one in caught if "ckpt_path" in str(one.message)]) == 1, "the stream is the same"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampled(batch_size=2).load_state_dict(state)
        sampled().load_state_dict(_state(rollouts(tmp_path)))  # there was none to compare with


def test_another_score_of_failed_rewards_is_told(tmp_path: Path) -> None:
    def rewarded(**options: Any) -> RolloutDataModule:
        return rollouts(tmp_path, reward=exact_match, reward_options=RewardOptions(**options))

    state = _state(rewarded())
    with pytest.warns(UserWarning, match=r"settings: data\.reward_options\.on_failure was drop and is 0\.0\. Rollouts"):
        rewarded(on_failure=0.0).load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewarded(workers=2, retries=1, cache=8).load_state_dict(state)  # the same rewards


def test_a_validation_goes_on_with_no_stream(tmp_path: Path) -> None:
    state = _state(rollouts(tmp_path))
    other = rollouts(tmp_path, seed=7)
    other.trainer.state.fn = TrainerFn.VALIDATING
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(state)


def test_how_answers_are_shown_and_which_are_rejected_is_told(tmp_path: Path) -> None:
    def pairs(**options: Any) -> Any:
        rejected = {"rejected": "1", "worse": "2"}
        path = tmp_path / "pairs.jsonl"
        path.write_text(json.dumps({"question": "1+1=", "answer": "3", **rejected}))
        return _set_up(PairsDataModule(JsonlPrompts(str(path)), f"char:{CHARS}", **options), tmp_path)

    with pytest.warns(UserWarning, match=r"data\.rejected_field was rejected and is worse\. "):
        pairs(rejected_field="worse").load_state_dict(_state(pairs()))
    told = r"data\.template_options was None and is {'enable_thinking': False}\. "
    with pytest.warns(UserWarning, match=told):
        supervised(tmp_path, template_options={"enable_thinking": False}).load_state_dict(_state(supervised(tmp_path)))


def test_what_is_long_is_compared_whole(tmp_path: Path) -> None:
    hints = [f"{{text}} {'Think. ' * 100}{end}" for end in ("Now!", "Later!")]
    first, second = (rollouts(tmp_path, workflow=RLVRWorkflow(4, hint=hint)) for hint in hints)
    with pytest.warns(UserWarning, match=r"data\.workflow\.hint was '{text} .*\.\.\., \w+ and is '{te") as caught:
        second.load_state_dict(first.state_dict())
    assert len(str(caught[0].message)) < 1000


def test_agents_and_judges_are_known_by_their_settings() -> None:
    def agent(**changed: Any) -> dict[str, str]:
        return fingerprint.of_object("workflow", AgentWorkflow("http://localhost:1/a", **changed))

    def judge(repeats: int) -> dict[str, str]:
        model = JudgeModel("http://user:password@localhost:1", "m", temperature=1.0)
        return fingerprint.of_object("reward", RubricJudge(model, {"right": "It is right."}, repeats=repeats))

    def changed(one: dict[str, str], other: dict[str, str]) -> set[str]:
        return {key for key in one if one[key] != other[key]}

    assert changed(agent(), agent()) == changed(judge(1), judge(1)) == set()
    assert changed(agent(), agent(temperature=0.5, untrainable="serve")) == {
        "workflow.temperature",
        "workflow.untrainable",
    }
    hinted = [
        fingerprint.of_object("workflow", RLVRWorkflow(4, hint="{solved}", hint_solved_at=least))
        for least in (0.5, 1.0)
    ]
    assert changed(*hinted) == {"workflow.hint_solved_at"}
    assert changed(agent(), agent(override_sampling=True)) == {"workflow.override_sampling"}, "as it is written"
    assert changed(judge(1), judge(2)) == {"reward.repeats"}
    assert "password" not in str(judge(1)) and "JudgeModel(" in judge(1)["reward.model"]


class Own:
    """A user's own workflow."""

    def __init__(self, depth: int, **options: Any) -> None:
        self._depth, self.options = depth, options
        self._api_key, self.secret = "s3cret", "s3cret"
        self._random, self._began = random.Random(), time.monotonic()
        self._loop: Any = self

    async def run(self, engine: Any, prompt: Any) -> list[Any]:
        return []


def test_what_is_no_setting_is_not_compared(tmp_path: Path) -> None:
    """What changes while a program runs, secrets, and what libraries hold."""
    found = fingerprint.of_object("workflow", Own(3, variables={"API_KEY": "s3cret", "lib": torch.nn.Linear(2, 2)}))
    assert found == {
        "workflow's import path": f"{__name__}.Own",
        "workflow.depth": "3",
        "workflow.options": "{'variables': {'lib': Linear()}}",
    }


def test_what_an_older_version_did_not_save_is_not_compared(tmp_path: Path) -> None:
    data = rollouts(tmp_path, workflow=RLVRWorkflow(4, temperature=0.5), reward=exact_match, over_sampling=1.5)
    made = {key: one for key, one in data._made_with.items() if "." not in key and "'" not in key}
    del made["over_sampling"]
    made |= {"workflow": "RLVRWorkflow(max_new_tokens=4, stop=[])"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.load_state_dict({"position": 3, fingerprint.KEY: made})


def test_a_workflow_may_have_slots(tmp_path: Path) -> None:
    class Slots:
        __slots__ = ("max_new_tokens",)

        def __init__(self) -> None:
            self.max_new_tokens = 4

        async def run(self, engine: Any, prompt: Any) -> list[Any]:
            return []

    assert rollouts(tmp_path, workflow=Slots()).state_dict()[fingerprint.KEY]["workflow.max_new_tokens"] == "4"


def test_a_trained_tokenizer_is_the_one_that_was_saved(tmp_path: Path) -> None:
    """What is saved in the run directory goes on with the run, whatever it was asked for in between."""
    tokenizer = load_tokenizer("train:300", texts_of(ArithmeticPrompts()))
    before = fingerprint.of_tokenizer(tokenizer)
    tokenizer(["1+1", "1"], padding=True, truncation=True, max_length=2)
    tokenizer.save_pretrained(tmp_path)
    assert fingerprint.of_tokenizer(AutoTokenizer.from_pretrained(tmp_path)) == before
    other = load_tokenizer("train:300", ["abcabcabc" * 9])
    assert fingerprint.of_tokenizer(other)["tokenizer"] != before["tokenizer"]


def test_another_file_of_recorded_data(tmp_path: Path) -> None:
    for name, vocabulary in (("a", 100), ("b", 99)):
        (tmp_path / name).mkdir()
        conversations(tmp_path / name / "x.npz", vocabulary=vocabulary)
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "x.npz").write_bytes((tmp_path / "a" / "x.npz").read_bytes())
    state = recorded(tmp_path / "a" / "x.npz").state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorded(tmp_path / "moved" / "x.npz").load_state_dict(state)
    with pytest.warns(UserWarning, match=r"data\.path was x\.npz, \d+ bytes, \w+ and is x\.npz, \d+ bytes"):
        recorded(tmp_path / "b" / "x.npz", seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"workload": "whole"}, r"data\.workload was turns and is whole"),
        ({"tasks_per_batch": 2}, r"data\.tasks_per_batch was 1 and is 2"),
        ({"trials": 2}, r"data\.trials was None and is 2"),
        ({"tasks": ["0", "1"]}, r"data\.tasks was None and is \['0', '1'\]"),
        ({"min_reward": 0.5}, r"data\.min_reward was None and is 0\.5"),
        ({"shuffle": False}, r"data\.shuffle was True and is False"),
        ({"seed": 1}, r"data\.seed was 0 and is 1"),
        ({"pairs": True}, r"data\.pairs was False and is True"),
        ({"unrewarded": "keep"}, r"data\.unrewarded was None and is keep"),
    ],
)
def test_other_settings_of_recorded_data_are_told(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    path = conversations(tmp_path / "x.npz")
    state = recorded(path).state_dict()
    assert pack(state)
    with pytest.warns(UserWarning, match=told) as caught:
        recorded(path, **changed).load_state_dict(state)
    assert str(caught[0].message).count(" was ") == 1, "and no other setting"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorded(path, **changed).load_state_dict(recorded(path, **changed).state_dict())


def test_another_directory_of_recorded_batches_is_told(tmp_path: Path) -> None:
    """Of as many sessions, too."""
    for name, seed in (("a", 0), ("b", 1)):
        turn = Trajectory(
            tokens=torch.tensor([1, 2 + seed]),
            loss_mask=torch.tensor([False, True]),
            behavior_logprobs=torch.tensor([0.0, -1.0]),
            versions=torch.tensor([-1, 0]),
            reward=1.0,
            group_id=0,
            episode_id=0,
        )
        RolloutRecorder(tmp_path / name).write(0, [Group(0, "p", 0, [turn])])
    state = recorded(tmp_path / "a").state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorded(tmp_path / "a").load_state_dict(state)
    with pytest.warns(UserWarning, match=r"data\.path was 1 sessions, \w+ and is 1 sessions, \w+"):
        recorded(tmp_path / "b").load_state_dict(state)


def test_recorded_text_goes_on_with_its_tokenizer_and_system_prompt(tmp_path: Path) -> None:
    mine, other = byte_tokenizer(), byte_tokenizer()
    other.add_tokens(["zebra"])
    mine.save_pretrained(tmp_path / "mine")
    other.save_pretrained(tmp_path / "other")
    path = write_jsonl(tmp_path / "c.jsonl", [line(), line("1")])
    (tmp_path / "system.json").write_text('{"system_prompt": "Be kind.", "tools": []}')
    system = {"system": str(tmp_path / "system.json")}
    bare, asked = (recorded(path, tokenizer=str(tmp_path / "mine"), **more) for more in ({}, system))
    assert bare.tokenizer is not None and bare.tokenizer.get_vocab() == mine.get_vocab(), "what callbacks decode with"
    with pytest.raises(ValueError, match=r"data\.tokenizer: .*Give the old tokenizer"):
        recorded(path, tokenizer=str(tmp_path / "other")).load_state_dict(bare.state_dict())
    with pytest.warns(UserWarning, match=r"data\.system was None and is system\.json"):
        asked.load_state_dict(bare.state_dict())
    with pytest.warns(UserWarning, match=r"data\.system was system\.json.* and is None"):
        bare.load_state_dict(asked.state_dict())


def test_prompts_of_a_file_are_known_by_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    first = fingerprint.of_prompts(JsonlPrompts(str(tmp_path / "a.jsonl")))
    (tmp_path / "a.jsonl").write_text('{"question": "1+2=", "answer": "3"}\n')
    assert fingerprint.of_prompts(JsonlPrompts(str(tmp_path / "a.jsonl"))) != first
